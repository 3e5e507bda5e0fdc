"""Kernels for the CPU of the messages of a TensorNet2, whose functions of a pair depend on charges.

Only what is closer than the cutoff is computed: rows of both directions of such pairs, after one for each atom with itself,
some at a time, so that what they need stays in the cache.
"""

from __future__ import annotations

import numpy as np

from ...models.tensornet2 import SMALLEST_SHARE
from .matmul import linear
from .simd import at, lanes, load, pointer, store, wide
from .steps import (
    LANES,
    activate,
    atom_size,
    atoms_first,
    by_part,
    channel_place,
    components_first,
    inlined,
    kernel,
    locate,
    nine,
    over_channels,
    part_sums,
    plus,
    put,
    sum_up,
    three,
    value_and_slope,
)

ROWS = 96  # at a time


@kernel
def _sums(h, replica, charge, shares, ratio):
    """Of each replica Σf² + ε, and the missing charge by it."""
    channels = shares.shape[1]
    shares[:] = SMALLEST_SHARE
    for m in range(len(charge)):
        ratio[m, :] = charge[m]
    for a in range(len(h)):
        for k in range(channels):
            shares[replica[a], k] += h[a, channels + k] * h[a, channels + k]
            ratio[replica[a], k] -= h[a, k]
    ratio /= shares


@kernel
def equilibrate(h, replica, charge, q):
    shares, ratio = np.empty((2, len(charge), q.shape[1]), h.dtype)
    _sums(h, replica, charge, shares, ratio)
    for a in range(len(h)):
        for k in range(q.shape[1]):
            f = h[a, q.shape[1] + k]
            q[a, k] = h[a, k] + f * f * ratio[replica[a], k]


@kernel
def equilibrate_backward(g_q, h, replica, charge, g_h):
    channels = g_q.shape[1]
    shares, ratio = np.empty((2, len(charge), channels), h.dtype)
    _sums(h, replica, charge, shares, ratio)
    along = np.zeros_like(shares)
    for a in range(len(h)):
        for k in range(channels):
            along[replica[a], k] += g_q[a, k] * h[a, channels + k] * h[a, channels + k]
    along /= shares
    for a in range(len(h)):
        for k in range(channels):
            by_q = g_q[a, k] - along[replica[a], k]
            g_h[a, k] = by_q
            g_h[a, channels + k] = 2 * h[a, channels + k] * by_q * ratio[replica[a], k]


@kernel
def _directed(distance, pairs, upper, atoms):
    """Receiver, sender and pair of each row; no pair (−1) for an atom with itself."""
    rows = np.empty((atoms + 2 * len(distance), 3), np.int64)
    count = atoms
    for a in range(atoms):
        rows[a, 0], rows[a, 1], rows[a, 2] = a, a, -1
    for p in range(len(distance)):
        if distance[p] >= upper:
            continue
        i, j = pairs[0, p], pairs[1, p]
        rows[count, 0], rows[count, 1], rows[count, 2] = i, j, p
        rows[count + 1, 0], rows[count + 1, 1], rows[count + 1, 2] = j, i, p
        count += 2
    return rows[:count]


@inlined
def _cubic(table, row, k, t):
    """One of the tabulated functions."""
    return table[row, 0, k] + t * (table[row, 1, k] + t * (table[row, 2, k] + t * table[row, 3, k]))


@over_channels
def _tabulated(f, like, c, columns, t, receiver, sender, h):
    share = load(c, f, like) + t * (
        load(c, columns + f, like) + t * (load(c, 2 * columns + f, like) + t * load(c, 3 * columns + f, like))
    )
    store(h, f, share + load(receiver, f, like) + load(sender, f, like))


@over_channels
def _constant(f, like, own, receiver, sender, h):
    store(h, f, load(own, f, like) + load(receiver, f, like) + load(sender, f, like))


@over_channels
def silu(f, like, x, out):
    store(out, f, activate(load(x, f, like), True))


@over_channels
def silu_gradient(f, like, g, x, out):
    store(out, f, load(g, f, like) * value_and_slope(load(x, f, like), True)[1])


@over_channels
def _message(f, like, h, channels, c, y, m):
    w, k = three(h, f, channels, like), channel_place(f)
    w = c * activate(w[0], True), c * activate(w[1], True), c * activate(w[2], True)
    put(m, k, LANES, plus(nine(m, k, LANES, like), by_part(w, nine(y, k, LANES, like))))


@kernel
def charge_message(
    distance, pairs, table, cutoff, own, terms, panels1, bias1, panels2, bias2, y_values, message, h0, h1, h2
):  # fmt: skip
    atoms, channels = y_values.shape[1:]
    intervals, columns = table.shape[0] - 2, table.shape[2]
    rows = _directed(distance, pairs, cutoff, atoms)
    size, y = atom_size(channels), atoms_first(y_values)
    m = np.zeros_like(y)
    c, s0, s1 = np.empty(ROWS, y.dtype), np.empty((ROWS, channels), y.dtype), np.empty((ROWS, len(bias1)), y.dtype)
    table_at, own_at, receiver_at, sender_at = (
        pointer(table),
        pointer(own),
        pointer(terms),
        at(pointer(terms), channels),
    )
    h0_at, h1_at, h2_at = pointer(h0), pointer(h1), pointer(h2)
    for first in range(0, len(rows), ROWS):
        count = min(ROWS, len(rows) - first)
        for r in range(count):
            i, j, p = rows[first + r]
            here = at(h0_at, (first + r) * channels)
            if p < 0:
                c[r] = own[channels]
                _constant(
                    channels, own_at, own_at, at(receiver_at, 2 * i * channels), at(sender_at, 2 * j * channels), here
                )
                continue
            row, t, _ = locate(distance[p], cutoff, intervals)
            c[r] = _cubic(table, row, channels, t)
            start = at(table_at, row * 4 * columns)
            _tabulated(
                channels,
                start,
                start,
                columns,
                t,
                at(receiver_at, 2 * i * channels),
                at(sender_at, 2 * j * channels),
                here,
            )
        last = first + count
        silu(count * channels, own_at, at(h0_at, first * channels), pointer(s0))
        linear(s0[:count], panels1, bias1, h1[first:last])
        silu(count * len(bias1), own_at, at(h1_at, first * len(bias1)), pointer(s1))
        linear(s1[:count], panels2, bias2, h2[first:last])
        for r in range(count):
            i, j = rows[first + r, 0] * size, rows[first + r, 1] * size
            there = at(h2_at, (first + r) * 3 * channels)
            _message(channels, own_at, there, channels, c[r], at(pointer(y), j), at(pointer(m), i))
    components_first(m, message)


