"""The operators' kernels for the CPU, in Numba; :mod:`.definitions` says what each computes.

Inner loops run over channels and take few rows at a time: LLVM makes vector instructions of them if a few comparisons
at run time show that what is written does not overlap what is read. Literals are cast, since Numba computes with float64 otherwise.
Each kernel runs on one thread in a fixed order, so that the same input gives the same bits.
"""

from __future__ import annotations

import logging
import math

import numpy as np
import torch
from numba import njit
from numba.core import event

from .. import tensors

# NaN must stay NaN, so not all of fastmath.
_kernel = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz", "arcp"})
EPSILON = 1e-5  # of LayerNorm
MOST_CELLS = 64  # along each direction
_HALF, _SIXTH = 1 / math.sqrt(2), 1 / math.sqrt(6)


class _SayOnce(event.Listener):
    """Says what the user is waiting for; kernels that come from Numba's cache are not compiled."""

    said = False

    def on_start(self, _: event.Event) -> None:
        if not self.said:
            self.said = True
            logging.getLogger("openmm_tensornet").warning(
                "openmm-tensornet: compiling kernels for this CPU, which takes about a minute, once for each precision"
            )

    def on_end(self, _: event.Event) -> None:
        pass


event.register("numba:compile", _SayOnce())


# ------------------------------------------------------------------------------------------------------------ pairs


@_kernel
def _clamped(place, number):
    """As an index below `number`, whatever rounding and overflow made of it."""
    return int(place) if 0 <= place < number else number - 1


@_kernel
def _cells(positions, box, width, cells):
    """Put each atom into a cell at least `width` wide; the number of cells along each direction, 0 where something is not finite.

    Along a periodic direction that has no room for three there is one: no cell may be a neighbor twice.
    """
    number, low, high = np.ones(3, np.int64), np.empty(3), np.empty(3)
    none = np.zeros(3, np.int64)
    for k in range(3):
        low[k] = high[k] = positions[0, k]
        for a in range(positions.shape[0]):
            if not np.isfinite(positions[a, k]):
                return none
            low[k], high[k] = min(low[k], positions[a, k]), max(high[k], positions[a, k])
    if box.shape[0] == 0:
        for k in range(3):
            extent = high[k] - low[k]
            number[k] = max(1, min(extent / width, MOST_CELLS))
            for a in range(positions.shape[0]):
                place = (positions[a, k] - low[k]) / max(extent, width) * number[k]
                cells[a, k] = _clamped(place, number[k])
        return number
    ax, bx, by, cx, cy, cz = box[0, 0], box[1, 0], box[1, 1], box[2, 0], box[2, 1], box[2, 2]
    # Distances between opposite faces, from the volume and the faces' areas.
    u, v, w = by * cz, bx * cz, bx * cy - by * cx
    heights = (ax * u / math.sqrt(u * u + v * v + w * w), u / math.sqrt(cz * cz + cy * cy), cz)
    for k in range(3):
        if not (heights[k] > 0 and np.isfinite(heights[k])):
            return none
        if heights[k] >= 3 * width:
            number[k] = min(heights[k] / width, MOST_CELLS)
    for a in range(positions.shape[0]):
        c = positions[a, 2] / cz
        b = (positions[a, 1] - c * cy) / by
        fraction = ((positions[a, 0] - b * bx - c * cx) / ax, b, c)
        for k in range(3):
            cells[a, k] = _clamped((fraction[k] - np.floor(fraction[k])) * number[k], number[k])
    return number


@_kernel
def _cell(x, y, z, number):
    return (x % number[0] * number[1] + y % number[1]) * number[2] + z % number[2]


@_kernel
def _by_cell(cells, number, begin, order):
    """Sort atoms by cell: where each cell begins in the order."""
    begin[:] = 0
    for a in range(len(order)):
        begin[_cell(cells[a, 0], cells[a, 1], cells[a, 2], number) + 1] += 1
    for c in range(1, len(begin)):
        begin[c] += begin[c - 1]
    free = begin[:-1].copy()
    for a in range(len(order)):
        c = _cell(cells[a, 0], cells[a, 1], cells[a, 2], number)
        order[free[c]] = a
        free[c] += 1


