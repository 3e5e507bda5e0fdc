"""Pairs of atoms.

:func:`find_pairs` is the readable reference that the model's own tests and training use. The static potential has graph-safe
lists of its own, compared with this one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

# Atoms in a nm³ of a dense liquid (water has 100), and the room left for fluctuations.
DENSE_LIQUID = 110.0
MARGIN = 1.25


class Pairs(NamedTuple):
    """Directed pairs.

    Attributes
    ----------
    edge_index : Tensor of int64, shape (2, E)
        Atoms i and j, i≠j, both directions.
    shift : Tensor, shape (E, 3)
        Lattice vector to add to x_i − x_j; zero without a box.
    """

    edge_index: Tensor
    shift: Tensor


def check_box(box: Tensor, cutoff: float, name: str = "box", unit: str = "") -> None:
    """Refuse boxes for which the nearest image is not enough.

    Parameters
    ----------
    box : Tensor, shape (3, 3)
        Rows a, b, c in OpenMM's reduced form: a along x, b in the xy plane, |b_x| ≤ a_x/2, |c_x| ≤ a_x/2, |c_y| ≤ b_y/2.
    cutoff : float
        In the unit of `box`.

    Raises
    ------
    ValueError
        If the box has another shape, is not finite, not reduced, or below twice the cutoff in a direction.
    """
    if tuple(box.shape) != (3, 3):
        raise ValueError(f"{name}: expected three box vectors, shape (3, 3), received shape {tuple(box.shape)}")
    if not bool(torch.isfinite(box).all()):
        raise ValueError(f"{name}: expected finite box vectors, received {box.tolist()}")
    b = box.double()
    edges = b.diagonal()
    slack = 1e-6 * float(edges.abs().max())
    reduced = (
        bool((b.triu(1) == 0).all())
        and bool((edges > 0).all())
        and abs(float(b[1, 0])) <= float(edges[0]) / 2 + slack
        and abs(float(b[2, 0])) <= float(edges[0]) / 2 + slack
        and abs(float(b[2, 1])) <= float(edges[1]) / 2 + slack
    )
    if not reduced:
        raise ValueError(
            f"{name}: expected box vectors in OpenMM's reduced form (a along x, b in the xy plane, off-diagonal elements "
            f"at most half the diagonal one), received {b.tolist()}; "
            "openmm.app.internal.unitcell.reducePeriodicBoxVectors brings them there"
        )
    least = float(edges.min())
    if least < 2 * cutoff:
        raise ValueError(
            f"{name}: expected a width of at least twice the cutoff, {2 * cutoff:.6g}{unit}, received {least:.6g}{unit}; "
            "use a larger box or a larger number of molecules in it"
        )


def find_pairs(positions: Tensor, molecules: Tensor, cutoff: float, box: Tensor | None = None) -> Pairs:
    """All directed pairs of one molecule with d < cutoff, by comparing every atom with every other.

    Parameters
    ----------
    positions : Tensor, shape (N, 3)
        Need not be wrapped.
    molecules : Tensor of int64, shape (N,)
    cutoff : float
        In the unit of `positions`.
    box : Tensor, shape (3, 3), optional
        Periodic box vectors in rows; see :func:`check_box`.
    """
    same = (molecules[:, None] == molecules[None, :]).fill_diagonal_(False)
    x = positions.detach()
    if box is None:
        distance = torch.linalg.vector_norm(x[:, None] - x[None, :], dim=-1)
        index = torch.nonzero(same & (distance < cutoff)).T
        return Pairs(index, positions.new_zeros(index.shape[1], 3))
    box = box.to(positions)
    check_box(box, cutoff)
    wrap = -torch.floor(x @ torch.linalg.inv(box)) @ box
    x = x + wrap
    index, shift = [], []
    for image in torch.cartesian_prod(*[torch.arange(-1, 2)] * 3):
        lattice = image.to(positions) @ box
        distance = torch.linalg.vector_norm(x[:, None] - x[None, :] + lattice, dim=-1)
        found = torch.nonzero(same & (distance < cutoff)).T
        index.append(found)
        shift.append(lattice + wrap[found[0]] - wrap[found[1]])
    return Pairs(torch.cat(index, dim=1), torch.cat(shift))


def all_pairs(molecules: Tensor) -> Tensor:
    """All pairs i<j of atoms of one molecule, shape (2, P)."""
    order = torch.argsort(molecules, stable=True)
    sizes = torch.bincount(molecules)
    found = [torch.combinations(members) for members in order.split(sizes.tolist())]
    return torch.sort(torch.cat(found), dim=1).values.T.contiguous()


def minimum_image(vector: Tensor, box: Tensor) -> Tensor:
    """Nearest image of vectors, shape (P, 3), in a reduced box, shape (3, 3); right for what is nearer than half its width.

    The order c, b, a matters: each vector of a reduced box only has components up to its own.
    """
    inverse = box.diagonal().reciprocal()
    for k in (2, 1, 0):
        turns = (vector[:, k] * inverse[k]).round()
        vector = torch.addcmul(vector, turns.unsqueeze(-1), box[k], value=-1)
    return vector


class AllPairs(nn.Module):
    """All pairs i<j of each molecule, known beforehand.

    Like every list of the static potential, it takes positions, shape (N, 3), and the box or None, and gives the pairs, int64 of shape
    (2, P), their vectors x_i − x_j, shape (P, 3), and a 0-d bool that says whether pairs were left out (or None where
    that cannot happen). Shapes do not depend on values and nothing is copied to the host.
    """

    def __init__(self, molecules: Tensor, periodic: bool):
        super().__init__()
        self.periodic = periodic
        self.register_buffer("index", all_pairs(molecules))
        self.register_buffer("ends", self.index.flatten())

    def vectors(self, positions: Tensor, box: Tensor | None) -> Tensor:
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

    def __init__(self, molecules: Tensor, periodic: bool, cutoff: float, capacity: int):
        super().__init__(molecules, periodic)
        self.capacity, self.cutoff = capacity, cutoff
        count = self.index.shape[1]
        self.register_buffer("candidates", torch.cat((self.index, torch.zeros(2, 1, dtype=torch.long)), dim=1))
        self.register_buffer("unused", torch.full((capacity + 1,), count))
        self.register_buffer("numbers", torch.arange(count))
        self.register_buffer("far", torch.tensor([[2 * cutoff, 0.0, 0.0]], dtype=torch.float64))

    def forward(self, positions: Tensor, box: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        vector = self.vectors(positions, box)
        near = (vector * vector).sum(1) < self.cutoff**2
        chosen, overflow = compact(near, self.numbers, self.unused)
        vector = torch.cat((vector, self.far.to(vector.dtype))).index_select(0, chosen)
        return self.candidates.index_select(1, chosen), vector, overflow


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


def pair_capacity(sizes: Tensor, cutoff: float, known: list[tuple[Tensor, Tensor, Tensor | None]]) -> int:
    """Pairs that a list should hold, with a margin.

    Parameters
    ----------
    sizes : Tensor, shape (M,)
        Atoms of each molecule.
    cutoff : float
        nm.
    known : list of (positions, molecules, box or None)
        Geometries that must fit.
    """
    neighbors = DENSE_LIQUID * 4 / 3 * math.pi * cutoff**3
    expected = float((sizes * torch.minimum(sizes - 1, torch.tensor(neighbors))).sum()) / 2
    counted = [find_pairs(*geometry[:2], cutoff, geometry[2]).edge_index.shape[1] / 2 for geometry in known]
    return math.ceil(MARGIN * max([expected, *counted])) + 16
