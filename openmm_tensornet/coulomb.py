"""Electrostatics of partial charges: the damped Coulomb interaction of a pair, and the dipole moment.

For the models, which were trained so, lengths are in angstrom and energies in eV; charges are in elementary charges.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# e²/(4πε₀) in eV·Å, with the digits of the oracle (hartree times bohr).
COULOMB_CONSTANT = 27.211386024367243 * 0.5291772105638411
# Below this distance the interaction is damped: there the network describes it.
DAMPING_RANGE = 4.6
# Relative permittivity outside of the reaction field's sphere: water.
DIELECTRIC = 78.3


def coulomb_interaction(distance: Tensor, cutoff: float | None) -> Tensor:
    """Energy of two unit charges, the same shape as `distance`.

    k·g(d)·c(d), where g = 1 − exp(1 − 1/(1−t²)), t = d/4.6 Å, damps short distances, and c is 1/d, or with a cutoff r_c the
    reaction field 1/d + k_rf d² − c_rf of a dielectric continuum (Tironi et al. 1995, 10.1063/1.469273).

    Parameters
    ----------
    distance : Tensor
        Angstrom.
    cutoff : float or None
        Angstrom; the interaction is zero beyond.
    """
    t = (distance / DAMPING_RANGE).clamp(0, 1 - 1e-6)
    damping = 1 - torch.exp(1 - 1 / (1 - t * t))
    if cutoff is None:
        return COULOMB_CONSTANT * damping / distance
    k_rf = (DIELECTRIC - 1) / ((2 * DIELECTRIC + 1) * cutoff**3)
    c_rf = 3 * DIELECTRIC / ((2 * DIELECTRIC + 1) * cutoff)
    inside = COULOMB_CONSTANT * damping * (1 / distance + k_rf * distance**2 - c_rf)
    return torch.where(distance < cutoff, inside, torch.zeros_like(inside))


def compute_dipole(positions: np.ndarray, charges: np.ndarray, masses: np.ndarray | None = None) -> np.ndarray:
    """Dipole moment of each frame of a molecule that is whole; the charges may differ from frame to frame.

    Parameters
    ----------
    positions : array, shape (frames, N, 3)
        nm.
    charges : array, shape (frames, N) or (N,)
        In elementary charges, such as the columns of ``charges.csv`` after the first.
    masses : array, shape (N,), optional
        The moment of a charged molecule depends on the origin, which is the centre of these masses; by default the mean position.

    Returns
    -------
    array, shape (frames, 3)
        Elementary charge times nm, which is 48.03205 debye; from negative to positive charge.
    """
    x, q = np.asarray(positions, dtype=float), np.asarray(charges, dtype=float)
    if x.ndim != 3 or x.shape[2] != 3:
        raise ValueError(f"positions: expected shape (frames, atoms, 3), received {x.shape}")
    if q.shape not in (x.shape[:2], x.shape[1:2]):
        raise ValueError(f"charges: expected shape {x.shape[:2]} or {x.shape[1:2]}, received {q.shape}")
    origin = np.average(x, axis=1, weights=masses)
    return (q[..., None] * (x - origin[:, None])).sum(1)