@_kernel
def _nearest(x, y, z, box, by_a, by_b, by_c):
    """Nearest image; c, b, a, since each vector of a reduced box only has components up to its own."""
    turns = np.rint(z * by_c)
    x, y, z = x - turns * box[2, 0], y - turns * box[2, 1], z - turns * box[2, 2]
    turns = np.rint(y * by_b)
    x, y = x - turns * box[1, 0], y - turns * box[1, 1]
    return x - np.rint(x * by_a) * box[0, 0], y, z


@_kernel
def near_pairs(positions, box, molecules, cutoff, capacity, pairs, found):
    periodic = box.shape[0] == 3
    by_a, by_b, by_c = (1 / box[0, 0], 1 / box[1, 1], 1 / box[2, 2]) if periodic else (0.0, 0.0, 0.0)
    cells = np.empty((positions.shape[0], 3), np.int64)
    # A little wider than the cutoff, so that rounding puts no pair two cells apart.
    number = _cells(positions, box, cutoff * (1 + 1e-9), cells)
    finite = number[0] > 0
    # Pairs in the order of their cells: those that follow each other share atoms, which are in the cache.
    begin = np.empty(number[0] * number[1] * number[2] + 1, np.int64)
    order = np.empty(positions.shape[0] if finite else 0, np.int64)
    _by_cell(cells, number, begin, order)
    low, high = np.empty(3, np.int64), np.empty(3, np.int64)
    count = 0
    for i in order:
        for k in range(3):
            low[k], high[k] = cells[i, k] - 1, cells[i, k] + 2
            if number[k] == 1 or not periodic:
                low[k], high[k] = max(low[k], 0), min(high[k], number[k])
        for x_cell in range(low[0], high[0]):
            for y_cell in range(low[1], high[1]):
                for z_cell in range(low[2], high[2]):
                    cell = _cell(x_cell, y_cell, z_cell, number)
                    for j in order[begin[cell] : begin[cell + 1]]:
                        if j <= i or molecules[i] != molecules[j]:
                            continue
                        x = positions[i, 0] - positions[j, 0]
                        y = positions[i, 1] - positions[j, 1]
                        z = positions[i, 2] - positions[j, 2]
                        if periodic:
                            x, y, z = _nearest(x, y, z, box, by_a, by_b, by_c)
                        if not x * x + y * y + z * z >= cutoff * cutoff:  # NaN, of an overflow, is near
                            if count < capacity:
                                pairs[0, count], pairs[1, count] = i, j
                            count += 1
    for p in range(count, capacity):
        pairs[0, p] = pairs[1, p] = 0
    found[0] = count if finite else capacity + 1


@_kernel
def by_atom(pairs, atoms, result):
    entries = result[atoms + 1 :]
    result[: atoms + 1] = 0
    for p in range(pairs.shape[1]):
        i, j = pairs[0, p], pairs[1, p]
        if i != j:
            result[i + 1] += 1
            result[j + 1] += 1
    for a in range(atoms):
        result[a + 1] += result[a]
    free = result[:atoms].copy()
    entries[result[atoms] :] = 0
    for p in range(pairs.shape[1]):
        i, j = pairs[0, p], pairs[1, p]
        if i != j:
            entries[free[i]], entries[free[j]] = 2 * p, 2 * p + 1
            free[i] += 1
            free[j] += 1


@_kernel
def geometry(positions, box, pairs, by_atom, far, single, distance, unit):
    cast = distance.dtype.type
    periodic = box.shape[0] == 3
    by_a, by_b, by_c = (1 / box[0, 0], 1 / box[1, 1], 1 / box[2, 2]) if periodic else (0.0, 0.0, 0.0)
    for p in range(len(distance)):
        i, j = pairs[0, p], pairs[1, p]
        if i == j:
            distance[p] = far
            unit[p, 0] = unit[p, 1] = unit[p, 2] = 0
            continue
        x = positions[i, 0] - positions[j, 0]
        y = positions[i, 1] - positions[j, 1]
        z = positions[i, 2] - positions[j, 2]
        if periodic:
            x, y, z = _nearest(x, y, z, box, by_a, by_b, by_c)
        x, y, z = cast(x), cast(y), cast(z)
        d = math.sqrt(x * x + y * y + z * z)
        distance[p] = d
        unit[p, 0], unit[p, 1], unit[p, 2] = x / d, y / d, z / d


