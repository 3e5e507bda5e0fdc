"""Simulated annealing."""

from openmm import LangevinMiddleIntegrator
from openmm.app import PDBFile, Simulation
from openmm.unit import femtoseconds, kelvin, picosecond

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds)
simulation = Simulation(pdb.topology, system, integrator)
simulation.context.setPositions(pdb.positions)
simulation.context.setVelocitiesToTemperature(600 * kelvin, 1)

before = simulation.context.getState(energy=True).getPotentialEnergy()
for temperature in range(600, 0, -100):
    integrator.setTemperature(temperature * kelvin)
    simulation.step(20)
simulation.minimizeEnergy()
assert integrator.getTemperature() == 100 * kelvin
assert simulation.context.getState(energy=True).getPotentialEnergy() < before
