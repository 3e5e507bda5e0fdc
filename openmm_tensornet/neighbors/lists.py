"""Lists of pairs of fixed size, which a CUDA graph can hold.

The tests compare them with :func:`openmm_tensornet.neighbors.reference.find_pairs`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from ..common.module import Module
from .plan import Grid
from .reference import all_pairs, minimum_image


class AllPairs(Module):
    """All pairs i<j of each replica, fixed at construction.

    Like every list of the static potential, it takes positions, shape (N, 3), and the box or None, and gives the pairs, int64 of shape
    (2, P), their vectors x_i − x_j, shape (P, 3), and a 0-d bool that says whether pairs were left out (or None where
    that cannot happen). Shapes do not depend on values and nothing is copied to the host.
    """

    def __init__(self, replicas: Tensor, periodic: bool, cutoff: float):
        super().__init__()
        self.periodic = periodic
        index = all_pairs(replicas)
        self.empty = index.shape[1] == 0
        self.register_buffer("index", torch.zeros(2, 1, dtype=torch.long) if self.empty else index)
        self.register_buffer("ends", self.index.flatten())
        self.register_buffer("far", torch.tensor([[2 * cutoff, 0.0, 0.0]], dtype=torch.float64))

    def vectors(self, positions: Tensor, box: Tensor | None) -> Tensor:
        """Vectors of the pairs of `index`."""
        if self.empty:  # single atoms: a dummy pair beyond the cutoff represents an empty list
            return self.far.to(positions.dtype)
        ends = positions.index_select(0, self.ends).view(2, -1, 3)
        vector = ends[0] - ends[1]
        if self.periodic:
            assert box is not None
            vector = minimum_image(vector, box)
        return vector

    def forward(self, positions: Tensor, box: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.index, self.vectors(positions, box), None


class SelectedPairs(AllPairs):
    """The pairs of :class:`AllPairs` closer than the cutoff, in a list of fixed length.

    Unused places name atom 0 twice, at twice the cutoff.
    """

    def __init__(self, replicas: Tensor, periodic: bool, cutoff: float, capacity: int):
        super().__init__(replicas, periodic, cutoff)
        self.capacity, self.cutoff = capacity, cutoff
        count = self.index.shape[1]
        self.register_buffer("candidates", torch.cat((self.index, torch.zeros(2, 1, dtype=torch.long)), dim=1))
        self.register_buffer("unused", torch.full((capacity + 1,), count))
        self.register_buffer("numbers", torch.arange(count))

    def forward(self, positions: Tensor, box: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        vector = self.vectors(positions, box)
        near = (vector * vector).sum(1) < self.cutoff**2
        chosen, overflow = compact(near, self.numbers, self.unused)
        vector = torch.cat((vector, self.far.to(vector.dtype))).index_select(0, chosen)
        return self.candidates.index_select(1, chosen), vector, overflow


class CellPairs(Module):
    """The pairs closer than the cutoff, found in cells as wide as the cutoff; the interface of :class:`AllPairs`.

    Cells repeat periodically, with or without a box: atoms that are far apart may share one, which costs a comparison, never
    a pair. Each atom is compared with its own cell and half of the 26 around it. A cell that overflows, or a box so
    small that a cell is narrower than the cutoff, counts as pairs left out.

    Parameters
    ----------
    replicas : Tensor of int64, shape (N,)
    periodic : bool
    cutoff : float
        nm.
    capacity : int
        Pairs of the list.
    grid : Grid
    """

    def __init__(self, replicas: Tensor, periodic: bool, cutoff: float, capacity: int, grid: Grid):
        super().__init__()
        self.periodic, self.cutoff, self.capacity, self.per_cell = periodic, cutoff, capacity, grid.per_cell
        self.several = bool((replicas != replicas[0]).any())
        cells = grid.cells[0] * grid.cells[1] * grid.cells[2]
        offsets = torch.cartesian_prod(*[torch.arange(-1, 2)] * 3)
        buffers = {
            "replicas": replicas,
            "cells": torch.tensor(grid.cells),
            "strides": torch.tensor([grid.cells[1] * grid.cells[2], grid.cells[2], 1]),
            "offsets": offsets[13:].unsqueeze(0),  # the cell itself, then one of each opposite pair
            "no_atom": torch.full((cells * grid.per_cell + 1,), len(replicas)),
            "order": torch.arange(len(replicas)),
            "candidates": torch.arange(len(replicas) * 14 * grid.per_cell),
            "unused": torch.full((capacity + 1,), len(replicas) * 14 * grid.per_cell),
            "unit": torch.eye(3, dtype=torch.float64),
            "far": torch.tensor([[2 * cutoff, 0.0, 0.0]], dtype=torch.float64),
            "nobody": torch.full((1, 3), torch.nan),
            "zero": torch.zeros(1, dtype=torch.long),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, positions: Tensor, box: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        count, per_cell = positions.shape[0], self.per_cell
        if self.periodic:
            assert box is not None
            inverse = torch.linalg.solve_triangular(box, self.unit.to(box.dtype), upper=False)
            place = torch.mm(positions, inverse)
            place = (place - place.floor()) * self.cells
            narrow = (torch.linalg.vector_norm(inverse, dim=0) * self.cells * self.cutoff).amax() > 1
        else:
            place = positions * (1 / self.cutoff)
            narrow = None
        cell = place.floor().long().remainder(self.cells)
        number = (cell * self.strides).sum(1)
        sorted_number, order = number.sort(stable=True)
        rank = self.order - torch.searchsorted(sorted_number, sorted_number)
        overflow = rank.amax() >= per_cell
        slot = torch.where(rank < per_cell, sorted_number * per_cell + rank, self.no_atom.shape[0] - 1)
        members = self.no_atom.scatter(0, slot, order)[:-1].view(-1, per_cell)

        around = ((cell.unsqueeze(1) + self.offsets).remainder(self.cells) * self.strides).sum(2)
        other = members.index_select(0, around.flatten()).view(count, 14, per_cell)
        # Compared in float32 with some slack; what is beyond the cutoff after all gets zero from every function.
        x = positions.float()
        if self.periodic:
            x = x - torch.mm((place / self.cells).floor().float(), box.float())  # type: ignore[union-attr]
        vector = (
            torch.cat((x, self.nobody)).index_select(0, other.flatten()).view(count, 14, per_cell, 3) - x[:, None, None]
        )
        if self.periodic:
            vector = minimum_image(vector.view(-1, 3), box.float()).view(count, 14, per_cell, 3)  # type: ignore[union-attr]
        near = (vector * vector).sum(3) < (1.0005 * self.cutoff) ** 2
        twice = other[:, 0] > self.order.unsqueeze(1)  # in its own cell an atom takes those after it
        near = torch.cat((near[:, :1] & twice.unsqueeze(1), near[:, 1:]), dim=1)
        if self.several:
            theirs = torch.cat((self.replicas, self.zero)).index_select(0, other.flatten()).view(count, 14, per_cell)
            near = near & (theirs == self.replicas[:, None, None])

        chosen, missed = compact(near.flatten(), self.candidates, self.unused)
        used = chosen < self.candidates.shape[0]
        i = torch.where(used, chosen // (14 * per_cell), 0)
        j = torch.where(used, torch.cat((other.flatten(), self.zero)).index_select(0, chosen), 0)
        exact = positions.index_select(0, i) - positions.index_select(0, j)
        if self.periodic:
            exact = minimum_image(exact, box)  # type: ignore[arg-type]
        exact = torch.where(used.unsqueeze(1), exact, self.far.to(exact.dtype))
        overflow = overflow | missed
        return torch.stack((i, j)), exact, overflow if narrow is None else overflow | narrow


_LIBRARY = torch.library.Library("openmm_tensornet", "FRAGMENT")
_LIBRARY.define("nnpops_pairs(Tensor positions, float cutoff, int capacity, Tensor? box) -> (Tensor, Tensor, Tensor)")


def import_nnpops() -> Callable:
    """NNPOps' function, which lists the pairs within a cutoff. That the package is found does not mean that it can be imported."""
    return importlib.import_module("NNPOps.neighbors").getNeighborPairs


