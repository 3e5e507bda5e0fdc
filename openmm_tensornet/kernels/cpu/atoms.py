"""The operators' kernels for the CPU, in Numba; :mod:`.definitions` says what each computes.

Most are written for some channels at a time (:mod:`.simd`); of plain loops LLVM makes vector instructions. Literals are cast
there, since Numba computes with float64 otherwise. Each kernel runs on one thread in a fixed order, so that the same input gives the
same bits.
"""

from __future__ import annotations

import math

import numpy as np

from .. import definitions
from .pairs import by_atom, geometry, geometry_backward, near_pairs  # noqa: F401  more of them
from .simd import at, keep, lanes, load, pointer, store, wide
from .steps import (
    HALF,
    LANES,
    SIXTH,
    activate,
    add,
    angular,
    atom_size,
    atoms_first,
    by_part,
    channel_place,
    clear,
    coefficients,
    components_first,
    each,
    inlined,
    kernel,
    locate,
    multiply,
    multiply_backward,
    nine,
    normalized,
    normalized_backward,
    over_channels,
    part_sums,
    plus,
    put,
    slopes,
    sum_up,
    three,
    times,
    value_and_slope,
    values,
)

EPSILON = definitions.EPSILON

# ------------------------------------------------------------------------------------------------------------ pairs


@over_channels
def _embed_pair(f, like, table, channels, t, g, receiver_i, sender_i, receiver_j, sender_j, x_i, x_j):
    v = values(coefficients(table, f, channels, like), t)
    z_i = load(receiver_i, f, like) + load(sender_j, f, like)
    z_j = load(receiver_j, f, like) + load(sender_i, f, like)
    forth = (1.0, g[0], g[1], g[2], g[3], g[4], g[5], g[6], g[7])
    back = (1.0, -g[0], -g[1], -g[2], g[3], g[4], g[5], g[6], g[7])
    k = channel_place(f)
    put(x_i, k, LANES, plus(nine(x_i, k, LANES, like), by_part((v[0] * z_i, v[1] * z_i, v[2] * z_i), forth)))
    put(x_j, k, LANES, plus(nine(x_j, k, LANES, like), by_part((v[0] * z_j, v[1] * z_j, v[2] * z_j), back)))


@over_channels
def _own_embedding(f, like, own, x):
    store(x, channel_place(f), load(own, f, like))


@kernel
def embed(distance, unit, pairs, _by_atom, receiver, sender, own, table, cutoff, result):
    atoms, channels = own.shape
    intervals = table.shape[0] - 2
    size = atom_size(channels)
    x = np.zeros((atoms, size), own.dtype)
    x_at, receiver_at, sender_at, table_at = pointer(x), pointer(receiver), pointer(sender), pointer(table)
    for a in range(atoms):
        _own_embedding(channels, x_at, at(pointer(own), a * channels), at(x_at, a * size))
    for p in range(len(distance)):
        if distance[p] >= cutoff:
            continue
        i, j = pairs[0, p], pairs[1, p]
        row, t, _ = locate(distance[p], cutoff, intervals)
        _embed_pair(
            channels, table_at, at(table_at, row * 12 * channels), channels, t, angular(unit, p),
            at(receiver_at, i * channels), at(sender_at, i * channels), at(receiver_at, j * channels), at(sender_at, j * channels),
            at(x_at, i * size), at(x_at, j * size),
        )  # fmt: skip
    components_first(x, result)


@over_channels
def _embed_pair_backward(
    f, like, table, channels, t, rate, g, receiver_i, sender_i, receiver_j, sender_j, g_i, g_j, sums
):
    """Add to the sums over channels: the gradients by the distance, and by the eight components."""
    c = coefficients(table, f, channels, like)
    v, s = values(c, t), slopes(c, t, rate)
    z_i = load(receiver_i, f, like) + load(sender_j, f, like)
    z_j = load(receiver_j, f, like) + load(sender_i, f, like)
    k = channel_place(f)
    by_i, by_j = times(z_i, nine(g_i, k, LANES, like)), times(z_j, nine(g_j, k, LANES, like))
    both = plus(by_i, by_part((1, -1, 1), by_j))
    along = s[0] * both[0]
    along += s[1] * (g[0] * both[1] + g[1] * both[2] + g[2] * both[3])
    along += s[2] * (g[3] * both[4] + g[4] * both[5] + g[5] * both[6] + g[6] * both[7] + g[7] * both[8])
    d = by_part(v, both)
    add(sums, (along, d[1], d[2], d[3], d[4], d[5], d[6], d[7], d[8]), like)


