"""Constant energy."""

from openmm import VerletIntegrator
from openmm.app import PDBFile, Simulation
from openmm.unit import femtoseconds, kelvin, kilojoule_per_mole

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
simulation = Simulation(pdb.topology, system, VerletIntegrator(0.25 * femtoseconds))
simulation.context.setPositions(pdb.positions)
simulation.minimizeEnergy()
simulation.context.setVelocitiesToTemperature(300 * kelvin, 1)

energies = []
for _ in range(20):
    simulation.step(20)
    state = simulation.context.getState(energy=True)
    energies.append((state.getPotentialEnergy() + state.getKineticEnergy()).value_in_unit(kilojoule_per_mole))
assert max(energies) - min(energies) < 2
