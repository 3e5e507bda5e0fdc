"""The fused operators with their derivatives, behind the interfaces of the portable program."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import tensors
from ..model import TensorNet
from ..module import Module
from ..tabulate import RadialTable
from . import operators  # noqa: F401  registers them

_OPS = torch.ops.openmm_tensornet


class _Direction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r: Tensor) -> tuple[Tensor, Tensor]:
        distance, unit = _OPS.direction(r)
        ctx.save_for_backward(distance, unit)
        return distance, unit

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return _OPS.direction_backward(*gradients, *ctx.saved_tensors)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, distance, unit, pairs, receiver, sender, own, table, lower, step) -> Tensor:
        ctx.save_for_backward(distance, unit, pairs, receiver, sender, table)
        ctx.range = lower, step
        return _OPS.embed(distance, unit, pairs, receiver, sender, own, table, lower, step)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return *_OPS.embed_backward(*gradients, *ctx.saved_tensors, *ctx.range), *(None,) * 7


class _Message(torch.autograd.Function):
    @staticmethod
    def forward(ctx, distance, pairs, own, table, lower, step, y) -> Tensor:
        ctx.save_for_backward(distance, pairs, own, table, y)
        ctx.range = lower, step
        return _OPS.message(distance, pairs, own, table, lower, step, y)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        *saved, y = ctx.saved_tensors
        g_distance, g_y = _OPS.message_backward(*gradients, *saved, *ctx.range, y)
        return g_distance, None, None, None, None, None, g_y


class _BlockMessage(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, scale, y) -> Tensor:
        ctx.save_for_backward(weight, scale, y)
        return _OPS.block_message(weight, scale, y)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return _OPS.block_message_backward(*gradients, *ctx.saved_tensors)


class _NormFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return x.view_as(x), _OPS.norm_features(x, weight, bias)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return _OPS.norm_features_backward(*gradients, *ctx.saved_tensors), None, None


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x) -> Tensor:
        ctx.save_for_backward(x)
        return _OPS.normalize(x)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return _OPS.normalize_backward(*gradients, *ctx.saved_tensors)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gates, normalize) -> Tensor:
        ctx.save_for_backward(x, gates)
        ctx.normalize = normalize
        return _OPS.gate(x, gates, normalize)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return *_OPS.gate_backward(*gradients, *ctx.saved_tensors, ctx.normalize), None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, m, factor, terms, weights) -> Tensor:
        ctx.save_for_backward(y, m, factor, terms, weights)
        return _OPS.product(y, m, factor, terms, weights)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return *_OPS.product_backward(*gradients, *ctx.saved_tensors), None, None, None


class _PlusSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, d, factor, terms, weights, normalize) -> Tensor:
        ctx.save_for_backward(x, d, factor, terms, weights)
        ctx.normalize = normalize
        return _OPS.plus_square(x, d, factor, terms, weights, normalize)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        g_x, g_d = _OPS.plus_square_backward(*gradients, *ctx.saved_tensors, ctx.normalize)
        return g_x, g_d, None, None, None, None


class _PartFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scalar, weight, bias) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scalar = scalar
        return _OPS.part_features(x, scalar, weight, bias)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        x, weight = ctx.saved_tensors
        return _OPS.part_features_backward(*gradients, x, ctx.scalar, weight), None, None, None


class FusedOperators(Module):
    """What :class:`~openmm_tensornet.network.PortableOperators` computes, in one kernel each."""

    def __init__(self, model: TensorNet, charge: Tensor, dtype: torch.dtype):
        super().__init__()
        table = tensors.product_table()
        both = model.config.group == "O(3)"
        turned = table.transpose(0, 1)
        self._terms("product", table + turned if both else 2 * turned, dtype)
        self._terms("square", (table + turned) / 2, dtype)
        self.register_buffer("square_factor", (1 + 0.1 * charge).to(dtype))
        self.register_buffer("product_factor", self.square_factor if both else torch.ones_like(self.square_factor))
        self.scalar = 3 * tensors.ONE_THIRD

    def _terms(self, name: str, table: Tensor, dtype: torch.dtype) -> None:
        """Register the terms (c, p, q) of a product and their weights."""
        terms = torch.nonzero(table.permute(2, 0, 1).abs() > 1e-12)
        self.register_buffer(f"{name}_terms", terms)
        self.register_buffer(f"{name}_weights", table[terms[:, 1], terms[:, 2], terms[:, 0]].to(dtype))

    def direction(self, r: Tensor) -> tuple[Tensor, Tensor]:
        return _Direction.apply(r)

    def pair_forces(self, pairs: Tensor, forces: Tensor, start: Tensor) -> Tensor:
        return _OPS.pair_forces(pairs, forces, start)

    def block_message(self, weight: Tensor, scale: Tensor, y: Tensor) -> Tensor:
        return _BlockMessage.apply(weight, scale, y)

    def norm_features(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return _NormFeatures.apply(x, weight, bias)

    def normalize(self, x: Tensor) -> Tensor:
        return _Normalize.apply(x)

    def gate(self, x: Tensor, gates: Tensor, normalize: bool) -> Tensor:
        return _Gate.apply(x, gates, normalize)

    def product(self, y: Tensor, m: Tensor) -> Tensor:
        return _Product.apply(y, m, self.product_factor, self.product_terms, self.product_weights)

    def plus_square(self, x: Tensor, d: Tensor, normalize: bool) -> Tensor:
        return _PlusSquare.apply(x, d, self.square_factor, self.square_terms, self.square_weights, normalize)

    def part_features(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return _PartFeatures.apply(x, self.scalar, weight, bias)


class FusedPairs(Module):
    """The pairs closer than the cutoff, found in cells; like :class:`~openmm_tensornet.neighbors.SelectedPairs`."""

    def __init__(self, molecules: Tensor, periodic: bool, cutoff: float, capacity: int):
        super().__init__()
        self.periodic, self.cutoff, self.capacity = periodic, cutoff, capacity
        self.register_buffer("molecules", molecules)
        self.register_buffer("no_box", torch.zeros(0, 3, dtype=torch.float64))

    def forward(self, positions: Tensor, box: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        lattice = box if self.periodic else self.no_box
        pairs, vectors, found = _OPS.near_pairs(positions, lattice, self.molecules, self.cutoff, self.capacity)
        return pairs, vectors, (found > self.capacity).any()


class FusedSums(Module):
    """Sums over a list of pairs i<j, like :class:`~openmm_tensornet.blocks.PairSums`; functions are evaluated inside.

    Parameters
    ----------
    radial : RadialTable
        Of the embedding and all layers.
    receiver, sender : Tensor, shape (A, F)
        Z_ij = receiver_i + sender_j.
    self_functions : Tensor, shape (G·F,)
        Radial functions at d = 0, for the self pair.
    """

    def __init__(self, radial: RadialTable, receiver: Tensor, sender: Tensor, self_functions: Tensor):
        super().__init__()
        channels = receiver.shape[1]
        self.lower, self.step = radial.lower, radial.step
        own = self_functions.view(-1, 3, channels)
        part = torch.arange(3).repeat_interleave(torch.tensor(tensors.PART_SIZES))
        self.register_buffer("receiver", receiver)
        self.register_buffer("sender", sender)
        self.register_buffer("own_embedding", (receiver + sender) * own[0, 0])
        self.layers = own.shape[0] - 1
        for k, table in enumerate(radial.tables(own.shape[0])):
            self.register_buffer(f"table_{k}", table.to(receiver.dtype))
            if k > 0:
                self.register_buffer(f"own_{k}", own[k].index_select(0, part))

    def forward(self, distance: Tensor, unit: Tensor, pairs: Tensor) -> tuple[Tensor, Any]:
        """Embed, and name what each layer's :meth:`message` needs."""
        table: Any = self.table_0
        x = _Embed.apply(
            distance, unit, pairs, self.receiver, self.sender, self.own_embedding, table, self.lower, self.step
        )
        return x, tuple((k, distance, pairs) for k in range(1, self.layers + 1))

    def message(self, weight: tuple[int, Tensor, Tensor], y: Tensor) -> Tensor:
        """M_i = Σ_j f_ij ⊙ Y_j, self pair included; (9, A, F)."""
        k, distance, pairs = weight
        own, table = getattr(self, f"own_{k}"), getattr(self, f"table_{k}")
        return _Message.apply(distance, pairs, own, table, self.lower, self.step, y)
