"""Steps that the kernels of this folder have in common, on vectors of channels (:mod:`.simd`).

What concerns one atom alone is a tuple of nine components; matrices are tuples of nine too, row by row.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numba import njit
from numba.core import event

from ..intervals import BEND
from .simd import FASTMATH, at, exp, lanes, load, narrow, pointer, store, wide

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": FASTMATH}
kernel = njit(**OPTIONS)
inlined = njit(forceinline=True, **OPTIONS)
HALF, THIRD, SIXTH = 2**-0.5, 3**-0.5, 6**-0.5
LANES = 8  # the most of a vector


class _SayOnce(event.Listener):
    """Says what the user is waiting for; kernels that come from Numba's cache are not compiled, and other functions are not ours."""

    said = False

    def on_start(self, started: event.Event) -> None:
        if not self.said and started.data["dispatcher"].py_func.__module__.startswith(__package__):
            self.said = True
            logging.getLogger("openmm_tensornet").warning(
                "openmm-tensornet: compiling kernels for this CPU, which takes about a minute, once for each precision"
            )

    def on_end(self, _: event.Event) -> None:
        pass


event.register("numba:compile", _SayOnce())


def over_channels(step):
    """Make of a step for some channels one for all of a row.

    The step gets the first channel, zeros of as many numbers (`like`), and more; what is made of it takes the number of
    channels, a pointer to the kind of number that is computed with, and the same.
    """
    compiled = inlined(step)

    @inlined
    def row(channels, x, *more):
        whole = channels - channels % lanes(x)
        for f in range(0, whole, lanes(x)):
            compiled(f, wide(x), *more)
        for f in range(whole, channels):
            compiled(f, narrow(x), *more)

    return row


# ------------------------------------------------------------------------------------------------------------ tuples


@inlined
def nine(x, at, stride, like):
    """Nine components, each `stride` after the one before."""
    return (
        load(x, at, like), load(x, at + stride, like), load(x, at + 2 * stride, like),
        load(x, at + 3 * stride, like), load(x, at + 4 * stride, like), load(x, at + 5 * stride, like),
        load(x, at + 6 * stride, like), load(x, at + 7 * stride, like), load(x, at + 8 * stride, like),
    )  # fmt: skip


@inlined
def put(x, at, stride, c):
    store(x, at, c[0])
    store(x, at + stride, c[1])
    store(x, at + 2 * stride, c[2])
    store(x, at + 3 * stride, c[3])
    store(x, at + 4 * stride, c[4])
    store(x, at + 5 * stride, c[5])
    store(x, at + 6 * stride, c[6])
    store(x, at + 7 * stride, c[7])
    store(x, at + 8 * stride, c[8])


@inlined
def three(x, at, stride, like):
    """What each part has."""
    return load(x, at, like), load(x, at + stride, like), load(x, at + 2 * stride, like)


@inlined
def plus(a, b):
    return (
        a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4], a[5] + b[5], a[6] + b[6], a[7] + b[7], a[8] + b[8],
    )  # fmt: skip


@inlined
def times(s, a):
    return s * a[0], s * a[1], s * a[2], s * a[3], s * a[4], s * a[5], s * a[6], s * a[7], s * a[8]


@inlined
def each(a, b):
    """Products, component by component."""
    return (
        a[0] * b[0], a[1] * b[1], a[2] * b[2], a[3] * b[3], a[4] * b[4], a[5] * b[5], a[6] * b[6], a[7] * b[7], a[8] * b[8],
    )  # fmt: skip


@inlined
def by_part(p, a):
    """Components times their part's factor."""
    return (
        p[0] * a[0], p[1] * a[1], p[1] * a[2], p[1] * a[3], p[2] * a[4], p[2] * a[5], p[2] * a[6], p[2] * a[7], p[2] * a[8],
    )  # fmt: skip


