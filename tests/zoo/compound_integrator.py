"""Two integrators of one Context."""

from openmm import BrownianIntegrator, CompoundIntegrator, VerletIntegrator
from openmm.app import PDBFile, Simulation
from openmm.unit import femtoseconds, kelvin, picosecond

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
integrator = CompoundIntegrator()
integrator.addIntegrator(VerletIntegrator(0.5 * femtoseconds))
integrator.addIntegrator(BrownianIntegrator(300 * kelvin, 1000 / picosecond, 0.1 * femtoseconds))
simulation = Simulation(pdb.topology, system, integrator)
simulation.context.setPositions(pdb.positions)
simulation.minimizeEnergy()
minimum = simulation.context.getState(energy=True).getPotentialEnergy()
for current in (0, 1, 0):
    integrator.setCurrentIntegrator(current)
    simulation.step(10)
state = simulation.context.getState(energy=True)
assert state.getPotentialEnergy() > minimum and abs(state.getTime().value_in_unit(femtoseconds) - 11) < 1e-6
