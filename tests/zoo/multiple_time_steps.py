"""Springs in the inner loop, the potential in the outer one."""

from openmm import CustomBondForce, MTSLangevinIntegrator
from openmm.app import PDBFile, Simulation
from openmm.unit import femtoseconds, kelvin, picosecond

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
spring = CustomBondForce("1000*(r-0.5)^2")
spring.addBond(1, 18)
spring.setForceGroup(1)
system.addForce(spring)
integrator = MTSLangevinIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds, [(0, 1), (1, 4)])
simulation = Simulation(pdb.topology, system, integrator)
simulation.context.setPositions(pdb.positions)
simulation.minimizeEnergy()
simulation.step(30)
groups = [simulation.context.getState(energy=True, groups={k}).getPotentialEnergy()._value for k in (0, 1)]
total = simulation.context.getState(energy=True).getPotentialEnergy()._value
assert groups[1] > 0 and abs(sum(groups) - total) < 1e-2 and simulation.context.getStepCount() == 30
