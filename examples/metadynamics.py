"""Well-tempered metadynamics of alanine dipeptide in vacuum along phi and psi, with OpenMM's own Metadynamics.

    python metadynamics.py [MODEL] [--time PS]

MODEL is a TorchMD-Net checkpoint (by default the model of the package). Prints the free energies of the conformers and writes
metadynamics.npy: the free energy (kJ/mol) on a grid of psi (rows) and phi (columns) from -180 to 180 degrees.
"""

import argparse
from math import pi
from pathlib import Path

import numpy as np
from openmm import CustomTorsionForce, LangevinMiddleIntegrator, Platform
from openmm.app import PDBFile, Simulation
from openmm.app.metadynamics import BiasVariable, Metadynamics
from openmm.unit import MOLAR_GAS_CONSTANT_R, femtoseconds, kelvin, kilojoule_per_mole, picosecond, radian

from openmm_tensornet import create_system
from openmm_tensornet.md.analysis import BASINS, compute_basins

GRID = 60  # points along each angle


def angle(pdb: PDBFile, *names: str) -> BiasVariable:
    """The torsion of four atoms named `residue:atom`."""
    index = {f"{atom.residue.name}:{atom.name}": atom.index for atom in pdb.topology.atoms()}
    torsion = CustomTorsionForce("theta")
    torsion.addTorsion(*(index[name] for name in names))
    return BiasVariable(torsion, -pi * radian, pi * radian, 0.35 * radian, periodic=True, gridWidth=GRID)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="alanine-dipeptide-gfn2", metavar="MODEL", help="(%(default)s)")
    parser.add_argument("--time", type=float, default=500.0, help="ps (%(default)s)")
    options = parser.parse_args()

    pdb = PDBFile(str(Path(__file__).with_name("alanine_dipeptide.pdb")))
    system = create_system(options.model, pdb.topology, positions=pdb.positions)
    phi = angle(pdb, "ACE:C", "ALA:N", "ALA:CA", "ALA:C")
    psi = angle(pdb, "ALA:N", "ALA:CA", "ALA:C", "NME:N")
    # A hill of 1 kJ/mol every 50 fs, lower where the bias is high: as if the two angles were at 8 times 300 K.
    metadynamics = Metadynamics(system, [phi, psi], 300 * kelvin, 8, 1 * kilojoule_per_mole, frequency=100)

    integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds)
    # The forces beside the network have too little to do for the threads of the CPU platform; with a GPU, name "CUDA".
    platform = Platform.getPlatformByName("Reference")
    simulation = Simulation(pdb.topology, system, integrator, platform)
    simulation.context.setPositions(pdb.positions)
    simulation.context.setVelocitiesToTemperature(300 * kelvin)
    metadynamics.step(simulation, round(options.time * 2000))

    free_energy = metadynamics.getFreeEnergy().value_in_unit(kilojoule_per_mole)
    free_energy -= free_energy.min()
    np.save("metadynamics.npy", free_energy)
    # Of a conformer: minus kT times the logarithm of its share. The last row and column repeat the first.
    kT = (MOLAR_GAS_CONSTANT_R * 300 * kelvin).value_in_unit(kilojoule_per_mole)
    degrees = np.linspace(-180, 180, GRID)[:-1]
    basins = compute_basins(np.stack(np.meshgrid(degrees, degrees), axis=-1))
    weights = np.exp(-free_energy[:-1, :-1] / kT)
    shares = np.array([weights[basins == k].sum() for k in range(len(BASINS))])
    for name, value in zip(BASINS, -kT * np.log(shares / shares.max()), strict=True):
        print(f"{name:6} {value:6.2f} kJ/mol")


if __name__ == "__main__":
    main()