@_kernel
def geometry_backward(g_distance, g_unit, distance, unit, pairs, by_atom, atoms, forces):
    for a in range(atoms):
        forces[a, 0] = forces[a, 1] = forces[a, 2] = 0
    for p in range(len(distance)):
        i, j = pairs[0, p], pairs[1, p]
        if i == j:
            continue
        x, y, z, d = unit[p, 0], unit[p, 1], unit[p, 2], distance[p]
        a, b, c = g_unit[p, 0] / d, g_unit[p, 1] / d, g_unit[p, 2] / d
        along = g_distance[p] - (x * a + y * b + z * c)
        a, b, c = a + x * along, b + y * along, c + z * along
        forces[i, 0] += a
        forces[i, 1] += b
        forces[i, 2] += c
        forces[j, 0] -= a
        forces[j, 1] -= b
        forces[j, 2] -= c


@_kernel
def _locate(distance, lower, step, intervals):
    """Row of the table and place in its interval, 0 to 1; row 0, which is NaN, for what is NaN or too close."""
    place = (np.float64(distance) - lower) / step + 1
    row = 0
    if place >= 1:
        row = min(int(place), intervals + 1)
    return row, place - row


@_kernel
def _functions(table, row, place, values):
    t = table.dtype.type(place)
    for k in range(len(values)):
        values[k] = table[row, 0, k] + t * (table[row, 1, k] + t * (table[row, 2, k] + t * table[row, 3, k]))


@_kernel
def _slopes(table, row, place, step, slopes):
    cast = table.dtype.type
    one, two, three = cast(1 / step), cast(2 * place / step), cast(3 * place * place / step)
    for k in range(len(slopes)):
        slopes[k] = one * table[row, 1, k] + two * table[row, 2, k] + three * table[row, 3, k]


@_kernel
def _angular(unit, p, g):
    """u and the five components of uuᵀ−𝟙/3."""
    x, y, z = unit[p, 0], unit[p, 1], unit[p, 2]
    g[0], g[1], g[2] = x, y, z
    g[3], g[4], g[5] = 2 * _HALF * x * y, 2 * _HALF * x * z, 2 * _HALF * y * z
    g[6], g[7] = _HALF * (x * x - y * y), _SIXTH * (2 * z * z - x * x - y * y)


@_kernel
def _atoms_first(x):
    """(9, A, F) to (A, 9, F), in which what a pair needs of an atom lies together."""
    y = np.empty((x.shape[1], 9, x.shape[2]), x.dtype)
    for k in range(9):
        for a in range(x.shape[1]):
            for f in range(x.shape[2]):
                y[a, k, f] = x[k, a, f]
    return y


@_kernel
def _components_first(y, x):
    """The way back."""
    for k in range(9):
        for a in range(x.shape[1]):
            for f in range(x.shape[2]):
                x[k, a, f] = y[a, k, f]


@_kernel
def embed(distance, unit, pairs, by_atom, receiver, sender, own, table, lower, step, result):
    atoms, channels = own.shape
    intervals = table.shape[0] - 2
    upper = lower + step * intervals
    values = np.empty(3 * channels, own.dtype)
    z_i, z_j = np.empty(channels, own.dtype), np.empty(channels, own.dtype)
    g = np.empty(8, own.dtype)
    x = np.zeros((atoms, 9, channels), own.dtype)
    for a in range(atoms):
        for f in range(channels):
            x[a, 0, f] = own[a, f]
    for p in range(len(distance)):
        if distance[p] >= upper:
            continue
        i, j = pairs[0, p], pairs[1, p]
        row, place = _locate(distance[p], lower, step, intervals)
        _functions(table, row, place, values)
        _angular(unit, p, g)
        for f in range(channels):
            z_i[f] = receiver[i, f] + sender[j, f]
        for f in range(channels):
            z_j[f] = receiver[j, f] + sender[i, f]
        for f in range(channels):
            x[i, 0, f] += values[f] * z_i[f]
        for f in range(channels):
            x[j, 0, f] += values[f] * z_j[f]
        for k in range(8):
            first = channels if k < 3 else 2 * channels
            forth = g[k]
            back = -forth if k < 3 else forth
            for f in range(channels):
                x[i, k + 1, f] += forth * values[first + f] * z_i[f]
            for f in range(channels):
                x[j, k + 1, f] += back * values[first + f] * z_j[f]
    _components_first(x, result)


