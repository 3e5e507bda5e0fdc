"""Positions that a potential cannot evaluate, or that are probably not meant."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from .atoms import Atoms
from .neighbors import minimum_image
from .program import MINIMUM_DISTANCE

COMPARED = 1 << 20  # pairs of atoms at a time


def check_positions(positions: Tensor, atoms: Atoms, labels: list[str], box: Tensor | None) -> None:
    """Refuse positions that are not finite, and overlapping atoms."""
    finite = torch.isfinite(positions).all(1)
    if not bool(finite.all()):
        bad = int((~finite).nonzero()[0])
        raise ValueError(f"positions: {labels[bad]}: expected finite coordinates, received {positions[bad].tolist()}")
    found = nearest_neighbors(positions, atoms, box)
    first = int(found.distance.argmin())
    if float(found.distance[first]) < MINIMUM_DISTANCE:
        k, other = sorted((first, int(found.neighbor[first])))
        raise ValueError(
            f"positions: {labels[k]} and {labels[other]}: expected a distance of at least {MINIMUM_DISTANCE} nm, received "
            f"{float(found.distance[first]):.4f} nm; are the positions in nm, and are molecules that overlap marked by `molecules`?"
        )


class Nearest(NamedTuple):
    """Distance (nm, infinite for an atom alone) and index of each atom's nearest neighbour in its molecule; shape (N,)."""

    distance: Tensor
    neighbor: Tensor


def nearest_neighbors(positions: Tensor, atoms: Atoms, box: Tensor | None) -> Nearest:
    """Compare every atom with every other, some at a time."""
    molecules = torch.tensor(atoms.molecules)
    distances, indices = [], []
    for some in torch.arange(len(positions)).split(max(1, COMPARED // len(positions))):
        vector = positions.unsqueeze(0) - positions[some].unsqueeze(1)
        if box is not None:
            vector = minimum_image(vector.flatten(0, 1), box).view(vector.shape)
        others = molecules.unsqueeze(0) != molecules[some].unsqueeze(1)
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