@over_channels
def _message_gradients(f, like, h, channels, c, g_i, y_j, g_y_j, g_h, sums):
    """Gradients by Y, by the pair's functions, and by c, whose sum over channels it adds to."""
    x, k = three(h, f, channels, like), channel_place(f)
    (s_i, by_i), (s_v, by_v), (s_s, by_s) = (
        value_and_slope(x[0], True),
        value_and_slope(x[1], True),
        value_and_slope(x[2], True),
    )
    g = nine(g_i, k, LANES, like)
    by = part_sums(g, nine(y_j, k, LANES, like))
    put(g_y_j, k, LANES, plus(nine(g_y_j, k, LANES, like), by_part((c * s_i, c * s_v, c * s_s), g)))
    store(sums, 0, load(sums, 0, like) + by[0] * s_i + by[1] * s_v + by[2] * s_s)
    store(g_h, f, c * by[0] * by_i)
    store(g_h, channels + f, c * by[1] * by_v)
    store(g_h, 2 * channels + f, c * by[2] * by_s)


@over_channels
def _term_gradients(f, like, g, h, g_receiver, g_sender, g_share):
    by = load(g, f, like) * value_and_slope(load(h, f, like), True)[1]
    store(g_receiver, f, load(g_receiver, f, like) + by)
    store(g_sender, f, load(g_sender, f, like) + by)
    store(g_share, f, by)


@over_channels
def _along(f, like, g, c, columns, one, two, three, sums):
    slope = (
        one * load(c, columns + f, like) + two * load(c, 2 * columns + f, like) + three * load(c, 3 * columns + f, like)
    )
    store(sums, 0, load(sums, 0, like) + load(g, f, like) * slope)


@kernel
def charge_message_backward(
    g_message, distance, pairs, table, cutoff, own, y_values, h0, h1, h2, panels2, panels1, g_distance, g_terms, g_values,
):  # fmt: skip
    atoms, channels = y_values.shape[1:]
    intervals, columns, hidden = table.shape[0] - 2, table.shape[2], h1.shape[1]
    rows = _directed(distance, pairs, cutoff, atoms)
    size, y, g_m = atom_size(channels), atoms_first(y_values), atoms_first(g_message)
    g_y = np.zeros_like(y)
    g_distance[:] = 0
    g_terms[:] = 0
    by_c, sums, none = np.empty(ROWS, y.dtype), np.empty(LANES, y.dtype), np.empty(0, y.dtype)
    g2, g1, g0 = (
        np.empty((ROWS, 3 * channels), y.dtype),
        np.empty((ROWS, hidden), y.dtype),
        np.empty((ROWS, channels), y.dtype),
    )
    table_at, sums_at, count_up = pointer(table), pointer(sums), lanes(pointer(sums))
    for first in range(0, len(rows), ROWS):
        count = min(ROWS, len(rows) - first)
        for r in range(count):
            i, j, p = rows[first + r]
            c = own[channels]
            if p >= 0:
                row, t, _ = locate(distance[p], cutoff, intervals)
                c = _cubic(table, row, channels, t)
            store(sums_at, 0, wide(sums_at))
            _message_gradients(
                channels, sums_at, at(pointer(h2), (first + r) * 3 * channels), channels, c, at(pointer(g_m), i * size),
                at(pointer(y), j * size), at(pointer(g_y), j * size), at(pointer(g2), r * 3 * channels), sums_at,
            )  # fmt: skip
            by_c[r] = sum_up(sums, 0, count_up)
        linear(g2[:count], panels2, none, g1[:count])
        silu_gradient(count * hidden, sums_at, pointer(g1), at(pointer(h1), first * hidden), pointer(g1))
        linear(g1[:count], panels1, none, g0[:count])
        for r in range(count):
            i, j, p = rows[first + r]
            share = at(pointer(g0), r * channels)
            _term_gradients(
                channels, sums_at, share, at(pointer(h0), (first + r) * channels), at(pointer(g_terms), 2 * i * channels),
                at(pointer(g_terms), (2 * j + 1) * channels), share,
            )  # fmt: skip
            if p >= 0:
                row, t, rate = locate(distance[p], cutoff, intervals)
                one, two, three_ = rate, 2 * t * rate, 3 * t * t * rate
                store(sums_at, 0, wide(sums_at))
                _along(channels, sums_at, share, at(table_at, row * 4 * columns), columns, one, two, three_, sums_at)
                slope = one * table[row, 1, channels] + two * table[row, 2, channels] + three_ * table[row, 3, channels]
                g_distance[p] += sum_up(sums, 0, count_up) + by_c[r] * slope
    components_first(g_y, g_values)
