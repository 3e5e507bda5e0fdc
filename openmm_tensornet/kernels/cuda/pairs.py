"""Lists of pairs and their geometry on NVIDIA GPUs; see :mod:`openmm_tensornet.kernels.cuda`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import definitions
from .steps import (
    ELEMENTS,
    at_once,
    entries,
    nearest_image,
    vector,
)


@triton.jit
def _near(positions, box, replicas, cutoff, atoms, i, j, PERIODIC: tl.constexpr):
    """Which atoms j > i are near to atom i; a coordinate of j that is not a number makes it near to all."""
    exists = (j > i) & (j < atoms)
    x, y, z = vector(positions, i, tl.where(exists, j, i))
    if PERIODIC:
        x, y, z = nearest_image(box, x, y, z)
    same = tl.load(replicas + i) == tl.load(replicas + j, exists, 0)
    return exists & same & ~(x * x + y * y + z * z >= cutoff * cutoff)


@triton.jit
def _count_near(positions, box, replicas, counts, cutoff, atoms, capacity, PERIODIC: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    count = tl.zeros((BLOCK,), tl.int64)
    limit = tl.load(cutoff)
    for first in range(i + 1, atoms, BLOCK):
        count += _near(positions, box, replicas, limit, atoms, i, first + tl.arange(0, BLOCK), PERIODIC).to(tl.int64)
    x, y, z = tl.load(positions + 3 * i), tl.load(positions + 3 * i + 1), tl.load(positions + 3 * i + 2)
    finite = (x - x == 0) & (y - y == 0) & (z - z == 0)
    tl.store(counts + i, tl.where(finite, tl.sum(count, 0), capacity + 1))


@triton.jit
def _list_near(
    positions, box, replicas, ends, pairs, cutoff, atoms, capacity, PERIODIC: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0)
    place, limit = tl.load(ends + i - 1, i > 0, 0), tl.load(cutoff)
    for first in range(i + 1, atoms, BLOCK):
        j = first + tl.arange(0, BLOCK)
        near = _near(positions, box, replicas, limit, atoms, i, j, PERIODIC).to(tl.int64)
        at = place + tl.cumsum(near, 0) - 1
        fits = (near > 0) & (at < capacity)
        tl.store(pairs + at, tl.zeros((BLOCK,), tl.int64) + i, fits)
        tl.store(pairs + capacity + at, j.to(tl.int64), fits)
        place += tl.sum(near, 0)


def near_pairs(positions, box, replicas, cutoff, capacity, pairs, found) -> None:
    """All atoms are compared with all: for a few thousand, a GPU does it in less time than cells take to fill."""
    atoms, options = len(replicas), {"PERIODIC": len(box) == 3, "BLOCK": ELEMENTS}
    limit = positions.new_full((), cutoff)  # an argument of Triton's would be float32
    counts = torch.empty_like(replicas)
    _count_near[(atoms,)](positions, box, replicas, counts, limit, atoms, capacity, **options)
    ends = counts.cumsum(0)
    found.copy_(ends[-1:])
    pairs.zero_()
    _list_near[(atoms,)](positions, box, replicas, ends, pairs, limit, atoms, capacity, **options)


@triton.jit
def _geometry(
    positions, box, pairs, far, distance, unit, count, PERIODIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = p < count
    i, j = tl.load(pairs + p, mask, 0), tl.load(pairs + count + p, mask, 0)
    x, y, z = vector(positions, i, j)
    if PERIODIC:
        x, y, z = nearest_image(box, x, y, z)
    dtype = distance.dtype.element_ty
    x, y, z = x.to(dtype), y.to(dtype), z.to(dtype)
    d = tl.sqrt(x * x + y * y + z * z)
    none = i == j
    tl.store(distance + p, tl.where(none, far, d), mask)
    tl.store(unit + 3 * p, tl.where(none, 0, x / d), mask)
    tl.store(unit + 3 * p + 1, tl.where(none, 0, y / d), mask)
    tl.store(unit + 3 * p + 2, tl.where(none, 0, z / d), mask)


def geometry(positions, box, pairs, by_atom, far, single, distance, unit) -> None:
    count = pairs.shape[1]
    if count:
        _geometry[(triton.cdiv(count, ELEMENTS),)](
            positions, box, pairs, far, distance, unit, count, PERIODIC=len(box) == 3, BLOCK=ELEMENTS
        )


@triton.jit
def _geometry_backward(g_distance, g_unit, distance, unit, pairs, by_atom, forces, count, atoms, BLOCK: tl.constexpr):
    atom = tl.program_id(0)
    start, end = tl.load(by_atom + atom), tl.load(by_atom + atom + 1)
    fx = tl.zeros((BLOCK,), tl.float64)
    fy = tl.zeros((BLOCK,), tl.float64)
    fz = tl.zeros((BLOCK,), tl.float64)
    for first in range(start, end, BLOCK):
        exists, p, _, sign = entries(by_atom, pairs, count, atoms, first + tl.arange(0, BLOCK), end)
        d = tl.load(distance + p, exists, 1)
        x, y, z = (
            tl.load(unit + 3 * p, exists, 0),
            tl.load(unit + 3 * p + 1, exists, 0),
            tl.load(unit + 3 * p + 2, exists, 0),
        )
        a = tl.load(g_unit + 3 * p, exists, 0) / d
        b = tl.load(g_unit + 3 * p + 1, exists, 0) / d
        c = tl.load(g_unit + 3 * p + 2, exists, 0) / d
        along = tl.load(g_distance + p, exists, 0) - (x * a + y * b + z * c)
        fx += (sign * (a + x * along)).to(tl.float64)
        fy += (sign * (b + y * along)).to(tl.float64)
        fz += (sign * (c + z * along)).to(tl.float64)
    tl.store(forces + 3 * atom, tl.sum(fx, 0))
    tl.store(forces + 3 * atom + 1, tl.sum(fy, 0))
    tl.store(forces + 3 * atom + 2, tl.sum(fz, 0))


def geometry_backward(g_distance, g_unit, distance, unit, pairs, by_atom, forces) -> None:
    atoms = len(forces)
    _geometry_backward[(atoms,)](
        g_distance, g_unit, distance, unit, pairs, by_atom, forces, pairs.shape[1], atoms, BLOCK=at_once(distance)
    )


def by_atom(pairs: Tensor, atoms: int, result: Tensor) -> None:
    result.copy_(definitions.by_atom(pairs, atoms))
