"""Molecular dynamics of alanine dipeptide in vacuum, 1 ps at 300 K, with a TensorNet potential.

    python alanine_dipeptide.py MODEL

MODEL is a TorchMD-Net checkpoint such as aceff-1.1.ckpt. Writes alanine_dipeptide.dcd.
"""

import sys
from pathlib import Path

from openmm import LangevinMiddleIntegrator
from openmm.app import DCDReporter, PDBFile, Simulation, StateDataReporter
from openmm.unit import femtoseconds, kelvin, picosecond

from openmm_tensornet import create_system

if len(sys.argv) != 2:
    sys.exit(__doc__)

pdb = PDBFile(str(Path(__file__).with_name("alanine_dipeptide.pdb")))
system = create_system(pdb.topology, sys.argv[1], positions=pdb.positions)

integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds)
simulation = Simulation(pdb.topology, system, integrator)
simulation.context.setPositions(pdb.positions)
simulation.minimizeEnergy()
simulation.context.setVelocitiesToTemperature(300 * kelvin)

simulation.reporters.append(DCDReporter("alanine_dipeptide.dcd", 100))
simulation.reporters.append(
    StateDataReporter(sys.stdout, 100, step=True, time=True, potentialEnergy=True, temperature=True, speed=True)
)
simulation.step(2000)
