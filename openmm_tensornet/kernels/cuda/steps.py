"""Sizes and steps that the kernels of this folder have in common.

What concerns one atom and channel alone is a tuple of nine components; matrices are tuples of nine too, row by row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from unittest import mock

import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from triton.runtime.jit import JITFunction

from .. import definitions, intervals

EPSILON: tl.constexpr = tl.constexpr(definitions.EPSILON)  # of LayerNorm
HALF: tl.constexpr = tl.constexpr(2**-0.5)
THIRD: tl.constexpr = tl.constexpr(3**-0.5)
SIXTH: tl.constexpr = tl.constexpr(6**-0.5)
BEND: tl.constexpr = tl.constexpr(intervals.BEND)

NEIGHBORS = 32  # at a time, in single precision
CHANNELS = 32  # of a program that sums over neighbors
ELEMENTS = 128  # atoms times channels of a program that treats each by itself


def at_once(like: Tensor) -> int:
    """Neighbors at a time: registers hold half as many numbers in double precision."""
    return NEIGHBORS * 4 // like.element_size()


_COUNTING = threading.Lock()


def count_launches(call: Callable[[], None]) -> int:
    """Kernels that a call on fake tensors would launch; on others they are launched, by whichever thread."""
    launched, run = [], JITFunction.run

    def launch(kernel, *args, **options):
        if not any(isinstance(a, FakeTensor) for a in args):
            return run(kernel, *args, **options)
        launched.append(kernel)

    with _COUNTING, mock.patch.object(JITFunction, "run", launch):
        call()
    return len(launched)


# ------------------------------------------------------------------------------------------------------------ tuples


@triton.jit
def load(x, stride, at, mask):
    """Nine components, each `stride` after the one before."""
    return (
        tl.load(x + at, mask, 0), tl.load(x + stride + at, mask, 0), tl.load(x + 2 * stride + at, mask, 0),
        tl.load(x + 3 * stride + at, mask, 0), tl.load(x + 4 * stride + at, mask, 0), tl.load(x + 5 * stride + at, mask, 0),
        tl.load(x + 6 * stride + at, mask, 0), tl.load(x + 7 * stride + at, mask, 0), tl.load(x + 8 * stride + at, mask, 0),
    )  # fmt: skip


@triton.jit
def store(x, stride, at, mask, c):
    for k in tl.static_range(9):
        tl.store(x + k * stride + at, c[k], mask)


@triton.jit
def plus(a, b):
    return (
        a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4], a[5] + b[5], a[6] + b[6], a[7] + b[7], a[8] + b[8],
    )  # fmt: skip


@triton.jit
def times(s, a):
    return s * a[0], s * a[1], s * a[2], s * a[3], s * a[4], s * a[5], s * a[6], s * a[7], s * a[8]


@triton.jit
def each(a, b):
    """Products, component by component."""
    return (
        a[0] * b[0], a[1] * b[1], a[2] * b[2], a[3] * b[3], a[4] * b[4], a[5] * b[5], a[6] * b[6], a[7] * b[7], a[8] * b[8],
    )  # fmt: skip


@triton.jit
def by_part(p, a):
    """Components times their part's factor."""
    return (
        p[0] * a[0], p[1] * a[1], p[1] * a[2], p[1] * a[3], p[2] * a[4], p[2] * a[5], p[2] * a[6], p[2] * a[7], p[2] * a[8],
    )  # fmt: skip


@triton.jit
def part_sums(a, b):
    """Sums of products over the components of each part."""
    return (
        a[0] * b[0],
        a[1] * b[1] + a[2] * b[2] + a[3] * b[3],
        a[4] * b[4] + a[5] * b[5] + a[6] * b[6] + a[7] * b[7] + a[8] * b[8],
    )


@triton.jit
def dot(a, b):
    i, v, s = part_sums(a, b)
    return i + v + s


@triton.jit
def sum_rows(a):
    """Over the first dimension."""
    return (
        tl.sum(a[0], 0), tl.sum(a[1], 0), tl.sum(a[2], 0), tl.sum(a[3], 0), tl.sum(a[4], 0), tl.sum(a[5], 0), tl.sum(a[6], 0),
        tl.sum(a[7], 0), tl.sum(a[8], 0),
    )  # fmt: skip