@_kernel
def embed_backward(
    g_result, g_through, distance, unit, pairs, receiver, sender, table, lower, step, g_distance, g_unit
):
    channels = receiver.shape[1]
    intervals = table.shape[0] - 2
    upper = lower + step * intervals
    g_x = _atoms_first(g_result)
    values, slopes = np.empty(3 * channels, g_x.dtype), np.empty(3 * channels, g_x.dtype)
    z_i, z_j = np.empty(channels, g_x.dtype), np.empty(channels, g_x.dtype)
    g, g_g = np.empty(8, g_x.dtype), np.empty(8, g_x.dtype)
    zero = g_x.dtype.type(0)
    for p in range(len(distance)):
        if distance[p] >= upper:
            g_distance[p] = g_through[p]
            g_unit[p, 0] = g_unit[p, 1] = g_unit[p, 2] = 0
            continue
        i, j = pairs[0, p], pairs[1, p]
        row, place = _locate(distance[p], lower, step, intervals)
        _functions(table, row, place, values)
        _slopes(table, row, place, step, slopes)
        _angular(unit, p, g)
        for f in range(channels):
            z_i[f] = receiver[i, f] + sender[j, f]
        for f in range(channels):
            z_j[f] = receiver[j, f] + sender[i, f]
        along = zero
        for f in range(channels):
            along += slopes[f] * (z_i[f] * g_x[i, 0, f] + z_j[f] * g_x[j, 0, f])
        for k in range(8):
            first = channels if k < 3 else 2 * channels
            sign = g_x.dtype.type(-1 if k < 3 else 1)
            by_value, by_slope = zero, zero
            for f in range(channels):
                both = z_i[f] * g_x[i, k + 1, f] + sign * z_j[f] * g_x[j, k + 1, f]
                by_value += values[first + f] * both
                by_slope += slopes[first + f] * both
            g_g[k] = by_value
            along += g[k] * by_slope
        g_distance[p] = g_through[p] + along
        x, y, z = g[0], g[1], g[2]
        g_unit[p, 0] = g_g[0] + 2 * (_HALF * (g_g[3] * y + g_g[4] * z + g_g[6] * x) - _SIXTH * g_g[7] * x)
        g_unit[p, 1] = g_g[1] + 2 * (_HALF * (g_g[3] * x + g_g[5] * z - g_g[6] * y) - _SIXTH * g_g[7] * y)
        g_unit[p, 2] = g_g[2] + 2 * (_HALF * (g_g[4] * x + g_g[5] * y) + 2 * _SIXTH * g_g[7] * z)


@_kernel
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


@_kernel
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


@_kernel
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


@_kernel
def _layer_norm(t, weight, bias, out, a):
    mean, scale = _moments(t)
    for k in range(len(t)):
        out[a, k] = (t[k] - mean) * scale * weight[k] + bias[k]


@_kernel
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


@_kernel
def _norms(x, a, t):
    for f in range(len(t)):
        t[f] = 0
    for c in range(9):
        for f in range(len(t)):
            t[f] += x[c, a, f] * x[c, a, f]


@_kernel
def norm_features(x, weight, bias, out):
    atoms, channels = x.shape[1:]
    t = np.empty(channels, x.dtype)
    for a in range(atoms):
        _norms(x, a, t)
        _layer_norm(t, weight, bias, out, a)


@_kernel
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


