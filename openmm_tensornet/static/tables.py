"""The network's radial functions, tabulated as cubic splines.

All functions of the distance that a TensorNet uses depend on it alone, so they are sampled once in float64, with exact
derivatives, and evaluated as piecewise cubic Hermite polynomials. That replaces nine tenths of the network's arithmetic.
The hundreds of functions are combinations of some tens of basis functions (a singular value decomposition of the
samples); only these are tabulated, so that a table takes about a MB, and a matrix product combines them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.module import Module
from ..kernels.intervals import BEND, distance_at, place

SAMPLES = 512  # distances that the basis functions are chosen at
# Closer than this, nm, no structure is ordinary; a table's errors there are judged by the larger functions that there are.
ORDINARY = 0.05
PART = 128  # distances at a time: the network's layers take 100 kB for each
Functions = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TabulationError:
    """Largest deviation of a table from its functions, on a grid ten times finer, relative to each one's largest value.

    At distances from :data:`ORDINARY` on, to its largest value there. No scale is below a millionth of the largest one.

    Attributes
    ----------
    value, derivative : float
        For the worst function.
    """

    value: float
    derivative: float


class _Spline(torch.autograd.Function):
    """A table's values, whose backward is the table's own."""

    @staticmethod
    def forward(ctx, table: RadialTable, distance: Tensor) -> Tensor:
        values, ctx.saved = table.evaluate(distance)
        ctx.table = table
        return values

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return None, ctx.table.slope(ctx.saved, gradients[0])


class RadialTable(Module):
    """Piecewise cubic table of functions of the distance, between none and a cutoff, on a grid that is finer at close range.

    At and beyond the cutoff every function is zero.

    Parameters
    ----------
    functions : callable
        Distances, shape (K,), to values, shape (K, C); float64 and differentiable; zero from `cutoff` on.
    cutoff : float
        In the unit of the distance.
    intervals : int
        Of the grid; see :func:`place`.
    rank : float
        Basis functions whose share is below this part of the largest one's are left out.

    Notes
    -----
    Table and arithmetic are in float64; `to(torch.float32)` gives the same table in single precision.
    """

    def __init__(self, functions: Functions, cutoff: float, intervals: int, rank: float):
        super().__init__()
        self.cutoff, self.intervals = cutoff, intervals
        nodes = distance_at(torch.arange(1, intervals + 2, dtype=torch.float64), cutoff, intervals)
        _, rate = place(nodes, cutoff, intervals)
        some = nodes[:: max(1, intervals // SAMPLES)]
        sample = torch.cat([value_and_derivative(functions, part)[0] for part in some.split(PART)])
        _, weight, modes = torch.linalg.svd(sample, full_matrices=False)
        modes = modes[weight > rank * weight[0]]
        # In parts and in place, since all functions at all nodes, or a few copies of the table, would take hundreds of MB.
        value, slope = nodes.new_empty(2, len(nodes), len(modes))
        for part, v, s in zip(nodes.split(PART), value.split(PART), slope.split(PART), strict=True):
            for found, own in zip(value_and_derivative(functions, part), (v, s), strict=True):
                torch.mm(found, modes.T, out=own)
        slope /= rate.unsqueeze(1)
        coefficients = nodes.new_zeros(intervals + 2, 4, len(modes))
        coefficients[0] = torch.nan
        c = coefficients[1:-1].unbind(1)
        rise = value[1:] - value[:-1]
        c[0].copy_(value[:-1])
        c[1].copy_(slope[:-1])
        c[2].copy_(3 * rise).sub_(slope[1:]).sub_(slope[:-1], alpha=2)
        c[3].copy_(slope[:-1]).add_(slope[1:]).sub_(rise, alpha=2)
        self.register_buffer("coefficients", coefficients)
        self.register_buffer("modes", modes)
        self.register_buffer("modes_t", modes.T.contiguous())
        self.register_buffer("exponents", torch.arange(4, dtype=torch.float64))
        # The place is offset − bent/(distance + shift), its derivative bent/(distance + shift)².
        self.shift = BEND * cutoff
        self.bent = (1 + BEND) * intervals * self.shift
        self.register_buffer("offset", torch.tensor(1 + (1 + BEND) * intervals, dtype=torch.float64))
        # d(t^k)/d(distance)·(distance + shift)² from t^0 ... t^3
        derivative = torch.diag(torch.arange(1, 4, dtype=torch.float64), 1) * self.bent
        self.register_buffer("derivative", derivative)

    def forward(self, distance: Tensor) -> Tensor:
        """Function values, shape (P, C), at distances of shape (P,)."""
        return _Spline.apply(self, distance)

    def evaluate(self, distance: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Values, shape (P, C), and what :meth:`slope` needs."""
        inverse = torch.reciprocal(distance + self.shift)
        position = torch.add(self.offset, inverse, alpha=-self.bent)
        # Clamped as an integer: a distance that is NaN or infinite must not become an index out of range.
        row = position.long().clamp(0, self.intervals + 1)
        powers = torch.pow((position - row).unsqueeze(-1), self.exponents)
        coefficients = self.coefficients.index_select(0, row)
        basis = torch.bmm(powers.unsqueeze(1), coefficients).squeeze(1)
        return torch.mm(basis, self.modes), (powers, coefficients, inverse)

    def slope(self, saved: tuple[Tensor, ...], gradient: Tensor) -> Tensor:
        """Derivative by the distance of (values · gradient), shape (P,)."""
        powers, coefficients, inverse = saved
        by_basis = torch.mm(gradient, self.modes_t)
        contracted = torch.bmm(by_basis.unsqueeze(1), coefficients.transpose(1, 2))
        slope = torch.bmm(contracted, torch.mm(powers, self.derivative).unsqueeze(2)).flatten()
        return slope * (inverse * inverse)

    def split(self, parts: int) -> list[RadialTable]:
        """Tables of equal shares of the functions."""
        tables = [copy.copy(self) for _ in range(parts)]
        for table, share in zip(tables, self.modes.chunk(parts, dim=1), strict=True):
            table._buffers = {**self._buffers, "modes": share.contiguous(), "modes_t": share.T.contiguous()}
        return tables

    def tables(self, parts: int) -> list[Tensor]:
        """Coefficients of the functions themselves, shape (K, 4, C/parts), for each of equal shares of the functions.

        Row 0 is NaN, for a distance that is NaN or zero; the last one is for what is beyond the cutoff.
        """
        whole = torch.matmul(self.coefficients, self.modes)
        return [share.contiguous() for share in whole.chunk(parts, dim=2)]

    @torch.no_grad()
    def error(self, functions: Functions) -> TabulationError:
        """Compare the table with its functions on a grid ten times finer."""
        positions = torch.arange(1.05, 1 + self.intervals, 0.1, dtype=torch.float64)
        distances = distance_at(positions, self.cutoff, self.intervals)
        ordinary = int((distances < ORDINARY).sum())
        close, far = (self._largest(functions, some) for some in (distances[:ordinary], distances[ordinary:]))
        relative = []
        for found, scale in ((close, torch.maximum(close, far)), (far, far)):
            error, scale = found[:2], scale[2:]
            relative.append(error / scale.maximum(1e-6 * scale.amax(1, keepdim=True)).clamp_min(1e-300))
        value, derivative = torch.stack(relative).amax((0, 2)).tolist()
        return TabulationError(value, derivative)

    def _largest(self, functions: Functions, distances: Tensor) -> Tensor:
        """Largest error of each function and of its derivative, largest value and largest derivative; shape (4, C)."""
        worst = torch.zeros(4, self.modes.shape[1], dtype=torch.float64)
        for part in distances.split(PART):
            value, slope = value_and_derivative(functions, part)
            position, rate = place(part, self.cutoff, self.intervals)
            row = position.floor()
            t = (position - row).unsqueeze(-1)
            c = self.coefficients[row.long()]
            own = (c[:, 0] + t * (c[:, 1] + t * (c[:, 2] + t * c[:, 3]))) @ self.modes
            own_slope = (rate.unsqueeze(1) * (c[:, 1] + t * (2 * c[:, 2] + 3 * t * c[:, 3]))) @ self.modes
            now = torch.stack([v.abs().amax(0) for v in (own - value, own_slope - slope, value, slope)])
            worst = torch.maximum(worst, now)
        return worst


def value_and_derivative(functions: Functions, distance: Tensor) -> tuple[Tensor, Tensor]:
    """Values and derivatives, each of shape (K, C), at distances of shape (K,).

    The backward pass is linear in what comes in; its derivative by that is the derivative of each function. (Forward
    differentiation does it at once, but imports PyTorch's compiler for it: seconds and 100 MB.)
    """
    with torch.enable_grad():
        d = distance.detach().requires_grad_(True)
        value = functions(d)
        incoming = torch.zeros_like(value, requires_grad=True)
        (outgoing,) = torch.autograd.grad(value, d, incoming, create_graph=True)
        (derivative,) = torch.autograd.grad(outgoing.sum(), incoming)
    return value.detach(), derivative
