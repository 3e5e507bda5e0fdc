"""Sums over pairs in the static potential, each pair evaluated once.

Two ways with one interface, compared with each other and with the reference model in the tests:

* :class:`DenseBlocks`: all pairs of each replica as a block of n×n atoms. No gathering of features: the cheaper one
  for small molecules (up to DENSE_ATOMS of :mod:`.program`).
* :class:`PairSums`: pairs as a list, gathered and added; for large molecules, where most pairs are beyond the cutoff.

Shapes: A slots for atoms (replicas padded to equal size), P pairs i<j, F channels, G = 3(1+layers) radial functions
a channel. Tensors of the network are (9, A, F), components in the orthonormal basis of :mod:`openmm_tensornet.models.tensors`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..common.module import Module
from ..models import tensors


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


class DenseBlocks(Module):
    """All pairs of each replica in padded blocks.

    Parameters
    ----------
    radial : nn.Module
        Distances, shape (P,), to functions, shape (P, G·F).
    pairs : Tensor of int64, shape (2, P)
        Pairs i<j of slots; a slot is replica·n + place.
    occupied : Tensor of bool, shape (B, n)
        Which slots hold an atom.
    species : Tensor, shape (A, n, F)
        Z_ij of each slot with each of its replica's; zero where a slot is empty.
    self_functions : Tensor, shape (G·F,)
        Radial functions at d = 0, for the self pair.
    """

    def __init__(self, radial: nn.Module, pairs: Tensor, occupied: Tensor, species: Tensor, self_functions: Tensor):
        super().__init__()
        self.radial = radial
        blocks, n = occupied.shape
        self.shape = (blocks, n)
        self.channels = species.shape[-1]
        count = pairs.shape[1]
        forth = pairs[0] * n + pairs[1] % n
        back = pairs[1] * n + pairs[0] % n
        own = torch.arange(blocks * n)[occupied.flatten()]
        own = own * n + own % n
        row = torch.full((blocks * n * n,), count + 1)
        row[forth] = row[back] = torch.arange(count)
        sign = torch.zeros(blocks * n * n, 8, dtype=species.dtype)
        sign[forth] = 1.0
        sign[back, :3], sign[back, 3:] = -1.0, 1.0
        row[own], sign[own] = count, 0.0  # last: without any pair, a far one stands at the diagonal
        # Where there is no pair, the sign is zero and any direction will do.
        direction = torch.where(row < count, row, 0)
        for name, value in (
            ("row", row),
            ("direction", direction),
            ("forth", forth),
            ("back", back),
            ("sign", sign),
        ):
            self.register_buffer(name, value)
        self.register_buffer("constant", torch.stack((self_functions, torch.zeros_like(self_functions))))
        self.register_buffer("species", species.unsqueeze(2))
        self.register_buffer("ones", sign.new_ones(blocks * n, 1, n))
        self.register_buffer("components", symmetric_components().to(species.dtype))

    def forward(self, distance: Tensor, unit: Tensor, pairs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Embed, and prepare the layers' weights.

        Parameters
        ----------
        distance : Tensor, shape (P,)
        unit : Tensor, shape (P, 3)
        pairs : Tensor of int64, shape (2, P)
            Not used: all pairs are known beforehand.

        Returns
        -------
        x : Tensor, shape (9, A, F)
            Σ_j Z_ij C(d) P rbf(d) ⊙ geometry, the self pair included.
        weights : tuple of Tensor, shape (A, n, 3, F)
            For :meth:`message`, one for each layer.
        """
        blocks, n = self.shape
        edges = _Expand.apply(self.radial(distance), self.constant, self.row, self.forth, self.back)
        first, *weights = edges.view(blocks * n, n, -1, self.channels).split(3, dim=2)
        geometry = _Geometry.apply(unit, self.components)
        geometry = _Expand.apply(geometry, None, self.direction, self.forth, self.back) * self.sign
        vector, symmetric = geometry.view(blocks * n, n, 8).split((3, 5), dim=2)
        w_i, w_a, w_s = (first * self.species).unbind(2)
        x = torch.cat((torch.bmm(self.ones, w_i), torch.bmm(vector.mT, w_a), torch.bmm(symmetric.mT, w_s)), dim=1)
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


