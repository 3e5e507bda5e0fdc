"""Physical terms that TorchMD-Net adds to the network's energy ("priors").

A prior has `cutoff` (length units of the model; 0 without pairs), `atom_energy(z)` (each atom, inside the
reduction over atoms) and `pair_energy(z_i, z_j, distance)` (each pair counted once, added once a replica). Energies
are in the model's unit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..common.module import Module
from ..common.units import AVOGADRO
from .radial import cosine_cutoff


class Prior(Module):
    """A prior that adds nothing; the base of the others."""

    cutoff = 0.0
    uses_box = True

    @property
    def arguments(self) -> dict:
        """What makes another one like this, its weights and buffers aside."""
        return {}

    def atom_energy(self, z: Tensor) -> Tensor | None:
        """Energy of each atom, shape (N,), or None."""
        return None

    def pair_energy(self, z_i: Tensor, z_j: Tensor, distance: Tensor) -> Tensor | None:
        """Energy of each pair, shape (P,), or None."""
        return None


class Atomref(Prior):
    """A reference energy for each atomic number (also LearnableAtomref); `enable=False` leaves it out."""

    def __init__(self, max_z: int, trainable: bool = False, enable: bool = True):
        super().__init__()
        self.atomref = nn.Embedding(max_z, 1, _weight=torch.zeros(max_z, 1))
        self.atomref.weight.requires_grad_(trainable)
        self.enable = enable

    @property
    def arguments(self) -> dict:
        return {"max_z": len(self.atomref.weight), "enable": self.enable}

    def atom_energy(self, z: Tensor) -> Tensor | None:
        return self.atomref(z).squeeze(-1) if self.enable else None


class ZBL(Prior):
    """Screened nuclear repulsion (Ziegler, Biersack, Littmark 1985, eq. 9 and 10), times a cosine cutoff.

    Parameters
    ----------
    cutoff_distance : float
        In model lengths.
    atomic_number : list of int
        Atomic number of each atom type.
    distance_scale, energy_scale : float
        One model length in metre, one model energy in joule.
    """

    screening = ((0.1818, 3.2), (0.5099, 0.9423), (0.2802, 0.4029), (0.02817, 0.2016))
    coulomb_constant = 2.30707755e-28  # e²/(4πε₀) in J·m, with the oracle's digits
    bohr = 5.29177210903e-11  # m

    def __init__(self, cutoff_distance: float, atomic_number: list[int], distance_scale: float, energy_scale: float):
        super().__init__()
        self.cutoff = float(cutoff_distance)
        self.distance_scale, self.energy_scale = float(distance_scale), float(energy_scale)
        self.register_buffer("atomic_number", torch.as_tensor(atomic_number, dtype=torch.long))

    @property
    def arguments(self) -> dict:
        scales = {"distance_scale": self.distance_scale, "energy_scale": self.energy_scale}
        return {"cutoff_distance": self.cutoff, "atomic_number": self.atomic_number.tolist(), **scales}

    def pair_energy(self, z_i: Tensor, z_j: Tensor, distance: Tensor) -> Tensor:
        z_i = self.atomic_number[z_i].to(distance.dtype)
        z_j = self.atomic_number[z_j].to(distance.dtype)
        length = 0.8854 * self.bohr / self.distance_scale / (z_i**0.23 + z_j**0.23)
        d = distance / length
        screened = sum(a * torch.exp(-b * d) for a, b in self.screening)
        scale = self.coulomb_constant / self.energy_scale / self.distance_scale
        return scale * z_i * z_j / distance * screened * cosine_cutoff(distance, 0.0, self.cutoff)


class D2(Prior):
    """Dispersion of DFT-D2 (Grimme, 10.1002/jcc.20495) with a hard cutoff. TorchMD-Net ignores the box here.

    `C_6` (J/mol·nm⁶) and `R_r` (nm) are read from the file, by atomic number.
    """

    uses_box = False
    steepness = 20.0

    def __init__(self, cutoff_distance: float, atomic_number: list[int], distance_scale: float, energy_scale: float):
        super().__init__()
        self.cutoff = float(cutoff_distance)
        self.distance_scale, self.energy_scale = float(distance_scale), float(energy_scale)
        self.nm_per_length = self.distance_scale * 1e9
        self.joule_per_mol_per_energy = self.energy_scale * AVOGADRO
        self.register_buffer("Z_map", torch.as_tensor(atomic_number, dtype=torch.long))
        self.register_buffer("C_6", torch.full((55,), torch.nan))
        self.register_buffer("R_r", torch.full((55,), torch.nan))

    @property
    def arguments(self) -> dict:
        scales = {"distance_scale": self.distance_scale, "energy_scale": self.energy_scale}
        return {"cutoff_distance": self.cutoff, "atomic_number": self.Z_map.tolist(), **scales}

    def pair_energy(self, z_i: Tensor, z_j: Tensor, distance: Tensor) -> Tensor:
        n_i, n_j = self.Z_map[z_i], self.Z_map[z_j]
        r = distance * self.nm_per_length
        c6 = (self.C_6[n_i] * self.C_6[n_j]).sqrt()
        damping = torch.sigmoid(self.steepness * (r / (self.R_r[n_i] + self.R_r[n_j]) - 1))
        energy = -c6 / r**6 * damping / self.joule_per_mol_per_energy
        return torch.where(distance < self.cutoff, energy, torch.zeros_like(energy))
