"""How much room a list of fixed size needs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .reference import find_pairs

# Atoms in a nm³ of a dense liquid (water has 100), and the room left for fluctuations.
DENSE_LIQUID = 110.0


MARGIN = 1.25


class Grid(NamedTuple):
    """Cells in each direction, and how many atoms each has room for."""

    cells: tuple[int, int, int]
    per_cell: int


def choose_grid(
    count: int, cutoff: float, box: Tensor | None, known: list[tuple[Tensor, Tensor, Tensor | None]]
) -> Grid | None:
    """Grid of cells for `count` atoms, or None where comparing all pairs is cheaper or the box too small.

    Parameters
    ----------
    cutoff : float
        nm.
    box : Tensor or None
        nm; may shrink by a few per cent during a run.
    known : list of (positions, replicas, box or None)
        Geometries that must fit.
    """
    per_cell = math.ceil(2 * DENSE_LIQUID * cutoff**3) + 8
    if box is not None:
        heights = 1 / torch.linalg.vector_norm(torch.linalg.inv(box), dim=0)
        cells = [int(0.96 * float(h) / cutoff) for h in heights]
        if min(cells) < 3:
            return None
    else:
        extent = max([float(x.amax() - x.amin()) for x, _, _ in known] + [(count / DENSE_LIQUID) ** (1 / 3)])
        cells = [min(max(3, math.ceil(extent / cutoff) + 1), 32)] * 3
    if 28 * per_cell > count:  # cells pay only if 14·per_cell comparisons per atom are fewer than N/2
        return None
    for x, _, lattice in known:
        place = x / cutoff if lattice is None else (x @ torch.linalg.inv(lattice)) * torch.tensor(cells)
        cell = place.floor().long().remainder(torch.tensor(cells))
        per_cell = max(per_cell, math.ceil(1.5 * int(torch.unique(cell, dim=0, return_counts=True)[1].max())))
    return Grid((cells[0], cells[1], cells[2]), per_cell)


def pair_capacity(sizes: Tensor, cutoff: float, known: list[tuple[Tensor, Tensor, Tensor | None]]) -> int:
    """Pairs that a list should hold, with a margin.

    Parameters
    ----------
    sizes : Tensor, shape (M,)
        Atoms of each replica.
    cutoff : float
        nm.
    known : list of (positions, replicas, box or None)
        Geometries that must fit.
    """
    neighbors = DENSE_LIQUID * 4 / 3 * math.pi * cutoff**3
    expected = float((sizes * torch.minimum(sizes - 1, torch.tensor(neighbors))).sum()) / 2
    return math.ceil(MARGIN * max(expected, count_pairs(cutoff, known))) + 16


def count_pairs(cutoff: float, known: list[tuple[Tensor, Tensor, Tensor | None]]) -> int:
    """Pairs i<j closer than the cutoff in the geometry that has most of them; arguments as of :func:`pair_capacity`."""
    return max((find_pairs(x, replicas, cutoff, box).edge_index.shape[1] // 2 for x, replicas, box in known), default=0)