@kernel
def embed_backward(g_result, g_through, distance, unit, pairs, receiver, sender, table, cutoff, g_distance, g_unit):
    channels = receiver.shape[1]
    intervals = table.shape[0] - 2
    size = atom_size(channels)
    g_x, sums = atoms_first(g_result), np.empty(9 * LANES, g_result.dtype)
    g_at, receiver_at, sender_at = pointer(g_x), pointer(receiver), pointer(sender)
    table_at, sums_at, count = pointer(table), pointer(sums), lanes(pointer(sums))
    for p in range(len(distance)):
        if distance[p] >= cutoff:
            g_distance[p] = g_through[p]
            g_unit[p, 0] = g_unit[p, 1] = g_unit[p, 2] = 0
            continue
        i, j = pairs[0, p], pairs[1, p]
        row, t, rate = locate(distance[p], cutoff, intervals)
        clear(sums_at, wide(g_at))
        _embed_pair_backward(
            channels, g_at, at(table_at, row * 12 * channels), channels, t, rate, angular(unit, p),
            at(receiver_at, i * channels), at(sender_at, i * channels), at(receiver_at, j * channels), at(sender_at, j * channels),
            at(g_at, i * size), at(g_at, j * size), sums_at,
        )  # fmt: skip
        g_distance[p] = g_through[p] + sum_up(sums, 0, count)
        by_x, by_y, by_z = sum_up(sums, 1, count), sum_up(sums, 2, count), sum_up(sums, 3, count)
        xy, xz, yz = sum_up(sums, 4, count), sum_up(sums, 5, count), sum_up(sums, 6, count)
        xx, zz = sum_up(sums, 7, count), sum_up(sums, 8, count)
        x, y, z = unit[p, 0], unit[p, 1], unit[p, 2]
        g_unit[p, 0] = by_x + 2 * (HALF * (xy * y + xz * z + xx * x) - SIXTH * zz * x)
        g_unit[p, 1] = by_y + 2 * (HALF * (xy * x + yz * z - xx * y) - SIXTH * zz * y)
        g_unit[p, 2] = by_z + 2 * (HALF * (xz * x + yz * y) + 2 * SIXTH * zz * z)
    keep(g_x)


@over_channels
def _own_message(f, like, own, channels, y, m):
    k = channel_place(f)
    put(m, k, LANES, each(nine(own, f, channels, like), nine(y, k, LANES, like)))


@over_channels
def _message(f, like, table, channels, t, y_i, y_j, m_i, m_j):
    v, k = values(coefficients(table, f, channels, like), t), channel_place(f)
    put(m_i, k, LANES, plus(nine(m_i, k, LANES, like), by_part(v, nine(y_j, k, LANES, like))))
    put(m_j, k, LANES, plus(nine(m_j, k, LANES, like), by_part(v, nine(y_i, k, LANES, like))))


@over_channels
def _message_product(f, like, y, m, factor, both, out, message, row):
    """The product, and the message, with components first: `row` numbers from one to the next."""
    k = channel_place(f)
    m_a = nine(m, k, LANES, like)
    put(message, f, row, m_a)
    put(out, f, row, normalized(multiply(nine(y, k, LANES, like), m_a, factor, both), True))


@kernel
def interact(distance, pairs, _by_atom, own, table, cutoff, y_values, factor, both, out, message):
    atoms, channels = y_values.shape[1:]
    intervals = table.shape[0] - 2
    size, y = atom_size(channels), atoms_first(y_values)
    m = np.empty_like(y)
    y_at, m_at, table_at = pointer(y), pointer(m), pointer(table)
    for a in range(atoms):
        _own_message(channels, y_at, pointer(own), channels, at(y_at, a * size), at(m_at, a * size))
    for p in range(len(distance)):
        if distance[p] >= cutoff:
            continue
        i, j = pairs[0, p] * size, pairs[1, p] * size
        row, t, _ = locate(distance[p], cutoff, intervals)
        _message(
            channels, y_at, at(table_at, row * 12 * channels), channels, t, at(y_at, i), at(y_at, j), at(m_at, i), at(m_at, j)
        )  # fmt: skip
    for a in range(atoms):
        _message_product(
            channels, y_at, at(y_at, a * size), at(m_at, a * size), factor[a], both,
            at(pointer(out), a * channels), at(pointer(message), a * channels), atoms * channels,
        )  # fmt: skip
    keep(y)
    keep(m)