@inlined
def part_sums(a, b):
    """Sums of products over the components of each part."""
    return (
        a[0] * b[0],
        a[1] * b[1] + a[2] * b[2] + a[3] * b[3],
        a[4] * b[4] + a[5] * b[5] + a[6] * b[6] + a[7] * b[7] + a[8] * b[8],
    )


@inlined
def dot(a, b):
    i, v, s = part_sums(a, b)
    return i + v + s


@inlined
def matrix(c):
    """From components in the orthonormal basis of :mod:`openmm_tensornet.models.tensors`."""
    i = c[0] * THIRD - c[8] * SIXTH
    return (
        i + c[7] * HALF, (c[4] - c[3]) * HALF, (c[5] + c[2]) * HALF,
        (c[4] + c[3]) * HALF, i - c[7] * HALF, (c[6] - c[1]) * HALF,
        (c[5] - c[2]) * HALF, (c[6] + c[1]) * HALF, c[0] * THIRD + c[8] * (2 * SIXTH),
    )  # fmt: skip


@inlined
def components(m):
    """The way back."""
    return (
        (m[0] + m[4] + m[8]) * THIRD, (m[7] - m[5]) * HALF, (m[2] - m[6]) * HALF, (m[3] - m[1]) * HALF,
        (m[1] + m[3]) * HALF, (m[2] + m[6]) * HALF, (m[5] + m[7]) * HALF, (m[0] - m[4]) * HALF,
        (m[8] + m[8] - m[0] - m[4]) * SIXTH,
    )  # fmt: skip


@inlined
def turn(a):
    return a[0], a[3], a[6], a[1], a[4], a[7], a[2], a[5], a[8]


@inlined
def matmul(a, b):
    return (
        a[0] * b[0] + a[1] * b[3] + a[2] * b[6], a[0] * b[1] + a[1] * b[4] + a[2] * b[7], a[0] * b[2] + a[1] * b[5] + a[2] * b[8],
        a[3] * b[0] + a[4] * b[3] + a[5] * b[6], a[3] * b[1] + a[4] * b[4] + a[5] * b[7], a[3] * b[2] + a[4] * b[5] + a[5] * b[8],
        a[6] * b[0] + a[7] * b[3] + a[8] * b[6], a[6] * b[1] + a[7] * b[4] + a[8] * b[7], a[6] * b[2] + a[7] * b[5] + a[8] * b[8],
    )  # fmt: skip


@inlined
def anticommutator(a, b):
    return plus(matmul(a, b), matmul(b, a))


@inlined
def clear(sums, like):
    """Nine sums over channels, :data:`LANES` numbers each, of which the first are used; see :func:`add` and :func:`sum_up`."""
    put(sums, 0, LANES, (like, like, like, like, like, like, like, like, like))


@inlined
def add(sums, c, like):
    put(sums, 0, LANES, plus(nine(sums, 0, LANES, like), c))


@inlined
def sum_up(sums, which, count):
    """One of the sums."""
    found = sums[which * LANES]
    for k in range(1, count):
        found += sums[which * LANES + k]
    return found


# ------------------------------------------------------------------------------------------------------------- steps


@inlined
def multiply(y, m, factor, both):
    """factor·(YM+MY), or factor·2MY, of components."""
    y, m = matrix(y), matrix(m)
    if both:
        p = times(factor, anticommutator(y, m))
    else:
        p = times(2 * factor, matmul(m, y))
    return components(p)


@inlined
def multiply_backward(g, y, m, factor, both):
    """Gradients by Y and M."""
    y, m = turn(matrix(y)), turn(matrix(m))
    if both:
        g = matrix(times(factor, g))
        g_y, g_m = anticommutator(g, m), anticommutator(g, y)
    else:
        g = matrix(times(2 * factor, g))
        g_y, g_m = matmul(m, g), matmul(g, y)
    return components(g_y), components(g_m)


@inlined
def normalized(x, normalize):
    """x/(‖x‖²+1), or x."""
    if normalize:
        x = times(1 / (dot(x, x) + 1), x)
    return x


