"""Geometries of alanine dipeptide to label; nothing here is a test set.

Each source is a function of a random generator that returns frames, shape (m, 22, 3), Å.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openmm
from openmm import LangevinMiddleIntegrator, unit
from openmm.app import ForceField, HBonds, PDBFile

from openmm_tensornet.common.units import KJ_PER_MOL_PER_EV, NM_PER_ANGSTROM

from .gfn2 import GFN2, LABELS

PDB = PDBFile(str(Path(__file__).resolve().parent.parent / "alanine_dipeptide.pdb"))
Z = np.array([atom.element.atomic_number for atom in PDB.topology.atoms()])
START = PDB.getPositions(asNumpy=True).value_in_unit(unit.angstrom)
PHI, PSI = (4, 6, 8, 14), (6, 8, 14, 16)  # C-N-CA-C and N-CA-C-N
C7EQ, C7AX = (-80.0, 70.0), (70.0, -60.0)  # degrees
# Heavy hydrogens move nothing in the ensemble of positions and allow twice the time step.
HYDROGEN_MASS = 4.0  # Da


class Amber:
    """Molecular dynamics with amber14 in vacuum, phi and psi restrained at will."""

    def __init__(self, seed: int):
        system = ForceField("amber14-all.xml").createSystem(
            PDB.topology, constraints=HBonds, hydrogenMass=HYDROGEN_MASS * unit.dalton
        )
        bond = openmm.CustomTorsionForce("0.5*k*d^2; d=min(a,6.283185307-a); a=abs(theta-center)")
        bond.addGlobalParameter("k", 0.0)
        bond.addPerTorsionParameter("center")
        for atoms in (PHI, PSI):
            bond.addTorsion(*atoms, [0.0])
        system.addForce(bond)
        self.restraint = bond
        self.integrator = LangevinMiddleIntegrator(300, 5, 0.002)
        self.integrator.setRandomNumberSeed(seed)
        self.context = openmm.Context(
            system, self.integrator, openmm.Platform.getPlatformByName("CPU"), {"Threads": "1"}
        )

    def restrain(self, phi: float, psi: float, k: float) -> None:
        """Hold phi and psi (degrees) with a force constant k (kJ/mol/rad²); 0 lets them go."""
        for index, (atoms, angle) in enumerate(((PHI, phi), (PSI, psi))):
            self.restraint.setTorsionParameters(index, *atoms, [np.radians(angle)])
        self.restraint.updateParametersInContext(self.context)
        self.context.setParameter("k", k)

    def start(self, phi: float, psi: float, temperature: float, seed: int) -> None:
        """Bring phi and psi from the start structure to their values, relax, and heat."""
        self.context.setPositions(START / 10)
        self.restrain(phi, psi, 500.0)
        openmm.LocalEnergyMinimizer.minimize(self.context, 10.0, 500)
        self.integrator.setTemperature(temperature)
        self.context.setVelocitiesToTemperature(temperature, seed)
        self.integrator.step(500)

    def frames(self, count: int, steps: int) -> list[np.ndarray]:
        """Positions (Å) every `steps` steps of 2 fs."""
        found = []
        for _ in range(count):
            self.integrator.step(steps)
            found.append(positions(self.context.getState(positions=True)))
        return found


def ramachandran_grid(rng: np.random.Generator, frames: int = 14) -> np.ndarray:
    """All of phi and psi, barriers included: restrained at 144 places, 500 K."""
    amber, found = Amber(int(rng.integers(1, 2**31))), []
    for phi in range(-180, 180, 30):
        for psi in range(-180, 180, 30):
            amber.start(phi, psi, 500.0, int(rng.integers(1, 2**31)))
            amber.restrain(phi, psi, 50.0)
            found += amber.frames(frames, 250)
    return np.array(found)


def free(rng: np.random.Generator, frames: int = 300) -> np.ndarray:
    """From both minima, at 300, 500 and 800 K, without restraint."""
    amber, found = Amber(int(rng.integers(1, 2**31))), []
    for temperature in (300.0, 500.0, 800.0):
        for phi, psi in (C7EQ, C7AX):
            amber.start(phi, psi, temperature, int(rng.integers(1, 2**31)))
            amber.restrain(phi, psi, 0.0)
            found += amber.frames(frames, 500)
    return np.array(found)


def displaced(rng: np.random.Generator, frames: np.ndarray, count: int = 1200) -> np.ndarray:
    """Frames with every atom displaced by up to 0.06 Å, and the molecule scaled by up to 5 %."""
    chosen = frames[rng.choice(len(frames), count)]
    scale = rng.uniform(0.95, 1.05, (count, 1, 1))
    noise = rng.uniform(0.01, 0.06, (count, 1, 1)) * rng.standard_normal(chosen.shape)
    return chosen * scale + noise


def heavy_hydrogens(system: openmm.System) -> openmm.System:
    """The same System with the hydrogens' mass for a time step of 2 fs."""
    for index in np.flatnonzero(Z == 1):
        system.setParticleMass(int(index), HYDROGEN_MASS)
    return system


def langevin(system: openmm.System, x: np.ndarray, temperature: float, seed: int) -> openmm.Context:
    """Langevin dynamics in steps of 2 fs, from positions `x` (Å), at a temperature (K)."""
    integrator = LangevinMiddleIntegrator(temperature, 2, 0.002)
    integrator.setRandomNumberSeed(seed)
    # PythonForce works on every platform, and one thread is enough for 22 atoms.
    context = openmm.Context(system, integrator, openmm.Platform.getPlatformByName("Reference"))
    context.setPositions(x / 10)
    context.setVelocitiesToTemperature(temperature, seed)
    return context


def teacher_system() -> openmm.System:
    """Alanine dipeptide with the energy of GFN2-xTB."""
    gfn2 = GFN2(Z, trajectory=True)

    def compute(state: openmm.State) -> tuple[float, np.ndarray]:
        energy, forces = gfn2(positions(state))
        return energy * KJ_PER_MOL_PER_EV, forces * (KJ_PER_MOL_PER_EV / NM_PER_ANGSTROM)

    system = openmm.System()
    for atom in PDB.topology.atoms():
        system.addParticle(atom.element.mass)
    system.addForce(openmm.PythonForce(compute))
    return heavy_hydrogens(system)


def positions(state: openmm.State) -> np.ndarray:
    """Positions of a state, shape (22, 3), Å."""
    return state.getPositions(asNumpy=True).value_in_unit(unit.angstrom)


def labelled(context: openmm.Context) -> tuple[np.ndarray, float, np.ndarray]:
    """Positions (Å), energy (eV) and forces (eV/Å) of a context."""
    state = context.getState(positions=True, energy=True, forces=True)
    forces = state.getForces(asNumpy=True).value_in_unit(unit.kilojoule_per_mole / unit.angstrom)
    energy = state.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole)
    return positions(state), energy / KJ_PER_MOL_PER_EV, forces / KJ_PER_MOL_PER_EV


def teacher(rng: np.random.Generator, starts: np.ndarray, runs: int = 100, frames: int = 20, steps: int = 10) -> dict:
    """Labelled frames of short trajectories of GFN2-xTB itself at 500 K, from random starts."""
    found: list[tuple] = []
    system = teacher_system()
    for start in starts[rng.choice(len(starts), runs)]:
        context = langevin(system, start, 500.0, int(rng.integers(1, 2**31)))
        for _ in range(frames):
            context.getIntegrator().step(steps)
            found.append(labelled(context))
    return {name: np.array(values) for name, values in zip(LABELS, zip(*found, strict=True), strict=True)}
