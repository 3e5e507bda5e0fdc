"""A peptide of the potential in water of a force field."""

from openmm import LangevinMiddleIntegrator
from openmm.app import ForceField, Modeller, PDBFile, Simulation
from openmm.unit import femtoseconds, kelvin, picosecond

from openmm_tensornet import create_mixed_system

pdb = PDBFile("alanine_dipeptide.pdb")
force_field = ForceField("amber14/protein.ff14SB.xml", "amber14/tip3p.xml")
modeller = Modeller(pdb.topology, pdb.positions)
modeller.addSolvent(force_field, numAdded=20)
modeller.topology.setPeriodicBoxVectors(None)
mm_system = force_field.createSystem(modeller.topology)
system = create_mixed_system(modeller.topology, mm_system, range(22), "alanine_dipeptide_among_others.safetensors")
simulation = Simulation(
    modeller.topology, system, LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds)
)
simulation.context.setPositions(modeller.positions)
before = simulation.context.getState(energy=True).getPotentialEnergy()
simulation.minimizeEnergy(maxIterations=50)
assert simulation.context.getState(energy=True).getPotentialEnergy() < before
assert len(simulation.context.getMolecules()[0]) == 22
simulation.step(20)