@inlined
def normalized_backward(g, x, normalize):
    """From the gradient by the result that by x."""
    if normalize:
        s = 1 / (dot(x, x) + 1)
        g = plus(times(s, g), times(-2 * s * s * dot(x, g), x))
    return g


@inlined
def sigmoid(x):
    return 1 / (1 + exp(-1 * x))


@inlined
def activate(x, silu):
    if silu:
        x = x * sigmoid(x)
    return x


@inlined
def value_and_slope(x, silu):
    """Of the activation."""
    slope = 0 * x + 1
    if silu:
        s = sigmoid(x)
        x = x * s
        slope = s + x * (1 - s)
    return x, slope


@inlined
def locate(distance, cutoff, intervals):
    """Row of the table, place in its interval, 0 to 1, and the place's derivative by the distance, as :func:`.intervals.place` has them.

    Row 0, which is NaN, for a distance that is NaN or zero.
    """
    whole = np.float64(distance) + BEND * cutoff
    scale = (1 + BEND) * intervals / whole
    place = 1 + scale * np.float64(distance)
    row = 0
    if place > 1:
        row = min(int(place), intervals + 1)
    return row, place - row, scale * BEND * cutoff / whole


@inlined
def coefficients(table, at, channels, like):
    """Of the three parts' functions, first those of t⁰, then of t¹, t² and t³."""
    row = 3 * channels
    return (
        three(table, at, channels, like), three(table, at + row, channels, like),
        three(table, at + 2 * row, channels, like), three(table, at + 3 * row, channels, like),
    )  # fmt: skip


@inlined
def values(c, t):
    """The functions' values."""
    c0, c1, c2, c3 = c
    return (
        c0[0] + t * (c1[0] + t * (c2[0] + t * c3[0])),
        c0[1] + t * (c1[1] + t * (c2[1] + t * c3[1])),
        c0[2] + t * (c1[2] + t * (c2[2] + t * c3[2])),
    )


@inlined
def slopes(c, t, rate):
    """Their derivatives by the distance."""
    _, c1, c2, c3 = c
    one, two, three = rate, 2 * t * rate, 3 * t * t * rate
    return (
        one * c1[0] + two * c2[0] + three * c3[0],
        one * c1[1] + two * c2[1] + three * c3[1],
        one * c1[2] + two * c2[2] + three * c3[2],
    )


@inlined
def angular(unit, p):
    """u and the five components of uuᵀ−𝟙/3."""
    x, y, z = unit[p, 0], unit[p, 1], unit[p, 2]
    return (
        x, y, z, 2 * HALF * x * y, 2 * HALF * x * z, 2 * HALF * y * z,
        HALF * (x * x - y * y), SIXTH * (2 * z * z - x * x - y * y),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------ atoms in rows


@inlined
def atom_size(channels):
    """Numbers of an atom in an array of :func:`atoms_first`."""
    return 9 * (channels + LANES - 1) // LANES * LANES


@inlined
def channel_place(f):
    """Of the first component of a channel there; the next ones are :data:`LANES` numbers apart."""
    return 9 * f - LANES * (f % LANES)


@over_channels
def _gather(f, like, x, row, y):
    put(y, channel_place(f), LANES, nine(x, f, row, like))


@over_channels
def _spread(f, like, y, x, row):
    put(x, f, row, nine(y, channel_place(f), LANES, like))


@kernel
def atoms_first(x):
    """(9, A, F) to atom by atom, in which what a pair needs of an atom and some channels lies together."""
    atoms, channels = x.shape[1:]
    y = np.empty((atoms, atom_size(channels)), x.dtype)
    for a in range(atoms):
        x_a = at(pointer(x), a * channels)
        _gather(channels, x_a, x_a, atoms * channels, at(pointer(y), a * y.shape[1]))
    return y


@kernel
def components_first(y, x):
    """The way back."""
    atoms, channels = x.shape[1:]
    for a in range(atoms):
        x_a = at(pointer(x), a * channels)
        _spread(channels, x_a, at(pointer(y), a * y.shape[1]), x_a, atoms * channels)
