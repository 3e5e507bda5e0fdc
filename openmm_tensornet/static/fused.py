"""The fused operators with their derivatives, behind the interfaces of the portable program."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common.module import Module
from ..kernels import operators  # noqa: F401  registers them
from ..models import tensors
from ..models.tensornet import TensorNet
from ..models.tensornet2 import TensorNet2
from .network import perceptron
from .tables import RadialTable

_OPS = torch.ops.openmm_tensornet


class _Geometry(torch.autograd.Function):
    @staticmethod
    def forward(ctx, positions, box, pairs, by_atom, far, single) -> tuple[Tensor, Tensor]:
        distance, unit = _OPS.geometry(positions, box, pairs, by_atom, far, single)
        ctx.save_for_backward(distance, unit, pairs, by_atom)
        ctx.atoms = positions.shape[0]
        return distance, unit

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return _OPS.geometry_backward(*gradients, *ctx.saved_tensors, ctx.atoms), *(None,) * 5


class _Embed(torch.autograd.Function):
    """Also gives the distances back, so that what later uses of them bring is added in one kernel."""

    @staticmethod
    def forward(ctx, distance, unit, pairs, by_atom, receiver, sender, own, table, cutoff):
        ctx.save_for_backward(distance, unit, pairs, receiver, sender, table)
        ctx.cutoff = cutoff
        x = _OPS.embed(distance, unit, pairs, by_atom, receiver, sender, own, table, cutoff)
        return x, distance.view_as(distance)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return *_OPS.embed_backward(*gradients, *ctx.saved_tensors, ctx.cutoff), *(None,) * 7


class _Interact(torch.autograd.Function):
    @staticmethod
    def forward(ctx, distance, pairs, by_atom, own, table, cutoff, y, factor, both) -> Tensor:
        out, m = _OPS.interact(distance, pairs, by_atom, own, table, cutoff, y, factor, both)
        ctx.save_for_backward(distance, pairs, by_atom, own, table, y, m, factor)
        ctx.rest = cutoff, both
        return out

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        *saved, y, m, factor = ctx.saved_tensors
        cutoff, both = ctx.rest
        g_distance, g_y = _OPS.interact_backward(*gradients, *saved, cutoff, y, m, factor, both)
        return g_distance, *(None,) * 5, g_y, None, None


class _BlockMessage(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, scale, y) -> Tensor:
        ctx.save_for_backward(weight, scale, y)
        return _OPS.block_message(weight, scale, y)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return _OPS.block_message_backward(*gradients, *ctx.saved_tensors)


class _ChargeMessage(torch.autograd.Function):
    """With the packed transposes of the weights, for the backward pass, as last arguments."""

    @staticmethod
    def forward(ctx, distance, pairs, table, cutoff, own, terms, *rest) -> Tensor:
        *perceptron, y, back2, back1 = rest
        m, *hidden = _OPS.charge_message(distance, pairs, table, cutoff, own, terms, *perceptron, y)
        ctx.save_for_backward(distance, pairs, table, own, y, *hidden, back2, back1)
        ctx.cutoff = cutoff
        return m

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        distance, pairs, table, *saved = ctx.saved_tensors
        found = _OPS.charge_message_backward(*gradients, distance, pairs, table, ctx.cutoff, *saved)
        g_distance, g_terms, g_y = found
        return g_distance, *(None,) * 4, g_terms, *(None,) * 4, g_y, None, None


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
    def forward(ctx, x, gates, silu, normalize) -> Tensor:
        ctx.save_for_backward(x, gates)
        ctx.options = silu, normalize
        return _OPS.gate(x, gates, silu, normalize)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return *_OPS.gate_backward(*gradients, *ctx.saved_tensors, *ctx.options), None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, m, factor, both) -> Tensor:
        ctx.save_for_backward(y, m, factor)
        ctx.both = both
        return _OPS.product(y, m, factor, both)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return *_OPS.product_backward(*gradients, *ctx.saved_tensors, ctx.both), None, None


class _PlusSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, d, factor, normalize) -> Tensor:
        ctx.save_for_backward(x, d, factor)
        ctx.normalize = normalize
        return _OPS.plus_square(x, d, factor, normalize)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return *_OPS.plus_square_backward(*gradients, *ctx.saved_tensors, ctx.normalize), None, None


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight, bias, silu) -> Tensor:
        ctx.save_for_backward(h, weight)
        ctx.silu = silu
        return _OPS.head(h, weight, bias, silu)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return _OPS.head_backward(*gradients, *ctx.saved_tensors, ctx.silu), None, None, None


class _PartFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scalar, square, weight, bias) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = scalar, square
        return _OPS.part_features(x, scalar, square, weight, bias)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        x, weight = ctx.saved_tensors
        return _OPS.part_features_backward(*gradients, x, *ctx.options, weight), *(None,) * 4


class _Equilibrate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, molecule, charge) -> Tensor:
        ctx.save_for_backward(h, molecule, charge)
        return _OPS.equilibrate(h, molecule, charge)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return _OPS.equilibrate_backward(*gradients, *ctx.saved_tensors), None, None


class FusedOperators(Module):
    """What :class:`~openmm_tensornet.static.network.PortableOperators` computes, in one kernel each."""

    def __init__(self, model: TensorNet, charge: Tensor, dtype: torch.dtype, atoms: int, far: float):
        super().__init__()
        self.atoms, self.far, self.single = atoms, far, dtype == torch.float32
        self.activation: Any = model.activation
        self.silu = isinstance(self.activation, torch.nn.SiLU)
        self.both = model.config.group == "O(3)"
        self.register_buffer("square_factor", (1 + 0.1 * charge).to(dtype))
        self.register_buffer("factor", self.square_factor if self.both else torch.ones_like(self.square_factor))
        self.register_buffer("no_box", torch.zeros(0, 3, dtype=torch.float64))
        self.scalar = 3 * tensors.ONE_THIRD

    def geometry(self, positions: Tensor, box: Tensor | None, pairs: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            by_atom = _OPS.by_atom(pairs, self.atoms)
        lattice = self.no_box if box is None else box
        return _Geometry.apply(positions, lattice, pairs, by_atom, self.far, self.single)

    def block_message(self, weight: Tensor, scale: Tensor, y: Tensor) -> Tensor:
        return _BlockMessage.apply(weight, scale, y)

    def norm_features(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return _NormFeatures.apply(x, weight, bias)

    def normalize(self, x: Tensor) -> Tensor:
        return _Normalize.apply(x)

    def gate(self, x: Tensor, gates: Tensor, normalize: bool) -> Tensor:
        return _Gate.apply(x, gates if self.silu else self.activation(gates), self.silu, normalize)

    def interact(self, sums: Any, weight: Any, y: Tensor) -> Tensor:
        if isinstance(sums, FusedSums):
            return sums.interact(weight, y, self.factor, self.both)
        return _Product.apply(y, sums.message(weight, y), self.factor, self.both)

    def plus_square(self, x: Tensor, d: Tensor, normalize: bool) -> Tensor:
        return _PlusSquare.apply(x, d, self.square_factor, normalize)

    def part_features(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return _PartFeatures.apply(x, self.scalar, True, weight, bias)

    def invariant_features(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return _PartFeatures.apply(x, 3**-0.5, False, weight, bias)

    def equilibrate(self, h: Tensor, molecule: Tensor, charge: Tensor) -> Tensor:
        return _Equilibrate.apply(h.contiguous(), molecule, charge)

    def perceptron(self, h: Tensor, linears: Any) -> Tensor:
        return perceptron(h, linears, self.activation)

    def head(self, h: Tensor, linears: Any) -> Tensor:
        *linears, last = linears
        h = self.perceptron(h, linears)
        return _Head.apply(h if self.silu else self.activation(h), *last, self.silu)


class FusedPairs(Module):
    """The pairs closer than the cutoff, found in cells; like :class:`~openmm_tensornet.neighbors.lists.SelectedPairs`."""

    def __init__(self, molecules: Tensor, periodic: bool, cutoff: float, capacity: int):
        super().__init__()
        self.periodic, self.cutoff, self.capacity = periodic, cutoff, capacity
        self.register_buffer("molecules", molecules)
        self.register_buffer("no_box", torch.zeros(0, 3, dtype=torch.float64))

    def forward(self, positions: Tensor, box: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """As there, without vectors: :meth:`FusedOperators.geometry` takes them from the positions."""
        lattice = box if self.periodic else self.no_box
        pairs, found = _OPS.near_pairs(positions, lattice, self.molecules, self.cutoff, self.capacity)
        return pairs, self.no_box, (found > self.capacity).any()


class FusedSums(Module):
    """Sums over a list of pairs i<j, like :class:`~openmm_tensornet.static.aggregation.PairSums`; functions are evaluated inside.

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
        self.cutoff = radial.cutoff
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
        """Embed, and name what each layer's :meth:`interact` needs."""
        table: Any = self.table_0
        with torch.no_grad():
            by_atom = _OPS.by_atom(pairs, self.receiver.shape[0])
        x, distance = _Embed.apply(
            distance, unit, pairs, by_atom, self.receiver, self.sender, self.own_embedding, table, self.cutoff
        )
        return x, tuple((k, distance, pairs, by_atom) for k in range(1, self.layers + 1))

    def interact(self, weight: tuple, y: Tensor, factor: Tensor, both: bool) -> Tensor:
        """Product of Y with its message Σ_j f_ij ⊙ Y_j, self pair included; (9, A, F)."""
        k, distance, pairs, by_atom = weight
        own, table = getattr(self, f"own_{k}"), getattr(self, f"table_{k}")
        return _Interact.apply(distance, pairs, by_atom, own, table, self.cutoff, y, factor, both)