@triton.jit
def matrix(c):
    """From components in the orthonormal basis of :mod:`openmm_tensornet.models.tensors`."""
    i = c[0] * THIRD - c[8] * SIXTH
    return (
        i + c[7] * HALF, (c[4] - c[3]) * HALF, (c[5] + c[2]) * HALF,
        (c[4] + c[3]) * HALF, i - c[7] * HALF, (c[6] - c[1]) * HALF,
        (c[5] - c[2]) * HALF, (c[6] + c[1]) * HALF, c[0] * THIRD + 2 * c[8] * SIXTH,
    )  # fmt: skip


@triton.jit
def components(m):
    """The way back."""
    return (
        (m[0] + m[4] + m[8]) * THIRD, (m[7] - m[5]) * HALF, (m[2] - m[6]) * HALF, (m[3] - m[1]) * HALF,
        (m[1] + m[3]) * HALF, (m[2] + m[6]) * HALF, (m[5] + m[7]) * HALF, (m[0] - m[4]) * HALF,
        (2 * m[8] - m[0] - m[4]) * SIXTH,
    )  # fmt: skip


@triton.jit
def turn(a):
    return a[0], a[3], a[6], a[1], a[4], a[7], a[2], a[5], a[8]


@triton.jit
def matmul(a, b):
    return (
        a[0] * b[0] + a[1] * b[3] + a[2] * b[6], a[0] * b[1] + a[1] * b[4] + a[2] * b[7], a[0] * b[2] + a[1] * b[5] + a[2] * b[8],
        a[3] * b[0] + a[4] * b[3] + a[5] * b[6], a[3] * b[1] + a[4] * b[4] + a[5] * b[7], a[3] * b[2] + a[4] * b[5] + a[5] * b[8],
        a[6] * b[0] + a[7] * b[3] + a[8] * b[6], a[6] * b[1] + a[7] * b[4] + a[8] * b[7], a[6] * b[2] + a[7] * b[5] + a[8] * b[8],
    )  # fmt: skip


@triton.jit
def anticommutator(a, b):
    return plus(matmul(a, b), matmul(b, a))


# ------------------------------------------------------------------------------------------------------------- steps


@triton.jit
def multiply(y, m, factor, BOTH: tl.constexpr):
    """factor·(YM+MY), or factor·2MY, of components."""
    y, m = matrix(y), matrix(m)
    if BOTH:
        return components(times(factor, anticommutator(y, m)))
    else:
        return components(times(2 * factor, matmul(m, y)))


@triton.jit
def multiply_backward(g, y, m, factor, BOTH: tl.constexpr):
    """Gradients by Y and M."""
    y, m = turn(matrix(y)), turn(matrix(m))
    if BOTH:
        g = matrix(times(factor, g))
        return components(anticommutator(g, m)), components(anticommutator(g, y))
    else:
        g = matrix(times(2 * factor, g))
        return components(matmul(m, g)), components(matmul(g, y))


@triton.jit
def normalized(x, NORMALIZE: tl.constexpr):
    """x/(‖x‖²+1), or x."""
    if NORMALIZE:
        x = times(1 / (dot(x, x) + 1), x)
    return x


@triton.jit
def normalized_backward(g, x, NORMALIZE: tl.constexpr):
    """From the gradient by the result that by x."""
    if NORMALIZE:
        s = 1 / (dot(x, x) + 1)
        g = plus(times(s, g), times(-2 * s * s * dot(x, g), x))
    return g


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def activate(x, SILU: tl.constexpr):
    if SILU:
        x = x * _sigmoid(x)
    return x


@triton.jit
def activation_slope(x, SILU: tl.constexpr):
    """Derivative by x."""
    if SILU:
        s = _sigmoid(x)
        return s * (1 + x * (1 - s))
    else:
        return x * 0 + 1


