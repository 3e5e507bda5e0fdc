"""Bonds to hydrogen are rigid, and the time step is 1 fs."""

import numpy as np
from openmm import LangevinMiddleIntegrator
from openmm.app import PDBFile, Simulation
from openmm.unit import femtoseconds, kelvin, nanometers, picosecond

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
positions = pdb.getPositions(asNumpy=True).value_in_unit(nanometers)
rigid = [(a.index, b.index) for a, b in pdb.topology.bonds() if "H" in (a.element.symbol, b.element.symbol)]
lengths = [np.linalg.norm(positions[a] - positions[b]) for a, b in rigid]
for (a, b), length in zip(rigid, lengths, strict=True):
    system.addConstraint(a, b, length)
integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 1 * femtoseconds)
simulation = Simulation(pdb.topology, system, integrator)
simulation.context.setPositions(pdb.positions)
simulation.minimizeEnergy()
simulation.step(50)
positions = simulation.context.getState(positions=True).getPositions(asNumpy=True).value_in_unit(nanometers)
found = [np.linalg.norm(positions[a] - positions[b]) for a, b in rigid]
assert len(rigid) == 12 and np.allclose(found, lengths, rtol=1e-4)
