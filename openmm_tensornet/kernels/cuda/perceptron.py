"""Linear layers with the activation between them as one kernel on NVIDIA GPUs; see :mod:`openmm_tensornet.kernels.cuda`.

A program takes some atoms through all layers. What lies between two of them is stored, since the backward pass needs it, and read
again by the same program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .steps import activate, activation_slope

ATOMS = 16  # of a program: the least that a product of tiles takes
COLUMNS = 32  # of a weight at a time
DEPTH = 16


@triton.jit
def _times(
    x,
    x_step,
    row,
    exists,
    weight,
    by_depth,
    by_column,
    depth,
    n,
    columns,
    total,
    SILU: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Some columns n of a product, added to `total`."""
    for first in range(0, depth, DEPTH):
        k = first + tl.arange(0, DEPTH)
        a = tl.load(x + row[:, None] * x_step + k[None, :], exists[:, None] & (k < depth)[None, :], 0)
        b = tl.load(
            weight + k[:, None] * by_depth + n[None, :] * by_column, (k < depth)[:, None] & (n < columns)[None, :], 0
        )
        total = tl.dot(activate(a, SILU), b, total, input_precision="ieee", out_dtype=total.dtype)
    return total


@triton.jit
def _layer(
    x, x_step, row, exists, weight, bias, depth, columns, out, out_step,
    SILU: tl.constexpr, ATOMS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    for first in range(0, columns, COLUMNS):
        n = first + tl.arange(0, COLUMNS)
        start = tl.zeros((ATOMS, COLUMNS), weight.dtype.element_ty) + tl.load(bias + n, n < columns, 0)[None, :]
        total = _times(x, x_step, row, exists, weight, columns, 1, depth, n, columns, start, SILU, DEPTH)
        tl.store(out + row[:, None] * out_step + n[None, :], total, exists[:, None] & (n < columns)[None, :])
    tl.debug_barrier()


@triton.jit
def _perceptron(
    h, weight1, bias1, weight2, bias2, weight3, bias3, hidden, out, atoms, n0, n1, n2, n3,
    THREE: tl.constexpr, ATOMS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ATOMS + tl.arange(0, ATOMS)
    exists = row < atoms
    if THREE:
        step = n1 + n2
        _layer(h, n0, row, exists, weight1, bias1, n0, n1, hidden, step, False, ATOMS, COLUMNS, DEPTH)
        _layer(hidden, step, row, exists, weight2, bias2, n1, n2, hidden + n1, step, True, ATOMS, COLUMNS, DEPTH)
        _layer(hidden + n1, step, row, exists, weight3, bias3, n2, n3, out, n3, True, ATOMS, COLUMNS, DEPTH)
    else:
        _layer(h, n0, row, exists, weight1, bias1, n0, n1, hidden, n1, False, ATOMS, COLUMNS, DEPTH)
        _layer(hidden, n1, row, exists, weight2, bias2, n1, n2, out, n2, True, ATOMS, COLUMNS, DEPTH)


def _widths(affine) -> tuple[list[int], bool]:
    """Of the input and of what each layer gives; that there are three layers."""
    widths = [len(affine[0]), *(len(bias) for bias in affine[1::2])]
    return widths + widths[-1:] * (4 - len(widths)), len(affine) == 6


def perceptron(h, affine, out, hidden) -> None:
    widths, three = _widths(affine)
    _perceptron[(triton.cdiv(len(h), ATOMS),)](
        h, *affine, *affine[2:] * (not three), hidden, out, len(h), *widths, THREE=three, ATOMS=ATOMS, COLUMNS=COLUMNS,
        DEPTH=DEPTH,
    )  # fmt: skip


@triton.jit
def _layer_backward(
    g, g_step, row, exists, weight, depth, columns, hidden, hidden_step, out, out_step,
    SILU: tl.constexpr, ATOMS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Gradient by a layer's input, which was activated on demand, from that by its result."""
    for first in range(0, depth, COLUMNS):
        n = first + tl.arange(0, COLUMNS)
        start = tl.zeros((ATOMS, COLUMNS), weight.dtype.element_ty)
        total = _times(g, g_step, row, exists, weight, 1, columns, columns, n, depth, start, False, DEPTH)
        mask = exists[:, None] & (n < depth)[None, :]
        if SILU:
            total *= activation_slope(tl.load(hidden + row[:, None] * hidden_step + n[None, :], mask, 0), True)
        tl.store(out + row[:, None] * out_step + n[None, :], total, mask)
    tl.debug_barrier()


@triton.jit
def _perceptron_backward(
    g, hidden, weight1, weight2, weight3, between, g_h, atoms, n0, n1, n2, n3,
    THREE: tl.constexpr, ATOMS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ATOMS + tl.arange(0, ATOMS)
    exists = row < atoms
    step = n1
    if THREE:
        step = n1 + n2
        _layer_backward(
            g, n3, row, exists, weight3, n2, n3, hidden + n1, step, between + n1, step, True, ATOMS, COLUMNS, DEPTH
        )
        _layer_backward(
            between + n1, step, row, exists, weight2, n1, n2, hidden, step, between, step, True, ATOMS, COLUMNS, DEPTH
        )
    else:
        _layer_backward(g, n2, row, exists, weight2, n1, n2, hidden, n1, between, n1, True, ATOMS, COLUMNS, DEPTH)
    _layer_backward(between, step, row, exists, weight1, n0, n1, hidden, step, g_h, n0, False, ATOMS, COLUMNS, DEPTH)


def perceptron_backward(g, hidden, affine, g_h) -> None:
    (widths, three), weights = _widths(affine), affine[::2]
    _perceptron_backward[(triton.cdiv(len(g), ATOMS),)](
        g, hidden, *weights, *weights[1:] * (not three), torch.empty_like(hidden), g_h, len(g), *widths, THREE=three,
        ATOMS=ATOMS, COLUMNS=COLUMNS, DEPTH=DEPTH,
    )  # fmt: skip