@over_channels
def _message_product_gradients(f, like, g_out, message, row, y, own, channels, factor, both, g_y, g_m):
    """Gradients by Y, the self pair's included, and by the message."""
    k = channel_place(f)
    y_a, m_a = nine(y, k, LANES, like), nine(message, f, row, like)
    g = normalized_backward(nine(g_out, f, row, like), multiply(y_a, m_a, factor, both), True)
    by_y, by_m = multiply_backward(g, y_a, m_a, factor, both)
    put(g_y, k, LANES, plus(by_y, each(nine(own, f, channels, like), by_m)))
    put(g_m, k, LANES, by_m)


@over_channels
def _message_backward(f, like, table, channels, t, rate, y_i, y_j, g_m_i, g_m_j, g_y_i, g_y_j, sums):
    c, k = coefficients(table, f, channels, like), channel_place(f)
    v, s = values(c, t), slopes(c, t, rate)
    g_i, g_j = nine(g_m_i, k, LANES, like), nine(g_m_j, k, LANES, like)
    forth, back = part_sums(g_i, nine(y_j, k, LANES, like)), part_sums(g_j, nine(y_i, k, LANES, like))
    along = s[0] * (forth[0] + back[0]) + s[1] * (forth[1] + back[1]) + s[2] * (forth[2] + back[2])
    store(sums, 0, load(sums, 0, like) + along)
    put(g_y_i, k, LANES, plus(nine(g_y_i, k, LANES, like), by_part(v, g_j)))
    put(g_y_j, k, LANES, plus(nine(g_y_j, k, LANES, like), by_part(v, g_i)))


@kernel
def interact_backward(
    g_out, distance, pairs, _by_atom, own, table, cutoff, y_values, message, factor, both, g_distance, g_values
):
    atoms, channels = y_values.shape[1:]
    intervals = table.shape[0] - 2
    size, y = atom_size(channels), atoms_first(y_values)
    g_m, g_y, sums = np.empty_like(y), np.empty_like(y), np.empty(LANES, y.dtype)
    y_at, g_m_at, g_y_at = pointer(y), pointer(g_m), pointer(g_y)
    table_at, sums_at = pointer(table), pointer(sums)
    for a in range(atoms):
        _message_product_gradients(
            channels, y_at, at(pointer(g_out), a * channels), at(pointer(message), a * channels), atoms * channels,
            at(y_at, a * size), pointer(own), channels, factor[a], both, at(g_y_at, a * size), at(g_m_at, a * size),
        )  # fmt: skip
    for p in range(len(distance)):
        if distance[p] >= cutoff:
            g_distance[p] = 0
            continue
        i, j = pairs[0, p] * size, pairs[1, p] * size
        row, t, rate = locate(distance[p], cutoff, intervals)
        store(sums_at, 0, wide(y_at))
        _message_backward(
            channels, y_at, at(table_at, row * 12 * channels), channels, t, rate, at(y_at, i), at(y_at, j),
            at(g_m_at, i), at(g_m_at, j), at(g_y_at, i), at(g_y_at, j), sums_at,
        )  # fmt: skip
        g_distance[p] = sum_up(sums, 0, lanes(y_at))
    components_first(g_y, g_values)
    keep(y)
    keep(g_m)


@kernel
def block_message(weight, scale, y, m):
    atoms, slots = scale.shape
    channels = y.shape[2]
    for i in range(atoms):
        for k in range(9):
            for f in range(channels):
                m[k, i, f] = 0
        for s in range(slots):
            c, j = scale[i, s], i // slots * slots + s
            if c == 0:
                continue
            for k in range(9):
                part = 0 if k == 0 else 1 if k < 4 else 2
                for f in range(channels):
                    m[k, i, f] += c * weight[i, s, part, f] * y[k, j, f]


