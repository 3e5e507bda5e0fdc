"""Ctrl-C at random moments of a simulation at constant pressure, which goes on each time."""

import os
import random
import signal
import threading

from openmm import LangevinMiddleIntegrator, MonteCarloBarostat, Vec3
from openmm.app import PDBFile, Simulation
from openmm.unit import bar, femtoseconds, kelvin, kilojoules_per_mole, nanometers, picosecond

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
pdb.topology.setPeriodicBoxVectors([Vec3(3, 0, 0), Vec3(0, 3, 0), Vec3(0, 0, 3)] * nanometers)
system = create_system(pdb.topology, "alanine_dipeptide_periodic.safetensors")
system.addForce(MonteCarloBarostat(1 * bar, 300 * kelvin, 5))
integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds)
simulation = Simulation(pdb.topology, system, integrator)
simulation.context.setPositions(pdb.positions)
simulation.minimizeEnergy()
other = Simulation(pdb.topology, system, LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds))

interrupted = 0
for _ in range(5):
    threading.Timer(random.uniform(0.01, 0.05), os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        integrator.step(10**7)
    except KeyboardInterrupt:
        interrupted += 1
    state = simulation.context.getState(positions=True, energy=True)
    other.context.setPeriodicBoxVectors(*state.getPeriodicBoxVectors())
    other.context.setPositions(state.getPositions())
    expected = other.context.getState(energy=True).getPotentialEnergy()
    assert abs(state.getPotentialEnergy() - expected) < 0.05 * kilojoules_per_mole
    simulation.step(5)
assert interrupted == 5
