"""A State in a file goes on in another Simulation."""

import numpy as np
from openmm import VerletIntegrator
from openmm.app import PDBFile, Simulation
from openmm.unit import femtoseconds, kelvin

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
simulation = Simulation(pdb.topology, system, VerletIntegrator(0.5 * femtoseconds))
simulation.context.setPositions(pdb.positions)
simulation.context.setVelocitiesToTemperature(300 * kelvin, 1)
simulation.step(10)
simulation.saveState("state.xml")
simulation.step(20)

other = Simulation(pdb.topology, system, VerletIntegrator(0.5 * femtoseconds))
other.loadState("state.xml")
assert other.currentStep == 10
other.step(20)
found, expected = (s.context.getState(positions=True).getPositions(asNumpy=True)._value for s in (other, simulation))
assert np.allclose(found, expected, rtol=0, atol=1e-6)
