"""Well-tempered metadynamics along phi."""

from math import pi

from openmm import CustomTorsionForce, LangevinMiddleIntegrator
from openmm.app import BiasVariable, Metadynamics, PDBFile, Simulation
from openmm.unit import femtoseconds, kelvin, kilojoules_per_mole, picosecond

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
torsion = CustomTorsionForce("theta")
torsion.addTorsion(4, 6, 8, 14)
phi = BiasVariable(torsion, -pi, pi, 0.35, periodic=True, gridWidth=60)
metadynamics = Metadynamics(system, [phi], 300 * kelvin, 8, 1 * kilojoules_per_mole, 10)
integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds)
simulation = Simulation(pdb.topology, system, integrator)
simulation.context.setPositions(pdb.positions)
simulation.minimizeEnergy()
metadynamics.step(simulation, 50)
free_energy = metadynamics.getFreeEnergy()
assert free_energy.shape == (60,) and free_energy.min()._value < -1
(at,) = metadynamics.getCollectiveVariables(simulation)
assert abs(free_energy.argmin() * 2 * pi / 59 - pi - at) < 0.5
