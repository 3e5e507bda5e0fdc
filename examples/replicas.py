"""Independent trajectories of alanine dipeptide in one System, at 300 K, by a TensorNet potential.

    python replicas.py MODEL [--time PS] [--replicas N]

MODEL is a TorchMD-Net checkpoint such as aceff-1.1.ckpt, or the name of a known model. The replicas do not see one another.
Writes replicas.dcd, whose frames hold the atoms of all replicas, one after the other.
"""

import argparse
from pathlib import Path
from time import perf_counter

import numpy as np
from openmm import LangevinMiddleIntegrator, Platform
from openmm.app import DCDReporter, PDBFile, Simulation
from openmm.unit import femtoseconds, kelvin, kilojoule_per_mole, picosecond

from openmm_tensornet import create_system, replicate, tensornet_forces


def main(model: str, length: float = 1.0, count: int = 64) -> np.ndarray:
    """Potential energy of each replica in the end, kJ/mol."""
    pdb = PDBFile(str(Path(__file__).with_name("alanine_dipeptide.pdb")))
    topology, positions, replicas = replicate(pdb.topology, pdb.positions, count)
    # A CMMotionRemover would take the mean motion of all replicas out of each.
    system = create_system(model, topology, replicas=replicas, remove_cm_motion=False)
    integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds)
    # PyTorch computes the potential. OpenMM's CPU platform would wake threads for nothing; with a GPU, name "CUDA".
    platform = Platform.getPlatformByName("Reference")
    simulation = Simulation(topology, system, integrator, platform)
    simulation.context.setPositions(positions)
    simulation.minimizeEnergy()
    simulation.context.setVelocitiesToTemperature(300 * kelvin)
    simulation.step(20)

    steps = max(1, round(length * 2000))
    simulation.reporters.append(DCDReporter("replicas.dcd", 200))
    start = perf_counter()
    simulation.step(steps)
    ns_per_day = steps * 0.5e-6 / (perf_counter() - start) * 86400
    (force,) = tensornet_forces(system)
    energies = force.replica_energies(simulation.context).value_in_unit(kilojoule_per_mole)
    print(f"{count} replicas: {count * ns_per_day:.3g} ns/day in all, {ns_per_day:.3g} each")
    print(f"potential energy: {energies.min():.2f} to {energies.max():.2f} kJ/mol, mean {energies.mean():.2f}")
    return energies


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--time", type=float, default=1.0, help="ps of each replica (%(default)s)")
    parser.add_argument("--replicas", type=int, default=64, help="(%(default)s)")
    options = parser.parse_args()
    main(options.model, options.time, options.replicas)
