"""Constant pressure: a molecule in a periodic box."""

from openmm import LangevinMiddleIntegrator, MonteCarloBarostat, Vec3
from openmm.app import PDBFile, Simulation
from openmm.unit import bar, femtoseconds, kelvin, nanometers, picosecond

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
pdb.topology.setPeriodicBoxVectors([Vec3(2, 0, 0), Vec3(0, 2, 0), Vec3(0, 0, 2)] * nanometers)
system = create_system(pdb.topology, "alanine_dipeptide_periodic.safetensors")
system.addForce(MonteCarloBarostat(1 * bar, 300 * kelvin, 2))
integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds)
simulation = Simulation(pdb.topology, system, integrator)
simulation.context.setPositions(pdb.positions)
simulation.minimizeEnergy()
before = simulation.context.getState().getPeriodicBoxVolume()
simulation.step(60)
state = simulation.context.getState(positions=True, enforcePeriodicBox=True)
assert state.getPeriodicBoxVolume() != before
positions = state.getPositions(asNumpy=True).value_in_unit(nanometers)
assert all(abs(positions[a.index] - positions[b.index]).max() < 0.2 for a, b in pdb.topology.bonds()), "torn apart"
