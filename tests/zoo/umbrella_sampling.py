"""Windows along a distance, each with a harmonic bias of its own."""

import numpy as np
from openmm import CustomBondForce, LangevinMiddleIntegrator
from openmm.app import PDBFile, Simulation
from openmm.unit import femtoseconds, kelvin, nanometers, picosecond

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
bias = CustomBondForce("k/2*(r-r0)^2")
bias.addGlobalParameter("k", 50000.0)
bias.addGlobalParameter("r0", 0.0)
bias.addBond(1, 18)  # from end to end
system.addForce(bias)
integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds)
simulation = Simulation(pdb.topology, system, integrator)
simulation.context.setPositions(pdb.positions)
means = []
for window in (0.45, 0.5, 0.55):
    simulation.context.setParameter("r0", window)
    simulation.minimizeEnergy(maxIterations=100)
    lengths = []
    for _ in range(10):
        simulation.step(5)
        positions = simulation.context.getState(positions=True).getPositions(asNumpy=True)
        lengths.append(np.linalg.norm((positions[18] - positions[1]).value_in_unit(nanometers)))
    means.append(np.mean(lengths))
assert means == sorted(means) and means[2] - means[0] > 0.05
