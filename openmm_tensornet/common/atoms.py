"""The fixed part of what a potential evaluates: atoms, replicas and their charges; and indices of a System's particles."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .checks import TRUTH_VALUES

# More in one potential would take tens of GB.
MAXIMUM_ATOMS = 20_000
MAXIMUM_PARTICLES = 10_000_000  # of a System, of which a force sees a part


@dataclass(frozen=True)
class Atoms:
    """The fixed part of what is evaluated.

    Attributes
    ----------
    numbers : tuple of int
        Atomic number of each atom.
    replicas : tuple of int
        Replica of each atom.
    charges : tuple of float
        Total charge of each replica; its length is the number of replicas (a replica may be empty).
    """

    numbers: tuple[int, ...]
    replicas: tuple[int, ...]
    charges: tuple[float, ...]

    @classmethod
    def make(
        cls,
        numbers: Sequence[int],
        replicas: Sequence[int] | None = None,
        total_charge: float | Sequence[float] = 0,
        num_replicas: int | None = None,
    ) -> Atoms:
        """Check and complete.

        Parameters
        ----------
        numbers : sequence of int
        replicas : sequence of int, optional
            One replica by default.
        total_charge : number or sequence of numbers
            Of the one replica, or one for each replica.
        num_replicas : int, optional
            Needed only if the last replicas are empty and `total_charge` is zero.

        Raises
        ------
        ValueError, TypeError
            If lengths or values do not fit.
        """
        z = integers("atomic_numbers", numbers)
        if not z:
            raise ValueError("atomic_numbers: expected at least one atom, received none")
        if len(z) > MAXIMUM_ATOMS:
            raise ValueError(
                f"atomic_numbers: expected at most {MAXIMUM_ATOMS} atoms, received {len(z)}; act on a part of them, or spread "
                "replicas over several forces"
            )
        if min(z) < 1:
            raise ValueError(
                f"atomic_numbers: expected numbers of at least 1, received {min(z)} for atom {z.index(min(z))}"
            )
        m = integers("replicas", replicas) if replicas is not None else (0,) * len(z)
        if len(m) != len(z):
            raise ValueError(f"replicas: expected one index for each of {len(z)} atoms, received {len(m)}")
        if min(m) < 0:
            raise ValueError(f"replicas: expected indices of at least 0, received {min(m)}")
        if max(m) >= len(z):
            raise ValueError(f"replicas: expected indices below the number of atoms, {len(z)}, received {max(m)}")
        given = _charges(total_charge) if hasattr(total_charge, "__iter__") else None
        count = num_replicas if num_replicas is not None else max(max(m) + 1, len(given or ()))
        if max(m) >= count:
            raise ValueError(f"replicas: expected indices below the number of replicas, {count}, received {max(m)}")
        if given is None:
            (charge,) = _charges([total_charge])
            if charge != 0 and count > 1:
                raise ValueError(
                    f"total_charge: expected one charge for each of {count} replicas, received the single number {charge:g}; "
                    "pass a list"
                )
            given = [charge] * count
        if len(given) != count:
            raise ValueError(f"total_charge: expected one charge for each of {count} replicas, received {len(given)}")
        protons: Counter[int] = Counter()
        for number, replica in zip(z, m, strict=True):
            protons[replica] += number
        for replica, charge in enumerate(given):
            if replica in protons and abs(charge) > protons[replica]:
                raise ValueError(
                    f"total_charge: expected -{protons[replica]} to {protons[replica]} elementary charges, as many as the replica has "
                    f"protons, received {charge:g}"
                )
        return cls(z, m, tuple(given))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """numbers, replicas (int64) and charges (float64)."""
        return (
            torch.tensor(self.numbers),
            torch.tensor(self.replicas),
            torch.tensor(self.charges, dtype=torch.float64),
        )


def _charges(values: Any) -> list[float]:
    """Total charges as floats."""
    if isinstance(values, (str, bytes, Mapping, Set)):
        raise TypeError(f"total_charge: expected a number, or one for each replica, received {values!r}")
    charges = []
    for value in values:
        try:
            charge = math.nan if isinstance(value, (*TRUTH_VALUES, str)) else float(value)
        except (TypeError, OverflowError):
            charge = math.nan
        if not charge.is_integer():
            raise ValueError(f"total_charge: expected whole numbers of elementary charges, received {value!r}")
        charges.append(charge)
    return charges


def formal_charge(atoms: Iterable[Any]) -> int | None:
    """Sum of the formal charges of a topology's atoms; None where no atom has one."""
    stated = [atom.formalCharge for atom in atoms if atom.formalCharge is not None]
    return sum(stated) if stated else None


def integers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Check a sequence of integers, of numpy's too, and make plain ones of them."""
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise TypeError(f"{name}: expected a sequence of integers, received {values!r}")
    if isinstance(values, (Mapping, Set)):
        raise TypeError(
            f"{name}: expected a sequence of integers, received a {type(values).__name__}; pass a list, whose order counts"
        )
    values = list(values)
    for value in values:
        if isinstance(value, TRUTH_VALUES) or not hasattr(value, "__index__") or getattr(value, "shape", None):
            raise TypeError(f"{name}: expected integers, received {value!r}")
    return tuple(value.__index__() for value in values)


def check_particles(values: Any) -> list[int]:
    """Check the indices in the System of a force's atoms."""
    particles = list(integers("atoms", values))
    if not particles:
        raise ValueError("atoms: expected at least one index, received none; leave it out to take all particles")
    repeated = [a for a, times in Counter(particles).items() if times > 1]
    if repeated:
        raise ValueError(f"atoms: expected each index once, received {min(repeated)} more than once")
    if min(particles) < 0:
        raise ValueError(f"atoms: expected indices of at least 0, received {min(particles)}")
    if max(particles) >= MAXIMUM_PARTICLES:
        raise ValueError(f"atoms: expected indices below {MAXIMUM_PARTICLES}, received {max(particles)}")
    return particles
