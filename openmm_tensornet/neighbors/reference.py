"""Which atoms are near to each other, by comparing all with all: the readable reference that models, tests and training use."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
            "use a larger box or a larger number of molecules in it, or none for a molecule in vacuum (periodic=False, --vacuum)"
        )


def find_pairs(positions: Tensor, replicas: Tensor, cutoff: float, box: Tensor | None = None) -> Pairs:
    """All directed pairs of one replica with d < cutoff, by comparing every atom with every other.

    Parameters
    ----------
    positions : Tensor, shape (N, 3)
        Need not be wrapped.
    replicas : Tensor of int64, shape (N,)
    cutoff : float
        In the unit of `positions`.
    box : Tensor, shape (3, 3), optional
        Periodic box vectors in rows; see :func:`check_box`.
    """
    same = (replicas[:, None] == replicas[None, :]).fill_diagonal_(False)
    x = positions.detach()
    if box is None:
        distance = torch.linalg.vector_norm(x[:, None] - x[None, :], dim=-1)
        index = torch.nonzero(same & (distance < cutoff)).T
        return Pairs(index, positions.new_zeros(index.shape[1], 3))
    box = box.to(positions)
    check_box(box, cutoff)
    inverse = torch.linalg.inv(box)
    fraction = x @ inverse
    wrap = -torch.floor(fraction) @ box
    x, fraction = x + wrap, fraction - torch.floor(fraction)
    reach = cutoff * torch.linalg.vector_norm(inverse, dim=0)  # as fractions of the box
    found_pairs, shift = [], []
    for image in torch.cartesian_prod(*[torch.arange(-1, 2)] * 3):
        # Only atoms near opposite faces can meet through an image.
        i = torch.nonzero(((image != 1) | (fraction < reach)).all(1) & ((image != -1) | (fraction > 1 - reach)).all(1))
        j = torch.nonzero(((image != -1) | (fraction < reach)).all(1) & ((image != 1) | (fraction > 1 - reach)).all(1))
        i, j = i.squeeze(1), j.squeeze(1)
        lattice = image.to(positions) @ box
        distance = torch.linalg.vector_norm(x[i][:, None] - x[j][None, :] + lattice, dim=-1)
        found = torch.nonzero(same[i][:, j] & (distance < cutoff)).T
        found = torch.stack((i[found[0]], j[found[1]]))
        found_pairs.append(found)
        shift.append(lattice + wrap[found[0]] - wrap[found[1]])
    return Pairs(torch.cat(found_pairs, dim=1), torch.cat(shift))


def all_pairs(replicas: Tensor) -> Tensor:
    """All pairs i<j of atoms of one replica, shape (2, P)."""
    order = torch.argsort(replicas, stable=True)
    sizes = torch.bincount(replicas)
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
