"""Properties of random models, molecules and lists of pairs; a part of tests/soak.py."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import openmm
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st
from openmm import unit

from openmm_tensornet import load_model
from openmm_tensornet.common.atoms import Atoms
from openmm_tensornet.export.compiled import compile_potential
from openmm_tensornet.export.exported import save
from openmm_tensornet.forces.system import BACKENDS, force_class
from openmm_tensornet.kernels.definitions import geometry
from openmm_tensornet.kernels.intervals import distance_at
from openmm_tensornet.kernels.operators import available
from openmm_tensornet.models.accuracy import TOLERANCES, deviation, reference_energy_and_forces
from openmm_tensornet.models.registry import find_model
from openmm_tensornet.models.tensornet import ACTIVATIONS, TensorNet, TensorNetConfig
from openmm_tensornet.models.tensornet2 import TensorNet2, TensorNet2Config
from openmm_tensornet.neighbors.lists import CellPairs, SelectedPairs
from openmm_tensornet.neighbors.plan import Grid
from openmm_tensornet.neighbors.reference import find_pairs
from openmm_tensornet.static import potential
from openmm_tensornet.static.fused import FusedPairs
from openmm_tensornet.static.potential import Options, choose_coulomb_cutoff, copy_double
from openmm_tensornet.static.tables import ORDINARY, RadialTable


@st.composite
def models(draw: Any) -> TensorNet:
    """A small model of any shape, with random weights."""
    lower = draw(st.sampled_from([0.0, 0.0, 0.5]))
    shape: dict[str, Any] = dict(
        embedding_dimension=draw(st.integers(2, 9)),
        num_layers=draw(st.integers(0, 2)),
        num_rbf=draw(st.integers(3, 8)),
        rbf_type=draw(st.sampled_from(["expnorm", "gauss"])),
        trainable_rbf=draw(st.booleans()),
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
        cutoff_lower=lower,
        cutoff_upper=draw(st.sampled_from([2.5, 3.5, 5.0])),
        max_z=draw(st.integers(10, 40)),
        group=draw(st.sampled_from(["O(3)", "SO(3)"])),
        reduce_op=draw(st.sampled_from(["sum", "sum", "mean"])),
        head_hidden_layers=draw(st.integers(0, 2)),
    )
    torch.manual_seed(draw(st.integers(0, 2**31)))
    if draw(st.booleans()):
        return TensorNet(TensorNetConfig(**shape)).eval()
    coulomb = draw(st.booleans())
    cutoff = draw(st.sampled_from([None, 3.0, 6.0])) if coulomb else None
    return TensorNet2(
        TensorNet2Config(**shape, q_dim=draw(st.integers(1, 3)), coulomb=coulomb, coulomb_cutoff=cutoff)
    ).eval()


@st.composite
def geometries(draw: Any, model: TensorNet) -> dict[str, Any]:
    """Atoms, positions (nm), a box or None, and where in a System the atoms are."""
    count = draw(st.integers(1, 7))
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.11, 0.16, 0.3]))
    lattice = np.array(list(np.ndindex(2, 2, 2)))[random.permutation(8)[:count]]
    positions = lattice * spread + random.uniform(-0.02, 0.02, (count, 3)) + random.uniform(-5, 5, 3)
    several = count > 1 and draw(st.booleans())
    replicas = np.sort(random.integers(0, 2, count)).tolist() if several else [0] * count
    replicas = [m - replicas[0] for m in replicas]
    charges = random.integers(-1, 2, max(replicas) + 1).tolist()
    numbers = random.integers(1, 10, count).tolist()
    box = None
    if max(replicas) == 0 and draw(st.booleans()):
        coulomb = isinstance(model, TensorNet2) and model.config.coulomb
        cutoff = max(model.network_cutoff, (model.config.coulomb_cutoff or 12.0) if coulomb else 0.0) / 10
        edges = 2 * cutoff * random.uniform(1.01, 1.5, 3)
        box = np.diag(edges)
        if draw(st.booleans()):
            box[1, 0], box[2, 0] = random.uniform(-0.5, 0.5, 2) * edges[0]
            box[2, 1] = random.uniform(-0.5, 0.5) * edges[1]
    particles = random.permutation(count + 3)[:count].tolist() if draw(st.booleans()) else None
    return dict(
        atoms=Atoms.make(numbers, replicas, charges), positions=positions, box=box, particles=particles, random=random
    )


def _evaluate(
    force: openmm.Force, particles: int, box: np.ndarray | None, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Energy (kJ/mol), shape (1,), and forces (kJ/mol/nm) on the Reference platform."""
    system = openmm.System()
    for _ in range(particles):
        system.addParticle(1.0)
    if box is not None:
        system.setDefaultPeriodicBoxVectors(*(openmm.Vec3(*row) for row in box))
    system.addForce(force)
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), openmm.Platform.getPlatformByName("Reference"))
    context.setPositions(positions)
    state = context.getState(energy=True, forces=True)
    energy = state.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole)
    return np.array([energy]), state.getForces(asNumpy=True).value_in_unit(unit.kilojoule_per_mole / unit.nanometer)