@kernel
def block_message_backward(g_m, weight, scale, y, g_weight, g_scale, g_y):
    atoms, slots = scale.shape
    channels = y.shape[2]
    for k in range(9):
        for i in range(atoms):
            for f in range(channels):
                g_y[k, i, f] = 0
    for i in range(atoms):
        for s in range(slots):
            c, j = scale[i, s], i // slots * slots + s
            for part in range(3):
                for f in range(channels):
                    g_weight[i, s, part, f] = 0
            g_scale[i, s] = 0
            if c == 0:  # no pair, or one beyond the cutoff, where the slope of the scale is zero too
                continue
            for k in range(9):
                part = 0 if k == 0 else 1 if k < 4 else 2
                for f in range(channels):
                    g_weight[i, s, part, f] += g_m[k, i, f] * y[k, j, f]
                for f in range(channels):
                    g_y[k, j, f] += c * weight[i, s, part, f] * g_m[k, i, f]
            total = y.dtype.type(0)
            for part in range(3):
                for f in range(channels):
                    total += g_weight[i, s, part, f] * weight[i, s, part, f]
                for f in range(channels):
                    g_weight[i, s, part, f] *= c
            g_scale[i, s] = total


# ------------------------------------------------------------------------------------------------------------ atoms


@kernel
def _moments(t):
    """Mean, and one over the standard deviation."""
    count = t.dtype.type(len(t))
    total = t.dtype.type(0)
    for k in range(len(t)):
        total += t[k]
    mean = total / count
    total = t.dtype.type(0)
    for k in range(len(t)):
        total += (t[k] - mean) * (t[k] - mean)
    return mean, t.dtype.type(1 / math.sqrt(total / count + EPSILON))


@kernel
def _layer_norm(t, weight, bias, out, a):
    mean, scale = _moments(t)
    for k in range(len(t)):
        out[a, k] = (t[k] - mean) * scale * weight[k] + bias[k]


@kernel
def _layer_norm_backward(t, weight, g, a, g_t):
    count = t.dtype.type(len(t))
    mean, scale = _moments(t)
    first = second = t.dtype.type(0)
    for k in range(len(t)):
        first += g[a, k] * weight[k]
        second += g[a, k] * weight[k] * (t[k] - mean)
    first, second = first / count, second / count * scale * scale
    for k in range(len(t)):
        g_t[k] = scale * (g[a, k] * weight[k] - first - (t[k] - mean) * second)


@kernel
def _norms(x, a, t):
    for f in range(len(t)):
        t[f] = 0
    for c in range(9):
        for f in range(len(t)):
            t[f] += x[c, a, f] * x[c, a, f]


@kernel
def norm_features(x, weight, bias, out):
    atoms, channels = x.shape[1:]
    t = np.empty(channels, x.dtype)
    for a in range(atoms):
        _norms(x, a, t)
        _layer_norm(t, weight, bias, out, a)


@kernel
def norm_features_backward(g_x, g_out, x, weight, result):
    atoms, channels = x.shape[1:]
    t, g_t = np.empty(channels, x.dtype), np.empty(channels, x.dtype)
    for a in range(atoms):
        _norms(x, a, t)
        _layer_norm_backward(t, weight, g_out, a, g_t)
        for f in range(channels):
            g_t[f] += g_t[f]
        for c in range(9):
            for f in range(channels):
                result[c, a, f] = g_x[c, a, f] + x[c, a, f] * g_t[f]


@kernel
def _part_norms(x, a, scalar, square, t):
    channels = x.shape[2]
    for f in range(channels):
        t[channels + f] = t[2 * channels + f] = 0
    for f in range(channels):
        t[f] = scalar * x[0, a, f] * (x[0, a, f] if square else x.dtype.type(1))
    for c in range(1, 9):
        first = channels if c < 4 else 2 * channels
        for f in range(channels):
            t[first + f] += x[c, a, f] * x[c, a, f]


@kernel
def part_features(x, scalar, square, weight, bias, out):
    atoms, channels = x.shape[1:]
    t = np.empty(3 * channels, x.dtype)
    for a in range(atoms):
        _part_norms(x, a, x.dtype.type(scalar), square, t)
        _layer_norm(t, weight, bias, out, a)


