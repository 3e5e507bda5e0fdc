"""Heavy atoms on springs to where they are."""

import numpy as np
from openmm import CustomExternalForce, LangevinMiddleIntegrator
from openmm.app import PDBFile, Simulation
from openmm.unit import femtoseconds, kelvin, nanometers, picosecond

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
restraint = CustomExternalForce("k*((x-x0)^2+(y-y0)^2+(z-z0)^2)")
restraint.addGlobalParameter("k", 1e5)
for name in ("x0", "y0", "z0"):
    restraint.addPerParticleParameter(name)
heavy = [atom.index for atom in pdb.topology.atoms() if atom.element.symbol != "H"]
for index in heavy:
    restraint.addParticle(index, pdb.positions[index])
system.addForce(restraint)
integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds)
simulation = Simulation(pdb.topology, system, integrator)
simulation.context.setPositions(pdb.positions)
simulation.minimizeEnergy()
simulation.step(50)
moved = simulation.context.getState(positions=True).getPositions(asNumpy=True) - pdb.getPositions(asNumpy=True)
assert 0 < np.abs(moved[heavy].value_in_unit(nanometers)).max() < 0.02