@_kernel
def _part_norms(x, a, scalar, t):
    channels = x.shape[2]
    for f in range(channels):
        t[channels + f] = t[2 * channels + f] = 0
    for f in range(channels):
        t[f] = scalar * x[0, a, f] * x[0, a, f]
    for c in range(1, 9):
        first = channels if c < 4 else 2 * channels
        for f in range(channels):
            t[first + f] += x[c, a, f] * x[c, a, f]


@_kernel
def part_features(x, scalar, weight, bias, out):
    atoms, channels = x.shape[1:]
    t = np.empty(3 * channels, x.dtype)
    for a in range(atoms):
        _part_norms(x, a, x.dtype.type(scalar), t)
        _layer_norm(t, weight, bias, out, a)


@_kernel
def part_features_backward(g_out, x, scalar, weight, g_x):
    atoms, channels = x.shape[1:]
    t, g_t = np.empty(3 * channels, x.dtype), np.empty(3 * channels, x.dtype)
    for a in range(atoms):
        _part_norms(x, a, x.dtype.type(scalar), t)
        _layer_norm_backward(t, weight, g_out, a, g_t)
        for c in range(9):
            first = 0 if c == 0 else channels if c < 4 else 2 * channels
            factor = x.dtype.type(2 * scalar if c == 0 else 2)
            for f in range(channels):
                g_x[c, a, f] = factor * g_t[first + f] * x[c, a, f]


def _sigmoid(h, silu):
    """With which SiLU and its slope are arithmetic alone: 1 for the identity. PyTorch's takes eight numbers at a time, Numba's exp one."""
    return torch.from_numpy(h).sigmoid().numpy() if silu else np.ones_like(h)


def gate(x, gates, silu, normalize, out):
    _gate(x, gates, _sigmoid(gates, silu), normalize, out)


def gate_backward(g_out, x, gates, silu, normalize, g_x, g_gates):
    _gate_backward(g_out, x, gates, _sigmoid(gates, silu), normalize, g_x, g_gates)


def head(h, weight, bias, silu, out):
    _head(h, _sigmoid(h, silu), weight, bias, out)


def head_backward(g_out, h, weight, silu, g_h):
    _head_backward(g_out, h, _sigmoid(h, silu), weight, g_h)


@_kernel
def _gate(x, gates, sigmoid, normalize, out):
    atoms, channels = x.shape[1:]
    s, n = np.empty(channels, x.dtype), np.empty(3 * channels, x.dtype)
    one, counts = x.dtype.type(1), x.dtype.type(1 if normalize else 0)
    for a in range(atoms):
        for f in range(3 * channels):
            n[f] = gates[a, f] * sigmoid[a, f]
        for f in range(channels):
            s[f] = 0
        for c in range(9):
            first = 0 if c == 0 else channels if c < 4 else 2 * channels
            for f in range(channels):
                value = x[c, a, f] * n[first + f]
                out[c, a, f] = value
                s[f] += value * value
        for f in range(channels):
            s[f] = one / (one + counts * s[f])
        for c in range(9):
            for f in range(channels):
                out[c, a, f] *= s[f]


@_kernel
def _gate_backward(g_out, x, gates, sigmoid, normalize, g_x, g_gates):
    atoms, channels = x.shape[1:]
    s, along, n = np.empty(channels, x.dtype), np.empty(channels, x.dtype), np.empty(3 * channels, x.dtype)
    one, counts = x.dtype.type(1), x.dtype.type(1 if normalize else 0)
    for a in range(atoms):
        for f in range(3 * channels):
            n[f] = gates[a, f] * sigmoid[a, f]
        for f in range(channels):
            s[f] = along[f] = 0
        for c in range(9):
            first = 0 if c == 0 else channels if c < 4 else 2 * channels
            for f in range(channels):
                value = x[c, a, f] * n[first + f]
                s[f] += value * value
                along[f] += value * g_out[c, a, f]
        for f in range(channels):
            s[f] = one / (one + counts * s[f])
            along[f] = (counts + counts) * along[f] * s[f]
        for f in range(3 * channels):
            g_gates[a, f] = 0
        for c in range(9):
            first = 0 if c == 0 else channels if c < 4 else 2 * channels
            for f in range(channels):
                g = s[f] * (g_out[c, a, f] - along[f] * x[c, a, f] * n[first + f])
                g_x[c, a, f] = g * n[first + f]
                g_gates[a, first + f] += g * x[c, a, f]
        for f in range(3 * channels):
            g_gates[a, f] *= sigmoid[a, f] + n[f] * (one - sigmoid[a, f])


