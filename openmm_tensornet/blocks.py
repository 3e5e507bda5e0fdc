"""Sums over pairs in the static potential, each pair evaluated once.

Two ways with one interface, compared with each other and with the reference model in the tests:

* :class:`DenseBlocks`: all pairs of each molecule as a block of n×n atoms. No gathering of features: the cheaper one
  for up to about a hundred atoms a molecule.
* :class:`PairSums`: pairs as a list, gathered and added; for large molecules, where most pairs are beyond the cutoff.

Shapes: A slots for atoms (molecules padded to equal size), P pairs i<j, F channels, G = 3(1+layers) radial functions
a channel. Tensors of the network are (9, A, F), components in the orthonormal basis of :mod:`openmm_tensornet.tensors`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from . import tensors


class _Expand(torch.autograd.Function):
    """Rows of pairs (and constant rows after them) to directed edges; backward adds a pair's two directions."""

    @staticmethod
    def forward(ctx, pairs: Tensor, constant: Tensor | None, row: Tensor, forth: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(forth, back)
        rows = pairs if constant is None else torch.cat((pairs, constant))
        return rows.index_select(0, row)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        forth, back = ctx.saved_tensors
        g = gradients[0]
        return g.index_select(0, forth) + g.index_select(0, back), None, None, None, None


class _Geometry(torch.autograd.Function):
    """Components (u, S of uuᵀ), shape (P, 8), of unit vectors, shape (P, 3)."""

    @staticmethod
    def forward(ctx, unit: Tensor, components: Tensor) -> Tensor:
        ctx.save_for_backward(unit, components)
        outer = (unit.unsqueeze(2) * unit.unsqueeze(1)).flatten(1)
        return torch.cat((unit, torch.mm(outer, components)), dim=1)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        unit, components = ctx.saved_tensors
        vector, symmetric = gradients[0].split((3, 5), dim=1)
        matrix = torch.mm(symmetric, components.T).unflatten(1, (3, 3))  # symmetric, hence the factor 2
        return torch.baddbmm(vector.unsqueeze(2), matrix, unit.unsqueeze(2), alpha=2).squeeze(2), None


def symmetric_components() -> Tensor:
    """Matrix C, shape (9, 5): the flattened outer product u uᵀ times C gives the five S components."""
    return tensors.basis()[4:].flatten(1).T.contiguous()


def part_scales() -> Tensor:
    """Factors of I, A and S of 𝟙, skew(u) and uuᵀ−𝟙/3 in the orthonormal basis, where the geometry is 1, u and C·uuᵀ."""
    return torch.tensor([math.sqrt(3), math.sqrt(2), 1.0], dtype=torch.float64)


class DenseBlocks(nn.Module):
    """All pairs of each molecule in padded blocks.

    Parameters
    ----------
    pairs : Tensor of int64, shape (2, P)
        Pairs i<j of slots; a slot is molecule·n + place.
    occupied : Tensor of bool, shape (B, n)
        Which slots hold an atom.
    species : Tensor, shape (A, n, F)
        Z_ij of each slot with each of its molecule's; zero where a slot is empty.
    self_functions : Tensor, shape (G·F,)
        Radial functions at d = 0, for the self pair.
    """

    def __init__(self, pairs: Tensor, occupied: Tensor, species: Tensor, self_functions: Tensor):
        super().__init__()
        blocks, n = occupied.shape
        self.shape = (blocks, n)
        self.channels = species.shape[-1]
        count = pairs.shape[1]
        forth = pairs[0] * n + pairs[1] % n
        back = pairs[1] * n + pairs[0] % n
        own = torch.arange(blocks * n)[occupied.flatten()]
        own = own * n + own % n
        row = torch.full((blocks * n * n,), count + 1)
        row[own] = count
        row[forth] = row[back] = torch.arange(count)
        sign = torch.zeros(blocks * n * n, 8, dtype=species.dtype)
        sign[forth] = 1.0
        sign[back, :3], sign[back, 3:] = -1.0, 1.0
        # Where there is no pair, the sign is zero and any direction will do.
        direction = torch.where(row < count, row, 0)
        for name, value in (("row", row), ("direction", direction), ("forth", forth), ("back", back), ("sign", sign)):
            self.register_buffer(name, value)
        self.register_buffer("constant", torch.stack((self_functions, torch.zeros_like(self_functions))))
        self.register_buffer("species", species.unsqueeze(2))
        self.register_buffer("ones", sign.new_ones(blocks * n, 1, n))
        self.register_buffer("components", symmetric_components().to(species.dtype))

    def forward(self, functions: Tensor, unit: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Embed, and prepare the layers' weights.

        Parameters
        ----------
        functions : Tensor, shape (P, G·F)
        unit : Tensor, shape (P, 3)

        Returns
        -------
        x : Tensor, shape (9, A, F)
            Σ_j Z_ij C(d) P rbf(d) ⊙ geometry, the self pair included.
        weights : tuple of Tensor, shape (A, n, 3, F)
            For :meth:`message`, one for each layer.
        """
        blocks, n = self.shape
        edges = _Expand.apply(functions, self.constant, self.row, self.forth, self.back)
        first, *weights = edges.view(blocks * n, n, -1, self.channels).split(3, dim=2)
        geometry = _Geometry.apply(unit, self.components)
        geometry = _Expand.apply(geometry, None, self.direction, self.forth, self.back) * self.sign
        vector, symmetric = geometry.view(blocks * n, n, 8).split((3, 5), dim=2)
        w_i, w_a, w_s = (first * self.species).unbind(2)
        x = torch.cat(
            (torch.bmm(self.ones, w_i), torch.bmm(vector.mT, w_a), torch.bmm(symmetric.mT, w_s)), dim=1
        )
        return x.transpose(0, 1), tuple(weights)

    def message(self, weight: Tensor, y: Tensor) -> Tensor:
        """M_i = Σ_j f_ij ⊙ Y_j of each part, self pair included; (9, A, F) from weights (A, n, 3, F) and Y (9, A, F)."""
        blocks, n = self.shape
        f = weight.view(blocks, n, n, 3, self.channels)
        parts = [
            (f_part.unsqueeze(0) * y_part.unflatten(1, (blocks, 1, n))).sum(3)
            for f_part, y_part in zip(f.unbind(3), y.split(tensors.PART_SIZES), strict=True)
        ]
        return torch.cat(parts).flatten(1, 2)


class PairSums(nn.Module):
    """Sums over a list of pairs i<j of atoms.

    The list comes with every evaluation (:meth:`set_pairs`), since it may depend on the positions. Unused slots of the list have
    a distance beyond the cutoff, where all functions are zero, so whatever atoms they name receive exactly nothing.

    Parameters
    ----------
    receiver, sender : Tensor, shape (N, F)
        Z_ij = receiver_i + sender_j.
    self_functions : Tensor, shape (G·F,)
        Radial functions at d = 0, for the self pair.
    """

    def __init__(self, receiver: Tensor, sender: Tensor, self_functions: Tensor):
        super().__init__()
        self.atoms, self.channels = receiver.shape
        own = self_functions.view(-1, 3, self.channels)
        part = torch.arange(3).repeat_interleave(torch.tensor(tensors.PART_SIZES))
        self.register_buffer("part", part)
        self.register_buffer("receiver", receiver)
        self.register_buffer("sender", sender)
        embedded = torch.zeros(9, self.atoms, self.channels, dtype=receiver.dtype)
        embedded[0] = (receiver + sender) * own[0, 0]
        self.register_buffer("own_embedding", embedded)
        self.register_buffer("own_weights", own[1:].index_select(1, part).unsqueeze(2))  # (L, 9, 1, F)
        self.register_buffer("components", symmetric_components().to(receiver.dtype))
        self.register_buffer("sign", torch.tensor([1.0] + [-1.0] * 3 + [1.0] * 5, dtype=receiver.dtype))

    def set_pairs(self, pairs: Tensor) -> None:
        """Pairs i<j of this evaluation, shape (2, P)."""
        self.pairs = pairs

    def forward(self, functions: Tensor, unit: Tensor) -> tuple[Tensor, tuple[tuple[Tensor, Tensor], ...]]:
        """Embed, and prepare the layers' weights; as :meth:`DenseBlocks.forward`."""
        i, j = self.pairs.unbind(0)
        first, *weights = functions.view(len(i), -1, 3, self.channels).unbind(1)
        geometry = torch.cat((torch.ones_like(unit[:, :1]), _Geometry.apply(unit, self.components)), dim=1)
        forth = first * (self.receiver.index_select(0, i) + self.sender.index_select(0, j)).unsqueeze(1)
        back = first * (self.receiver.index_select(0, j) + self.sender.index_select(0, i)).unsqueeze(1)
        x = self.own_embedding.transpose(0, 1)
        x = x.index_add(0, i, forth.index_select(1, self.part) * geometry.unsqueeze(-1))
        x = x.index_add(0, j, back.index_select(1, self.part) * (geometry * self.sign).unsqueeze(-1))
        return x.transpose(0, 1), tuple(zip(weights, self.own_weights.unbind(0), strict=True))

    def message(self, weight: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        """M_i = Σ_j f_ij ⊙ Y_j, self pair included; (9, N, F)."""
        pair_weight, own_weight = weight
        i, j = self.pairs.unbind(0)
        f = pair_weight.index_select(1, self.part)
        rows = y.transpose(0, 1)
        m = (y * own_weight).transpose(0, 1)
        m = m.index_add(0, i, f * rows.index_select(0, j)).index_add(0, j, f * rows.index_select(0, i))
        return m.transpose(0, 1)
