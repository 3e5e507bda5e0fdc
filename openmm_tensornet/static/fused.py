"""The package's own operators behind the interfaces of the portable program."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common.module import Module
from ..kernels.operators import call
from ..models import tensors
from ..models.tensornet import TensorNet
from ..models.tensornet2 import TensorNet2
from .network import perceptron
from .tables import RadialTable

_OPS = torch.ops.openmm_tensornet


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
        return call("geometry", positions, lattice, pairs, by_atom, self.far, self.single)

    def block_message(self, weight: Tensor, scale: Tensor, y: Tensor) -> Tensor:
        return call("block_message", weight, scale, y)

    def norm_features(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return call("norm_features", x, weight, bias)

    def normalize(self, x: Tensor) -> Tensor:
        return call("normalize", x)

    def gate(self, x: Tensor, gates: Tensor, normalize: bool) -> Tensor:
        return call("gate", x, gates if self.silu else self.activation(gates), self.silu, normalize)

    def interact(self, sums: Any, weight: Any, y: Tensor) -> Tensor:
        if isinstance(sums, FusedSums):
            return sums.interact(weight, y, self.factor, self.both)
        return call("product", y, sums.message(weight, y), self.factor, self.both)

    def plus_square(self, x: Tensor, d: Tensor, normalize: bool) -> Tensor:
        return call("plus_square", x, d, self.square_factor, normalize)

    def part_features(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return call("part_features", x, self.scalar, True, weight, bias)

    def invariant_features(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return call("part_features", x, 3**-0.5, False, weight, bias)

    def equilibrate(self, h: Tensor, replica: Tensor, charge: Tensor) -> Tensor:
        return call("equilibrate", h.contiguous(), replica, charge)

    def perceptron(self, h: Tensor, linears: Any) -> Tensor:
        return perceptron(h, linears, self.activation)

    def head(self, h: Tensor, linears: Any) -> Tensor:
        *linears, last = linears
        h = self.perceptron(h, linears)
        return call("head", h if self.silu else self.activation(h), *last, self.silu)


class FusedPairs(Module):
    """The pairs closer than the cutoff, found by one operator; like :class:`~openmm_tensornet.neighbors.lists.SelectedPairs`."""

    def __init__(self, replicas: Tensor, periodic: bool, cutoff: float, capacity: int):
        super().__init__()
        self.periodic, self.cutoff, self.capacity = periodic, cutoff, capacity
        self.register_buffer("replicas", replicas)
        self.register_buffer("no_box", torch.zeros(0, 3, dtype=torch.float64))

    def forward(self, positions: Tensor, box: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """As there, without vectors: :meth:`FusedOperators.geometry` takes them from the positions."""
        lattice = box if self.periodic else self.no_box
        pairs, found = _OPS.near_pairs(positions, lattice, self.replicas, self.cutoff, self.capacity)
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
        x, distance = call(
            "embed", distance, unit, pairs, by_atom, self.receiver, self.sender, self.own_embedding, table, self.cutoff
        )
        return x, tuple((k, distance, pairs, by_atom) for k in range(1, self.layers + 1))

    def interact(self, weight: tuple, y: Tensor, factor: Tensor, both: bool) -> Tensor:
        """Product of Y with its message Σ_j f_ij ⊙ Y_j, self pair included; (9, A, F)."""
        k, distance, pairs, by_atom = weight
        own, table = getattr(self, f"own_{k}"), getattr(self, f"table_{k}")
        return call("interact", distance, pairs, by_atom, own, table, self.cutoff, y, factor, both)


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
        back = {name: getattr(self, f"{name}_{k}") for name in ("back2", "back1")}
        return call("charge_message", distance, pairs, table, self.cutoff, own, terms, *perceptron, y, **back)