@_kernel
def _head(h, sigmoid, weight, bias, out):
    for a in range(h.shape[0]):
        total = bias[0]
        for k in range(h.shape[1]):
            total += h[a, k] * sigmoid[a, k] * weight[k, 0]
        out[a] = total


@_kernel
def _head_backward(g_out, h, sigmoid, weight, g_h):
    one = h.dtype.type(1)
    for a in range(h.shape[0]):
        for k in range(h.shape[1]):
            slope = sigmoid[a, k] * (one + h[a, k] * (one - sigmoid[a, k]))
            g_h[a, k] = g_out[a] * weight[k, 0] * slope


# ------------------------------------------------------------------------------------------- products of 3×3 tensors
# As sums of terms: component c of the product gets weight·y_p·m_q for each (c, p, q). All that concerns one atom is
# copied to arrays of shape (9, F) first: rows of (9, A, F) that are far apart in memory would evict each other.


def _terms(table):
    """The terms (c, p, q) of a product and their weights, which Numba takes for constants."""
    c, p, q = np.nonzero(np.abs(table.numpy().transpose(2, 0, 1)) > 1e-12)
    return np.stack((c, p, q), axis=1), table.numpy()[p, q, c]


_BOTH_TERMS, _BOTH_WEIGHTS = _terms(tensors.layer_table(True))
_ONE_TERMS, _ONE_WEIGHTS = _terms(tensors.layer_table(False))
_SQUARE_TERMS, _SQUARE_WEIGHTS = _terms(tensors.square_table())


@_kernel
def _product_terms(both):
    return (_BOTH_TERMS, _BOTH_WEIGHTS) if both else (_ONE_TERMS, _ONE_WEIGHTS)


@_kernel
def _load(x, a, own):
    for c in range(9):
        for f in range(own.shape[1]):
            own[c, f] = x[c, a, f]


@_kernel
def _store(own, x, a):
    for c in range(9):
        for f in range(own.shape[1]):
            x[c, a, f] = own[c, f]


@_kernel
def _multiply(terms, weights, factor, y, m, out):
    """Add a product."""
    for t in range(len(weights)):
        c, p, q, weight = terms[t, 0], terms[t, 1], terms[t, 2], out.dtype.type(factor * weights[t])
        for f in range(out.shape[1]):
            out[c, f] += weight * y[p, f] * m[q, f]


@_kernel
def _multiply_backward(terms, weights, factor, g, y, m, g_y, g_m):
    """Add to the gradients by y and m, which may be the same array."""
    for t in range(len(weights)):
        c, p, q, weight = terms[t, 0], terms[t, 1], terms[t, 2], g.dtype.type(factor * weights[t])
        for f in range(g.shape[1]):
            g_y[p, f] += weight * g[c, f] * m[q, f]
        for f in range(g.shape[1]):
            g_m[q, f] += weight * g[c, f] * y[p, f]


@_kernel
def _normalize(counts, x, s):
    """x/(‖x‖²+1) in place, or x where counts is 0; 1/(‖x‖²+1) stays in s."""
    one = x.dtype.type(1)
    for f in range(len(s)):
        s[f] = 0
    for c in range(9):
        for f in range(len(s)):
            s[f] += x[c, f] * x[c, f]
    for f in range(len(s)):
        s[f] = one / (one + counts * s[f])
    for c in range(9):
        for f in range(len(s)):
            x[c, f] *= s[f]


