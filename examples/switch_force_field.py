"""Free energy of alanine dipeptide in vacuum from a force field (Amber 14) to a TensorNet potential, by MBAR.

    python switch_force_field.py [MODEL] [--windows N] [--time PS]

MODEL is a TorchMD-Net checkpoint (by default the model of the package). Both potentials are in one System, each with a factor:
the energy is (1 - lambda_ml) of the force field's plus lambda_ml of the network's. It is sampled at several values of lambda_ml.
"""

import argparse
import copy
from pathlib import Path

import numpy as np
from openmm import CustomCVForce, LangevinMiddleIntegrator, Platform, System
from openmm.app import ForceField, PDBFile, Simulation
from openmm.unit import MOLAR_GAS_CONSTANT_R, femtoseconds, kelvin, kilojoule_per_mole, picosecond
from pymbar import MBAR

from openmm_tensornet import create_system


def both(pdb: PDBFile, model: str) -> System:
    """The network, scaled by lambda_ml, and the forces of a force field, scaled by the rest."""
    system = create_system(model, pdb.topology, positions=pdb.positions, scale_parameter="lambda_ml")
    amber = ForceField("amber14-all.xml").createSystem(pdb.topology, constraints=None, removeCMMotion=False)
    names = [f"E{k}" for k in range(amber.getNumForces())]
    rest = CustomCVForce(f"(1 - lambda_ml) * ({' + '.join(names)})")
    rest.addGlobalParameter("lambda_ml", 1.0)
    for name, force in zip(names, amber.getForces(), strict=True):
        rest.addCollectiveVariable(name, copy.deepcopy(force))
    system.addForce(rest)
    return system


def energy(simulation: Simulation, factor: float) -> float:
    """In kJ/mol."""
    simulation.context.setParameter("lambda_ml", factor)
    return simulation.context.getState(energy=True).getPotentialEnergy().value_in_unit(kilojoule_per_mole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="alanine-dipeptide-gfn2", metavar="MODEL", help="(%(default)s)")
    parser.add_argument("--windows", type=int, default=6, help="values of lambda_ml from 0 to 1 (%(default)s)")
    parser.add_argument("--time", type=float, default=20.0, help="ps in each window (%(default)s)")
    options = parser.parse_args()

    pdb = PDBFile(str(Path(__file__).with_name("alanine_dipeptide.pdb")))
    integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds)
    # The forces beside the network have too little to do for the threads of the CPU platform; with a GPU, name "CUDA".
    platform = Platform.getPlatformByName("Reference")
    simulation = Simulation(pdb.topology, both(pdb, options.model), integrator, platform)
    simulation.context.setPositions(pdb.positions)
    simulation.context.setVelocitiesToTemperature(300 * kelvin)
    # Energies of the network are those of all electrons: without this offset the free energy would be 1e5 kJ/mol.
    offset = energy(simulation, 1.0) - energy(simulation, 0.0)

    lambdas = np.linspace(0, 1, options.windows)
    frames = max(2, round(options.time / 0.1))  # one every 0.1 ps
    ends = np.empty((options.windows, frames, 2))  # energies at lambda_ml = 0 and 1
    for k, factor in enumerate(lambdas):
        simulation.context.setParameter("lambda_ml", factor)
        simulation.step(frames * 200 // 5)  # equilibration: a fifth
        for frame in range(frames):
            simulation.step(200)
            ends[k, frame] = energy(simulation, 0.0), energy(simulation, 1.0) - offset
            simulation.context.setParameter("lambda_ml", factor)
        print(f"lambda_ml {factor:.2f}: mean dE/dlambda {np.diff(ends[k]).mean():8.2f} kJ/mol", flush=True)

    kT = (MOLAR_GAS_CONSTANT_R * 300 * kelvin).value_in_unit(kilojoule_per_mole)
    start, end = ends.reshape(-1, 2).T / kT
    reduced = np.outer(1 - lambdas, start) + np.outer(lambdas, end)
    result = MBAR(reduced, [frames] * options.windows).compute_free_energy_differences()
    print(
        f"free energy {result['Delta_f'][0, -1] * kT:.2f} ± {result['dDelta_f'][0, -1] * kT:.2f} kJ/mol, without {offset:.2f}"
    )


if __name__ == "__main__":
    main()
