"""Constant temperature."""

from openmm import LangevinMiddleIntegrator
from openmm.app import PDBFile, Simulation
from openmm.unit import MOLAR_GAS_CONSTANT_R, femtoseconds, kelvin, kilojoule_per_mole, picosecond

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds)
simulation = Simulation(pdb.topology, system, integrator)
simulation.context.setPositions(pdb.positions)
simulation.minimizeEnergy()
simulation.context.setVelocitiesToTemperature(300 * kelvin, 1)

kinetic = []
for _ in range(20):
    simulation.step(20)
    kinetic.append(simulation.context.getState(energy=True).getKineticEnergy().value_in_unit(kilojoule_per_mole))
temperature = 2 * sum(kinetic) / len(kinetic) / (63 * MOLAR_GAS_CONSTANT_R.value_in_unit(kilojoule_per_mole / kelvin))
assert 75 < temperature < 400  # the minimum takes half of the energy first
