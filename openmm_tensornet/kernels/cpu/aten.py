"""Kernels that stand for PyTorch's own operators, so that a sequence need not be interrupted by these."""

from __future__ import annotations

from ..table import row
from .charges import silu as silu_of_row
from .charges import silu_gradient
from .matmul import linear as linear
from .simd import pointer
from .steps import kernel

ROWS = (
    row("linear(r2 x, r1 panels, r1 added) -> r2 out"),
    row("silu(r1 x) -> r1 out"),
    row("silu_backward(r1 g_out, r1 x) -> r1 g_x"),
    row("plus(r1 x, r1 y) -> r1 out"),
    row("widen(r1 x) -> d1 out"),
    row("addmv(d1 added, d2 matrix, d1 x) -> d1 out"),
    row("add(d1 x, d1 y, float factor) -> d1 out"),
)


@kernel
def silu(x, out):
    silu_of_row(len(x), pointer(x), pointer(x), pointer(out))


@kernel
def silu_backward(g, x, g_x):
    silu_gradient(len(x), pointer(x), pointer(g), pointer(x), pointer(g_x))


@kernel
def plus(x, y, out):
    for i in range(len(out)):
        out[i] = x[i] + y[i]


@kernel
def widen(x, out):
    """To float64."""
    for i in range(len(out)):
        out[i] = x[i]


@kernel
def addmv(added, matrix, x, out):
    for i in range(len(out)):
        total = added[i]
        for k in range(len(x)):
            total += matrix[i, k] * x[k]
        out[i] = total


@kernel
def add(x, y, factor, out):
    """x + factor·y of a single number y."""
    for i in range(len(out)):
        out[i] = x[i] + factor * y[0]
