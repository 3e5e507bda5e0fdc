"""The TensorNet2 of :mod:`openmm_tensornet.models.tensornet2`, specialised to fixed atoms: what it has beyond a TensorNet.

A layer's scalar function of a pair, σ(L₂σ(L₁σ(L₀[rbf, q_i, q_j]))), depends on the charges of receiver i and sender j, so that f_ij
and f_ji differ. Its first linear layer is taken apart: the radial share is tabulated, those of the charges are computed once for each
atom, and added for each directed pair.

Shapes as in :mod:`openmm_tensornet.static.aggregation`; K charge channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..common.module import Module
from ..models import tensors
from ..models.coulomb import coulomb_interaction
from ..models.tensornet2 import TensorNet2
from .aggregation import DenseBlocks, PairSums, _Expand, _joined, _scale_parts, _sum_parts, part_scales
from .network import StaticNetwork, _affines

# Pairs of a layer's list that are evaluated at a time, in chunks of the embedding's: larger ones suit matrix products.
CHUNKS_AT_ONCE = 8


class _EmbeddingFunctions(Module):
    """C(d)·P rbf(d) as the static network takes it: distances in nm, (D,), to (D, 3F)."""

    def __init__(self, model: TensorNet2):
        super().__init__()
        self.model = model
        self.register_buffer("scales", part_scales().unsqueeze(1).to(model.mean.dtype))

    def forward(self, distance: Tensor) -> Tensor:
        d = distance / self.model.units.nm_per_length
        values = self.model.embedding.radial_weight(self.model.rbf(d)) * self.scales
        return (self.model.cutoff_function(d)[:, None, None] * values).flatten(1)


class _LayerFunctions(Module):
    """Radial share of the first linear layer of some layers, and C(d): distances in nm, (D,), to (D, layers·F + 1)."""

    def __init__(self, model: TensorNet2, layers: list[int]):
        super().__init__()
        self.model, self.layers = model, layers

    def forward(self, distance: Tensor) -> Tensor:
        d = distance / self.model.units.nm_per_length
        rbf = self.model.rbf(d)
        shares = [rbf @ self.model.layers[k].radial[0].weight[:, : rbf.shape[1]].T for k in self.layers]
        return torch.cat((*shares, self.model.cutoff_function(d).unsqueeze(1)), dim=1)


def charge_radial_functions(model: TensorNet2, dense: bool) -> list[nn.Module]:
    """What is tabulated: functions of the embedding, then of all layers together (dense blocks) or each (lists)."""
    layers = list(range(len(model.layers)))
    groups = [layers] if dense else [[k] for k in layers]
    return [_EmbeddingFunctions(model), *(_LayerFunctions(model, group) for group in groups if group)]


class _PairFunction(Module):
    """σ(L₂σ(L₁σ(h))) of a layer, (E, 3F), from what its first linear layer gives, (E, F)."""

    def __init__(self, layer: Any, dtype: torch.dtype):
        super().__init__()
        self.linears: Any = _affines(layer.radial[1:], dtype)
        self.activation: Any = layer.activation

    def forward(self, h: Tensor) -> Tensor:
        h = self.activation(h)
        for weight, bias in self.linears:
            h = self.activation(torch.addmm(bias, h, weight))
        return h


class ChargeBlocks(DenseBlocks):
    """All pairs of each replica in padded blocks, both directions of each.

    Parameters
    ----------
    model : TensorNet2
    radial : list of nn.Module
        Tables of :func:`charge_radial_functions`.
    self_functions : list of Tensor
        Their functions at d = 0, for the self pair.
    operators : nn.Module
        As in :class:`~openmm_tensornet.static.network.StaticNetwork`.
    embedding : nn.Module or None
        Sums of the embedding over `pairs` in place of its own.
    pairs, occupied, species
        As in :class:`~openmm_tensornet.static.aggregation.DenseBlocks`.
    """

    def __init__(
        self,
        model: TensorNet2,
        radial: list[nn.Module],
        self_functions: list[Tensor],
        operators: Any,
        embedding: nn.Module | None,
        pairs: Tensor,
        occupied: Tensor,
        species: Tensor,
    ):
        super().__init__(radial[0], pairs, occupied, species, self_functions[0])
        self.operators, self.embedding = operators, embedding
        self.register_buffer("pairs", pairs)
        self.pair_functions: Any = nn.ModuleList(_PairFunction(layer, species.dtype) for layer in model.layers)
        if self.pair_functions:
            self.layer_radial = radial[1]
            own = self_functions[1]
            self.register_buffer("layer_constant", torch.stack((own, torch.zeros_like(own))))

    def forward(self, distance: Tensor, unit: Tensor, pairs: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        x, _ = (super().forward if self.embedding is None else self.embedding)(distance, unit, self.pairs)
        if not self.pair_functions:
            return x, ()
        rows = _Expand.apply(self.layer_radial(distance), self.layer_constant, self.row, self.forth, self.back)
        *shares, c = rows.split([self.channels] * len(self.pair_functions) + [1], dim=1)
        return x, tuple((k, share, c) for k, share in enumerate(shares))

    def message(self, weight: Any, y: Tensor) -> Tensor:
        """As in DenseBlocks, with the terms of the charges, (A, 2F), of receivers and senders beside what `forward` gave."""
        (k, share, c), terms = weight
        receiver, sender = terms.chunk(2, dim=1)
        blocks, n = self.shape
        first = share.view(blocks, n, n, -1) + receiver.view(blocks, n, 1, -1) + sender.view(blocks, 1, n, -1)
        f = self.pair_functions[k](first.flatten(0, 2))
        return self.operators.block_message(f.view(blocks * n, n, 3, -1), c.view(blocks * n, n), y)


class ChargePairSums(PairSums):
    """Sums over a list of pairs i<j, both directions of each.

    Parameters
    ----------
    model : TensorNet2
    radial : list of nn.Module
        Tables of :func:`charge_radial_functions`.
    self_functions : list of Tensor
        Their functions at d = 0, for the self pair.
    embedding : nn.Module or None
        Sums of the embedding in place of its own.
    receiver, sender, chunk
        As in :class:`~openmm_tensornet.static.aggregation.PairSums`.
    """

    def __init__(
        self,
        model: TensorNet2,
        radial: list[nn.Module],
        self_functions: list[Tensor],
        embedding: nn.Module | None,
        receiver: Tensor,
        sender: Tensor,
        chunk: int,
    ):
        super().__init__(radial[:1], receiver, sender, self_functions[0], chunk)
        self.embedding = embedding
        self.layer_radial: Any = nn.ModuleList(radial[1:])
        self.pair_functions: Any = nn.ModuleList(_PairFunction(layer, receiver.dtype) for layer in model.layers)
        for k, own in enumerate(self_functions[1:]):
            self.register_buffer(f"own_{k}", own)
        self.register_buffer("part", torch.arange(3).repeat_interleave(torch.tensor(tensors.PART_SIZES)))

    def forward(self, distance: Tensor, unit: Tensor, pairs: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        x, _ = (super().forward if self.embedding is None else self.embedding)(distance, unit, pairs)
        return x, tuple((k, distance, pairs) for k in range(len(self.pair_functions)))

    def message(self, weight: Any, y: Tensor) -> Tensor:
        """As in PairSums, with the terms of the charges, (N, 2F), of receivers and senders beside what `forward` gave."""
        (k, distance, pairs), terms = weight
        receiver, sender = terms.chunk(2, dim=1)
        share, c = getattr(self, f"own_{k}").split([receiver.shape[1], 1])
        own = (self.pair_functions[k](share + receiver + sender) * c).unflatten(1, (3, -1)).index_select(1, self.part)
        y = y.transpose(0, 1)
        others = _ListMessage.apply(self, k, pairs, distance, receiver, sender, y.contiguous())
        return (own * y + others).transpose(0, 1)

    def directed(self, k: int, pairs: Tensor, distance: Tensor, receiver: Tensor, sender: Tensor):
        """Chunks of directed pairs: receivers and senders, the first linear layer's values, C(d), and what a slope needs."""
        size = CHUNKS_AT_ONCE * self.chunk
        for i, j, d in zip(*(v.split(size) for v in (*pairs.unbind(0), distance)), strict=True):
            a, b = torch.cat((i, j)), torch.cat((j, i))
            values, saved = self.layer_radial[k].evaluate(d)
            share, c = torch.cat((values, values)).split([receiver.shape[1], 1], dim=1)
            yield a, b, share + receiver.index_select(0, a) + sender.index_select(0, b), c, saved


