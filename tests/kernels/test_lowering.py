"""Sequences of kernels in one call: the same numbers as operator by operator."""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import CASES, CHARGE_CASES, some
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from openmm_tensornet import load_model
from openmm_tensornet.graph.record import flatten
from openmm_tensornet.static.potential import (
    Options,
    StaticPotential,
    choose_coulomb_cutoff,
    expected_energies_and_forces,
)

pytest.importorskip("numba", reason="numba, which compiles the kernels for the CPU, is not installed")
from openmm_tensornet.kernels import lowering

SYSTEMS = CASES | CHARGE_CASES


def called(graph: torch.fx.GraphModule) -> list[str]:
    return [n.target.name() for n in graph.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]


def potential(name: str, precision: str) -> tuple[StaticPotential, tuple[Tensor, ...]]:
    case = SYSTEMS[name]
    x, box = case.tensors()
    model = choose_coulomb_cutoff(load_model(case.checkpoint), box is not None, case.coulomb_cutoff)
    check = [(x, box, expected_energies_and_forces(model, case.atoms, {"case": (x, box)})["case"])]
    periodic = box is not None
    static = StaticPotential.make(
        model, case.atoms, Options(periodic=periodic, precision=precision, kernels="fused"), check=check
    )
    return static, (x,) if box is None else (x, box)


@pytest.mark.parametrize("precision", ["single", "double"])
@pytest.mark.parametrize("name", some(SYSTEMS, quick=("alanine", "triclinic")))
def test_the_same_numbers(name, precision):
    static, inputs = potential(name, precision)
    lowered = lowering.lower(static.program)
    with torch.no_grad():
        expected = static.program(*inputs)
        for a, b in zip(lowered(*inputs), expected, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            assert float((a - b).norm() / b.norm()) < {"single": 2e-5, "double": 1e-11}[precision]
        assert all(bool(torch.isfinite(t).all()) for t in lowered(*(t.float() for t in inputs)))
    names = called(lowered)
    assert "openmm_tensornet::run" in names
    if name == "alanine-dipeptide":
        assert names == ["openmm_tensornet::run"]


def test_two_threads():
    """What lives within a call is each thread's own."""
    static, (x,) = potential("alanine-dipeptide", "single")
    lowered = lowering.lower(static.program)
    moved = [x, x + 0.001 * torch.sin(x)]
    expected = [lowered(y) for y in moved]
    wrong = []

    def evaluate(k: int) -> None:
        for _ in range(200):
            if not all(torch.equal(a, b) for a, b in zip(lowered(moved[k]), expected[k], strict=True)):
                wrong.append(k)

    threads = [threading.Thread(target=evaluate, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Perceptron(nn.Module):
    """Two products, the second one added to something, and their gradient."""

    def __init__(self, depth: int, columns: int, matrices: int):
        super().__init__()
        generator = torch.Generator().manual_seed(depth + columns)
        self.register_buffer("first", torch.randn(depth, columns, generator=generator))
        self.register_buffer("bias", torch.randn(columns, generator=generator))
        self.register_buffer("second", torch.randn(matrices, columns, depth, generator=generator))
        self.second[1:] = self.second[-1]

    def forward(self, x: Tensor) -> Tensor:
        h = torch.nn.functional.silu(torch.addmm(self.bias, x.flatten(0, 1), self.first))
        return torch.baddbmm(x, h.view(*x.shape[:2], -1), self.second)


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 22, 97])
@pytest.mark.parametrize(("depth", "columns"), [(1, 1), (3, 16), (20, 24), (128, 40)])
def test_products(rows, depth, columns):
    x = torch.randn(3, rows, depth, generator=torch.Generator().manual_seed(rows))
    module = Perceptron(depth, columns, 3)
    lowered = lowering.lower(flatten(module, (x,)))
    assert called(lowered) == ["aten::view", "openmm_tensornet::run"]  # the view is of what is given
    torch.testing.assert_close(lowered(x), module.double()(x.double()).float(), rtol=1e-4, atol=1e-4)


def test_what_has_no_kernel_stays():
    class Mixed(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = torch.nn.functional.silu(torch.nn.functional.silu(x))
            before = x.cos()  # does not need what is in the open sequence
            after = torch.nn.functional.silu(torch.nn.functional.silu(y.sin()))
            return before + after, y.view(-1)

    x = torch.randn(4, 8)
    module = Mixed()
    lowered = lowering.lower(flatten(module, (x,)))
    run = "openmm_tensornet::run"
    assert called(lowered) == ["aten::cos", run, "aten::sin", "aten::view", run]
    for a, b in zip(lowered(x), module(x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 500)), min_size=1, max_size=12))
def test_what_is_needed_at_the_same_time_does_not_overlap(lives):
    """Each place is written in one call, and read in the same or a later one."""
    places = [lowering._Place(k, 0) for k in range(len(lives))]  # type: ignore[arg-type]
    spans = [(min(a, b), max(a, b), size) for a, b, size in lives]
    calls = [
        lowering._Call(
            lowering.Kernel.plus,
            [lowering._Array(p, 0, ()) for p, s in zip(places, spans, strict=True) if k in s[:2]],
            [],
        )
        for k in range(10)
    ]
    offsets, size = lowering._plan(calls, {p: s[2] for p, s in zip(places, spans, strict=True)})
    for p, (first, last, bytes_) in zip(places, spans, strict=True):
        assert offsets[p] % lowering.ALIGNMENT == 0 and offsets[p] + bytes_ <= size
        for q, (begin, end, others) in zip(places, spans, strict=True):
            if p != q and first <= end and begin <= last:
                assert offsets[p] + bytes_ <= offsets[q] or offsets[q] + others <= offsets[p]
