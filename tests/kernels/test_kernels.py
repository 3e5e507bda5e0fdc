"""The fused operators against their definitions: values and gradients, awkward sizes."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CHARGE_VARIANTS, KJ_PER_EV, VARIANTS
from torch.utils._pytree import tree_flatten, tree_unflatten

from openmm_tensornet import load_model
from openmm_tensornet.common.files import others_can_write
from openmm_tensornet.graph import capture as graphsafety
from openmm_tensornet.graph.capture import check_graph_safety
from openmm_tensornet.graph.record import flatten
from openmm_tensornet.kernels import definitions, operators
from openmm_tensornet.models.accuracy import TABULATION
from openmm_tensornet.static import fused as functions
from openmm_tensornet.static import program
from openmm_tensornet.static.potential import RANK, TABLE_SIZES, copy_double
from openmm_tensornet.static.program import radial_functions, radial_tables

pytest.importorskip("numba", reason="numba, which compiles the kernels for the CPU, is not installed")
from openmm_tensornet.kernels.cpu import matmul as cpu_matmul

CUTOFF, INTERVALS = 0.5, 45
NO_BOX = torch.zeros(0, 3, dtype=torch.float64)
TRICLINIC = [[1.4, 0, 0], [0.5, 1.3, 0], [-0.6, 0.4, 1.2]]
ATOMS = (1, 2, 3, 21, 22, 23)
CHANNELS = (16, 20, 128)
# In the interpreter, which tests/kernels/test_triton.py asks for, the kernels for GPUs run on the CPU: some hundred times slower.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MANY = 140 if INTERPRETED else 400  # atoms, more than a block compares at a time
SIZES = [(a, f) for a in ATOMS for f in CHANNELS] + [(3, 256), (100, 20)]
if INTERPRETED:
    from openmm_tensornet.kernels.cuda import steps as cuda_steps

    cuda_steps.NEIGHBORS = 4  # several rounds for few atoms
    SIZES = [(1, 16), (2, 16), (3, 20), (7, 40)]
    operators.RUNNERS["CPU"] = operators.RUNNERS["CUDA"]
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}


class Case:
    """Random arguments for every operator; NaN fills freed memory before each call, so what is not written shows."""

    def __init__(self, atoms: int, channels: int, dtype: torch.dtype, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, f = dtype, channels
        self.pairs = torch.combinations(torch.arange(atoms)).T.contiguous()
        self.by_atom = definitions.by_atom(self.pairs, atoms)
        # Some pairs are beyond the end of the table.
        places = torch.arange(atoms, dtype=torch.float64).view(-1, 1) // torch.tensor([1.0, 5.0, 25.0]) % 5
        self.positions = 0.12 * places + 0.01 * torch.rand(atoms, 3, generator=self.generator, dtype=torch.float64)
        self.distance, self.unit = definitions.geometry(self.positions, NO_BOX, self.pairs, self.by_atom, 1.0, False)
        self.distance, self.unit = self.distance.to(dtype), self.unit.to(dtype)
        self.table = self.random(INTERVALS + 2, 4, 3 * f)
        self.table[0], self.table[-1] = torch.nan, 0.0
        self.receiver, self.sender, self.own = self.random(atoms, f), self.random(atoms, f), self.random(atoms, f)
        self.self_weights = self.random(9, f)
        self.x, self.y, self.m = (self.random(9, atoms, f) for _ in range(3))
        blocks = next(n for n in (3, 2, 1) if atoms % n == 0)
        self.block_weight = self.random(atoms, atoms // blocks, 3, f)
        self.scale = self.random(atoms, atoms // blocks)
        self.gates, self.factor = self.random(atoms, 3 * f), 1 + 0.1 * self.random(atoms).round()
        self.weight, self.bias = self.random(f), self.random(f)
        self.weight3, self.bias3 = self.random(3 * f), self.random(3 * f)
        self.h, self.last = self.random(atoms, f), self.random(f, 1)
        self.charge_table = torch.cat((self.table[:, :, :f], self.table[:, :, -1:]), dim=2)
        self.weight_in, self.weight_out = 0.3 * self.random(f, f + 4), 0.3 * self.random(f + 4, 3 * f)
        self.molecule, self.charge = torch.arange(atoms) % blocks, self.random(blocks)
        self.directed = self.random(atoms + 2 * self.pairs.shape[1], 3 * f)
        self.last3, self.bias_in = self.random(3 * f, 1), self.random(f + 4)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def arguments(self, name: str) -> tuple:
        pairs, table = (self.distance, self.unit, self.pairs, self.by_atom), (self.table, CUTOFF)
        message = (self.distance, self.pairs, self.by_atom, self.self_weights, *table, self.y)
        own = torch.cat((self.weight, self.bias[:1]))
        listed = (self.distance, self.pairs, self.by_atom, self.charge_table, CUTOFF, own)
        single = self.dtype == torch.float32
        return {
            "geometry": (self.positions, NO_BOX, self.pairs, self.by_atom, 1.0, single),
            "embed": (*pairs, self.receiver, self.sender, self.own, *table),
            "interact": (*message, self.factor, True),
            "block_message": (self.block_weight, self.scale, self.y),
            "norm_features": (self.x, self.weight, self.bias),
            "part_features": (self.x, 0.7, True, self.weight3, self.bias3),
            "charge_message": self.charge_message(),
            "pair_terms": (*listed, torch.cat((self.receiver, self.sender), dim=1)),
            "directed_message": (*listed, self.directed, self.y),
            "perceptron": (
                self.h,
                [self.weight_in, self.bias_in, self.weight_out, self.bias3, self.last3, self.bias[:1]],
            ),
            "coulomb": (self.distance, self.pairs, self.by_atom, self.h, self.weight, 10.0, 6.0),
            "equilibrate": (self.gates[:, : 2 * (self.gates.shape[1] // 2)].contiguous(), self.molecule, self.charge),
            "normalize": (self.x,),
            "gate": (self.x, self.gates, True, True),
            "product": (self.y, self.m, self.factor, True),
            "plus_square": (self.x, self.y, self.factor, True),
            "head": (self.h, self.last, self.bias[:1], True),
        }[name]

    def charge_message(self) -> tuple:
        bias = self.weight3[: self.weight_in.shape[1]]
        terms = torch.cat((self.receiver, self.sender), dim=1)
        functions_of = (self.charge_table, CUTOFF, torch.cat((self.weight, self.bias[:1])))
        perceptron = (cpu_matmul.pack(self.weight_in), bias, cpu_matmul.pack(self.weight_out), self.bias3)
        return (self.distance, self.pairs, *functions_of, terms, *perceptron, self.y)


# What has a derivative by positions: the places of these arguments.
MOVING = {
    "geometry": (0,), "embed": (0, 1), "interact": (0, 6), "block_message": (0, 1, 2), "charge_message": (0, 5, 10),
    "equilibrate": (0,), "norm_features": (0,), "part_features": (0,), "normalize": (0,), "gate": (0, 1), "product": (0, 1),
    "plus_square": (0, 1), "head": (0,), "pair_terms": (0, 6), "directed_message": (0, 6, 7), "perceptron": (0,), "coulomb": (0, 3),
}  # fmt: skip
# The program for GPUs has others in the place of those, which run as their definitions on a CPU.
FOR_CPUS, FOR_GPUS = {"charge_message"}, {"pair_terms", "directed_message", "perceptron", "coulomb"}


def charge_message(*arguments) -> torch.Tensor:
    """With the transposed weights, for the backward pass."""
    (panels1, bias1, panels2, bias2), channels = arguments[6:10], arguments[5].shape[1] // 2
    back2 = cpu_matmul.pack(definitions.unpack(panels2, len(bias1), len(bias2)).T)
    back1 = cpu_matmul.pack(definitions.unpack(panels1, channels, len(bias1)).T)
    return operators.call("charge_message", *arguments, back2=back2, back1=back1)


# The place of the result that has a derivative, among what is given back with what is passed on, and among those of the definition.
RESULT = {"norm_features": 1, "embed": 0, "pair_terms": 0}
DEFINED = {"interact": 0, "pair_terms": 1, "perceptron": 0}


def values_and_gradients(function, arguments: tuple, moving: tuple[int, ...], seeds=None):
    arguments = tuple(
        a.clone().requires_grad_(k in moving) if torch.is_tensor(a) else a for k, a in enumerate(arguments)
    )
    results = function(*arguments)
    results = results if isinstance(results, tuple) else (results,)
    if seeds is None:
        generator = torch.Generator().manual_seed(5)
        seeds = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype) for r in results]
    gradients = torch.autograd.grad(results, [arguments[k] for k in moving], seeds)
    return [*(r.detach() for r in results), *gradients]


def one(place: int | None, function):
    """A function that gives only the result in this place."""
    return function if place is None else lambda *a: function(*a)[place]


def fused(name: str):
    return one(RESULT.get(name), charge_message if name == "charge_message" else partial(operators.call, name))


def definition(name: str):
    return one(DEFINED.get(name), getattr(definitions, name))


def poison(monkeypatch):
    """Fill the memory of results with NaN before a kernel writes them."""
    allocate = torch.empty_like, torch.Tensor.new_empty

    def poisoned(x: torch.Tensor) -> torch.Tensor:
        return x.fill_(torch.nan if x.is_floating_point() else -1)

    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(allocate[0](*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poisoned(allocate[1](*a, **k)))


@pytest.mark.parametrize("name", sorted(set(MOVING) - FOR_CPUS if INTERPRETED else MOVING))
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["single", "double"])
def test_operators_equal_their_definitions(name, dtype, monkeypatch):
    for atoms, channels in SIZES:
        case = Case(atoms, channels, dtype)
        exact = Case(atoms, channels, torch.float64)
        if dtype == torch.float32:  # the same numbers, computed in float64
            for key, value in vars(case).items():
                if torch.is_tensor(value) and value.is_floating_point():
                    setattr(exact, key, value.double())
        expected = values_and_gradients(definition(name), exact.arguments(name), MOVING[name])
        with monkeypatch.context() as patch:
            poison(patch)
            found = values_and_gradients(fused(name), case.arguments(name), MOVING[name])
        for a, b in zip(found, expected, strict=True):
            # The gradient by positions has their dtype.
            assert a.dtype == (torch.float64 if name == "geometry" and a is found[-1] else dtype) and a.shape == b.shape
            if b.numel():
                # Small differences of large terms: what a molecule of one atom leaves of the seeds, which are about 1, and the
                # derivative by the distance of the only pair, a sum of terms of about 100.
                least = {"equilibrate": 1.0, "interact": 100.0}.get(name, 1e-30)
                error = float((a.double() - b).abs().max() / b.abs().max().clamp_min(least))
                assert error < TOLERANCE[dtype], (atoms, channels, error)


def by_plain_pytorch(name: str, *args, **only_backward):
    """What `operators.call` gives, by the plain PyTorch of the operator."""
    result = definition(name)(*args)
    passed_on = {"embed": (result, args[0]), "norm_features": (args[0], result)}
    return passed_on.get(name, result)


@pytest.mark.parametrize("way", ["blocks", "list"])
@pytest.mark.parametrize("name", ["so3-gauss-2layers-meanstd", "so3", "lower-cutoff-mean"])
def test_plain_pytorch_of_the_operators_is_the_oracle(name, way, monkeypatch):
    """So that a kernel which equals it is right, also one for GPUs that none is here to run. Two of the models have charges."""
    if way == "list":
        monkeypatch.setattr(program, "DENSE_ATOMS", 1)
    monkeypatch.setattr(functions, "call", by_plain_pytorch)
    case = (VARIANTS | CHARGE_VARIANTS)[name]
    model = copy_double(load_model(case.checkpoint))
    list_plans = program.plan_lists(model, case.atoms, None, [], "fused")
    radial = radial_functions(model, list_plans[0].capacity is None)
    tables = radial_tables(model, radial, TABLE_SIZES[-1], RANK["double"])
    fused = program.StaticProgram(model, case.atoms, False, torch.float64, tables, list_plans, fused=True)
    energies, forces = (found.detach().numpy() / KJ_PER_EV for found in fused(case.tensors()[0])[:2])
    assert np.abs(energies - case.energies).max() / len(forces) < TABULATION["double"].energy
    assert np.linalg.norm(forces / 10 - case.forces) / np.linalg.norm(case.forces) < TABULATION["double"].force


@pytest.mark.parametrize("atoms", ATOMS)
def test_pairs_by_atom(atoms, monkeypatch):
    """The same entries as the definition's; of pairs that stand for none there are none."""
    pairs = torch.cat((Case(atoms, 16, torch.float32).pairs, torch.zeros(2, 3, dtype=torch.long)), dim=1)
    pairs = pairs[:, torch.randperm(pairs.shape[1], generator=torch.Generator().manual_seed(1))].contiguous()
    found, expected = torch.ops.openmm_tensornet.by_atom(pairs, atoms), definitions.by_atom(pairs, atoms)
    used = atoms + 1 + int(expected[atoms])
    assert found.shape == expected.shape and int(expected[atoms]) == atoms * (atoms - 1)
    assert torch.equal(found[:used], expected[:used])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["single", "double"])
