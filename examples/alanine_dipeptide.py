"""Molecular dynamics of alanine dipeptide in vacuum at 300 K with a TensorNet potential of your own.

    python alanine_dipeptide.py MODEL [--time PS]

MODEL is a TorchMD-Net checkpoint such as aceff-1.1.ckpt, or the name of a known model. Writes alanine_dipeptide.dcd.
"""

import argparse
import sys
from pathlib import Path

from openmm import LangevinMiddleIntegrator, Platform
from openmm.app import DCDReporter, PDBFile, Simulation, StateDataReporter
from openmm.unit import femtoseconds, kelvin, picosecond

from openmm_tensornet import create_system, tensornet_forces

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", metavar="MODEL")
parser.add_argument("--time", type=float, default=1.0, help="ps (%(default)s)")
options = parser.parse_args()

pdb = PDBFile(str(Path(__file__).with_name("alanine_dipeptide.pdb")))
system = create_system(options.model, pdb.topology, positions=pdb.positions)
(force,) = tensornet_forces(system)
network = force.metadata["model"]["config"]
print(
    f"{network['embedding_dimension']} channels, {network['num_layers']} layers, cutoff {force.metadata['cutoff_nm']:g} nm, "
    f"elements {force.metadata['model']['elements']}"
)

integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds)
# PyTorch computes the potential. OpenMM's CPU platform would wake threads for nothing; with a GPU, name "CUDA".
platform = Platform.getPlatformByName("Reference")
simulation = Simulation(pdb.topology, system, integrator, platform)
simulation.context.setPositions(pdb.positions)
simulation.minimizeEnergy()
simulation.context.setVelocitiesToTemperature(300 * kelvin)

simulation.reporters.append(DCDReporter("alanine_dipeptide.dcd", 100))
simulation.reporters.append(
    StateDataReporter(sys.stdout, 100, step=True, time=True, potentialEnergy=True, temperature=True, speed=True)
)
simulation.step(round(options.time * 2000))