@_kernel
def _normalize_backward(counts, x, s, along, g):
    """From the gradient by the normalised result, g, that by x, in its place; x is normalised too."""
    _normalize(counts, x, s)
    for f in range(len(s)):
        along[f] = 0
    for c in range(9):
        for f in range(len(s)):
            along[f] += x[c, f] * g[c, f]
    for f in range(len(s)):
        along[f] *= counts + counts
    for c in range(9):
        for f in range(len(s)):
            g[c, f] = s[f] * g[c, f] - along[f] * x[c, f]


@_kernel
def _zero(x):
    for c in range(9):
        for f in range(x.shape[1]):
            x[c, f] = 0


@_kernel
def normalize(x, out):
    atoms, channels = x.shape[1:]
    p, s = np.empty((9, channels), x.dtype), np.empty(channels, x.dtype)
    for a in range(atoms):
        _load(x, a, p)
        _normalize(x.dtype.type(1), p, s)
        _store(p, out, a)


@_kernel
def normalize_backward(g_out, x, g_x):
    atoms, channels = x.shape[1:]
    p, g = np.empty((9, channels), x.dtype), np.empty((9, channels), x.dtype)
    s, along = np.empty(channels, x.dtype), np.empty(channels, x.dtype)
    for a in range(atoms):
        _load(x, a, p)
        _load(g_out, a, g)
        _normalize_backward(x.dtype.type(1), p, s, along, g)
        _store(g, g_x, a)


@_kernel
def product(y, m, factor, both, out):
    atoms, channels = y.shape[1:]
    terms, weights = _product_terms(both)
    own = np.empty((3, 9, channels), y.dtype)
    y_a, m_a, p = own[0], own[1], own[2]
    s = np.empty(channels, y.dtype)
    for a in range(atoms):
        _load(y, a, y_a)
        _load(m, a, m_a)
        _zero(p)
        _multiply(terms, weights, factor[a], y_a, m_a, p)
        _normalize(y.dtype.type(1), p, s)
        _store(p, out, a)


@_kernel
def product_backward(g_out, y, m, factor, both, g_y, g_m):
    atoms, channels = y.shape[1:]
    terms, weights = _product_terms(both)
    own = np.empty((6, 9, channels), y.dtype)
    y_a, m_a, p, g, by_y, by_m = own[0], own[1], own[2], own[3], own[4], own[5]
    s, along = np.empty(channels, y.dtype), np.empty(channels, y.dtype)
    for a in range(atoms):
        _load(y, a, y_a)
        _load(m, a, m_a)
        _load(g_out, a, g)
        _zero(p)
        _zero(by_y)
        _zero(by_m)
        _multiply(terms, weights, factor[a], y_a, m_a, p)
        _normalize_backward(y.dtype.type(1), p, s, along, g)
        _multiply_backward(terms, weights, factor[a], g, y_a, m_a, by_y, by_m)
        _store(by_y, g_y, a)
        _store(by_m, g_m, a)


@_kernel
def interact(distance, pairs, by_atom, own, table, lower, step, y_values, factor, both, out, message):
    atoms, channels = y_values.shape[1:]
    intervals = table.shape[0] - 2
    upper = lower + step * intervals
    y = _atoms_first(y_values)
    m = np.empty((atoms, 9, channels), y.dtype)
    values = np.empty(3 * channels, y.dtype)
    for a in range(atoms):
        for k in range(9):
            for f in range(channels):
                m[a, k, f] = own[k, f] * y[a, k, f]
    for p in range(len(distance)):
        if distance[p] >= upper:
            continue
        i, j = pairs[0, p], pairs[1, p]
        row, place = _locate(distance[p], lower, step, intervals)
        _functions(table, row, place, values)
        for k in range(9):
            first = 0 if k == 0 else channels if k < 4 else 2 * channels
            for f in range(channels):
                m[i, k, f] += values[first + f] * y[j, k, f]
            for f in range(channels):
                m[j, k, f] += values[first + f] * y[i, k, f]
    terms, weights = _product_terms(both)
    p_a, s = np.empty((9, channels), y.dtype), np.empty(channels, y.dtype)
    for a in range(atoms):
        _zero(p_a)
        _multiply(terms, weights, factor[a], y[a], m[a], p_a)
        _normalize(y.dtype.type(1), p_a, s)
        _store(p_a, out, a)
    _components_first(m, message)


