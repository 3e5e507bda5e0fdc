"""The network's radial functions, tabulated as cubic splines.

All functions of the distance that a TensorNet uses depend on it alone, so they are sampled once in float64, with exact
derivatives, and evaluated as piecewise cubic Hermite polynomials. That replaces nine tenths of the network's arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Functions = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TabulationError:
    """Largest deviation of a table from its functions, on a grid ten times finer, relative to each one's largest value.

    Attributes
    ----------
    value, derivative : float
        For the worst function.
    """

    value: float
    derivative: float


class _Spline(torch.autograd.Function):
    """Σ_k t^k c_k; its derivative needs only the contraction of the coefficients with the incoming gradient."""

    @staticmethod
    def forward(ctx, distance: Tensor, t: Tensor, coefficients: Tensor, exponents: Tensor, derivative: Tensor) -> Tensor:
        powers = torch.pow(t.unsqueeze(-1), exponents)
        ctx.save_for_backward(powers, coefficients, derivative)
        return torch.bmm(powers.unsqueeze(1), coefficients).squeeze(1)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        powers, coefficients, derivative = ctx.saved_tensors
        contracted = torch.bmm(gradients[0].unsqueeze(1), coefficients.transpose(1, 2)).squeeze(1)
        return (contracted * torch.mm(powers, derivative)).sum(-1), None, None, None, None


class RadialTable(nn.Module):
    """Piecewise cubic table of functions of the distance, between `lower` and `upper`.

    At and beyond `upper` every function is zero. Below `lower`, where the table is not trusted, every function is NaN,
    so that the energy and forces of two atoms on top of each other are NaN and never a plausible number.

    Parameters
    ----------
    functions : callable
        Distances, shape (K,), to values, shape (K, C); float64 and differentiable; zero from `upper` on.
    lower, upper : float
        Range, in the unit of the distance.
    intervals : int
        Equal intervals of the grid.
    dtype : torch.dtype
        Of the table and the arithmetic.
    """

    def __init__(self, functions: Functions, lower: float, upper: float, intervals: int, dtype: torch.dtype):
        super().__init__()
        self.lower, self.upper, self.intervals = lower, upper, intervals
        self.step = (upper - lower) / intervals
        nodes = torch.linspace(lower, upper, intervals + 1, dtype=torch.float64)
        value, slope = value_and_derivative(functions, nodes)
        slope = slope * self.step
        rise = value[1:] - value[:-1]
        cubic = torch.stack(
            (
                value[:-1],
                slope[:-1],
                3 * rise - 2 * slope[:-1] - slope[1:],
                slope[:-1] + slope[1:] - 2 * rise,
            ),
            dim=1,
        )
        below, beyond = torch.full_like(cubic[:1], torch.nan), torch.zeros_like(cubic[:1])
        self.register_buffer("coefficients", torch.cat((below, cubic, beyond)).to(dtype))
        self.register_buffer("exponents", torch.arange(4, dtype=dtype))
        # d(t^k)/d(distance) from t^0 ... t^3
        derivative = torch.diag(torch.arange(1, 4, dtype=torch.float64), 1) / self.step
        self.register_buffer("derivative", derivative.to(dtype))
        self.register_buffer("offset", torch.tensor(1 - lower / self.step, dtype=dtype))

    def forward(self, distance: Tensor) -> Tensor:
        """Function values, shape (P, C), at distances of shape (P,)."""
        with torch.no_grad():
            position = torch.add(self.offset, distance, alpha=1 / self.step)
            # Clamped as an integer: a distance that is NaN or infinite must not become an index out of range.
            row = position.long().clamp(0, self.intervals + 1)
            coefficients = self.coefficients.index_select(0, row)
            t = position - row
        return _Spline.apply(distance, t, coefficients, self.exponents, self.derivative)

    @torch.no_grad()
    def error(self, functions: Functions) -> TabulationError:
        """Compare the table with its functions on a grid ten times finer."""
        distance = torch.linspace(self.lower, self.upper, 10 * self.intervals + 1, dtype=torch.float64)[:-1]
        distance = distance + 0.05 * self.step
        worst = torch.zeros(4, self.coefficients.shape[-1], dtype=torch.float64)
        table = self.coefficients.double()
        for part in distance.split(2048):
            value, slope = value_and_derivative(functions, part)
            position = (part - self.lower) / self.step + 1
            row = position.floor()
            t = (position - row).unsqueeze(-1)
            c = table[row.long()]
            own = c[:, 0] + t * (c[:, 1] + t * (c[:, 2] + t * c[:, 3]))
            own_slope = (c[:, 1] + t * (2 * c[:, 2] + 3 * t * c[:, 3])) / self.step
            now = torch.stack([v.abs().amax(0) for v in (own - value, own_slope - slope, value, slope)])
            worst = torch.maximum(worst, now)
        scale = worst[2:].clamp_min(1e-300)
        relative = worst[:2] / scale
        return TabulationError(float(relative[0].max()), float(relative[1].max()))


def value_and_derivative(functions: Functions, distance: Tensor) -> tuple[Tensor, Tensor]:
    """Values and derivatives, each of shape (K, C), at distances of shape (K,)."""
    with torch.no_grad():
        return torch.func.jvp(functions, (distance,), (torch.ones_like(distance),))
