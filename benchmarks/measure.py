"""Compare backends, then time them alternately."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .systems import ROOT, Case, Structure, load

KJ_PER_EV = 96.48533212331
# How far two backends in single precision may be apart: eV an atom, and the forces' deviation over their norm.
ENERGY_TOLERANCE = 2e-6
FORCE_TOLERANCE = 3e-5
# Up to so many atoms. Above, sums in float32 lose more with the root of the number of terms, coordinates with the
# system's width.
TOLERANCE_ATOMS = 200
SHAKE = 0.002  # nm
MINIMUM_COUNT = 3
MAXIMUM_COUNT = 2000


class WrongResult(RuntimeError):
    """A backend gives other energies or forces than the one that it is compared with."""


class WorkerFailed(RuntimeError):
    """A worker reported an error or ended."""


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes
    ----------
    model : str
        Path of the checkpoint.
    precision : str
        "single" or "double".
    platform : str
        Of OpenMM.
    threads : int
        For OpenMM and for PyTorch.
    timestep_fs : float
    rounds : int
        How often each backend takes its turn.
    block_seconds : float
        About how long one turn lasts, for steps and for evaluations each.
    """

    model: str
    precision: str = "single"
    platform: str = "Reference"
    threads: int = 1
    timestep_fs: float = 0.5
    rounds: int = 7
    block_seconds: float = 2.0


class Evaluator(Protocol):
    """What answers a worker's commands."""

    def call(self, do: str, **arguments: Any) -> Any:
        """Run one command of :class:`benchmarks.worker.Session`."""