@kernel
def part_features_backward(g_out, x, scalar, square, weight, g_x):
    atoms, channels = x.shape[1:]
    t, g_t = np.empty(3 * channels, x.dtype), np.empty(3 * channels, x.dtype)
    for a in range(atoms):
        _part_norms(x, a, x.dtype.type(scalar), square, t)
        _layer_norm_backward(t, weight, g_out, a, g_t)
        for c in range(9):
            first = 0 if c == 0 else channels if c < 4 else 2 * channels
            factor = x.dtype.type(2 * scalar if c == 0 else 2)
            for f in range(channels):
                g_x[c, a, f] = factor * g_t[first + f] * x[c, a, f]
        if not square:
            for f in range(channels):
                g_x[0, a, f] = x.dtype.type(scalar) * g_t[f]


@over_channels
def _gate(f, like, x, row, gates, channels, silu, normalize, out):
    n = three(gates, f, channels, like)
    n = activate(n[0], silu), activate(n[1], silu), activate(n[2], silu)
    put(out, f, row, normalized(by_part(n, nine(x, f, row, like)), normalize))


@kernel
def gate(x, gates, silu, normalize, out):
    atoms, channels = x.shape[1:]
    for a in range(atoms):
        x_a, out_a = at(pointer(x), a * channels), at(pointer(out), a * channels)
        _gate(
            channels, x_a, x_a, atoms * channels, at(pointer(gates), 3 * a * channels), channels, silu, normalize, out_a
        )


@over_channels
def _gate_gradients(f, like, g_out, x, row, gates, channels, silu, normalize, g_x, g_gates):
    n = three(gates, f, channels, like)
    (i, by_i), (v, by_v), (s, by_s) = (
        value_and_slope(n[0], silu),
        value_and_slope(n[1], silu),
        value_and_slope(n[2], silu),
    )
    n = i, v, s
    x_a = nine(x, f, row, like)
    g = normalized_backward(nine(g_out, f, row, like), by_part(n, x_a), normalize)
    put(g_x, f, row, by_part(n, g))
    by_gate = part_sums(g, x_a)
    store(g_gates, f, by_i * by_gate[0])
    store(g_gates, f + channels, by_v * by_gate[1])
    store(g_gates, f + 2 * channels, by_s * by_gate[2])


@kernel
def gate_backward(g_out, x, gates, silu, normalize, g_x, g_gates):
    atoms, channels = x.shape[1:]
    for a in range(atoms):
        g_a, x_a, to_a = at(pointer(g_out), a * channels), at(pointer(x), a * channels), at(pointer(g_x), a * channels)
        _gate_gradients(
            channels,
            x_a,
            g_a,
            x_a,
            atoms * channels,
            at(pointer(gates), 3 * a * channels),
            channels,
            silu,
            normalize,
            to_a,
            at(pointer(g_gates), 3 * a * channels),
        )


@over_channels
def _head(f, like, h, weight, silu, sums):
    store(sums, 0, load(sums, 0, like) + activate(load(h, f, like), silu) * load(weight, f, like))


@kernel
def head(h, weight, bias, silu, out):
    sums = np.empty(LANES, h.dtype)
    weight_at, sums_at = pointer(weight), pointer(sums)
    for a in range(h.shape[0]):
        store(sums_at, 0, wide(weight_at))
        _head(h.shape[1], weight_at, at(pointer(h), a * h.shape[1]), weight_at, silu, sums_at)
        out[a] = bias[0] + sum_up(sums, 0, lanes(weight_at))


@over_channels
def _head_gradient(f, like, h, g, weight, silu, g_h):
    store(g_h, f, g * (load(weight, f, like) * value_and_slope(load(h, f, like), silu)[1]))


@kernel
def head_backward(g_out, h, weight, silu, g_h):
    for a in range(h.shape[0]):
        h_a = at(pointer(h), a * h.shape[1])
        _head_gradient(h.shape[1], h_a, h_a, g_out[a], pointer(weight), silu, at(pointer(g_h), a * h.shape[1]))


