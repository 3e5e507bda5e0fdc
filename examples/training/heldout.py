"""Trajectories of GFN2-xTB itself, for testing only, and the errors of a model on their frames."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tqdm import tqdm

from . import sampling
from .gfn2 import read_arrays, write_arrays
from .sampling import TeacherDynamics

TEMPERATURES = (300, 500)  # K
RUNS = 5  # trajectories at each temperature
EQUILIBRATION, FRAMES = 2, 100  # ps, one frame each, of each trajectory
STEPS = 500  # of 2 fs


class Trajectory:
    """One trajectory of GFN2-xTB, extended by a picosecond at a time and kept in a file.

    Parameters
    ----------
    path : Path
    temperature : float
        K.
    seed : sequence of int
        Every picosecond has random numbers of its own, so that a stopped run goes on as if it had not been.
    """

    def __init__(self, path: Path, temperature: float, seed: list[int]):
        self.path, self.temperature, self.seed = path, temperature, seed
        if path.exists():
            self.data = read_arrays(path)
        else:
            n = len(sampling.Z)
            self.data = {
                "positions": np.empty((0, n, 3)),
                "energies": np.empty(0),
                "forces": np.empty((0, n, 3)),
                "velocity": np.empty(0),
            }

    def __len__(self) -> int:
        return len(self.data["energies"])

    def extend(self) -> None:
        """One picosecond, one frame (Å, eV, eV/Å)."""
        rng = np.random.default_rng([*self.seed, len(self)])
        if len(self) == 0:
            run = TeacherDynamics(self._start(rng), self.temperature, rng)
        else:
            run = TeacherDynamics(self.data["positions"][-1], self.temperature, rng)
            run.v = np.array(self.data["velocity"])
        for _ in range(STEPS):
            run.step()
        for name, value in (("positions", run.x), ("energies", run.energy), ("forces", run.force)):
            self.data[name] = np.concatenate((self.data[name], np.asarray(value)[None]))
        self.data["velocity"] = run.v
        write_arrays(self.path, **self.data)

    def _start(self, rng: np.random.Generator) -> np.ndarray:
        """A geometry at a random place of phi and psi."""
        amber = sampling.Amber(int(rng.integers(1, 2**31)))
        amber.start(*rng.uniform(-180, 180, 2), 300.0, int(rng.integers(1, 2**31)))
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
    length = EQUILIBRATION + FRAMES
    with tqdm(total=length * len(runs), initial=sum(map(len, runs)), unit="ps", desc="GFN2-xTB") as bar:
        while (shortest := min(runs, key=len)) and len(shortest) < length:
            shortest.extend()
            bar.update()


def frames(folder: Path, seed: int, temperature: int) -> dict[str, np.ndarray]:
    """Frames after equilibration of all trajectories at a temperature: positions (Å), energies (eV), forces (eV/Å)."""
    data = [run.data for run in trajectories(folder, seed)[temperature]]
    return {
        name: np.concatenate([d[name][EQUILIBRATION:] for d in data]) for name in ("positions", "energies", "forces")
    }
