"""Heavier hydrogens allow longer steps."""

from openmm import LangevinMiddleIntegrator
from openmm.app import PDBFile, Simulation
from openmm.unit import femtoseconds, kelvin, picosecond

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors", hydrogen_mass=3)
integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 2 * femtoseconds)
simulation = Simulation(pdb.topology, system, integrator)
simulation.context.setPositions(pdb.positions)
simulation.minimizeEnergy()
simulation.context.setVelocitiesToTemperature(300 * kelvin, 1)
simulation.step(100)
energy = simulation.context.getState(energy=True).getKineticEnergy()._value
assert 10 < energy < 200  # 79 kJ/mol at 300 K
