"""Checks of a model on the user's molecule: accuracy, capture, symmetries, forces against the energy; and its speed."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import openmm
import torch
from torch import Tensor

from ..common.atoms import Atoms
from ..common.units import KJ_PER_MOL_PER_EV
from ..export.compiled import Exported, compile_potential
from ..models.accuracy import TABULATION, TOLERANCES
from ..models.tensornet import TensorNet
from ..static.potential import Options

# Of the checks in double precision: eV an atom, and norms of forces relative to the norm of the forces.
ENERGY, FORCE = 1e-8, 1e-6
DISPLACEMENT = 2e-5  # nm, of the central difference of energies
SLOPE = 1e-5  # of that difference against the forces, relative

# Of a timing; the warm-up is longer than what TorchForce needs to capture a CUDA graph.
WARMUP_STEPS, PARTS = 20, 10


@dataclass(frozen=True)
class Check:
    """What one check found.

    Attributes
    ----------
    name : str
    value, limit : float
        Passed if `value` is at most `limit` (NaN is not).
    unit : str
    """

    name: str
    value: float
    limit: float
    unit: str

    @property
    def passed(self) -> bool:
        """Whether the value is within its limit."""
        return self.value <= self.limit


def check_model(
    model: TensorNet,
    atoms: Atoms,
    positions: Tensor,
    *,
    box: Tensor | None = None,
    precision: str = "single",
    coulomb_cutoff: float | None = None,
    seed: int = 1,
) -> tuple[list[Check], dict[str, Any]]:
    """Compile a model for some atoms and check what comes out.

    Parameters
    ----------
    model : TensorNet
    atoms : Atoms
    positions : Tensor of float64, shape (N, 3)
        nm.
    box : Tensor of float64, shape (3, 3), optional
        nm.
    precision : str
        Of the program whose accuracy is checked; symmetries are checked in double precision.
    coulomb_cutoff : float, optional
        nm.
    seed : int
        Of the random rotation, displacement and order.

    Returns
    -------
    checks : list of Check
    metadata : dict
        Of the program in `precision`.

    Raises
    ------
    GraphSafetyError
        If the program could not be captured in a CUDA graph.
    RuntimeError
        If the program disagrees with the reference model by more than it may.
    """
    compiled = partial(compile_potential, model, box=box, coulomb_cutoff=coulomb_cutoff)
    metadata = compiled(atoms, Options(box is not None, precision), positions=positions).metadata
    deviation, tabulation = metadata["deviation"], metadata["tabulation"]
    checks = [
        Check(
            "energy against the reference model",
            deviation["energy_eV_per_atom"],
            TOLERANCES[precision].energy,
            "eV/atom",
        ),
        Check(
            "forces against the reference model", deviation["relative_force"], TOLERANCES[precision].force, "relative"
        ),
        Check("energy by tabulation", tabulation["energy_eV_per_atom"], TABULATION[precision].energy, "eV/atom"),
        Check("forces by tabulation", tabulation["relative_force"], TABULATION[precision].force, "relative"),
    ]
    generator = torch.Generator().manual_seed(seed)
    return [*checks, *_symmetries(compiled, model, atoms, positions, box, generator)], metadata


def _evaluate(exported: Exported, positions: Tensor, box: Tensor | None) -> tuple[float, Tensor]:
    found = exported.module(positions) if box is None else exported.module(positions, box)
    energy, forces = (t.clone() for t in found)  # the next call writes there
    return float(energy), forces


def _symmetries(
    compiled: Callable[..., Exported],
    model: TensorNet,
    atoms: Atoms,
    x: Tensor,
    box: Tensor | None,
    generator: torch.Generator,
) -> Iterator[Check]:
    options = Options(box is not None, "double")
    exported = compiled(atoms, options, positions=x)
    energy, forces = _evaluate(exported, x, box)
    norm = float(forces.norm()) or 1.0

    def compare(name: str, found: tuple[float, Tensor], expected: Tensor) -> Iterator[Check]:
        difference = abs(found[0] - energy) / len(x) / KJ_PER_MOL_PER_EV
        yield Check(f"energy, {name}", difference, ENERGY, "eV/atom")
        yield Check(f"forces, {name}", float((found[1] - expected).norm()) / norm, FORCE, "relative")

    shift = torch.randn(3, generator=generator, dtype=torch.float64)
    yield from compare("translated", _evaluate(exported, x + shift, box), forces)
    if box is None:
        turn = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64)).Q
        turn = turn * torch.linalg.det(turn)
        yield from compare("rotated", _evaluate(exported, x @ turn, box), forces @ turn)
        if model.config.group == "O(3)":
            yield from compare("mirrored", _evaluate(exported, -x, box), -forces)
        torque = torch.linalg.cross(x - x.mean(0), forces).sum(0)
        yield Check("net torque", float(torque.norm()) / norm, FORCE, "nm, relative")
    else:
        moved = x.clone()
        moved[0] += box[0] - box[1]
        yield from compare("one atom in another image", _evaluate(exported, moved, box), forces)
    yield Check("net force", float(forces.sum(0).norm()) / norm, FORCE, "relative")

    order = torch.randperm(len(x), generator=generator)
    numbers, replicas = ([values[k] for k in order] for values in (atoms.numbers, atoms.replicas))
    shuffled = dataclasses.replace(atoms, numbers=tuple(numbers), replicas=tuple(replicas))
    other = compiled(shuffled, options, positions=x[order])
    yield from compare("atoms in another order", _evaluate(other, x[order], box), forces[order])

    direction = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    direction *= DISPLACEMENT / direction.norm(dim=1).mean()
    ends = [_evaluate(exported, x + sign * direction, box)[0] for sign in (1, -1)]
    slope, expected = (ends[1] - ends[0]) / 2, float((forces * direction).sum())
    size = norm * float(direction.norm())
    yield Check("forces against differences of energies", abs(slope - expected) / size, SLOPE, "relative")


def time_steps(system: openmm.System, positions: Any, platform: str, timestep: float, seconds: float) -> float:
    """Seconds a step of molecular dynamics takes at 300 K: median of ten parts of a run.

    Parameters
    ----------
    system : openmm.System
    positions : (n, 3) array or Quantity
        nm.
    platform : str
    timestep : float
        fs.
    seconds : float
        How long to run.

    Raises
    ------
    openmm.OpenMMException
        If the platform does not work here.
    """
    integrator = openmm.LangevinMiddleIntegrator(300, 1, timestep / 1000)
    context = openmm.Context(system, integrator, openmm.Platform.getPlatformByName(platform))
    context.setPositions(positions)
    context.setVelocitiesToTemperature(300)

    def run(steps: int) -> float:
        begin = perf_counter()
        integrator.step(steps)
        context.getState(energy=True)  # waits for a GPU
        return (perf_counter() - begin) / steps

    run(WARMUP_STEPS)
    steps = max(1, int(seconds / PARTS / run(WARMUP_STEPS)))
    return statistics.median(run(steps) for _ in range(PARTS))
