"""Sums over neighbors on the CPU."""

from __future__ import annotations

import numpy as np

from .simd import at, keep, lanes, load, pointer, store, wide
from .steps import (
    HALF,
    LANES,
    SIXTH,
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
    times,
    values,
)


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
