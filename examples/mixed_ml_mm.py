"""Alanine dipeptide by a TensorNet potential in a box of TIP3P water by Amber 14.

    python mixed_ml_mm.py MODEL [--time PS]

MODEL is a TorchMD-Net checkpoint such as aceff-1.1.ckpt, or the name of a known model. Runs at 300 K, then without a
thermostat, and that also with the force field alone, to compare how well energy is conserved.
"""

import argparse
from pathlib import Path

import numpy as np
from openmm import Context, LangevinMiddleIntegrator, Platform, State, System, VerletIntegrator
from openmm.app import PME, ForceField, Modeller, PDBFile, Simulation
from openmm.unit import MOLAR_GAS_CONSTANT_R, femtosecond, kelvin, kilojoule_per_mole, nanometer, picosecond

from openmm_tensornet import create_mixed_system


def solvate() -> tuple[Modeller, System]:
    """Alanine dipeptide in 2.4 nm of water, and a System with a force field for all of it; the peptide is flexible."""
    forcefield = ForceField("amber14-all.xml", "amber14/tip3p.xml")
    pdb = PDBFile(str(Path(__file__).with_name("alanine_dipeptide.pdb")))
    modeller = Modeller(pdb.topology, pdb.positions)
    modeller.addSolvent(forcefield, model="tip3p", boxSize=np.full(3, 2.4) * nanometer)
    system = forcefield.createSystem(
        modeller.topology, nonbondedMethod=PME, nonbondedCutoff=0.9 * nanometer, constraints=None, rigidWater=True
    )
    return modeller, system


def temperature(context: Context) -> float:
    """In K."""
    system = context.getSystem()
    dof = 3 * system.getNumParticles() - system.getNumConstraints() - 3  # the CMMotionRemover takes three
    kinetic = context.getState(energy=True).getKineticEnergy()
    return (2 * kinetic / (dof * MOLAR_GAS_CONSTANT_R)).value_in_unit(kelvin)


def run_at_300_kelvin(modeller: Modeller, system: System, length: float, before: float) -> tuple[float, State]:
    """Mean temperature (K) over `length` ps after `before` ps of equilibration, and the last State."""
    integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 1 * femtosecond)
    # The force field of the water keeps the CPU platform's threads busy; with a GPU, name "CUDA".
    platform = Platform.getPlatformByName("CPU")
    simulation = Simulation(modeller.topology, system, integrator, platform)
    simulation.context.setPositions(modeller.positions)
    simulation.minimizeEnergy(maxIterations=200)
    simulation.context.setVelocitiesToTemperature(300 * kelvin)
    simulation.step(round(before * 1000))
    temperatures = []
    for _ in range(max(1, round(length * 1000 / 50))):
        simulation.step(50)
        temperatures.append(temperature(simulation.context))
    return float(np.mean(temperatures)), simulation.context.getState(positions=True, velocities=True)


def conserve_energy(system: System, state: State, length: float) -> tuple[float, float]:
    """Drift (kJ/mol/ps) and standard deviation (kJ/mol) of the total energy over `length` ps at 0.5 fs."""
    integrator = VerletIntegrator(0.5 * femtosecond)
    context = Context(system, integrator, Platform.getPlatformByName("CPU"))
    context.setState(state)
    integrator.step(200)  # the start is no point of the trajectory that Verlet follows
    energies = []
    for _ in range(round(length * 2000 / 20)):
        integrator.step(20)
        now = context.getState(energy=True)
        energies.append((now.getKineticEnergy() + now.getPotentialEnergy()).value_in_unit(kilojoule_per_mole))
    return float(np.polyfit(np.arange(len(energies)) * 0.01, energies, 1)[0]), float(np.std(energies))


def main(model: str, length: float = 20.0, short: float = 2.0) -> dict[str, float]:
    modeller, mm_system = solvate()
    peptide = [atom.index for atom in modeller.topology.atoms() if atom.residue.name != "HOH"]
    mixed_system = create_mixed_system(model, modeller.topology, mm_system, peptide)
    results = {}
    for name, system in (("ML/MM", mixed_system), ("MM alone", mm_system)):
        results[f"{name} temperature"], state = run_at_300_kelvin(modeller, system, length, short)
        drift, deviation = conserve_energy(system, state, short)
        results[f"{name} drift"], results[f"{name} deviation"] = drift, deviation
        print(
            f"{name}: {results[f'{name} temperature']:.1f} K over {length:g} ps; total energy over {short:g} ps: drift {drift:+.3f} "
            f"kJ/mol/ps, standard deviation {deviation:.3f} kJ/mol",
            flush=True,
        )
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--time", type=float, default=20.0, help="ps at 300 K (%(default)s)")
    parser.add_argument(
        "--short", type=float, default=2.0, help="ps before that, and without a thermostat (%(default)s)"
    )
    options = parser.parse_args()
    main(options.model, options.time, options.short)
