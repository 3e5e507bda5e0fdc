"""TensorNet2: a TensorNet that predicts partial charges, and lets them interact.

The charges are equilibrated as in AIMNet2 (D. M. Anstine, R. Zubatyuk, O. Isayev, Chem. Sci. 2025, 10.1039/D4SC08572H)
with TorchMD-Net's conventions.

Shapes: N atoms, M replicas, E directed pairs, F channels, L layers, K charge channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..common.module import Module
from ..common.units import ModelUnits
from ..neighbors.reference import Pairs
from . import tensors
from .coulomb import coulomb_interaction
from .priors import Prior
from .radial import cosine_cutoff
from .tensornet import ACTIVATIONS, TensorNet, TensorNetConfig, pair_geometry

# Keeps the equilibration finite where no atom of a replica may take charge.
SMALLEST_SHARE = 1e-6


@dataclass(frozen=True)
class TensorNet2Config(TensorNetConfig):
    """Shape and options of a TensorNet2.

    Attributes
    ----------
    q_dim : int
        Charge channels K.
    coulomb : bool
        Whether the energy holds the Coulomb interaction of the charges (the output model ScalarPlusWeightedCoulomb).
    coulomb_cutoff : float or None
        In model lengths: cutoff of the Coulomb interaction, with a reaction field; None takes all pairs of a replica, which is
        possible in vacuum only.
    """

    q_dim: int = 16
    coulomb: bool = True
    coulomb_cutoff: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.q_dim, int) or isinstance(self.q_dim, bool) or self.q_dim < 1:
            raise ValueError(f"q_dim: expected an integer of at least 1, received {self.q_dim!r}")
        if self.coulomb_cutoff is not None and not 0 < self.coulomb_cutoff < float("inf"):
            raise ValueError(f"coulomb_cutoff: expected a positive length or None, received {self.coulomb_cutoff!r}")

    @property
    def layer_inputs(self) -> int:
        return self.num_rbf + 2 * self.q_dim


class ChargePrediction(Module):
    """Partial charges of the atoms from their tensors, such that those of a replica sum to its total charge."""

    def __init__(self, config: TensorNet2Config):
        super().__init__()
        f = config.embedding_dimension
        self.norm = nn.LayerNorm(3 * f)
        self.mlp: Any = nn.ModuleList((nn.Linear(3 * f, f), nn.Linear(f, f), nn.Linear(f, 2 * config.q_dim)))
        self.activation: Any = ACTIVATIONS[config.activation]()

    def forward(self, x: Tensor, replicas: Tensor, total_charge: Tensor) -> Tensor:
        """Charges, shape (N, K), from tensors, shape (N, 3, 3, F), and total charges, shape (M,)."""
        scalar, a, s = tensors.decompose(x)
        h = self.norm(torch.cat((scalar, tensors.squared_norm(a), tensors.squared_norm(s)), dim=-1))
        for linear in self.mlp[:-1]:
            h = self.activation(linear(h))
        charge, share = self.mlp[-1](h).chunk(2, dim=-1)
        share = share**2
        zeros = share.new_zeros(len(total_charge), share.shape[-1])
        missing = total_charge.unsqueeze(-1) - zeros.index_add(0, replicas, charge)
        of_all = zeros.index_add(0, replicas, share) + SMALLEST_SHARE
        return charge + share / of_all[replicas] * missing[replicas]


def mean_charges(charges: Tensor, replicas: Tensor, total_charge: Tensor) -> Tensor:
    """Mean over channels, shape (N,), of charges of shape (N, K), such that those of a replica sum to its total charge.

    The equilibration leaves about 1e-5 e of it out (:data:`SMALLEST_SHARE`), which all atoms of the replica share here.
    """
    mean = charges.mean(-1)
    zeros = torch.zeros_like(total_charge)
    missing = total_charge - zeros.index_add(0, replicas, mean)
    count = zeros.index_add(0, replicas, torch.ones_like(mean))
    return mean + (missing / count)[replicas]


class TensorNet2(TensorNet):
    """TensorNet with charges; see :class:`~openmm_tensornet.models.tensornet.TensorNet`.

    Attributes
    ----------
    charges : list of ChargePrediction
        After the embedding and after each layer; length L + 1.
    charge_weights : Tensor, shape ((L + 1)·K,)
        Weight of each channel's Coulomb energy, of the embedding and of each layer; their scale does not matter. Only with
        ``config.coulomb``.
    """

    config: TensorNet2Config

    def __init__(self, config: TensorNet2Config, priors: list[Prior] | None = None, units: ModelUnits | None = None):
        super().__init__(config, priors, units)
        self.charges: Any = nn.ModuleList(ChargePrediction(config) for _ in range(1 + config.num_layers))
        if config.coulomb:
            self.register_buffer("charge_weights", torch.ones((1 + config.num_layers) * config.q_dim))

    @property
    def cutoff(self) -> float:
        """That of the network and that of the Coulomb interaction, which may be infinite."""
        if not self.config.coulomb:
            return self.network_cutoff
        return max(self.network_cutoff, self.config.coulomb_cutoff or float("inf"))

    def tensors_and_charges(
        self, z: Tensor, edge_index: Tensor, distance: Tensor, unit: Tensor, replicas: Tensor, total_charge: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """The last layer's tensors, shape (N, 3, 3, F), and the charges, (N, K), of the embedding and each layer."""
        i, j = edge_index
        rbf, c = self.rbf(distance), self.cutoff_function(distance)
        zero = distance.new_zeros(())
        self_rbf, self_c = self.rbf(zero), self.cutoff_function(zero)
        radial = c[:, None, None] * self.embedding.radial_weight(rbf)
        x = self.embedding(z, edge_index, unit, radial, self_c * self.embedding.radial_weight(self_rbf))
        charges = [self.charges[0](x, replicas, total_charge)]
        for layer, prediction in zip(self.layers, self.charges[1:], strict=True):
            q = charges[-1]
            radial = c[:, None, None] * layer.radial_weight(torch.cat((rbf, q[i], q[j]), dim=-1))
            own = torch.cat((self_rbf.expand(len(q), -1), q, q), dim=-1)
            x = layer(x, edge_index, radial, self_c * layer.radial_weight(own))
            charges.append(prediction(x, replicas, total_charge))
        return x, charges

    def cutoff_function(self, distance: Tensor) -> Tensor:
        """C(d) of distances in model lengths."""
        return cosine_cutoff(distance, self.config.cutoff_lower, self.config.cutoff_upper)

    def atom_energy(self, z, edge_index, distance, unit, replicas, total_charge) -> Tensor:
        x, charges = self.tensors_and_charges(z, edge_index, distance, unit, replicas, total_charge)
        energy = self.readout(self.invariants(x))
        if self.config.coulomb:
            i, j = edge_index
            q = torch.cat(charges, dim=-1)
            weights = self.charge_weights / self.charge_weights.sum()
            pair = coulomb_interaction(distance, self.config.coulomb_cutoff) * (q[i] * q[j] * weights).sum(-1)
            energy = energy.index_add(0, i, 0.5 * pair)
        return energy

    def partial_charges(
        self,
        z: Tensor,
        positions: Tensor,
        replicas: Tensor,
        pairs: Pairs,
        num_replicas: int,
        total_charge: Tensor | None = None,
    ) -> Tensor:
        """Partial charges, shape (N,), in elementary charges: :func:`mean_charges` of the last layer.

        Arguments as :meth:`forward`.
        """
        distance, unit = pair_geometry(positions, pairs)
        charge = positions.new_zeros(num_replicas) if total_charge is None else total_charge.to(positions.dtype)
        last = self.tensors_and_charges(z, pairs.edge_index, distance, unit, replicas, charge)[1][-1]
        return mean_charges(last, replicas, charge)