@pytest.mark.parametrize("triclinic", [False, True])
def test_geometry_in_a_box(dtype, triclinic):
    """Nearest images, and pairs of an atom with itself, which are far away and exert no force."""
    box = torch.tensor(TRICLINIC if triclinic else np.diag([1.4, 1.3, 1.2]), dtype=torch.float64)
    x = 3 * torch.rand(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    pairs = torch.cat((torch.combinations(torch.arange(40)).T, torch.zeros(2, 2, dtype=torch.long)), dim=1)
    arguments = (x, box, pairs, definitions.by_atom(pairs, 40), 2.5, dtype == torch.float32)
    expected = values_and_gradients(definitions.geometry, arguments, (0,))
    found = values_and_gradients(fused("geometry"), arguments, (0,))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=20 * TOLERANCE[dtype])
    assert found[0][-2:].tolist() == [2.5, 2.5]


@pytest.mark.parametrize("name", ["gate", "plus_square", "head", "product", "interact"])
def test_the_other_option(name):
    case = Case(5, 24, torch.float64)
    arguments = (*case.arguments(name)[:-1], False)
    for a, b in zip(
        values_and_gradients(fused(name), arguments, MOVING[name]),
        values_and_gradients(definition(name), arguments, MOVING[name]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_features_with_the_scalar_itself():
    case = Case(5, 24, torch.float64)
    x, scalar, _, *affine = case.arguments("part_features")
    for a, b in zip(
        values_and_gradients(fused("part_features"), (x, scalar, False, *affine), (0,)),
        values_and_gradients(definitions.part_features, (x, scalar, False, *affine), (0,)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "largest", "error"), [(np.float32, 87, 2e-7), (np.float64, 708, 5e-16)])
def test_exponential(dtype, largest, error):
    """Vectors of it, which SiLU is made of."""
    from numba import njit

    from openmm_tensornet.kernels.cpu import simd
    from openmm_tensornet.kernels.cpu import steps as cpu_steps

    @cpu_steps.over_channels
    def step(f, like, x, out):
        simd.store(out, f, simd.exp(simd.load(x, f, like)))

    @njit
    def exponential(x, out):
        step(len(x), simd.pointer(x), simd.pointer(x), simd.pointer(out))

    x = np.linspace(-largest, largest, 9999, dtype=dtype)
    found = np.full_like(x, np.nan)
    exponential(x, found)
    exact = np.exp(x.astype(np.longdouble))
    assert float(np.abs(found / exact - 1).max()) < error
    x = np.array([np.nan, np.inf, -np.inf, 0, 1000], dtype)
    found = np.empty_like(x)
    exponential(x, found)
    assert np.isnan(found[0]) and found[1] > 1e37 and 0 <= found[2] < 1e-37 and found[3] == 1 and np.isfinite(found[4])


def test_gates_that_are_activated_already():
    case = Case(5, 24, torch.float64)
    arguments = (case.x, case.gates, False, True)
    for a, b in zip(
        values_and_gradients(fused("gate"), arguments, MOVING["gate"]),
        values_and_gradients(definitions.gate, arguments, MOVING["gate"]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_passing_through_adds_gradients():
    """Some functions also give an argument back, so that the gradients of both uses are added in one kernel."""
    case = Case(4, 16, torch.float64)
    x = case.x.clone().requires_grad_(True)
    through, features = operators.call("norm_features", x, case.weight, case.bias)
    (found,) = torch.autograd.grad((through * case.y).sum() + features.sum(), x)
    (other,) = torch.autograd.grad(definitions.norm_features(x, case.weight, case.bias).sum(), x)
    torch.testing.assert_close(found, case.y + other, rtol=1e-12, atol=1e-12)

    distance = case.distance.clone().requires_grad_(True)
    x, through = operators.call("embed", distance, *case.arguments("embed")[1:])
    (found,) = torch.autograd.grad(x.sum() + 3 * through.sum(), distance)
    (other,) = torch.autograd.grad(definitions.embed(distance, *case.arguments("embed")[1:]).sum(), distance)
    torch.testing.assert_close(found, 3 + other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["embed", "interact"])
def test_far_near_and_nan(name):
    """Beyond the table nothing is added, also where its pair is a dummy; too close and NaN make NaN of both atoms."""
    case = Case(4, 16, torch.float32)
    distance, *arguments = case.arguments(name)
    operator = one(DEFINED.get(name), getattr(torch.ops.openmm_tensornet, name))
    far = operator(torch.full_like(distance, CUTOFF), *arguments)
    none = [0 * a if a is case.by_atom else a for a in arguments]
    own = operator(distance[:0], *none)  # no pair at all
    assert torch.equal(far, own)
    for bad in (0.0, torch.nan, -torch.inf):
        d = distance.clone()
        d[0] = bad
        result = operator(d, *arguments)
        touched = torch.isnan(result).flatten(2).any(2).any(0)
        assert touched.tolist() == [True, True, False, False]


def test_what_is_scaled_by_zero_is_left_out():
    """As the slots of a block that hold no atom are, or atoms beyond the cutoff."""
    case = Case(6, 16, torch.float64)
    weight, scale, y = case.arguments("block_message")
    scale[1, 1] = 0
    full = values_and_gradients(definitions.block_message, (weight, scale, y), (0, 2))
    for a, b in zip(values_and_gradients(fused("block_message"), (weight, scale, y), (0, 2)), full, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    scale[1, 1] = torch.nan
    touched = torch.isnan(fused("block_message")(weight, scale, y)).flatten(2).any(2).any(0)
    assert touched.tolist() == [False, True] + 4 * [False]


@pytest.mark.parametrize("name", MOVING)
def test_same_bits_twice(name):
    case = Case(22, 128, torch.float32)
    first = values_and_gradients(fused(name), case.arguments(name), MOVING[name])
    again = values_and_gradients(fused(name), case.arguments(name), MOVING[name])
    assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("name", MOVING)
def test_registration(name):
    """Schemas, fake results and strides agree with what the kernels give."""
    case = Case(3, 16, torch.float32)
    operator = getattr(torch.ops.openmm_tensornet, name).default
    torch.library.opcheck(operator, case.arguments(name), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["single", "double"])
@pytest.mark.parametrize("several", [False, True], ids=["one molecule", "three molecules"])
@pytest.mark.parametrize(
    ("atoms", "scale", "cutoff"),
    [
        (1, 1, 0.5),
        (2, 1, 0.5),
        (70, 1, 0.5),
        (MANY, 2, 0.5),
        (MANY, 2, 0.3),
        (min(150, MANY), 40, 7.0),
        (60, 1, 0.002),
    ],
    ids=["one", "two", "no room for cells", "cells in part", "many cells", "wide", "more cells than there may be"],
)
@pytest.mark.parametrize(
    "box", [None, np.diag([1.4, 1.3, 1.2]), np.array(TRICLINIC)], ids=["vacuum", "rectangular", "triclinic"]
)
def test_near_pairs(dtype, several, atoms, scale, cutoff, box):
    box = torch.zeros(0, 3, dtype=dtype) if box is None else torch.tensor(scale * box, dtype=dtype)
    x = torch.rand(atoms, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 3 * scale - scale
    x = x.to(dtype)
    replicas = torch.arange(atoms) % 3 if several else torch.zeros(atoms, dtype=torch.long)
    capacity = atoms * atoms // 2 + 1
    pairs, found = torch.ops.openmm_tensornet.near_pairs(x, box, replicas, cutoff, capacity)
    right, right_found = definitions.near_pairs(x, box, replicas, cutoff, capacity)
    assert torch.equal(found, right_found)
    first, other = ((p[0] * atoms + p[1]).argsort(stable=True) for p in (pairs, right))
    assert torch.equal(pairs[:, first], right[:, other])
    if int(found) > 1:
        few = torch.ops.openmm_tensornet.near_pairs(x, box, replicas, cutoff, 1)
        assert torch.equal(few[1], found) and few[0].shape == (2, 1)
    for bad in (torch.nan, torch.inf, -torch.inf):
        broken = x.clone()
        broken[-1, 1] = bad
        assert int(torch.ops.openmm_tensornet.near_pairs(broken, box, replicas, cutoff, capacity)[1]) > capacity


@pytest.mark.parametrize("box", [np.zeros((3, 3)), np.full((3, 3), np.nan), np.diag([1.4, np.inf, 1.2])])
def test_near_pairs_in_no_box(box):
    """Nothing is read or written where it should not be, and what comes out is an overflow."""
    x, replicas = torch.rand(70, 3, dtype=torch.float64), torch.zeros(70, dtype=torch.long)
    found = torch.ops.openmm_tensornet.near_pairs(x, torch.tensor(box), replicas, 0.5, 100)[1]
    assert int(found) > 100


@pytest.mark.parametrize("size", [1e10, 1e20, 1e300])
@pytest.mark.parametrize(
    "box", [np.zeros((0, 3)), np.diag([1.4, 1.3, 1.2]), np.array(TRICLINIC), 3 * np.array(TRICLINIC)]
)
def test_near_pairs_of_atoms_far_away(size, box):
    """Numbers that are too large for an index lead nowhere else."""
    x = size * torch.randn(MANY, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pairs, found = torch.ops.openmm_tensornet.near_pairs(
        x, torch.tensor(box), torch.zeros(MANY, dtype=torch.long), 0.5, 200_000
    )
    assert 0 <= int(found) <= 200_001 and int(pairs.min()) >= 0 and int(pairs.max()) < MANY
    if not len(box):
        assert int(found) == 0


@pytest.mark.slow
def test_compiling_says_so(tmp_path):
    """Once, and not where kernels come from the cache."""
    code = "import torch; from openmm_tensornet.kernels import operators; torch.ops.openmm_tensornet.normalize(torch.ones(9, 1, 3))"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    said = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stderr
        for _ in range(2)
    ]
    assert said[0].count("compiling kernels for this CPU") == 1 and "compiling" not in said[1]


def test_functions_of_others_are_not_announced():
    code = (
        "import openmm_tensornet.kernels.cpu.program; from numba import njit\n@njit\ndef mine(x):\n    return x + 1\n"
        "assert mine(1) == 2"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_where_no_cache_can_be_written(tmp_path):
    """Kernels are compiled without one, with a line that names the way out."""
    copied = tmp_path / "openmm_tensornet"
    package = Path(operators.__file__).parents[1]
    shutil.copytree(package, copied, ignore=shutil.ignore_patterns("__pycache__", "models"))
    for folder in (copied, copied / "kernels", copied / "kernels" / "cpu"):
        (folder / "__pycache__").touch()  # a file in the folder's place, so that nobody can write there
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "HOME": os.devnull,
        "XDG_CACHE_HOME": f"{os.devnull}/cache",
    }
    environment.pop("NUMBA_CACHE_DIR", None)
    code = "from openmm_tensornet.kernels.cpu import program as c; print(c.__file__, c.execute._cache.cache_path)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"{copied / 'kernels' / 'cpu' / 'program.py'} None\n", done.stderr
    assert done.stderr.count("\n") == 1 and "set NUMBA_CACHE_DIR to a folder" in done.stderr


def test_every_operator_has_a_kernel_and_a_definition():
    from openmm_tensornet.kernels.cpu.program import Kernel

    registered = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    names = {name for space, _, name in registered if space == "openmm_tensornet"} - {
        "nnpops_pairs",
        "near_pairs",
        "by_atom",
        "run",
        "potential",
        "partial_charges",
    }
    assert set(MOVING) <= names <= {*MOVING, *(f"{n}_backward" for n in MOVING)}
    own = {n for n in names if n.removesuffix("_backward") in FOR_GPUS}
    assert names - own < set(Kernel.__members__) and not own.intersection(Kernel.__members__)
    assert all(hasattr(definitions, n) for n in own)
    cuda = pytest.importorskip("openmm_tensornet.kernels.cuda", reason="triton is not installed")
    assert all(hasattr(cuda, n) for n in names if n.removesuffix("_backward") not in FOR_CPUS)
    assert all(hasattr(definitions, n) for n in MOVING)
    assert operators.available()


def test_an_array_of_another_rank_is_refused():
    """Alone, and in a sequence: the kernel would read other memory."""
    program = pytest.importorskip("openmm_tensornet.kernels.cpu.program", reason="numba is not installed")
    with pytest.raises(ValueError, match=r"^normalize: x: expected 3 dimensions, received shape \(9, 3\)"):
        torch.ops.openmm_tensornet.normalize(torch.ones(9, 3))
    silu = int(program.Kernel.silu)
    expected = [silu, 0, 0, 6, 0, 0, 0, 1, 64, 6, 0, 0, 0]
    assert program.encode(program.Kernel.silu, [(0, 0, (6,)), (1, 64, (6,))]) == expected
    with pytest.raises(ValueError, match=r"^silu: out: expected 1 dimensions, received shape \(2, 3\)"):
        program.encode(program.Kernel.silu, [(0, 0, (6,)), (1, 64, (2, 3))])
    with pytest.raises(ValueError, match="shorter"):
        program.encode(program.Kernel.silu, [(0, 0, (6,))])


@pytest.mark.skipif(os.name != "posix", reason="folders have no such permissions on Windows")
def test_cache_that_others_can_write(tmp_path):
    """What lies there is unpickled."""
    for cache, above, expected in (
        (0o700, 0o700, False),
        (0o775, 0o1777, False),
        (0o777, 0o700, True),
        (0o700, 0o777, True),
    ):
        folder = tmp_path / f"{above:o}" / f"{cache:o}"
        folder.mkdir(parents=True)
        folder.chmod(cache)
        folder.parent.chmod(above)
        assert others_can_write(folder) == expected, folder
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    code = "from openmm_tensornet.kernels.cpu import program as c; print(c.execute._cache.cache_path)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "None\n" and f"others can write to the folder for compiled kernels, {folder}" in done.stderr


@pytest.mark.parametrize("name", sorted(set(MOVING) - FOR_CPUS))
def test_declared_launches(name):
    """As many as are counted inside an operator and inside that of its derivative, on a GPU that is not there."""
    pytest.importorskip("triton", reason="triton, which launches them, is not installed")
    arguments, structure = tree_flatten(Case(4, 16, torch.float32).arguments(name))
    places = [k for k, a in enumerate(arguments) if torch.is_tensor(a)]

    class Differentiated(torch.nn.Module):
        def forward(self, *tensors):
            given = dict(zip(places, tensors, strict=True))
            all_of_them = tree_unflatten([given.get(k, a) for k, a in enumerate(arguments)], structure)
            moving = [all_of_them[k].requires_grad_(True) for k in MOVING[name]]
            results = fused(name)(*all_of_them)
            results = results if isinstance(results, tuple) else (results,)
            return torch.autograd.grad(results, moving, [torch.ones_like(r) for r in results])

    inputs = tuple(arguments[k] for k in places)
    found = check_graph_safety(flatten(Differentiated(), inputs), *inputs)
    names = [operator.rpartition(".")[0].replace(".", "::") for operator in found.operators.elements()]
    assert sum(n.startswith(operators.NAMESPACE) for n in names) == 2
    assert found.kernels == found.counted == sum(graphsafety._LAUNCHES.get(n, 1) for n in names)


@pytest.mark.parametrize("periodic", [False, True])
def test_declared_launches_of_lists(periodic):
    """The two operators without a derivative."""
    pytest.importorskip("triton", reason="triton, which launches them, is not installed")

    class Lists(torch.nn.Module):
        def forward(self, positions, box, replicas):
            pairs, found = torch.ops.openmm_tensornet.near_pairs(positions, box, replicas, 0.5, 20)
            return torch.ops.openmm_tensornet.by_atom(pairs, len(replicas)), found

    box = torch.eye(3, dtype=torch.float64)[: 3 * periodic]
    inputs = (torch.rand(8, 3, dtype=torch.float64), box, torch.zeros(8, dtype=torch.long))
    found = check_graph_safety(Lists(), *inputs)
    declared = [graphsafety._LAUNCHES[f"{operators.NAMESPACE}::{name}"] for name in ("near_pairs", "by_atom")]
    assert found.kernels == found.counted == sum(declared)