def _agree(found: tuple[Any, Any], reference: tuple[Any, Any], what: str) -> None:
    pairs = [tuple(torch.as_tensor(np.asarray(v), dtype=torch.float64) for v in pair) for pair in (found, reference)]
    difference = deviation(pairs[0], pairs[1])
    assert difference.within(TOLERANCES["double"]), (what, difference)


def one_potential(data: Any) -> None:
    """Reference = exported = reloaded = both back ends; symmetries; outside of the domain NaN."""
    model = data.draw(models())
    case = data.draw(geometries(model))
    atoms, x, box, particles, random = (case[k] for k in ("atoms", "positions", "box", "particles", "random"))
    count = len(x)
    options = dict(precision="double", periodic=box is not None, kernels="portable")
    tensors = torch.tensor(x), None if box is None else torch.tensor(box)
    chosen = choose_coulomb_cutoff(model, box is not None, None)
    reference = reference_energy_and_forces(copy_double(chosen), atoms, *tensors)
    total = reference[0].sum().reshape(1), reference[1]

    size = count if particles is None else count + 3
    places = list(range(count)) if particles is None else particles

    def everywhere(own: np.ndarray) -> np.ndarray:
        full = random.uniform(-9, 9, (size, 3))
        full[places] = own
        return full

    exported = compile_potential(
        model, atoms, Options(**options), particles=particles, positions=tensors[0], box=tensors[1]
    )
    arguments = [torch.tensor(everywhere(x))] + ([] if box is None else [tensors[1]])
    energy, forces = exported.module(*arguments)
    _agree((energy.reshape(1), forces[places]), total, "exported")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        save(exported, path)
        common: dict[str, Any] = dict(
            atomic_numbers=list(atoms.numbers), replicas=list(atoms.replicas), total_charge=list(atoms.charges), atoms=particles,
            box_vectors=box,
        )  # fmt: skip
        made = {backend: force_class(backend)(path, **common) for backend in ("torch", "python")}
    for backend, force in made.items():
        evaluated = _evaluate(force, size, box, everywhere(x))
        _agree((evaluated[0], evaluated[1][places]), total, backend)
        others = np.delete(evaluated[1], places, axis=0)
        assert (others == 0).all(), "a force on an atom that is none of the force's"

    def module(own: np.ndarray, lattice: np.ndarray | None = box) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = [torch.tensor(everywhere(own))] + ([] if lattice is None else [torch.tensor(lattice)])
        energy, forces = exported.module(*inputs)
        return energy.reshape(1), forces[places]

    if box is None:
        turn, _ = np.linalg.qr(random.normal(size=(3, 3)))
        if np.linalg.det(turn) < 0 and model.config.group == "SO(3)":
            turn[0] *= -1
        energy, forces = module(x @ turn.T + random.uniform(-3, 3, 3))
        _agree((energy, forces @ torch.tensor(turn)), total, "rotation and translation")
    else:
        _agree(
            module(x + random.integers(-3, 4, (count, 3)) @ box + random.uniform(-3, 3, 3)),
            total,
            "lattice translation",
        )
    order = np.arange(count)
    labels = list(zip(atoms.numbers, atoms.replicas, strict=True))
    for label in set(labels):
        like = [k for k in range(count) if labels[k] == label]
        order[like] = random.permutation(like)
    energy, forces = module(x[order])
    back = np.argsort(order)
    _agree((energy, forces[back]), total, "permutation of like atoms")

    # Outside of the domain
    broken = x.copy()
    broken[random.integers(count), random.integers(3)] = random.choice([np.nan, np.inf, -np.inf])
    _all_nan(module(broken), "a coordinate that is no number")
    same = [(i, j) for i in range(count) for j in range(i) if atoms.replicas[i] == atoms.replicas[j]]
    if same:
        i, j = same[random.integers(len(same))]
        near = x.copy()
        near[i] = near[j]
        _all_nan(module(near), "two atoms in one place")
    if box is not None:
        small = box.copy()
        k = random.integers(3)
        small[:, k] *= random.uniform(0.01, 0.999) * 2 * exported.metadata["cutoff_nm"] / box[k, k]
        _all_nan(module(x, small), "a box below twice the cutoff")


