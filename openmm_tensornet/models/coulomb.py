"""The damped Coulomb interaction of two partial charges.

For the models, which were trained so, lengths are in angstrom and energies in eV; charges are in elementary charges.
"""

from __future__ import annotations

import torch
from torch import Tensor

# e²/(4πε₀) in eV·Å, with the digits of the oracle (hartree times bohr).
COULOMB_CONSTANT = 27.211386024367243 * 0.5291772105638411
# Below this distance the interaction is damped: there the network describes it.
DAMPING_RANGE = 4.6
# Relative permittivity outside of the reaction field's sphere: water.
DIELECTRIC = 78.3
# t, which is below 1.
LARGEST = 1 - 1e-6


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
    t = (distance / DAMPING_RANGE).clamp(0, LARGEST)
    square = t * t
    damping = -torch.expm1(-square / (1 - square))  # exact also where it is almost zero and 1/d is large
    if cutoff is None:
        return COULOMB_CONSTANT * damping / distance
    k_rf, c_rf = reaction_field(cutoff)
    inside = COULOMB_CONSTANT * damping * (1 / distance + k_rf * distance**2 - c_rf)
    return torch.where(distance < cutoff, inside, torch.zeros_like(inside))


def reaction_field(cutoff: float) -> tuple[float, float]:
    """k_rf, 1/Å³, and c_rf, 1/Å, of a cutoff in angstrom."""
    return (DIELECTRIC - 1) / ((2 * DIELECTRIC + 1) * cutoff**3), 3 * DIELECTRIC / ((2 * DIELECTRIC + 1) * cutoff)


def coulomb_slope(distance: Tensor, cutoff: float | None) -> Tensor:
    """Derivative of :func:`coulomb_interaction` by the distance."""
    t = (distance / DAMPING_RANGE).clamp(0, LARGEST)
    rest = 1 / (1 - t * t)
    x = t * t * rest
    damping = -torch.expm1(-x)
    rise = torch.where(distance < LARGEST * DAMPING_RANGE, torch.exp(-x) * 2 * t * rest * rest / DAMPING_RANGE, 0)
    k_rf, c_rf = (0.0, 0.0) if cutoff is None else reaction_field(cutoff)
    bare, fall = 1 / distance + k_rf * distance**2 - c_rf, 2 * k_rf * distance - 1 / distance**2
    slope = COULOMB_CONSTANT * (rise * bare + damping * fall)
    return slope if cutoff is None else torch.where(distance < cutoff, slope, 0)