@triton.jit
def locate(distance, intervals, cutoff: tl.constexpr, dtype: tl.constexpr):
    """Row of the table, place in its interval, and the place's derivative by the distance, as :func:`.intervals.place` has them.

    Row 0, which is NaN, for a distance that is NaN or zero.
    """
    whole = distance.to(tl.float64) + BEND * cutoff
    scale = (1 + BEND) * intervals / whole
    place = 1 + scale * distance.to(tl.float64)
    place = tl.where(place > 1, place, 0)
    row = tl.minimum(tl.minimum(place, intervals + 1.0).to(tl.int32), intervals + 1)
    return row, (place - row).to(dtype), (scale * BEND * cutoff / whole).to(dtype)


@triton.jit
def polynomial(c, t, mask, row_stride):
    third = tl.load(c + 3 * row_stride, mask, 0)
    return tl.load(c, mask, 0) + t * (
        tl.load(c + row_stride, mask, 0) + t * (tl.load(c + 2 * row_stride, mask, 0) + t * third)
    )


@triton.jit
def function_values(table, row, t, f, mask, channels):
    """Values of the three parts' functions."""
    c = table + row * 12 * channels + f
    row_stride = 3 * channels
    return (
        polynomial(c, t, mask, row_stride),
        polynomial(c + channels, t, mask, row_stride),
        polynomial(c + 2 * channels, t, mask, row_stride),
    )


@triton.jit
def polynomial_slope(c, t, mask, row_stride, rate):
    third = tl.load(c + 3 * row_stride, mask, 0)
    return (tl.load(c + row_stride, mask, 0) + t * (2 * tl.load(c + 2 * row_stride, mask, 0) + 3 * t * third)) * rate


@triton.jit
def function_slopes(table, row, t, f, mask, channels, rate):
    """Derivatives of the functions by the distance."""
    c = table + row * 12 * channels + f
    row_stride = 3 * channels
    return (
        polynomial_slope(c, t, mask, row_stride, rate),
        polynomial_slope(c + channels, t, mask, row_stride, rate),
        polynomial_slope(c + 2 * channels, t, mask, row_stride, rate),
    )


@triton.jit
def angular(x, y, z):
    """1, u and the five components of uuᵀ−𝟙/3."""
    return (
        x * 0 + 1, x, y, z, 2 * x * y * HALF, 2 * x * z * HALF, 2 * y * z * HALF, (x * x - y * y) * HALF,
        (2 * z * z - x * x - y * y) * SIXTH,
    )  # fmt: skip


@triton.jit
def vector(positions, i, j):
    """x_i − x_j."""
    return (
        tl.load(positions + 3 * i) - tl.load(positions + 3 * j),
        tl.load(positions + 3 * i + 1) - tl.load(positions + 3 * j + 1),
        tl.load(positions + 3 * i + 2) - tl.load(positions + 3 * j + 2),
    )


@triton.jit
def nearest_image(box, x, y, z):
    """In the order c, b, a, since each vector of a reduced box only has components up to its own."""
    turns = tl.floor(z / tl.load(box + 8) + 0.5)
    x, y, z = x - turns * tl.load(box + 6), y - turns * tl.load(box + 7), z - turns * tl.load(box + 8)
    turns = tl.floor(y / tl.load(box + 4) + 0.5)
    x, y = x - turns * tl.load(box + 3), y - turns * tl.load(box + 4)
    return x - tl.floor(x / tl.load(box) + 0.5) * tl.load(box), y, z


@triton.jit
def entries(by_atom, pairs, count, atoms, k, end):
    """Some entries of an atom: which exist, their pairs, other atoms, and 1 or −1 for the direction."""
    exists = k < end
    entry = tl.load(by_atom + atoms + 1 + k, exists, 0)
    p, second = entry // 2, entry % 2
    other = tl.load(pairs + tl.where(second == 0, count, 0) + p, exists, 0)
    return exists, p, other, 1 - 2 * second


@triton.jit
def directed(p, sign, count, atoms):
    """Rows in which an atom receives from the other one of a pair, and in which it sends to it.

    First come the rows of the atoms themselves, then those of pairs, in which the first atom receives, then those of pairs turned around.
    """
    forth, back = atoms + p, atoms + count + p
    return tl.where(sign > 0, forth, back), tl.where(sign > 0, back, forth)