def _all_nan(found: tuple[torch.Tensor, torch.Tensor], what: str) -> None:
    assert bool(found[0].isnan().all()) and bool(found[1].isnan().all()), (what, found)


def one_list(data: Any) -> None:
    """Every list has all pairs, or says that it has not."""
    random = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    count = data.draw(st.integers(2, 120))
    cutoff = float(random.uniform(0.3, 0.6))
    box = None
    edges = random.uniform(2.01, 4.5, 3) * cutoff
    if data.draw(st.booleans()):
        box = torch.diag(torch.tensor(edges))
        if data.draw(st.booleans()):
            box[1, 0], box[2, 0] = (float(v) for v in random.uniform(-0.5, 0.5, 2) * edges[0])
            box[2, 1] = float(random.uniform(-0.5, 0.5) * edges[1])
    x = torch.tensor(
        random.uniform(0, 1, (count, 3)) * edges * random.choice([0.3, 1.0, 3.0]) + random.uniform(-9, 9, 3)
    )
    replicas = torch.tensor(random.integers(0, random.integers(1, 4), count))
    listed = find_pairs(x, replicas, cutoff, box).edge_index
    pairs = {tuple(pair) for pair in listed.T.tolist() if pair[0] < pair[1]}
    capacity = max(1, len(pairs) + int(random.integers(-3, 4)))
    finders: list[Any] = []
    if bool((torch.bincount(replicas) > 1).any()):
        finders.append(SelectedPairs(replicas, box is not None, cutoff, capacity))
    cells = tuple(int(v) for v in np.maximum(3, random.integers(3, 6, 3)))
    finders.append(CellPairs(replicas, box is not None, cutoff, capacity, Grid(cells, int(random.integers(2, 80)))))  # type: ignore[arg-type]
    lattice = torch.zeros(0, 3, dtype=torch.float64) if box is None else box
    if available():
        finders.append(FusedPairs(replicas, box is not None, cutoff, capacity))
    for finder in finders:
        index, vector, overflow = finder(x, box)
        assert index.shape[1] == capacity
        if bool(overflow):
            continue
        fused = isinstance(finder, FusedPairs)  # whose vectors come with the operator that follows
        distance = geometry(x, lattice, index, index, 2 * cutoff, False)[0] if fused else vector.norm(dim=1)
        near = (distance < cutoff).tolist()
        found = [tuple(sorted(p)) for p, within in zip(index.T.tolist(), near, strict=True) if within]
        assert len(found) == len(set(found)), (type(finder), "a pair twice")
        assert set(found) == pairs, (type(finder), "pairs missing without a word", pairs ^ set(found))
        assert len(pairs) <= capacity


# ---------------------------------------------------------------------------------------- making of forces

BUNDLED = "alanine-dipeptide-gfn2"
ORGANIC = (1, 1, 1, 1, 6, 6, 6, 7, 8)  # elements, as often as in ordinary molecules


@cache
def creation_model(name: str) -> TensorNet:
    """The bundled model, a published one or, without its weights, the stand-in of its shape, or a small one."""
    from conftest import SEEDED, VARIANTS, WEIGHTS

    if name in VARIANTS:
        return load_model(VARIANTS[name].checkpoint)
    if name in SEEDED:
        path, missing = WEIGHTS.get(name, (SEEDED[name], ""))
        return load_model(SEEDED[name] if missing else path)
    return load_model(find_model(name))


