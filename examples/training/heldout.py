"""Trajectories of GFN2-xTB itself, for testing only, and the errors of a model on their frames."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openmm
from openmm import unit
from tqdm import tqdm

from .gfn2 import LABELS, read_arrays, write_arrays
from .sampling import Amber, labelled, langevin, teacher_system

TEMPERATURES = (300, 500)  # K
RUNS = 5  # trajectories at each temperature
EQUILIBRATION, FRAMES = 2, 100  # frames of each trajectory, one a picosecond
STEPS = 500  # of 2 fs


class Trajectory:
    """One trajectory of GFN2-xTB, extended by a frame at a time and kept in a file.

    Parameters
    ----------
    path : Path
    temperature : float
        K.
    seed : sequence of int
        Every frame has random numbers of its own, so that a stopped run goes on with others than it began with.
    start : tuple of float, optional
        phi and psi, degrees; at random by default.
    steps : int
        Of 2 fs, between frames.
    """

    def __init__(
        self,
        path: Path,
        temperature: float,
        seed: list[int],
        start: tuple[float, float] | None = None,
        steps: int = STEPS,
    ):
        self.path, self.temperature, self.seed, self.start, self.steps = path, temperature, seed, start, steps
        self.data = read_arrays(path) if path.exists() else {}

    def __len__(self) -> int:
        return len(self.data.get("energies", ()))

    def extend(self, system: openmm.System) -> None:
        """Run to the next frame (Å, eV, eV/Å) and write the file."""
        rng = np.random.default_rng([*self.seed, len(self)])
        seed = int(rng.integers(1, 2**31))
        if self.data:
            context = langevin(system, self.data["positions"][-1], self.temperature, seed)
            context.setVelocities(self.data["velocities"])
        else:
            context = langevin(system, self._first(rng), self.temperature, seed)
        context.getIntegrator().step(self.steps)
        for name, value in zip(LABELS, labelled(context), strict=True):
            new = np.asarray(value)[None]
            self.data[name] = np.concatenate((self.data[name], new)) if name in self.data else new
        state = context.getState(velocities=True)
        self.data["velocities"] = state.getVelocities(asNumpy=True).value_in_unit(unit.nanometer / unit.picosecond)
        write_arrays(self.path, **self.data)

    def _first(self, rng: np.random.Generator) -> np.ndarray:
        amber = Amber(int(rng.integers(1, 2**31)))
        phi, psi = rng.uniform(-180, 180, 2) if self.start is None else self.start
        amber.start(phi, psi, 300.0, int(rng.integers(1, 2**31)))
        return amber.frames(1, 1)[0]


def trajectories(folder: Path, seed: int) -> dict[int, list[Trajectory]]:
    """Held-out trajectories by temperature (K), as far as they have come."""
    return {
        temperature: [
            Trajectory(folder / f"{temperature}K-{run}.npz", temperature, [seed, 200, temperature, run])
            for run in range(RUNS)
        ]
        for temperature in TEMPERATURES
    }


def generate(folder: Path, seed: int) -> None:
    """Extend all trajectories in turn to their full length; continues what `folder` holds."""
    runs = [run for several in trajectories(folder, seed).values() for run in several]
    extend(runs, EQUILIBRATION + FRAMES)


def extend(runs: list[Trajectory], length: int) -> None:
    """Extend trajectories in turn until each has `length` frames."""
    system = teacher_system()
    with tqdm(total=length * len(runs), initial=sum(map(len, runs)), unit="frame", desc="GFN2-xTB") as bar:
        while len(shortest := min(runs, key=len)) < length:
            shortest.extend(system)
            bar.update()


def frames(folder: Path, seed: int, temperature: int) -> dict[str, np.ndarray]:
    """Frames after equilibration of all trajectories at a temperature: positions (Å), energies (eV), forces (eV/Å)."""
    data = [run.data for run in trajectories(folder, seed)[temperature]]
    return {name: np.concatenate([d[name][EQUILIBRATION:] for d in data if d]) for name in LABELS}
