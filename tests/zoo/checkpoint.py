"""A checkpoint continues to the last bit."""

import numpy as np
from openmm import LangevinMiddleIntegrator
from openmm.app import PDBFile, Simulation
from openmm.unit import femtoseconds, kelvin, picosecond

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds)
simulation = Simulation(pdb.topology, system, integrator)
simulation.context.setPositions(pdb.positions)
simulation.minimizeEnergy()
simulation.step(10)
simulation.saveCheckpoint("run.chk")
simulation.step(20)
expected = simulation.context.getState(positions=True).getPositions(asNumpy=True)

simulation.loadCheckpoint("run.chk")
simulation.step(20)
assert np.array_equal(simulation.context.getState(positions=True).getPositions(asNumpy=True), expected)
