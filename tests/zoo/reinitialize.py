"""A force is added while it runs; the Context keeps its state."""

from openmm import CustomExternalForce, LangevinMiddleIntegrator
from openmm.app import PDBFile, Simulation
from openmm.unit import femtoseconds, kelvin, picosecond

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds)
simulation = Simulation(pdb.topology, system, integrator)
simulation.context.setPositions(pdb.positions)
simulation.step(10)
before = simulation.context.getState(positions=True, energy=True)
wall = CustomExternalForce("100")
wall.addParticle(0)
system.addForce(wall)
simulation.context.reinitialize(preserveState=True)
after = simulation.context.getState(positions=True, energy=True)
assert (after.getPositions(asNumpy=True) == before.getPositions(asNumpy=True)).all()
assert abs((after.getPotentialEnergy() - before.getPotentialEnergy())._value - 100) < 0.02
simulation.step(10)