@_kernel
def interact_backward(
    g_out, distance, pairs, by_atom, own, table, lower, step, y_values, message, factor, both, g_distance, g_values
):
    atoms, channels = y_values.shape[1:]
    intervals = table.shape[0] - 2
    upper = lower + step * intervals
    terms, weights = _product_terms(both)
    y = _atoms_first(y_values)
    g_m, g_y = np.empty((atoms, 9, channels), y.dtype), np.empty((atoms, 9, channels), y.dtype)
    rows = np.empty((3, 9, channels), y.dtype)
    m_a, p_a, g_a = rows[0], rows[1], rows[2]
    s, along_f = np.empty(channels, y.dtype), np.empty(channels, y.dtype)
    for a in range(atoms):
        _load(message, a, m_a)
        _load(g_out, a, g_a)
        _zero(p_a)
        _zero(g_y[a])
        _zero(g_m[a])
        _multiply(terms, weights, factor[a], y[a], m_a, p_a)
        _normalize_backward(y.dtype.type(1), p_a, s, along_f, g_a)
        _multiply_backward(terms, weights, factor[a], g_a, y[a], m_a, g_y[a], g_m[a])
        for k in range(9):
            for f in range(channels):
                g_y[a, k, f] += own[k, f] * g_m[a, k, f]
    values, slopes = np.empty(3 * channels, y.dtype), np.empty(3 * channels, y.dtype)
    for p in range(len(distance)):
        if distance[p] >= upper:
            g_distance[p] = 0
            continue
        i, j = pairs[0, p], pairs[1, p]
        row, place = _locate(distance[p], lower, step, intervals)
        _functions(table, row, place, values)
        _slopes(table, row, place, step, slopes)
        along = y.dtype.type(0)
        for k in range(9):
            first = 0 if k == 0 else channels if k < 4 else 2 * channels
            for f in range(channels):
                along += slopes[first + f] * (g_m[i, k, f] * y[j, k, f] + g_m[j, k, f] * y[i, k, f])
            for f in range(channels):
                g_y[i, k, f] += values[first + f] * g_m[j, k, f]
            for f in range(channels):
                g_y[j, k, f] += values[first + f] * g_m[i, k, f]
        g_distance[p] = along
    _components_first(g_y, g_values)


@_kernel
def _sum(x, d, a, d_a, p):
    """d and x + d of an atom."""
    _load(d, a, d_a)
    for c in range(9):
        for f in range(p.shape[1]):
            p[c, f] = x[c, a, f] + d_a[c, f]


@_kernel
def plus_square(x, d, factor, normalize, out):
    atoms, channels = x.shape[1:]
    own = np.empty((2, 9, channels), x.dtype)
    d_a, p = own[0], own[1]
    s = np.empty(channels, x.dtype)
    for a in range(atoms):
        _sum(x, d, a, d_a, p)
        _multiply(_SQUARE_TERMS, _SQUARE_WEIGHTS, factor[a], d_a, d_a, p)
        _normalize(x.dtype.type(1 if normalize else 0), p, s)
        _store(p, out, a)


@_kernel
def plus_square_backward(g_out, x, d, factor, normalize, g_x, g_d):
    atoms, channels = x.shape[1:]
    own = np.empty((4, 9, channels), x.dtype)
    d_a, p, g, by_d = own[0], own[1], own[2], own[3]
    s, along = np.empty(channels, x.dtype), np.empty(channels, x.dtype)
    for a in range(atoms):
        _sum(x, d, a, d_a, p)
        _multiply(_SQUARE_TERMS, _SQUARE_WEIGHTS, factor[a], d_a, d_a, p)
        _load(g_out, a, g)
        _normalize_backward(x.dtype.type(1 if normalize else 0), p, s, along, g)
        _store(g, g_x, a)
        _load(g_x, a, by_d)
        _multiply_backward(_SQUARE_TERMS, _SQUARE_WEIGHTS, factor[a], g, d_a, d_a, by_d, by_d)
        _store(by_d, g_d, a)
