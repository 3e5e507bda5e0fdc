"""Named geometries, named tolerances and comparisons, for the package's own checks and for those of others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..common.units import KJ_PER_MOL_PER_EV
from ..neighbors.reference import find_pairs, minimum_image

if TYPE_CHECKING:
    from ..common.atoms import Atoms
    from .tensornet import TensorNet


@dataclass(frozen=True)
class Tolerance:
    """How far energies and forces may be from the reference model's.

    Attributes
    ----------
    energy : float
        eV an atom (96.485 kJ/mol), on the largest deviation of a replica's energy.
    force : float
        Norm of the deviation over the norm of the forces, or over that of forces of :data:`USUAL_FORCE` (of tables: :data:`SMALL_FORCE`)
        on every atom where it is larger.
    """

    energy: float
    force: float


# kJ/mol/nm; what an atom of a molecule feels at room temperature. Where forces are smaller, as at a minimum of the energy, they are
# differences of larger forces, whose errors they inherit.
USUAL_FORCE = 1000.0
SMALL_FORCE = 100.0  # the same for tables, which are not rounded to single precision
# Of an exported file, over the named geometries, compressed ones included.
TOLERANCES = {"single": Tolerance(1e-5, 1e-4), "double": Tolerance(2e-7, 2e-6)}
# Of tabulation alone, evaluated in double precision.
TABULATION = {"single": Tolerance(1e-7, 1e-6), "double": Tolerance(1e-8, 1e-7)}


@dataclass(frozen=True)
class Deviation:
    """Largest deviations that a comparison found; units as in :class:`Tolerance`."""

    energy: float
    force: float

    def within(self, tolerance: Tolerance) -> bool:
        """Whether both are at most the tolerance's (NaN is not)."""
        return self.energy <= tolerance.energy and self.force <= tolerance.force


def reference_energy_and_forces(
    model: TensorNet, atoms: Atoms, positions: Tensor, box: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Energies (M,), kJ/mol, and forces (N, 3), kJ/mol/nm, of the reference model; positions in nm, everything float64."""
    z, replicas, charges = atoms.tensors()
    units = model.units
    x = positions.double() / units.nm_per_length
    lattice = None if box is None else box.double() / units.nm_per_length
    pairs = find_pairs(x, replicas, model.cutoff, lattice)
    energy, forces = model.energy_and_forces(z, x, replicas, pairs, len(atoms.charges), charges)
    kj = units.kj_per_mol_per_energy
    return energy.detach() * kj, forces.detach() * (kj / units.nm_per_length)


def deviation(
    found: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor], smallest: float = USUAL_FORCE
) -> Deviation:
    """Compare energies (M,), kJ/mol, and forces (N, 3) with the reference's; forces below `smallest` count as that large."""
    energy, forces = found
    energy_error = float((energy.double() - reference[0]).abs().max()) / len(forces) / KJ_PER_MOL_PER_EV
    scale = max(float(reference[1].norm()), smallest * len(forces) ** 0.5)
    return Deviation(energy_error, float((forces.double() - reference[1]).norm()) / scale)


def packing(atoms: Atoms, seed: int, box: Tensor | None = None, closest: float = 0.095) -> Tensor:
    """A random dense geometry with no two atoms of a replica closer than `closest`; nm, float64, shape (N, 3).

    Each replica is packed on its own, in a cube of about 60 atoms/nm³ around the origin, which is a corner of the box. If the box
    is smaller than that, it is filled.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.empty(len(atoms.numbers), 3, dtype=torch.float64)
    replicas = torch.tensor(atoms.replicas)
    for replica in replicas.unique().tolist():
        members = torch.nonzero(replicas == replica).squeeze(1)
        edge = (len(members) / 60) ** (1 / 3)
        fill = box is not None and edge > float(box.diagonal().min()) - closest
        placed = torch.empty(0, 3, dtype=torch.float64)
        lattice = box.double() if fill else torch.eye(3, dtype=torch.float64) * edge  # type: ignore[union-attr]
        for _ in range(len(members)):
            for attempt in range(1000):
                trial = (torch.rand(1, 3, generator=generator, dtype=torch.float64) - 0.5) @ lattice
                vector = placed - trial
                if box is not None:
                    vector = minimum_image(vector, box.double())
                if attempt >= 50 and not fill:
                    lattice = lattice * 1.02
                if bool((vector.norm(dim=1) >= closest).all()):
                    break
            placed = torch.cat((placed, trial))
        x[members] = placed
    return x


def geometries(atoms: Atoms, cutoff: float, positions: Tensor | None = None, box: Tensor | None = None) -> dict:
    """Named geometries for comparisons: name to (positions, box or None); nm, float64.

    Given positions are used as they are and shaken by 5 pm; else there are two random packings, the second with all atoms in the box, so
    that pairs lie across its faces, and, where these are smaller than the cutoff, one that is stretched to it. Large systems get one
    geometry.
    """
    generator = torch.Generator().manual_seed(20)
    if positions is not None:
        x = positions.double()
        shaken = x + 0.005 * torch.randn(x.shape, generator=generator, dtype=torch.float64)
        found = {"given": (x, box), "given, shaken by 5 pm": (shaken, box)}
    else:
        found = {f"packing {k}": (packing(atoms, k, box), box) for k in (1, 2)}
        x, _ = found["packing 2"]
        size = float((x.amax(0) - x.amin(0)).max())
        if 0 < size < cutoff:
            found["packing 2, stretched to the cutoff"] = (x * (cutoff / size), box)
        if box is not None:
            found["packing 2"] = (x - torch.floor(x @ torch.linalg.inv(box)) @ box, box)
    return found if len(atoms.numbers) <= 300 else dict(list(found.items())[:1])
