"""Geometries of alanine dipeptide to label; nothing here is a test set.

Each source is a function of a random generator that returns frames, shape (m, 22, 3), Å.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openmm
from openmm import LangevinMiddleIntegrator, unit
from openmm.app import ForceField, HBonds, PDBFile

from .gfn2 import GFN2

PDB = PDBFile(str(Path(__file__).resolve().parent.parent / "alanine_dipeptide.pdb"))
Z = np.array([atom.element.atomic_number for atom in PDB.topology.atoms()])
START = PDB.getPositions(asNumpy=True).value_in_unit(unit.angstrom)
PHI, PSI = (4, 6, 8, 14), (6, 8, 14, 16)  # C-N-CA-C and N-CA-C-N
C7EQ, C7AX = (-80.0, 70.0), (70.0, -60.0)  # degrees
# Heavy hydrogens move nothing in the ensemble of positions and allow twice the time step.
HYDROGEN_MASS = 4.0  # Da
KB = unit.MOLAR_GAS_CONSTANT_R.value_in_unit(unit.kilojoule_per_mole / unit.kelvin) / 96.48533212331  # eV/K


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
            state = self.context.getState(positions=True)
            found.append(state.getPositions(asNumpy=True).value_in_unit(unit.angstrom))
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


class TeacherDynamics:
    """Langevin dynamics (BAOAB; the ensemble of positions of a harmonic oscillator is exact) with GFN2-xTB.

    Parameters
    ----------
    x : array, shape (n, 3)
        Start, Å.
    temperature : float
        K.
    rng : numpy Generator
    timestep : float
        fs.
    friction : float
        1/ps.
    """

    def __init__(
        self, x: np.ndarray, temperature: float, rng: np.random.Generator, timestep: float = 2.0, friction: float = 2.0
    ):
        self.potential, self.rng = GFN2(Z), rng
        self.mass = np.array([HYDROGEN_MASS if a.element.symbol == "H" else a.element.mass._value for a in PDB.topology.atoms()])
        self.mass = self.mass[:, None]
        # eV/(Da Å/fs²): 1 Da Å²/fs² = 103.6427 eV
        self.per_mass = 96.48533212331e-4 / self.mass  # acceleration in Å/fs² for 1 eV/Å
        self.dt, self.decay = timestep, np.exp(-friction * timestep / 1000)
        self.thermal = np.sqrt(KB * temperature * self.per_mass)
        self.x, self.v = np.array(x), self.thermal * rng.standard_normal(x.shape)
        self.energy, self.force = self.potential(self.x)

    def step(self) -> None:
        """One time step."""
        self.v += 0.5 * self.dt * self.force * self.per_mass
        self.x += 0.5 * self.dt * self.v
        noise = np.sqrt(1 - self.decay**2) * self.thermal * self.rng.standard_normal(self.x.shape)
        self.v = self.decay * self.v + noise
        self.x += 0.5 * self.dt * self.v
        self.energy, self.force = self.potential(self.x)
        self.v += 0.5 * self.dt * self.force * self.per_mass


def teacher(rng: np.random.Generator, starts: np.ndarray, runs: int = 100, steps: int = 200, every: int = 10):
    """Labelled frames of short trajectories of GFN2-xTB itself at 500 K, from random starts."""
    found: dict[str, list] = {"positions": [], "energies": [], "forces": []}
    for start in starts[rng.choice(len(starts), runs)]:
        run = TeacherDynamics(start, 500.0, rng)
        for step in range(1, steps + 1):
            run.step()
            if step % every == 0:
                for name, value in (("positions", run.x), ("energies", run.energy), ("forces", run.force)):
                    found[name].append(np.array(value))
    return {name: np.array(values) for name, values in found.items()}