@st.composite
def creations(draw: Any, names: tuple[str, ...]) -> tuple[TensorNet, str, dict[str, Any], np.random.Generator]:
    """A model, a back end, and arguments of a force: a formula of 1 to 40 atoms, in vacuum or any box that the cutoffs fit."""
    model = creation_model(draw(st.sampled_from(names)))
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    count = draw(st.integers(1, 40))
    known = model.metadata["elements"] or sorted(set(ORGANIC))
    numbers = random.choice(known if draw(st.booleans()) else ORGANIC, count).tolist()
    options: dict[str, Any] = dict(
        atomic_numbers=numbers,
        total_charge=draw(st.integers(-1, 1)) if model.config.charge else 0,
        precision=draw(st.sampled_from(["single", "double"])),
        kernels=draw(st.sampled_from(["auto", "portable"])),
        any_molecule=True,
    )
    lattice = np.eye(3) * (count / 20) ** (1 / 3)
    if draw(st.booleans()):
        cutoff = model.network_cutoff / 10
        if isinstance(model, TensorNet2) and model.config.coulomb:
            options["coulomb_cutoff"] = draw(st.sampled_from([None, 1.0, 1.5]))
            cutoff = options["coulomb_cutoff"] or max(
                cutoff, potential.COULOMB_CUTOFF, (model.config.coulomb_cutoff or 0) / 10
            )
        widest = draw(st.sampled_from([2.2 * cutoff, 10.0]))
        lattice = np.diag(random.uniform(2.0001 * cutoff, widest, 3))
        if draw(st.booleans()):
            lattice = np.diag(np.sort(np.diag(lattice))[::-1])
            lattice[1, 0], lattice[2, 0] = random.uniform(-0.5, 0.5, 2) * lattice[0, 0]
            lattice[2, 1] = random.uniform(-0.5, 0.5) * lattice[1, 1]
        options["box_vectors"] = lattice
    if draw(st.booleans()):  # anywhere, also in places that have nothing near them
        sites = np.array(list(np.ndindex(4, 4, 4)))[random.permutation(64)[:count]]
        options["positions"] = (sites + random.uniform(-0.2, 0.2, (count, 3))) / 4 @ lattice
    return model, draw(st.sampled_from(sorted(BACKENDS))), options, random


def change_value(table: RadialTable, random: np.random.Generator) -> None:
    """Change one value of one function by a thousandth, at a distance where it is not small."""
    nodes = distance_at(torch.arange(1, table.intervals + 2, dtype=torch.float64), table.cutoff, table.intervals)
    values = table.coefficients[1:, 0] @ table.modes
    values[nodes < ORDINARY] = 0
    largest = values.abs().amax(0)
    column = random.choice(torch.nonzero(largest > 1e-6 * largest.max()).flatten())
    row = random.choice(torch.nonzero(values[:, column].abs() > 0.1 * largest[column]).flatten())
    function = table.modes[:, column]
    table.coefficients[1 + row, 0] += 1e-3 * values[row, column] * function / function.dot(function)


def exchange_functions(table: RadialTable, random: np.random.Generator) -> None:
    """Exchange two of the functions."""
    order = torch.arange(table.modes.shape[1])
    first, second = random.permutation(len(order))[:2].tolist()
    order[[first, second]] = order[[second, first]]
    table.modes, table.modes_t = table.modes[:, order].contiguous(), table.modes_t[order].contiguous()


def one_creation(names: tuple[str, ...], data: Any) -> None:
    """A force of a sound model is always made; one whose table is wrong never is."""
    model, backend, options, random = data.draw(creations(names))
    kind, make_tables = force_class(backend), potential.radial_tables
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        sound = kind(model, **options)
        for damage in (change_value, exchange_functions):

            def damaged(*arguments: Any, damage: Callable[..., None] = damage) -> list[RadialTable]:
                tables = make_tables(*arguments)
                damage(tables[random.integers(len(tables))], random)
                return tables

            sizes = (sound.metadata["tabulation"]["intervals"],)
            with patch.multiple(potential, radial_tables=damaged, TABLE_SIZES=sizes):
                try:
                    kind(model, **options)
                except RuntimeError as error:
                    assert "expected radial functions" in str(error), error
                else:
                    raise AssertionError((damage.__name__, "was not found", options))


PROPERTIES: dict[str, Callable[[Any], None]] = {
    "potentials": one_potential,
    "lists of pairs": one_list,
    "creations": partial(one_creation, ("aceff-1.1", "aceff-2.0", BUNDLED)),
    "creations of small models": partial(one_creation, ("zero-layers", "no-layers")),
}


def check_property(name: str, examples: int, seed: int) -> None:
    """Try a property on so many examples; AssertionError with the first one that fails (a smaller one would take minutes to find)."""

    @with_seed(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(st.data())
    def run(data: Any) -> None:
        PROPERTIES[name](data)

    run()


def properties(minutes: float, seed: int) -> Counter[str]:
    """Try all properties for some time; counts of examples."""
    counts: Counter[str] = Counter()
    end = time.monotonic() + 60 * minutes
    batches = {"potentials": 5, "lists of pairs": 50, "creations": 5}
    while time.monotonic() < end:
        for name, examples in batches.items():
            try:
                check_property(name, examples, seed)
                counts[f"examples of {name}"] += examples
            except Exception as error:
                print(f"seed {seed}: {name}: {error}", flush=True)
                counts[f"DEFECT {name}"] += 1
        seed += 1
    return counts
