"""Trajectories, tables and checkpoints while it runs."""

import csv

from openmm import LangevinMiddleIntegrator
from openmm.app import CheckpointReporter, DCDReporter, PDBFile, PDBReporter, Simulation, StateDataReporter, XTCReporter
from openmm.unit import femtoseconds, kelvin, picosecond

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds)
simulation = Simulation(pdb.topology, system, integrator)
simulation.context.setPositions(pdb.positions)
simulation.minimizeEnergy()
simulation.reporters += [
    PDBReporter("run.pdb", 20),
    DCDReporter("run.dcd", 10),
    XTCReporter("run.xtc", 20),
    CheckpointReporter("run.chk", 20),
    StateDataReporter("run.csv", 10, step=True, potentialEnergy=True, temperature=True, speed=True),
]
simulation.step(40)
last = simulation.context.getState(positions=True).getPositions(asNumpy=True)
simulation.reporters.clear()  # closes the files

assert PDBFile("run.pdb").getNumFrames() == 2
assert abs(PDBFile("run.pdb").getPositions(asNumpy=True, frame=1) - last).max()._value < 1e-3
with open("run.csv", newline="") as file:
    rows = list(csv.reader(file))[1:]
assert [row[0] for row in rows] == ["10", "20", "30", "40"]
simulation.loadCheckpoint("run.chk")
assert simulation.currentStep == 40
