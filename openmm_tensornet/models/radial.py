"""Radial bases and cutoff functions (distances in the model's length unit)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..common.module import Module


def cosine_cutoff(distance: Tensor, lower: float, upper: float) -> Tensor:
    """Smooth cutoff C(d), the same shape as `distance`.

    ½(cos(πd/r_c)+1) below `upper`; with ``lower > 0``, ½(cos(π(2(d−lo)/(hi−lo)+1))+1) inside (lo, hi), else 0.
    """
    if lower > 0:
        value = 0.5 * (torch.cos(math.pi * (2 * (distance - lower) / (upper - lower) + 1)) + 1)
        return value * ((distance > lower) & (distance < upper))
    return 0.5 * (torch.cos(math.pi * distance / upper) + 1) * (distance < upper)


class ExpNormal(Module):
    """Exponential-normal basis C₀(d)·exp(−β(exp(−α(d−lo))−μ)²), α = 5/(hi−lo) (PhysNet, 10.1021/acs.jctc.9b00181).

    C₀ is the cosine cutoff from 0 to `upper` whatever `lower` is.
    """

    def __init__(self, num_rbf: int, lower: float, upper: float, trainable: bool = False):
        super().__init__()
        self.lower, self.upper = lower, upper
        self.alpha = 5.0 / (upper - lower)
        start = math.exp(lower - upper)
        self.means = nn.Parameter(torch.linspace(start, 1, num_rbf), requires_grad=trainable)
        width = 2 / num_rbf * (1 - start)
        self.betas = nn.Parameter(torch.full((num_rbf,), width**-2), requires_grad=trainable)

    def forward(self, distance: Tensor) -> Tensor:
        """Basis values, shape (..., num_rbf), of distances of shape (...)."""
        d = distance.unsqueeze(-1)
        gauss = torch.exp(-self.betas * (torch.exp(self.alpha * (self.lower - d)) - self.means) ** 2)
        return cosine_cutoff(d, 0.0, self.upper) * gauss


class Gaussian(Module):
    """Gaussians exp(coeff·(d−offset)²) on a uniform grid; no cutoff factor."""

    def __init__(self, num_rbf: int, lower: float, upper: float, trainable: bool = False):
        super().__init__()
        offset = torch.linspace(lower, upper, num_rbf)
        self.offset = nn.Parameter(offset, requires_grad=trainable)
        spacing = (upper - lower) / (num_rbf - 1)
        self.coeff = nn.Parameter(torch.tensor(-0.5 / spacing**2), requires_grad=trainable)

    def forward(self, distance: Tensor) -> Tensor:
        """Basis values, shape (..., num_rbf), of distances of shape (...)."""
        return torch.exp(self.coeff * (distance.unsqueeze(-1) - self.offset) ** 2)


RADIAL_BASES = {"expnorm": ExpNormal, "gauss": Gaussian}