class _ListMessage(torch.autograd.Function):
    """Σ_j f_ij ⊙ Y_j over both directions of a list, (N, 9, F), from distances (P,), charge terms (N, F) and Y (N, 9, F).

    What the pairs' functions need for their derivative is kept: to compute it again would take as long as the backward pass.
    """

    @staticmethod
    def forward(
        ctx, sums: ChargePairSums, k: int, pairs: Tensor, distance: Tensor, receiver: Tensor, sender: Tensor, y: Tensor
    ) -> Tensor:
        ctx.sums, ctx.k, ctx.kept = sums, k, []
        ctx.save_for_backward(y)
        m = torch.zeros_like(y)
        for a, b, first, c, saved in sums.directed(k, pairs, distance, receiver, sender):
            with torch.enable_grad():
                first = first.detach().requires_grad_(True)
                s = sums.pair_functions[k](first)
            ctx.kept.append((a, b, first, s, c, saved))
            m = m.index_add_(0, a, _scale_parts(y.index_select(0, b), (s.detach() * c).unflatten(1, (3, -1))))
        return m

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        (y,) = ctx.saved_tensors
        gm = gradients[0].contiguous()
        gy = torch.zeros_like(y)
        to_receiver, to_sender = y.new_zeros(y.shape[0], y.shape[2]), y.new_zeros(y.shape[0], y.shape[2])
        to_distance = []
        for a, b, first, s, c, saved in ctx.kept:
            gm_a = gm.index_select(0, a)
            gf = _sum_parts(gm_a * y.index_select(0, b)).flatten(1)
            (g_first,) = torch.autograd.grad(s, first, gf * c)
            s = s.detach()
            gy = gy.index_add_(0, b, _scale_parts(gm_a, (s * c).unflatten(1, (3, -1))))
            to_receiver = to_receiver.index_add_(0, a, g_first)
            to_sender = to_sender.index_add_(0, b, g_first)
            forth, back = torch.cat((g_first, (gf * s).sum(1, keepdim=True)), dim=1).chunk(2)
            to_distance.append(ctx.sums.layer_radial[ctx.k].slope(saved, forth + back))
        return None, None, None, _joined(to_distance), to_receiver, to_sender, gy


