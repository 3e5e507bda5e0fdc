"""The error of a step decides how long it is."""

from openmm import VariableLangevinIntegrator
from openmm.app import PDBFile, Simulation
from openmm.unit import femtoseconds, kelvin, picosecond

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
integrator = VariableLangevinIntegrator(300 * kelvin, 1 / picosecond, 1e-4)
simulation = Simulation(pdb.topology, system, integrator)
simulation.context.setPositions(pdb.positions)
simulation.minimizeEnergy()
simulation.context.setVelocitiesToTemperature(300 * kelvin, 1)
simulation.step(30)
assert 0.1 < simulation.context.getState().getTime().value_in_unit(femtoseconds) / 30 < 3
