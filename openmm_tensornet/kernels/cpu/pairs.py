"""Kernels for the CPU that list pairs and find their distances."""

from __future__ import annotations

import math

import numpy as np

from .steps import kernel

MOST_CELLS = 64  # along each direction


@kernel
def _clamped(place, number):
    """As an index below `number`, whatever rounding and overflow made of it."""
    return int(place) if 0 <= place < number else number - 1


@kernel
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


@kernel
def _cell(x, y, z, number):
    return (x % number[0] * number[1] + y % number[1]) * number[2] + z % number[2]


@kernel
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


@kernel
def _nearest(x, y, z, box, by_a, by_b, by_c):
    """Nearest image; c, b, a, since each vector of a reduced box only has components up to its own."""
    turns = np.rint(z * by_c)
    x, y, z = x - turns * box[2, 0], y - turns * box[2, 1], z - turns * box[2, 2]
    turns = np.rint(y * by_b)
    x, y = x - turns * box[1, 0], y - turns * box[1, 1]
    return x - np.rint(x * by_a) * box[0, 0], y, z


@kernel
def near_pairs(positions, box, replicas, cutoff, capacity, pairs, found):
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
                        if j <= i or replicas[i] != replicas[j]:
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


@kernel
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


@kernel
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


@kernel
def geometry_backward(g_distance, g_unit, distance, unit, pairs, by_atom, forces):
    for a in range(len(forces)):
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
