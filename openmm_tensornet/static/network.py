"""The TensorNet of :mod:`openmm_tensornet.models.tensornet`, specialised to fixed atoms: pair vectors in, atom energies out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..common.module import Module
from ..models import tensors
from ..models.tensornet import TensorNet
from ..models.tensornet2 import SMALLEST_SHARE


class _Normalize(torch.autograd.Function):
    """x/(‖x‖²+1), components first."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        size = (x * x).sum(0) + 1
        y = x / size
        ctx.save_for_backward(x, y, size)
        return y

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        x, y, size = ctx.saved_tensors
        g = gradients[0]
        return torch.addcmul(g, y, (x * g).sum(0), value=-2) / size


class _WithNorm(torch.autograd.Function):
    """x and ‖x‖², components first."""

    @staticmethod
    def forward(ctx, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x.view_as(x), (x * x).sum(0)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        (x,) = ctx.saved_tensors
        return torch.addcmul(gradients[0], x, gradients[1], value=2)


class _PartNorms(torch.autograd.Function):
    """Weighted sums of squares over components, (3, A·F) from (9, A·F) and the weights, shape (3, 9)."""

    @staticmethod
    def forward(ctx, x: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights)
        return torch.mm(weights, x * x)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        x, weights = ctx.saved_tensors
        return torch.mm(2 * weights.T, gradients[0]) * x, None


class _PlusSquare(torch.autograd.Function):
    """x + c·D·D for components of shape (9, A·F), given D and c·D with a constant c of each atom.

    The table, shape (9, 81), is symmetric in its factors.
    """

    @staticmethod
    def forward(ctx, x: Tensor, d: Tensor, scaled: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(scaled, table)
        return torch.addmm(x, table, (d.unsqueeze(1) * scaled.unsqueeze(0)).flatten(0, 1))

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        scaled, table = ctx.saved_tensors
        g = torch.mm(2 * table.T, gradients[0]).unflatten(0, (9, 9))
        return gradients[0], (g * scaled.unsqueeze(0)).sum(1), None, None


class _ByPart(torch.autograd.Function):
    """Repeat each part's values for its components, (A, 3, F) to (A, 9, F)."""

    @staticmethod
    def forward(ctx, values: Tensor, part: Tensor, zeros: Tensor) -> Tensor:
        ctx.save_for_backward(part, zeros)
        return values.index_select(1, part)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        part, zeros = ctx.saved_tensors
        return zeros.index_add(1, part, gradients[0]), None, None


class _Geometry(torch.autograd.Function):
    """Distance and unit vector of pairs, (P,) and (P, 3), from their vectors; backward gives the gradient by the positions."""

    @staticmethod
    def forward(ctx, positions: Tensor, pairs: Tensor, r: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
        distance = torch.linalg.vector_norm(r, dim=-1)
        unit = r / distance.unsqueeze(-1)
        ctx.save_for_backward(distance, unit, pairs, zeros)
        return distance, unit

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        distance, unit, pairs, zeros = ctx.saved_tensors
        across = gradients[1] / distance.unsqueeze(-1)
        along = torch.baddbmm(gradients[0].view(-1, 1, 1), unit.unsqueeze(1), across.unsqueeze(2), alpha=-1)
        g = torch.addcmul(across, unit, along.squeeze(2)).double()
        i, j = pairs.unbind(0)
        return zeros.index_add(0, i, g).index_add(0, j, g, alpha=-1), None, None, None


class _Linear(torch.autograd.Function):
    """x itself, and x times the weights, (9, A, F) each: the gradients of both uses are added by the matrix product."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(weight)
        return x.view_as(x), torch.bmm(x, weight)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        (weight,) = ctx.saved_tensors
        return torch.baddbmm(gradients[0], gradients[1], weight.mT), None


class _Invariants(torch.autograd.Function):
    """[I/√3, ‖A‖², ‖S‖²], (3, A·F), of components (9, A·F), given weights (3, 9) and a row of ones."""

    @staticmethod
    def forward(ctx, x: Tensor, weights: Tensor, ones: Tensor) -> Tensor:
        factor = torch.cat((ones, x[1:]))
        ctx.save_for_backward(factor, weights)
        return torch.mm(weights, x * factor)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        factor, weights = ctx.saved_tensors
        doubled = torch.cat((weights[:, :1], 2 * weights[:, 1:]), dim=1)
        return torch.mm(doubled.T, gradients[0]) * factor, None, None


class _Equilibrate(torch.autograd.Function):
    """q + f²/(Σf² + ε)·(Q − Σq) of h = (q, f), (A, 2K), with sums over the atoms of each of M replicas, Q of shape (M,); (A, K)."""

    @staticmethod
    def forward(ctx, h: Tensor, replica: Tensor, charge: Tensor) -> Tensor:
        q, f = h.chunk(2, dim=1)
        square = f * f
        ctx.several = len(charge) > 1
        total = _Equilibrate.of_replica(ctx, square, replica, charge) + SMALLEST_SHARE
        whole = charge.index_select(0, replica) if ctx.several else charge
        ratio = (whole.unsqueeze(1) - _Equilibrate.of_replica(ctx, q, replica, charge)) / total
        ctx.save_for_backward(f, square, total, ratio, replica, charge)
        return torch.addcmul(q, square, ratio)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        f, square, total, ratio, replica, charge = ctx.saved_tensors
        to_q = gradients[0] - _Equilibrate.of_replica(ctx, gradients[0] * square, replica, charge) / total
        return torch.cat((to_q, 2 * f * (to_q * ratio)), dim=1), None, None

    @staticmethod
    def of_replica(ctx, values: Tensor, replica: Tensor, charge: Tensor) -> Tensor:
        """Sum over each atom's replica, (A, K), or (1, K) where there is one replica."""
        if not ctx.several:
            return values.sum(0, keepdim=True)
        zeros = torch.zeros_like(charge).unsqueeze(1).repeat(1, values.shape[1])
        return zeros.index_add(0, replica, values).index_select(0, replica)


def equilibrate(h: Tensor, replica: Tensor, charge: Tensor) -> Tensor:
    """See :meth:`PortableOperators.equilibrate`."""
    return _Equilibrate.apply(h, replica, charge)


class PortableOperators(Module):
    """The node-wise steps of the network in PyTorch's own operators.

    Parameters
    ----------
    model : TensorNet
    charge : Tensor of float64, shape (A,)
        Total charge of each slot's replica.
    dtype : torch.dtype
    atoms : int
        Atoms N, which may be fewer than slots A.
    far : float
        nm; distance given to unused places of the pair list, which name an atom with itself. Beyond the cutoff.
    """

    def __init__(self, model: TensorNet, charge: Tensor, dtype: torch.dtype, atoms: int, far: float):
        super().__init__()
        self.group = model.config.group
        self.activation: Any = model.activation
        sizes = torch.tensor(tensors.PART_SIZES)
        part = torch.arange(3).repeat_interleave(sizes)
        pair_table = tensors.layer_table(self.group == "O(3)")
        square_table = tensors.square_table()
        collect = torch.zeros(3, 9, dtype=torch.float64)
        collect[part, torch.arange(9)] = 1.0
        collect[0] *= 3 * tensors.ONE_THIRD
        self.charged = bool((charge != 0).any())
        self.register_buffer("no_forces", torch.zeros(atoms, 3, dtype=torch.float64))
        self.register_buffer("part", part)
        self.register_buffer("zeros", torch.zeros(len(charge), 3, model.config.embedding_dimension, dtype=dtype))
        self.register_buffer("pair_table", pair_table.flatten(0, 1).T.contiguous().to(dtype))
        self.register_buffer("square_table", square_table.flatten(0, 1).T.contiguous().to(dtype))
        self.register_buffer("collect", collect.to(dtype))
        linear = collect.clone()
        linear[0, 0] = 3**-0.5
        self.register_buffer("collect_linear", linear.to(dtype))
        self.register_buffer("ones", torch.ones(1, len(charge) * model.config.embedding_dimension, dtype=dtype))
        self.register_buffer("charge_factor", (1 + 0.1 * charge).to(dtype).unsqueeze(-1))

    def geometry(self, positions: Tensor, box: Tensor | None, pairs: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Distances, shape (P,), and unit vectors, shape (P, 3), of pairs, given their vectors; differentiable by the positions."""
        # Cast after the subtraction; an operator also where the dtypes agree while tracing.
        r = torch.ops.aten._to_copy(vectors, dtype=self.collect.dtype)
        return _Geometry.apply(positions, pairs, r, self.no_forces)

    def block_message(self, weight: Tensor, scale: Tensor, y: Tensor) -> Tensor:
        """Σ_j scale_ij weight_ij ⊙ Y_j over the n slots j of i's block; (9, A, F), weights (A, n, 3, F), scale (A, n)."""
        atoms, n = scale.shape
        f = (weight * scale[:, :, None, None]).view(atoms // n, n, n, 3, -1)
        parts = [
            (f_part.unsqueeze(0) * y_part.unflatten(1, (atoms // n, 1, n))).sum(3)
            for f_part, y_part in zip(f.unbind(3), y.split(tensors.PART_SIZES), strict=True)
        ]
        return torch.cat(parts).flatten(1, 2)

    def norm_features(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """x itself, shape (9, A, F), and LayerNorm of ‖x‖², shape (A, F)."""
        x, norm = _WithNorm.apply(x)
        return x, _layer_norm(norm, weight, bias)

    def gate(self, x: Tensor, gates: Tensor, normalize: bool) -> Tensor:
        """x times its part's gate, the activated `gates` of shape (A, 3F), divided by ‖·‖²+1 on demand."""
        gates = _ByPart.apply(self.activation(gates).unflatten(-1, (3, -1)), self.part, self.zeros)
        x = x * gates.transpose(0, 1)
        return _Normalize.apply(x) if normalize else x

    def normalize(self, x: Tensor) -> Tensor:
        """x/(‖x‖²+1)."""
        return _Normalize.apply(x)

    def interact(self, sums: Any, weight: Any, y: Tensor) -> Tensor:
        """P/(‖P‖²+1) of P = (1+0.1q)(YM+MY), or 2MY in SO(3), where M is the message of Y."""
        m = sums.message(weight, y)
        outer = (y.unsqueeze(1) * m.unsqueeze(0)).flatten(0, 1)
        p = torch.mm(self.pair_table, outer.flatten(1)).view(y.shape)
        if self.charged and self.group == "O(3)":
            p = p * self.charge_factor
        return _Normalize.apply(p)

    def plus_square(self, x: Tensor, d: Tensor, normalize: bool) -> Tensor:
        """x + d + (1+0.1q) d·d, divided by ‖·‖²+1 on demand."""
        scaled = (d * self.charge_factor if self.charged else d).detach()
        x = _PlusSquare.apply((x + d).flatten(1), d.flatten(1), scaled.flatten(1), self.square_table).view(x.shape)
        return _Normalize.apply(x) if normalize else x

    def part_features(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """LayerNorm of (3I², ‖A‖², ‖S‖²), shape (A, 3F)."""
        norms = _PartNorms.apply(x.flatten(1), self.collect).view(3, *x.shape[1:])
        return _layer_norm(norms.transpose(0, 1).flatten(1), weight, bias)

    def invariant_features(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """LayerNorm of (I/√3, ‖A‖², ‖S‖²), shape (A, 3F)."""
        h = _Invariants.apply(x.flatten(1), self.collect_linear, self.ones).view(3, *x.shape[1:])
        return _layer_norm(h.transpose(0, 1).flatten(1), weight, bias)

    def equilibrate(self, h: Tensor, replica: Tensor, charge: Tensor) -> Tensor:
        """Charges, (A, K), of predictions and their shares, (A, 2K), that sum to the charge, (M,), of each slot's replica, (A,)."""
        return equilibrate(h, replica, charge)

    def perceptron(self, h: Tensor, linears: Any) -> Tensor:
        """See :func:`perceptron`."""
        return perceptron(h, linears, self.activation)

    def head(self, h: Tensor, linears: Any) -> Tensor:
        """Of a perceptron that gives one number, shape (A,)."""
        return self.perceptron(h, linears).squeeze(-1)


def perceptron(h: Tensor, linears: Any, activation: Any) -> Tensor:
    """Linear layers with the activation between them; the caller applies the one after the last layer, if any."""
    for k, (weight, bias) in enumerate(linears):
        h = torch.addmm(bias, h if k == 0 else activation(h), weight)
    return h


class StaticNetwork(Module):
    """Everything between pair vectors and the energy of each slot.

    Parameters
    ----------
    model : TensorNet
        Its weights are copied.
    sums : nn.Module
        :class:`~openmm_tensornet.static.aggregation.DenseBlocks` or another one with its interface.
    operators : nn.Module
        :class:`PortableOperators` or another one with its interface.
    dtype : torch.dtype
    """

    def __init__(self, model: TensorNet, sums: Any, operators: Any, dtype: torch.dtype):
        super().__init__()
        self.sums, self.operators = sums, operators
        sizes = torch.tensor(tensors.PART_SIZES)

        def linears(modules) -> Tensor:
            """Weights of the three parts' linears for each component, to multiply from the right; (9, F, F)."""
            return torch.stack([m.weight.detach().T for m in modules]).repeat_interleave(sizes, 0).to(dtype)

        self.register_buffer("embedding_tensor", linears(model.embedding.tensor))
        self.gates: Any = _affines((model.embedding.norm, *model.embedding.scalar), dtype)
        self.num_layers = len(model.layers)
        for k, layer in enumerate(model.layers):
            self.register_buffer(f"tensor_in_{k}", linears(layer.tensor[:3]))
            self.register_buffer(f"tensor_out_{k}", linears(layer.tensor[3:]))
        self.readout: Any = _affines((model.out_norm, model.out, *model.head), dtype)

    def forward(self, distance: Tensor, unit: Tensor, pairs: Tensor) -> Tensor:
        """Head outputs, shape (A,), of pairs: distances in nm, (P,), unit vectors, (P, 3), and atoms, (2, P)."""
        x, weights = self.sums(distance, unit, pairs)
        x = self._embed(x, normalize=self.num_layers > 0)
        for k, weight in enumerate(weights):
            x = self._interact(k, x, weight, normalize=k + 1 < self.num_layers)
        return self._read(x)

    def _embed(self, x: Tensor, normalize: bool) -> Tensor:
        """From the sums over neighbours, (9, A, F), to the atoms' tensors, (9, A, F)."""
        norm, *linears = self.gates
        x, gates = self.operators.norm_features(x, *norm)
        gates = self.operators.perceptron(gates, linears)
        return self.operators.gate(torch.bmm(x, self.embedding_tensor), gates, normalize)

    def _interact(self, k: int, x: Tensor, weight: Any, normalize: bool) -> Tensor:
        """Layer k, from normalised tensors and what its message needs; the result is normalised for another layer."""
        x, y = _Linear.apply(x, getattr(self, f"tensor_in_{k}"))
        p = self.operators.interact(self.sums, weight, y)
        d = torch.bmm(p, getattr(self, f"tensor_out_{k}"))
        return self.operators.plus_square(x, d, normalize)

    def _read(self, x: Tensor) -> Tensor:
        """Head outputs, shape (A,)."""
        norm, *linears = self.readout
        return self.operators.head(self.operators.part_features(x, *norm), linears)


class _Affine(Module):
    """Weight (to multiply from the right; a vector for a LayerNorm) and bias, as buffers."""

    def __init__(self, module: Any, dtype: torch.dtype):
        super().__init__()
        weight = module.weight.detach()
        self.register_buffer("weight", (weight.T if weight.dim() == 2 else weight).contiguous().to(dtype))
        self.register_buffer("bias", module.bias.detach().to(dtype))

    def __iter__(self):
        return iter((self.weight, self.bias))


def _affines(modules, dtype: torch.dtype) -> nn.ModuleList:
    return nn.ModuleList(_Affine(module, dtype) for module in modules)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, (x.shape[-1],), weight, bias)