def _nnpops_pairs(positions: Tensor, cutoff: float, capacity: int, box: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs, vectors and the count found, from NNPOps; an operator of our own, since its own cannot be traced everywhere.

    The results have room for `capacity` pairs, as NNPOps' have on a GPU. On a CPU it gives as many columns as there are pairs, and
    raises where the box is below twice the cutoff; here all are listed as lost then, so that energy and forces become NaN.
    """
    pairs, vector = (
        positions.new_full((2, capacity), -1, dtype=torch.int32),
        positions.new_full((capacity, 3), torch.nan),
    )
    if positions.device.type == "cpu" and box is not None and bool(box.diagonal().amin() < 2 * cutoff):
        return pairs, vector, pairs.new_full((1,), capacity + 1)
    neighbors, deltas, _, found = import_nnpops()(positions.contiguous(), cutoff, capacity, box, False)
    columns = min(capacity, neighbors.shape[1])
    pairs[:, :columns], vector[:columns] = neighbors[:, :columns], deltas[:columns]
    return pairs, vector, found


def _fake_nnpops_pairs(positions: Tensor, cutoff: float, capacity: int, box: Tensor | None):
    pairs, found = (positions.new_empty(shape, dtype=torch.int32) for shape in ((2, capacity), (1,)))
    return pairs, positions.new_empty((capacity, 3)), found


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("nnpops_pairs", _nnpops_pairs, _device)
torch.library.register_fake("openmm_tensornet::nnpops_pairs", _fake_nnpops_pairs, lib=_LIBRARY)


class NNPOpsPairs(Module):
    """The pairs closer than the cutoff, found by NNPOps; the interface of :class:`AllPairs`.

    NNPOps knows nothing of replicas: pairs across them take up room, and are marked as unused afterwards. Its order of pairs
    differs from run to run on a GPU.
    """

    def __init__(self, replicas: Tensor, periodic: bool, cutoff: float, capacity: int):
        super().__init__()
        self.periodic, self.cutoff, self.capacity = periodic, cutoff, capacity
        self.several = bool((replicas != replicas[0]).any())
        self.register_buffer("replicas", replicas)
        self.register_buffer("far", torch.tensor([[2 * cutoff, 0.0, 0.0]], dtype=torch.float64))

    def forward(self, positions: Tensor, box: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        neighbors, vector, found = torch.ops.openmm_tensornet.nnpops_pairs(
            positions, self.cutoff, self.capacity, box if self.periodic else None
        )
        unused = neighbors[0] < 0  # −1 and NaN
        pairs = neighbors.long().clamp(min=0)
        if self.several:
            replicas = self.replicas.index_select(0, pairs.flatten()).view(2, -1)
            unused = unused | (replicas[0] != replicas[1])
        vector = torch.where(unused.unsqueeze(1), self.far.to(vector.dtype), vector)
        return torch.where(unused, 0, pairs), vector, (found > self.capacity).any()


def compact(mask: Tensor, values: Tensor, unused: Tensor) -> tuple[Tensor, Tensor]:
    """Values where the mask is true, in a tensor of fixed length, in the place of a data-dependent shape.

    Parameters
    ----------
    mask : Tensor of bool, shape (C,)
    values : Tensor, shape (C,)
    unused : Tensor, shape (P + 1,)
        What stands in unused places.

    Returns
    -------
    Tensor, shape (P,)
    Tensor of bool, 0-d
        Whether more than P were true.
    """
    capacity = unused.shape[0] - 1
    place = mask.cumsum(0) - 1
    overflow = place[-1] >= capacity
    place = torch.where(mask, place, capacity).clamp(max=capacity)
    return unused.scatter(0, place, values)[:-1], overflow
