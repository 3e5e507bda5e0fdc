"""Parts of programs for GPUs alone that replace many small operators, behind the interfaces of the portable program."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common.module import Module
from ..kernels.operators import call
from ..models.tensornet2 import TensorNet2
from .fused import ChargeTables, FusedOperators

_OPS = torch.ops.openmm_tensornet


class GPUOperators(FusedOperators):
    """Linear layers in one kernel, where there are two or three and SiLU between them."""

    def perceptron(self, h: Tensor, linears: Any) -> Tensor:
        if self.silu and len(linears) in (2, 3):
            return call("perceptron", h, [tensor for linear in linears for tensor in linear])
        return super().perceptron(h, linears)

    def head(self, h: Tensor, linears: Any) -> Tensor:
        if self.silu and len(linears) in (2, 3):
            return self.perceptron(h, linears).squeeze(1)
        return super().head(h, linears)


class DirectedSums(ChargeTables):
    """Sums of a TensorNet2 with SiLU, like :class:`~openmm_tensornet.static.network2.ChargePairSums`; arguments as of the base."""

    def keep_weight(self, place: str, weight: Tensor) -> None:
        self.register_buffer(f"weight{place}", weight.T.contiguous())

    def message(self, weight: Any, y: Tensor) -> Tensor:
        """As in ChargePairSums."""
        (k, distance, pairs), terms = weight
        table, own, weight1, bias1, weight2, bias2 = (
            getattr(self, f"{name}_{k}") for name in ("table", "own", "weight1", "bias1", "weight2", "bias2")
        )
        with torch.no_grad():
            by_atom = _OPS.by_atom(pairs, y.shape[1])
        h, distance = call("pair_terms", distance, pairs, by_atom, table, self.cutoff, own, terms)
        h = torch.nn.functional.silu(torch.addmm(bias1, h, weight1))
        z = torch.addmm(bias2, h, weight2)
        return call("directed_message", distance, pairs, by_atom, table, self.cutoff, own, z, y)


class FusedCoulomb(Module):
    """Like :class:`~openmm_tensornet.static.network2.StaticCoulomb`, whose arguments it takes."""

    def __init__(self, model: TensorNet2, shape: tuple[int, int], dtype: torch.dtype):
        super().__init__()
        self.atoms = shape[0] * shape[1]
        self.cutoff = model.config.coulomb_cutoff or 0.0
        self.per_nm = 1 / model.units.nm_per_length
        weights = model.charge_weights.double()
        self.register_buffer("weights", (0.5 * weights / weights.sum()).to(dtype))

    def forward(self, charges: list[Tensor], distance: Tensor, pairs: Tensor) -> Tensor:
        with torch.no_grad():
            by_atom = _OPS.by_atom(pairs, self.atoms)
        q = torch.cat(charges, dim=1)
        return call("coulomb", distance, pairs, by_atom, q, self.weights, self.per_nm, self.cutoff)