class ChargeNetwork(StaticNetwork):
    """Everything between pair vectors and the energy and charges of each slot.

    Parameters
    ----------
    model : TensorNet2
        Its weights are copied.
    sums : nn.Module
        :class:`ChargeBlocks` or :class:`ChargePairSums`.
    operators : nn.Module
        As in :class:`~openmm_tensornet.static.network.StaticNetwork`.
    replicas : Tensor of int64, shape (A,)
        Replica of each slot.
    occupied : Tensor of bool, shape (A,)
        Which slots hold an atom.
    total_charge : Tensor of float64, shape (M,)
        Of each replica.
    dtype : torch.dtype
    """

    def __init__(
        self,
        model: TensorNet2,
        sums: Any,
        operators: Any,
        replicas: Tensor,
        occupied: Tensor,
        total_charge: Tensor,
        dtype: torch.dtype,
    ):
        super().__init__(model, sums, operators, dtype)
        self.padded = not bool(occupied.all())
        num_rbf, k = model.config.num_rbf, model.config.q_dim
        self.register_buffer("replica", replicas)
        self.register_buffer("occupied", occupied.unsqueeze(1).to(dtype))
        self.register_buffer("total_charge", total_charge.to(dtype))
        self.predictions: Any = nn.ModuleList(_affines((part.norm, *part.mlp), dtype) for part in model.charges)
        for index, layer in enumerate(model.layers):
            receiver, sender = layer.radial[0].weight.detach()[:, num_rbf:].T.split(k)
            bias = layer.radial[0].bias.detach()
            self.register_buffer(f"charge_in_{index}", torch.cat((receiver, sender), dim=1).to(dtype))
            self.register_buffer(f"charge_bias_{index}", torch.cat((bias, torch.zeros_like(bias))).to(dtype))

    def forward(self, distance: Tensor, unit: Tensor, pairs: Tensor) -> tuple[Tensor, list[Tensor]]:  # type: ignore[override]
        """Head outputs, shape (A,), and the charges, (A, K), of the embedding and each layer; arguments as in StaticNetwork."""
        x, weights = self.sums(distance, unit, pairs)
        x = self._embed(x, normalize=False)
        charges = [self._predict(0, x)]
        for k, weight in enumerate(weights):
            terms = torch.addmm(getattr(self, f"charge_bias_{k}"), charges[-1], getattr(self, f"charge_in_{k}"))
            x = self._interact(k, self.operators.normalize(x), (weight, terms), normalize=False)
            charges.append(self._predict(k + 1, x))
        return self._read(x), charges

    def _predict(self, index: int, x: Tensor) -> Tensor:
        """Charges, shape (A, K)."""
        norm, *linears = self.predictions[index]
        h = self.operators.perceptron(self.operators.invariant_features(x, *norm), linears)
        if self.padded:
            h = h * self.occupied
        return self.operators.equilibrate(h, self.replica, self.total_charge)


class StaticCoulomb(Module):
    """Coulomb energy of each slot: half of that with every other atom of its replica.

    The interactions of all pairs form a matrix for each block, which multiplies the charges of all channels at once.

    Parameters
    ----------
    model : TensorNet2
    shape : tuple of int
        Blocks B and slots n of each; (1, N) for a list of pairs.
    dtype : torch.dtype
    """

    def __init__(self, model: TensorNet2, shape: tuple[int, int], dtype: torch.dtype):
        super().__init__()
        self.shape = shape
        self.cutoff = model.config.coulomb_cutoff
        self.per_nm = 1 / model.units.nm_per_length
        weights = model.charge_weights.double()
        self.register_buffer("weights", (0.5 * weights / weights.sum()).to(dtype))
        self.register_buffer("zeros", torch.zeros(shape[0] * shape[1] * shape[1], dtype=dtype))

    def forward(self, charges: list[Tensor], distance: Tensor, pairs: Tensor) -> Tensor:
        """Energies, shape (A,), model units, of charges, (A, K) each, distances in nm, (P,), and pairs of slots, (2, P)."""
        blocks, n = self.shape
        interaction = coulomb_interaction(distance * self.per_nm, self.cutoff)
        with torch.no_grad():
            i, j = pairs.unbind(0)
            forth, back = (torch.add(b.remainder(n), a, alpha=n) for a, b in ((i, j), (j, i)))
        matrix = self.zeros.index_add(0, forth, interaction).index_add(0, back, interaction)
        q = torch.cat(charges, dim=1).view(blocks, n, -1)
        potential = torch.bmm(matrix.view(blocks, n, n), q)
        return (q * potential * self.weights).sum(2).flatten()