class PairSums(Module):
    """Sums over a list of pairs i<j of atoms, chunk by chunk, so that what is gathered stays in cache.

    Unused slots of the list have a distance beyond the cutoff, where all functions are zero, so that the atoms they name
    receive exactly nothing. Backward gathers again instead of keeping what forward gathered.

    Parameters
    ----------
    radial : list of nn.Module
        Radial functions of the embedding and of each layer (3F each), with `evaluate` and `slope` as in
        :class:`~openmm_tensornet.static.tables.RadialTable`.
    receiver, sender : Tensor, shape (N, F)
        Z_ij = receiver_i + sender_j.
    self_functions : Tensor, shape (G·F,)
        Radial functions at d = 0, for the self pair.
    chunk : int
        Pairs at a time.
    """

    def __init__(self, radial: list[nn.Module], receiver: Tensor, sender: Tensor, self_functions: Tensor, chunk: int):
        super().__init__()
        self.chunk = chunk
        self.radial: Any = nn.ModuleList(radial)
        atoms, channels = receiver.shape
        own = self_functions.view(-1, 3, channels)
        part = torch.arange(3).repeat_interleave(torch.tensor(tensors.PART_SIZES))
        self.register_buffer("receiver", receiver)
        self.register_buffer("sender", sender)
        embedded = torch.zeros(atoms, 9, channels, dtype=receiver.dtype)
        embedded[:, 0] = (receiver + sender) * own[0, 0]
        self.register_buffer("own_embedding", embedded)
        self.register_buffer("own_weights", own[1:].index_select(1, part))  # (L, 9, F)
        self.register_buffer("components", symmetric_components().to(receiver.dtype))
        self.register_buffer("sign", torch.tensor([-1.0] * 3 + [1.0] * 5, dtype=receiver.dtype))

    def forward(self, distance: Tensor, unit: Tensor, pairs: Tensor) -> tuple[Tensor, tuple[tuple, ...]]:
        """Embed, and name what each layer's :meth:`message` needs; shapes as :meth:`DenseBlocks.forward`."""
        geometry = _Geometry.apply(unit, self.components)
        x = _ListEmbedding.apply(self, pairs, distance, geometry)
        return x.transpose(0, 1), tuple((k, distance, pairs) for k in range(1, len(self.radial)))

    def message(self, weight: tuple[int, Tensor, Tensor], y: Tensor) -> Tensor:
        """M_i = Σ_j f_ij ⊙ Y_j, self pair included; (9, N, F)."""
        k, distance, pairs = weight
        return _ListMessage.apply(self, k, pairs, distance, y.transpose(0, 1).contiguous()).transpose(0, 1)

    def chunks(self, pairs: Tensor, *values: Tensor):
        """Split pairs, shape (2, P), and values of pairs into chunks: receivers and senders of both directions, and values of pairs."""
        for i, j, *own in zip(*(v.split(self.chunk) for v in (*pairs.unbind(0), *values)), strict=True):
            yield torch.cat((i, j)), torch.cat((j, i)), *own

    def functions(self, k: int, distance: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Radial functions of one layer, shape (C, 3, F), and what their slope needs."""
        values, saved = self.radial[k].evaluate(distance)
        return values.unflatten(1, (3, -1)), saved

    def species(self, a: Tensor, b: Tensor) -> Tensor:
        """Z_ab, shape (2, C, 1, F), of both directions."""
        z = self.receiver.index_select(0, a) + self.sender.index_select(0, b)
        return z.unflatten(0, (2, -1)).unsqueeze(2)


def _joined(chunks: list[Tensor]) -> Tensor:
    """What the chunks of a list give; of one chunk without a copy."""
    return torch.cat(chunks) if len(chunks) > 1 else chunks[0]


def _scale_parts(rows: Tensor, factors: Tensor) -> Tensor:
    """Multiply rows, shape (C, 9, F) or twice as many, in place by factors of each part, shape (C, 3, F)."""
    parts = rows.unflatten(0, (-1, factors.shape[0])).split(tensors.PART_SIZES, dim=2)
    for part, factor in zip(parts, factors.split(1, dim=1), strict=True):
        part.mul_(factor)
    return rows


def _sum_parts(rows: Tensor) -> Tensor:
    """Sum components of each part; (C, 9, F) to (C, 3, F)."""
    scalar, vector, symmetric = rows.split(tensors.PART_SIZES, dim=1)
    return torch.cat((scalar, vector.sum(1, keepdim=True), symmetric.sum(1, keepdim=True)), dim=1)


class _ListEmbedding(torch.autograd.Function):
    """Σ_j Z_ij f_ij ⊙ geometry over a list, (N, 9, F), from distances (P,) and geometry (P, 8)."""

    @staticmethod
    def forward(ctx, sums: PairSums, pairs: Tensor, distance: Tensor, geometry: Tensor) -> Tensor:
        ctx.sums = sums
        ctx.save_for_backward(pairs, distance, geometry)
        x = sums.own_embedding.clone()
        for a, b, d, g in sums.chunks(pairs, distance, geometry):
            f = sums.functions(0, d)[0]
            scalar, vector, symmetric = (f * sums.species(a, b)).flatten(0, 1).split(1, dim=1)
            turned = torch.cat((g, g * sums.sign)).unsqueeze(2)
            message = torch.cat((scalar, vector * turned[:, :3], symmetric * turned[:, 3:]), dim=1)
            x = x.index_add_(0, a, message)
        return x

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        sums = ctx.sums
        pairs, distance, geometry = ctx.saved_tensors
        gx = gradients[0].contiguous()
        to_distance, to_geometry = [], []
        for a, b, d, g in sums.chunks(pairs, distance, geometry):
            f, saved = sums.functions(0, d)
            gf: Tensor | None = None
            gg: Tensor | None = None
            both = zip(sums.species(a, b).unbind(0), gx.index_select(0, a).chunk(2), (None, sums.sign), strict=True)
            for z, gx_a, sign in both:
                turned = (g if sign is None else g * sign).unsqueeze(2)
                scalar, directed = gx_a.split((1, 8), dim=1)
                w_vector, w_symmetric = (f * z).split((1, 1, 1), dim=1)[1:]
                vector, symmetric = directed.split((3, 5), dim=1)
                along = torch.cat(
                    (torch.bmm(vector, w_vector.mT), torch.bmm(symmetric, w_symmetric.mT)), dim=1
                ).squeeze(2)
                by_part = torch.cat(
                    (scalar, torch.bmm(turned[:, :3].mT, vector), torch.bmm(turned[:, 3:].mT, symmetric)),
                    dim=1,
                )
                gf = by_part * z if gf is None else gf.addcmul_(by_part, z)
                gg = along if gg is None else gg.addcmul_(along, sums.sign)
            assert gf is not None and gg is not None
            to_distance.append(sums.radial[0].slope(saved, gf.flatten(1)))
            to_geometry.append(gg)
        return None, None, _joined(to_distance), _joined(to_geometry)


class _ListMessage(torch.autograd.Function):
    """Σ_j f_ij ⊙ Y_j over a list, self pair included; (N, 9, F) from distances (P,) and Y (N, 9, F)."""

    @staticmethod
    def forward(ctx, sums: PairSums, k: int, pairs: Tensor, distance: Tensor, y: Tensor) -> Tensor:
        ctx.sums, ctx.k = sums, k
        ctx.save_for_backward(pairs, distance, y)
        m = y * sums.own_weights[k - 1]
        for a, b, d in sums.chunks(pairs, distance):
            f = sums.functions(k, d)[0]
            m = m.index_add_(0, a, _scale_parts(y.index_select(0, b), f))
        return m

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        sums, k = ctx.sums, ctx.k
        pairs, distance, y = ctx.saved_tensors
        gm = gradients[0].contiguous()
        gy = gm * sums.own_weights[k - 1]
        to_distance = []
        for a, b, d in sums.chunks(pairs, distance):
            f, saved = sums.functions(k, d)
            gm_a = gm.index_select(0, a)
            (gm_i, gm_j), (y_j, y_i) = gm_a.chunk(2), y.index_select(0, b).chunk(2)
            product = (gm_i * y_j).addcmul_(gm_j, y_i)
            to_distance.append(sums.radial[k].slope(saved, _sum_parts(product).flatten(1)))
            # f_ij = f_ji, so the derivative by Y is the same sum over the incoming gradient.
            gy = gy.index_add_(0, b, _scale_parts(gm_a, f))
        return None, None, None, _joined(to_distance), gy
