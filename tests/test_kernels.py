"""The fused operators against their definitions: values and gradients, awkward sizes."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from openmm_tensornet import tensors
from openmm_tensornet.kernels import definitions, functions, operators

pytest.importorskip("numba", reason="numba, which compiles the kernels for the CPU, is not installed")

LOWER, STEP, INTERVALS = 0.05, 0.01, 45
ATOMS = (1, 2, 3, 21, 22, 23)
CHANNELS = (16, 20, 128)
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}


class Case:
    """Random arguments for every operator; NaN fills freed memory before each call, so what is not written shows."""

    def __init__(self, atoms: int, channels: int, dtype: torch.dtype, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, f = dtype, channels
        self.pairs = torch.combinations(torch.arange(atoms)).T.contiguous()
        r = 0.1 * self.random(self.pairs.shape[1], 3)
        self.r = r + 0.06 * r / r.norm(dim=1, keepdim=True)
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
        table = tensors.product_table()
        self.terms = torch.nonzero(table.permute(2, 0, 1))
        self.weights = table[self.terms[:, 1], self.terms[:, 2], self.terms[:, 0]].to(dtype)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def arguments(self, name: str) -> tuple:
        distance, unit = definitions.direction(self.r)
        return {
            "direction": (self.r,),
            "embed": (distance, unit, self.pairs, self.receiver, self.sender, self.own, self.table, LOWER, STEP),
            "message": (distance, self.pairs, self.self_weights, self.table, LOWER, STEP, self.y),
            "block_message": (self.block_weight, self.scale, self.y),
            "norm_features": (self.x, self.weight, self.bias),
            "part_features": (self.x, 0.7, self.weight3, self.bias3),
            "normalize": (self.x,),
            "gate": (self.x, self.gates, True),
            "product": (self.y, self.m, self.factor, self.terms, self.weights),
            "plus_square": (self.x, self.y, self.factor, self.terms, self.weights, True),
        }[name]


# What has a derivative by positions: the places of these arguments.
MOVING = {
    "direction": (0,), "embed": (0, 1), "message": (0, 6), "block_message": (0, 1, 2), "norm_features": (0,), "part_features": (0,),
    "normalize": (0,), "gate": (0, 1), "product": (0, 1), "plus_square": (0, 1),
}  # fmt: skip
FUNCTIONS = {
    "direction": functions._Direction, "embed": functions._Embed, "message": functions._Message,
    "block_message": functions._BlockMessage, "norm_features": functions._NormFeatures,
    "part_features": functions._PartFeatures, "gate": functions._Gate,
    "normalize": functions._Normalize, "product": functions._Product, "plus_square": functions._PlusSquare,
}  # fmt: skip


def values_and_gradients(function, arguments: tuple, moving: tuple[int, ...], seeds=None):
    arguments = tuple(
        a.clone().requires_grad_(k in moving) if torch.is_tensor(a) else a for k, a in enumerate(arguments)
    )
    results = function(*arguments)
    results = results if isinstance(results, tuple) else (results,)
    results = results[-2:] if function is definitions.direction else results
    if seeds is None:
        generator = torch.Generator().manual_seed(5)
        seeds = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype) for r in results]
    gradients = torch.autograd.grad(results, [arguments[k] for k in moving], seeds)
    return [*(r.detach() for r in results), *gradients]


def fused(name: str):
    """The fused operator; the one that passes its argument through gives only its own result."""
    apply = FUNCTIONS[name].apply
    return (lambda *a: apply(*a)[1]) if name == "norm_features" else apply


def poison(monkeypatch):
    """Fill the memory of results with NaN before a kernel writes them."""
    allocate = torch.empty_like, torch.Tensor.new_empty
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: allocate[0](*a, **k).fill_(torch.nan))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: allocate[1](*a, **k).fill_(torch.nan))


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["single", "double"])
def test_operators_equal_their_definitions(name, dtype, monkeypatch):
    for atoms in ATOMS:
        for channels in CHANNELS:
            case = Case(atoms, channels, dtype)
            exact = Case(atoms, channels, torch.float64)
            if dtype == torch.float32:  # the same numbers, computed in float64
                for key, value in vars(case).items():
                    if torch.is_tensor(value) and value.is_floating_point():
                        setattr(exact, key, value.double())
            expected = values_and_gradients(getattr(definitions, name), exact.arguments(name), MOVING[name])
            with monkeypatch.context() as patch:
                poison(patch)
                found = values_and_gradients(fused(name), case.arguments(name), MOVING[name])
            for a, b in zip(found, expected, strict=True):
                assert a.dtype == dtype and a.shape == b.shape
                if b.numel():
                    error = float((a.double() - b).abs().max() / b.abs().max().clamp_min(1e-30))
                    assert error < TOLERANCE[dtype], (atoms, channels, error)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["single", "double"])
def test_pair_forces(dtype, monkeypatch):
    for atoms in ATOMS:
        case = Case(atoms, 16, dtype)
        start = case.random(atoms, 3).double()
        expected = definitions.pair_forces(case.pairs, case.r, start)
        with monkeypatch.context() as patch:
            poison(patch)
            found = torch.ops.openmm_tensornet.pair_forces(case.pairs, case.r, start)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", ["gate", "plus_square"])
def test_normalization_on_demand(name):
    case = Case(5, 24, torch.float64)
    arguments = (*case.arguments(name)[:-1], False)
    for a, b in zip(
        values_and_gradients(fused(name), arguments, MOVING[name]),
        values_and_gradients(getattr(definitions, name), arguments, MOVING[name]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_passing_through_adds_gradients():
    """norm_features also gives its argument back, so that the gradients of both uses are added in one kernel."""
    case = Case(4, 16, torch.float64)
    x = case.x.clone().requires_grad_(True)
    through, features = functions._NormFeatures.apply(x, case.weight, case.bias)
    (found,) = torch.autograd.grad((through * case.y).sum() + features.sum(), x)
    (other,) = torch.autograd.grad(definitions.norm_features(x, case.weight, case.bias).sum(), x)
    torch.testing.assert_close(found, case.y + other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["embed", "message"])
def test_far_near_and_nan(name):
    """Beyond the table nothing is added, also where its pair is a dummy; too close and NaN make NaN of both atoms."""
    case = Case(4, 16, torch.float32)
    arguments = case.arguments(name)
    distance = arguments[0]
    operator = getattr(torch.ops.openmm_tensornet, name)
    far = operator(torch.full_like(distance, LOWER + STEP * INTERVALS), *arguments[1:])
    own = operator(distance[:0], *arguments[1:])  # no pair at all
    assert torch.equal(far, own)
    for bad in (LOWER - 1e-4, torch.nan, -torch.inf):
        d = distance.clone()
        d[0] = bad
        result = operator(d, *arguments[1:])
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


TRICLINIC = [[1.4, 0, 0], [0.5, 1.3, 0], [-0.6, 0.4, 1.2]]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["single", "double"])
@pytest.mark.parametrize("several", [False, True], ids=["one molecule", "three molecules"])
@pytest.mark.parametrize(
    ("atoms", "scale", "cutoff"),
    [(1, 1, 0.5), (2, 1, 0.5), (70, 1, 0.5), (400, 2, 0.5), (400, 2, 0.3), (150, 40, 7.0), (60, 1, 0.002)],
    ids=["one", "two", "no room for cells", "cells in part", "many cells", "wide", "more cells than there may be"],
)
@pytest.mark.parametrize(
    "box", [None, np.diag([1.4, 1.3, 1.2]), np.array(TRICLINIC)], ids=["vacuum", "rectangular", "triclinic"]
)
def test_near_pairs(dtype, several, atoms, scale, cutoff, box):
    box = torch.zeros(0, 3, dtype=dtype) if box is None else torch.tensor(scale * box, dtype=dtype)
    x = torch.rand(atoms, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 3 * scale - scale
    x = x.to(dtype)
    molecules = torch.arange(atoms) % 3 if several else torch.zeros(atoms, dtype=torch.long)
    capacity = atoms * atoms // 2 + 1
    pairs, vectors, found = torch.ops.openmm_tensornet.near_pairs(x, box, molecules, cutoff, capacity)
    right, right_vectors, right_found = definitions.near_pairs(x, box, molecules, cutoff, capacity)
    assert torch.equal(found, right_found)
    one, other = ((p[0] * atoms + p[1]).argsort(stable=True) for p in (pairs, right))
    assert torch.equal(pairs[:, one], right[:, other])
    torch.testing.assert_close(vectors[one], right_vectors[other], rtol=1e-5, atol=1e-6 * scale)
    if int(found) > 1:
        few = torch.ops.openmm_tensornet.near_pairs(x, box, molecules, cutoff, 1)
        assert torch.equal(few[2], found) and few[0].shape == (2, 1)
    for bad in (torch.nan, torch.inf, -torch.inf):
        broken = x.clone()
        broken[-1, 1] = bad
        assert int(torch.ops.openmm_tensornet.near_pairs(broken, box, molecules, cutoff, capacity)[2]) > capacity


@pytest.mark.parametrize("box", [np.zeros((3, 3)), np.full((3, 3), np.nan), np.diag([1.4, np.inf, 1.2])])
def test_near_pairs_in_no_box(box):
    """Nothing is read or written where it should not be, and what comes out is an overflow."""
    x, molecules = torch.rand(70, 3, dtype=torch.float64), torch.zeros(70, dtype=torch.long)
    found = torch.ops.openmm_tensornet.near_pairs(x, torch.tensor(box), molecules, 0.5, 100)[2]
    assert int(found) > 100


@pytest.mark.parametrize("size", [1e10, 1e20, 1e300])
@pytest.mark.parametrize(
    "box", [np.zeros((0, 3)), np.diag([1.4, 1.3, 1.2]), np.array(TRICLINIC), 3 * np.array(TRICLINIC)]
)
def test_near_pairs_of_atoms_far_away(size, box):
    """Numbers that are too large for an index lead nowhere else."""
    x = size * torch.randn(500, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pairs, _, found = torch.ops.openmm_tensornet.near_pairs(
        x, torch.tensor(box), torch.zeros(500, dtype=torch.long), 0.5, 200_000
    )
    assert 0 <= int(found) <= 200_001 and int(pairs.min()) >= 0 and int(pairs.max()) < 500
    if not len(box):
        assert int(found) == 0


def test_compiling_says_so(tmp_path):
    """Once, and not where kernels come from the cache."""
    code = "import torch; from openmm_tensornet.kernels import operators; torch.ops.openmm_tensornet.direction(torch.ones(2, 3))"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    said = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stderr
        for _ in range(2)
    ]
    assert said[0].count("compiling kernels for this CPU") == 1 and "compiling" not in said[1]


def test_every_operator_has_a_kernel_and_a_definition():
    from openmm_tensornet.kernels import cpu

    registered = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    names = {name for space, _, name in registered if space == "openmm_tensornet"} - {
        "nnpops_pairs",
        "near_pairs",
        "pair_forces",
    }
    assert set(MOVING) <= names <= {*MOVING, *(f"{n}_backward" for n in MOVING)}
    assert all(hasattr(cpu, n) for n in names)
    assert operators.available()
