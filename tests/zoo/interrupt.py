"""Ctrl-C, or a notebook's button, during one long step; then the simulation goes on."""

import os
import signal
import threading

from openmm import LangevinMiddleIntegrator
from openmm.app import PDBFile, Simulation
from openmm.unit import femtoseconds, kelvin, picosecond

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds)
simulation = Simulation(pdb.topology, system, integrator)
simulation.context.setPositions(pdb.positions)
simulation.step(5)
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    simulation.step(10**7)
except KeyboardInterrupt:
    stopped = simulation.context.getStepCount()
simulation.step(5)
assert stopped < simulation.context.getStepCount() < 10**7