class ChargeTables(Module):
    """What sums of a TensorNet2 over a list of pairs have in common.

    Parameters
    ----------
    model : TensorNet2
    radial : list of RadialTable
        Of :func:`~openmm_tensornet.static.network2.charge_radial_functions`.
    self_functions : list of Tensor
        Their functions at d = 0, for the self pair.
    embedding : FusedSums
    slots : Tensor of int64, shape (2, P), optional
        Pairs of slots, where they are known beforehand and are not those of atoms that :meth:`forward` is given.
    """

    def __init__(
        self,
        model: TensorNet2,
        radial: list[RadialTable],
        self_functions: list[Tensor],
        embedding: FusedSums,
        slots: Tensor | None = None,
    ):
        super().__init__()
        self.embedding, self.layers, self.fixed = embedding, len(model.layers), slots is not None
        self.register_buffer("slots", torch.zeros(2, 0, dtype=torch.long) if slots is None else slots)
        self.dtype, channels = embedding.receiver.dtype, embedding.receiver.shape[1]
        k = 0
        for functions, own in zip(radial[1:], self_functions[1:], strict=True):
            self.cutoff = functions.cutoff
            (table,) = functions.tables(1)
            for first in range(
                0, table.shape[2] - 1, channels
            ):  # of each layer, and the cutoff function, which is last
                chosen = torch.cat((torch.arange(first, first + channels), torch.tensor([table.shape[2] - 1])))
                self.register_buffer(f"table_{k}", table.index_select(2, chosen).to(self.dtype))
                self.register_buffer(f"own_{k}", own.index_select(0, chosen).to(self.dtype))
                k += 1
        for k, layer in enumerate(model.layers):
            for which, linear in enumerate(layer.radial[1:], 1):
                self.register_buffer(f"bias{which}_{k}", linear.bias.detach().to(self.dtype))
                self.keep_weight(f"{which}_{k}", linear.weight.detach().to(self.dtype))

    def keep_weight(self, place: str, weight: Tensor) -> None:
        """Register a linear layer's weight, shape (out, in), as the message takes it, under names that end in `place`."""
        raise NotImplementedError

    def forward(self, distance: Tensor, unit: Tensor, pairs: Tensor) -> tuple[Tensor, Any]:
        """As in ChargePairSums."""
        pairs = self.slots if self.fixed else pairs
        x, _ = self.embedding(distance, unit, pairs)
        return x, tuple((k, distance, pairs) for k in range(self.layers))


class FusedChargeSums(ChargeTables):
    """Sums of a TensorNet2 with SiLU, like :class:`~openmm_tensornet.static.network2.ChargePairSums`; arguments as of the base."""

    def keep_weight(self, place: str, weight: Tensor) -> None:
        from ..kernels.cpu.matmul import pack  # which needs numba

        self.register_buffer(f"panels{place}", pack(weight.T))
        self.register_buffer(f"back{place}", pack(weight))

    def message(self, weight: Any, y: Tensor) -> Tensor:
        """As in ChargePairSums."""
        (k, distance, pairs), terms = weight
        table, own, *perceptron = (
            getattr(self, f"{name}_{k}") for name in ("table", "own", "panels1", "bias1", "panels2", "bias2")
        )
        back = getattr(self, f"back2_{k}"), getattr(self, f"back1_{k}")
        return _ChargeMessage.apply(distance, pairs, table, self.cutoff, own, terms, *perceptron, y, *back)
