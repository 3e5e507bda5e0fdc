"""Where a distance stands in a table of radial functions."""

from __future__ import annotations

from torch import Tensor

# How much finer the grid is at close range, where the functions are steep: by (1 + 1/BEND)² between no distance and the cutoff.
BEND = 0.25


def place(distance: Tensor, cutoff: float, intervals: int) -> tuple[Tensor, Tensor]:
    """Place of a distance in a table, and the place's derivative by the distance; both of the shape of `distance`.

    1 + (1 + b)·K·d/(d + b·cutoff), with b = :data:`BEND` and K intervals: 1 at no distance, 1 + K at the cutoff. Its integer part is
    the table's row, the rest the place in the interval.
    """
    whole = distance + BEND * cutoff
    scale = (1 + BEND) * intervals / whole
    return 1 + scale * distance, scale * BEND * cutoff / whole


def distance_at(place: Tensor, cutoff: float, intervals: int) -> Tensor:
    """The distance at a place: the inverse of :func:`place`."""
    part = (place - 1) / intervals
    return part * (BEND * cutoff) / (1 + BEND - part)
