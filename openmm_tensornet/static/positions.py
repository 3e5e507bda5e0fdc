"""Positions that a potential cannot evaluate, or that are probably not meant."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.atoms import Atoms
from ..neighbors.reference import minimum_image
from .tables import ORDINARY

COMPARED = 1 << 20  # pairs of atoms at a time
# Two atoms closer than this are in one place: the network takes the direction from one to the other.
COINCIDENT = 1e-4  # nm


def check_positions(positions: Tensor, atoms: Atoms, labels: list[str], box: Tensor | None) -> None:
    """Refuse positions that are not finite, atoms in one place, and positions in another unit."""
    finite = torch.isfinite(positions).all(1)
    if not bool(finite.all()):
        bad = int((~finite).nonzero()[0])
        raise ValueError(f"positions: {labels[bad]}: expected finite coordinates, received {positions[bad].tolist()}")
    found = nearest_neighbors(positions, atoms, box)
    closest = found.closest()
    if closest.distance < COINCIDENT or float(found.distance.median()) < ORDINARY:
        raise ValueError(
            f"positions: {closest.named(labels)}: expected a distance of at least {ORDINARY} nm, received "
            f"{closest.distance:.4f} nm; are the positions in nm, and are copies that overlap told apart by `replicas`?"
        )


def warn_about_close_atoms(positions: Tensor, atoms: Atoms, labels: list[str], box: Tensor | None) -> None:
    """Warn where two atoms are closer than in any molecule, as in a structure that has not been minimised."""
    closest = nearest_neighbors(positions, atoms, box).closest()
    if closest.distance < ORDINARY:
        warnings.warn(
            f"positions: {closest.named(labels)} are {closest.distance:.4f} nm apart; no model was trained on atoms closer than "
            f"{ORDINARY} nm: minimise the energy before dynamics",
            stacklevel=5,
        )


class ClosePair(NamedTuple):
    """Two atoms and their distance.

    Attributes
    ----------
    first, second : int
        first < second, except where there is but one atom.
    distance : float
        nm.
    """

    first: int
    second: int
    distance: float

    def named(self, labels: list[str]) -> str:
        return f"{labels[self.first]} and {labels[self.second]}"


class Nearest(NamedTuple):
    """Distance (nm, infinite for an atom alone) and index of each atom's nearest neighbour in its replica; shape (N,)."""

    distance: Tensor
    neighbor: Tensor

    def closest(self) -> ClosePair:
        """The closest two atoms."""
        k = int(self.distance.argmin())
        first, second = sorted((k, int(self.neighbor[k])))
        return ClosePair(first, second, float(self.distance[k]))


def nearest_neighbors(positions: Tensor, atoms: Atoms, box: Tensor | None) -> Nearest:
    """Compare every atom with every other, some at a time."""
    replicas = torch.tensor(atoms.replicas)
    distances, indices = [], []
    for some in torch.arange(len(positions)).split(max(1, COMPARED // len(positions))):
        vector = positions.unsqueeze(0) - positions[some].unsqueeze(1)
        if box is not None:
            vector = minimum_image(vector.flatten(0, 1), box).view(vector.shape)
        others = replicas.unsqueeze(0) != replicas[some].unsqueeze(1)
        others[torch.arange(len(some)), some] = True
        distance, index = vector.norm(dim=2).masked_fill(others, torch.inf).min(1)
        distances.append(distance)
        indices.append(index)
    return Nearest(torch.cat(distances), torch.cat(indices))


def warn_about_lone_atoms(
    positions: Tensor, atoms: Atoms, labels: list[str], box: Tensor | None, cutoff: float
) -> None:
    """Warn where an atom has nobody within the cutoff: angstrom taken for nm would give the energy of free atoms."""
    nearest = nearest_neighbors(positions, atoms, box).distance
    lone = (nearest > cutoff) & torch.isfinite(nearest)
    if bool(lone.any()):
        first = int(lone.nonzero()[0])
        warnings.warn(
            f"positions: {labels[first]}: expected a neighbour closer than the cutoff of {cutoff:g} nm, the nearest is "
            f"{float(nearest[first]):.4g} nm away ({int(lone.sum())} such atoms); the network takes them for free atoms: are the "
            "positions in nm?",
            stacklevel=5,
        )
