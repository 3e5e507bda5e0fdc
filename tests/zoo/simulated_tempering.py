"""Simulated tempering."""

from openmm import LangevinMiddleIntegrator
from openmm.app import PDBFile, SimulatedTempering, Simulation
from openmm.unit import femtoseconds, kelvin, picosecond

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds)
simulation = Simulation(pdb.topology, system, integrator)
simulation.context.setPositions(pdb.positions)
simulation.minimizeEnergy()
tempering = SimulatedTempering(
    simulation, numTemperatures=3, minTemperature=300 * kelvin, maxTemperature=330 * kelvin, tempChangeInterval=5,
    reportInterval=5, reportFile="tempering.csv",
)  # fmt: skip
tempering.step(50)
assert integrator.getTemperature() in tempering.temperatures
with open("tempering.csv") as file:
    assert len(file.readlines()) > 5