# ------------------------------------------------------------------------------------------- products of 3×3 tensors
# Of one atom at a time; from component to component there are `row` numbers.


@over_channels
def _normalize(f, like, x, row, out):
    put(out, f, row, normalized(nine(x, f, row, like), True))


@kernel
def normalize(x, out):
    atoms, channels = x.shape[1:]
    for a in range(atoms):
        x_a = at(pointer(x), a * channels)
        _normalize(channels, x_a, x_a, atoms * channels, at(pointer(out), a * channels))


@over_channels
def _normalize_gradient(f, like, g_out, x, row, g_x):
    put(g_x, f, row, normalized_backward(nine(g_out, f, row, like), nine(x, f, row, like), True))


@kernel
def normalize_backward(g_out, x, g_x):
    atoms, channels = x.shape[1:]
    for a in range(atoms):
        x_a = at(pointer(x), a * channels)
        _normalize_gradient(
            channels, x_a, at(pointer(g_out), a * channels), x_a, atoms * channels, at(pointer(g_x), a * channels)
        )


@over_channels
def _product(f, like, y, m, row, factor, both, out):
    put(out, f, row, normalized(multiply(nine(y, f, row, like), nine(m, f, row, like), factor, both), True))


@kernel
def product(y, m, factor, both, out):
    atoms, channels = y.shape[1:]
    row = atoms * channels
    for a in range(atoms):
        y_a, m_a = at(pointer(y), a * channels), at(pointer(m), a * channels)
        _product(channels, y_a, y_a, m_a, row, factor[a], both, at(pointer(out), a * channels))


@over_channels
def _multiplied_gradients(f, like, g_out, y, m, row, factor, both, g_y, g_m):
    y_a, m_a = nine(y, f, row, like), nine(m, f, row, like)
    g = normalized_backward(nine(g_out, f, row, like), multiply(y_a, m_a, factor, both), True)
    by_y, by_m = multiply_backward(g, y_a, m_a, factor, both)
    put(g_y, f, row, by_y)
    put(g_m, f, row, by_m)


@kernel
def product_backward(g_out, y, m, factor, both, g_y, g_m):
    atoms, channels = y.shape[1:]
    for a in range(atoms):
        g_a, y_a, m_a = at(pointer(g_out), a * channels), at(pointer(y), a * channels), at(pointer(m), a * channels)
        to_y, to_m = at(pointer(g_y), a * channels), at(pointer(g_m), a * channels)
        _multiplied_gradients(channels, y_a, g_a, y_a, m_a, atoms * channels, factor[a], both, to_y, to_m)


@inlined
def _squared(x, d, factor):
    """x + d + factor·DD."""
    return plus(plus(x, d), multiply(d, d, 0.5 * factor, True))


@over_channels
def _plus_square(f, like, x, d, row, factor, normalize, out):
    p = _squared(nine(x, f, row, like), nine(d, f, row, like), factor)
    put(out, f, row, normalized(p, normalize))


@kernel
def plus_square(x, d, factor, normalize, out):
    atoms, channels = x.shape[1:]
    for a in range(atoms):
        x_a, d_a = at(pointer(x), a * channels), at(pointer(d), a * channels)
        _plus_square(channels, x_a, x_a, d_a, atoms * channels, factor[a], normalize, at(pointer(out), a * channels))


@over_channels
def _plus_square_gradients(f, like, g_out, x, d, row, factor, normalize, g_x, g_d):
    d_a = nine(d, f, row, like)
    g = normalized_backward(nine(g_out, f, row, like), _squared(nine(x, f, row, like), d_a, factor), normalize)
    put(g_x, f, row, g)
    put(g_d, f, row, plus(g, multiply_backward(g, d_a, d_a, factor, True)[0]))


@kernel
def plus_square_backward(g_out, x, d, factor, normalize, g_x, g_d):
    atoms, channels = x.shape[1:]
    for a in range(atoms):
        g_a, x_a, d_a = at(pointer(g_out), a * channels), at(pointer(x), a * channels), at(pointer(d), a * channels)
        to_x, to_d = at(pointer(g_x), a * channels), at(pointer(g_d), a * channels)
        _plus_square_gradients(channels, x_a, g_a, x_a, d_a, atoms * channels, factor[a], normalize, to_x, to_d)