class Worker:
    """A :mod:`benchmarks.worker` process; a context manager that ends it.

    Parameters
    ----------
    python : path
        The interpreter of the backend's environment.
    backend : str
    threads : int
    module : str
        What the process runs.
    """

    def __init__(self, python: str | os.PathLike, backend: str, threads: int = 1, module: str = "benchmarks.worker"):
        # An empty cache of compiled code, as for a system that was never run before.
        self._folder = tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True)
        self._log = Path(self._folder.name) / "stderr"
        self._backend = backend
        limits = {f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "MKL", "OPENBLAS", "NUMBA")}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [os.fspath(python), "-m", module, "--backend", backend],
                cwd=ROOT,
                env={**os.environ, **limits, "TORCHINDUCTOR_CACHE_DIR": self._folder.name},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def call(self, do: str, **arguments: Any) -> Any:
        """Run one command and return its result.

        Raises
        ------
        WorkerFailed
            With the end of what the worker wrote to stderr.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"error": f"the process ended (status {self._process.wait()})"}
        if "error" in answer:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
            raise WorkerFailed(f"{self._backend}, {do}: {answer['error']}\n{tail}")
        return answer["result"]

    def kill(self) -> None:
        """End the process; a call that waits for it fails."""
        self._process.kill()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=20)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()


def geometries(structure: Structure) -> list[np.ndarray]:
    """Positions (N, 3) to compare at: as they are, and shaken by 2 pm, nm."""
    noise = np.random.default_rng(11).normal(size=structure.positions.shape)
    return [structure.positions, structure.positions + SHAKE * noise]


def tolerances(atoms: int) -> tuple[float, float]:
    """Tolerances of energy and forces for a system of that size."""
    growth = max(1.0, atoms / TOLERANCE_ATOMS)
    return ENERGY_TOLERANCE * growth ** (1 / 2), FORCE_TOLERANCE * growth ** (1 / 3)


def compare(name: str, found: list[dict], expected: list[dict]) -> dict[str, float]:
    """Largest deviations over several geometries.

    Parameters
    ----------
    name : str
        What is compared, for the message.
    found, expected : list of dict
        `energy`, kJ/mol, and `forces`, (N, 3), kJ/mol/nm, of each geometry.

    Returns
    -------
    dict
        `energy_eV_per_atom` and `relative_force`.

    Raises
    ------
    WrongResult
        If one is above its tolerance or not a number.
    """
    energy = force = 0.0
    for one, other in zip(found, expected, strict=True):
        forces, right = np.array(one["forces"]), np.array(other["forces"])
        deviations = (
            abs(one["energy"] - other["energy"]) / len(right) / KJ_PER_EV,
            float(np.linalg.norm(forces - right) / np.linalg.norm(right)),
        )
        # max() would lose a NaN
        energy, force = (float(np.maximum(a, b)) for a, b in zip((energy, force), deviations, strict=True))
    energy_allowed, force_allowed = tolerances(len(expected[0]["forces"]))
    if not (energy <= energy_allowed and force <= force_allowed):
        raise WrongResult(
            f"{name}: not timed, because the results differ: energy by {energy:.2e} eV an atom "
            f"(at most {energy_allowed:.0e}), forces by {force:.2e} of their norm (at most {force_allowed:.0e})"
        )
    return {"energy_eV_per_atom": energy, "relative_force": force}


def start(worker: Evaluator, case: Case, settings: Settings) -> Any:
    """Make the force of a case in a worker; what the worker says of it."""
    return worker.call(
        "start",
        case=case.name,
        model=settings.model,
        precision=settings.precision,
        threads=settings.threads,
        timestep_fs=settings.timestep_fs,
        platform_name=settings.platform,
    )


def measure(
    case: Case,
    settings: Settings,
    workers: dict[str, Evaluator],
    reference: Evaluator | None = None,
    report: Callable[[str], None] = print,
) -> dict:
    """Start the workers on a case, compare them, and time them.

    Parameters
    ----------
    case : Case
    settings : Settings
    workers : dict
        By backend; the first one is what the others are compared with. None was started yet.
    reference : Evaluator, optional
        A further worker, which answers `reference`, to compare the first one with.
    report : callable
        Takes lines that say what happens.

    Returns
    -------
    dict
        For the results' `cases`.

    Raises
    ------
    WrongResult
        If results differ. Nothing has been timed then.
    """
    first, *others = workers
    geometry = [x.tolist() for x in geometries(load(case))]
    backends: dict[str, dict] = {}
    found = {}
    for name, worker in workers.items():
        report(f"{case.name}: starting {name}")
        backends[name] = start(worker, case, settings)
        found[name] = [worker.call("evaluate", positions=x) for x in geometry]
    comparisons = {}
    if reference is not None:
        expected = reference.call("reference", case=case.name, model=settings.model, positions=geometry)
        comparisons["reference model"] = compare(f"{case.name}, {first}", found[first], expected)
    for name in others:
        comparisons[name] = compare(f"{case.name}, {name} and {first}", found[name], found[first])
    for name, deviations in comparisons.items():
        report(f"{case.name}: {first} and {name} agree: {deviations}")

    times = alternate(workers, settings)
    for name, worker in workers.items():
        backends[name] |= {"memory": worker.call("memory"), **summary(times[name], settings.timestep_fs)}
        backends[name]["kernels"] = worker.call("kernels")  # after the memory, of which counting takes some
    return {
        "name": case.name,
        "description": case.description,
        "atoms": case.atoms,
        "total_charge": case.total_charge,
        "periodic": case.periodic,
        "comparisons": comparisons,
        "backends": backends,
        "ratios": {name: ratios(times[name], times[first]) for name in others},
    }


def alternate(workers: dict[str, Evaluator], settings: Settings) -> dict[str, dict[str, list[float]]]:
    """Seconds a step and an evaluation, one of each a round, for each backend; the backends take turns."""
    times: dict[str, dict[str, list[float]]] = {name: {"step_s": [], "evaluation_s": []} for name in workers}
    counts = {}
    for name, worker in workers.items():
        seconds = worker.call("time_evaluations", count=MINIMUM_COUNT)
        counts[name] = min(MAXIMUM_COUNT, max(MINIMUM_COUNT, round(settings.block_seconds / seconds)))
    for _ in range(settings.rounds):
        for name, worker in workers.items():
            times[name]["step_s"].append(worker.call("time_steps", count=counts[name]))
            times[name]["evaluation_s"].append(worker.call("time_evaluations", count=counts[name]))
    return times


def summary(times: dict[str, list[float]], timestep_fs: float) -> dict:
    """Medians over the rounds, the rounds themselves, and the length of a trajectory in ns/day."""
    step = statistics.median(times["step_s"])
    return {
        "step_s": step,
        "evaluation_s": statistics.median(times["evaluation_s"]),
        "ns_per_day": timestep_fs * 1e-6 * 86400 / step,
        "rounds": times,
    }


def ratios(times: dict[str, list[float]], ours: dict[str, list[float]]) -> dict:
    """How many times ours is faster, for each kind of time: ratio of the medians, and the smallest and largest ratio of a round."""
    found = {}
    for kind in ours:
        each = [other / own for other, own in zip(times[kind], ours[kind], strict=True)]
        found[kind.removesuffix("_s")] = {
            "median": statistics.median(times[kind]) / statistics.median(ours[kind]),
            "rounds": [min(each), max(each)],
        }
    return found
