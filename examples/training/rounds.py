"""Rounds: fit, run molecular dynamics with the model, label what it finds, fit on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openmm
from tqdm import tqdm

from openmm_tensornet import create_system

from . import sampling
from .fit import Fit, load_frames, predict
from .gfn2 import GFN2, read_arrays, write_arrays
from .sampling import PDB, START, Z, heavy_hydrogens, langevin, positions

# Shares of all steps after which the model runs, and what it finds is added.
ROUNDS = (0.15, 0.35, 0.6)
TEMPERATURES = (300.0, 400.0, 500.0, 600.0)  # K
RUNS, FRAMES, STEPS = 24, 30, 20  # trajectories of a round, frames of each, steps of 2 fs between them
CALM = 5.0  # eV/Å; trajectories start from frames without a larger force
KEPT = 600  # frames of a round: half those with the largest errors, half at random


def first_labels(folder: Path, seed: int) -> None:
    """Label the geometries that need no model; files that are there are kept."""

    def rng(source: int) -> np.random.Generator:
        return np.random.default_rng([seed, source])

    def write(name: str, frames) -> np.ndarray:
        path = folder / f"{name}.npz"
        if not path.exists():
            found = frames()
            if not isinstance(found, dict):
                found = GFN2(Z).label(found, lambda x: tqdm(x, desc=f"labels {name}", unit="frame"))
            write_arrays(path, **found)
        return read_arrays(path)["positions"]

    grid = write("0-grid", lambda: sampling.ramachandran_grid(rng(0)))
    free = write("1-free", lambda: sampling.free(rng(1)))
    write("2-displaced", lambda: sampling.displaced(rng(2), np.concatenate((grid, free))))
    write("3-teacher", lambda: sampling.teacher(rng(3), grid))


def train(folder: Path, seed: int, steps: int, batch_size: int, start: str | None = None) -> Fit:
    """Label, fit and extend, in turn, up to `steps` steps; continues what `folder` holds."""
    labels = folder / "labels"
    first_labels(labels, seed)
    # Whole eV: exact in any precision, and the same whatever is added later.
    mean = float(np.round(np.mean(read_arrays(labels / "0-grid.npz")["energies"])))
    fit = Fit(folder, seed, mean, start)
    for number, share in enumerate((*ROUNDS, 1.0), start=1):
        training, validation = load_frames(labels, seed, mean, number)
        fit.run(round(share * steps), steps, training, validation, batch_size)
        path = labels / f"round-{number}.npz"
        if share < 1 and not path.exists():
            write_arrays(path, **explore(fit, labels, np.random.default_rng([seed, 100 + number])))
    return fit


def explore(fit: Fit, labels: Path, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Run the model at 300 to 600 K, from labelled frames, and label what it visits.

    A label costs no more than a few steps of the model, so where the model is wrong is measured and not estimated: all
    frames are labelled, and the worst half of :data:`KEPT` is joined by as many at random. A trajectory that falls apart ends
    there.
    """
    known = [read_arrays(path) for path in sorted(labels.glob("*.npz"))]
    starts = np.concatenate([data["positions"][np.abs(data["forces"]).max((1, 2)) < CALM] for data in known])
    system = create_system(fit.folder / "model.ckpt", PDB.topology, positions=PDB.positions)
    context = langevin(heavy_hydrogens(system), START, 300.0, int(rng.integers(1, 2**31)))
    integrator = context.getIntegrator()
    frames = []
    for run in tqdm(range(RUNS), desc="exploring", unit="run"):
        context.setPositions(starts[rng.integers(len(starts))] / 10)
        temperature = TEMPERATURES[run % len(TEMPERATURES)]
        integrator.setTemperature(temperature)
        context.setVelocitiesToTemperature(temperature, int(rng.integers(1, 2**31)))
        for _ in range(FRAMES):
            try:
                integrator.step(STEPS)
                x = positions(context.getState(positions=True))
            except openmm.OpenMMException:  # positions are NaN
                break
            if not np.isfinite(x).all() or np.abs(x - x.mean(0)).max() > 10:
                break
            frames.append(x)
    found = GFN2(Z).label(np.array(frames), lambda x: tqdm(x, desc="labels", unit="frame"))
    errors = np.abs(predict(fit.average_batch, found["positions"])[1] - found["forces"]).mean((1, 2))
    print(f"mean absolute force error on the model's own frames: {errors.mean():.4f} eV/Å, worst {errors.max():.3f}")
    order = np.argsort(-errors)
    worst, rest = order[: KEPT // 2], order[KEPT // 2 :]
    kept = np.concatenate((worst, rng.permutation(rest)[: KEPT - len(worst)]))
    return {name: values[kept] for name, values in found.items()}
