"""The reference model: TensorNet in readable, differentiable PyTorch.

G. Simeon, G. De Fabritiis, "TensorNet: Cartesian Tensor Representations for Efficient Learning of Molecular Potentials",
NeurIPS 2023 (arXiv:2306.06482), with TorchMD-Net's conventions. Every fast path of the package is compared with
this one.

Shapes: N atoms, M replicas, E directed pairs, F channels. Lengths and energies are in the model's own units.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..common.module import Module
from ..common.units import ModelUnits
from ..neighbors.reference import Pairs
from . import tensors
from .priors import Prior
from .radial import RADIAL_BASES, cosine_cutoff


class ShiftedSoftplus(Module):
    """softplus(x) − ln 2, with ln 2 rounded to float32 as in TorchMD-Net."""

    shift = 0.6931471824645996

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.softplus(x) - self.shift


ACTIVATIONS = {
    "silu": nn.SiLU,
    "swish": nn.SiLU,  # TorchMD-Net's Swish with its only β, 1
    "ssp": ShiftedSoftplus,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "mish": nn.Mish,
}
GROUPS = ("O(3)", "SO(3)")
REDUCTIONS = ("sum", "mean")


@dataclass(frozen=True)
class TensorNetConfig:
    """Shape and options of a TensorNet; the names are TorchMD-Net's where it has them.

    Attributes
    ----------
    embedding_dimension : int
        Channels F.
    num_layers : int
        Interaction layers; 0 is legal.
    num_rbf, rbf_type, trainable_rbf
        Radial basis, "expnorm" or "gauss".
    activation : str
        A key of :data:`ACTIVATIONS`.
    cutoff_lower, cutoff_upper : float
        In model lengths.
    max_z : int
        Atomic numbers are below this.
    group : str
        "O(3)" or "SO(3)".
    reduce_op : str
        "sum" or "mean"; the mean divides by the number of atoms plus one, as the oracle does.
    head_hidden_layers : int
        Hidden layers of the head beyond the first.
    charge : bool
        Whether the model was trained with total charges; the energy does not depend on this.
    """

    embedding_dimension: int = 128
    num_layers: int = 2
    num_rbf: int = 32
    rbf_type: str = "expnorm"
    trainable_rbf: bool = False
    activation: str = "silu"
    cutoff_lower: float = 0.0
    cutoff_upper: float = 4.5
    max_z: int = 128
    group: str = "O(3)"
    reduce_op: str = "sum"
    head_hidden_layers: int = 0
    charge: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (
            ("rbf_type", tuple(RADIAL_BASES)),
            ("activation", tuple(ACTIVATIONS)),
            ("group", GROUPS),
            ("reduce_op", REDUCTIONS),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, received {value!r}")
        for name, least in (
            ("embedding_dimension", 2),
            ("num_layers", 0),
            ("num_rbf", 2),
            ("max_z", 1),
            ("head_hidden_layers", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}: expected an integer of at least {least}, received {value!r}")
        if not 0 <= self.cutoff_lower < self.cutoff_upper < float("inf"):
            raise ValueError(
                "cutoff_lower, cutoff_upper: expected 0 <= cutoff_lower < cutoff_upper, "
                f"received {self.cutoff_lower} and {self.cutoff_upper}"
            )

    @property
    def layer_inputs(self) -> int:
        """Numbers that the scalar function of a layer takes for each pair."""
        return self.num_rbf


def pair_geometry(positions: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Distances d, shape (E,), and directions (x_i − x_j)/d, shape (E, 3)."""
    i, j = pairs.edge_index
    vector = positions[i] - positions[j] + pairs.shift
    distance = torch.linalg.vector_norm(vector, dim=-1)
    return distance, vector / distance.unsqueeze(-1)


class Embedding(Module):
    """Tensor embedding of each atom from its neighbours' species, distances and directions."""

    def __init__(self, config: TensorNetConfig):
        super().__init__()
        f = config.embedding_dimension
        self.species = nn.Embedding(config.max_z, f)
        self.species_pair = nn.Linear(2 * f, f)
        self.radial: Any = nn.ModuleList(nn.Linear(config.num_rbf, f) for _ in range(3))
        self.norm = nn.LayerNorm(f)
        self.scalar: Any = nn.ModuleList((nn.Linear(f, 2 * f), nn.Linear(2 * f, 3 * f)))
        self.tensor: Any = nn.ModuleList(nn.Linear(f, f, bias=False) for _ in range(3))
        self.activation: Any = ACTIVATIONS[config.activation]()

    def pair_species(self, z_i: Tensor, z_j: Tensor) -> Tensor:
        """Z_ij = emb2[emb(z_i), emb(z_j)], shape (P, F)."""
        return self.species_pair(torch.cat((self.species(z_i), self.species(z_j)), dim=-1))

    def radial_weight(self, rbf: Tensor) -> Tensor:
        """P rbf of the three parts, shape (..., 3, F)."""
        return torch.stack([linear(rbf) for linear in self.radial], dim=-2)

    def gates(self, norm: Tensor) -> Tensor:
        """Scalar factors n of the three parts, shape (N, 3, F), from ‖X‖², shape (N, F)."""
        n = self.norm(norm)
        for linear in self.scalar:
            n = self.activation(linear(n))
        return n.unflatten(-1, (3, -1))

    def forward(self, z: Tensor, edge_index: Tensor, unit: Tensor, radial: Tensor, self_radial: Tensor) -> Tensor:
        """Embed.

        Parameters
        ----------
        z : Tensor, shape (N,)
        edge_index : Tensor, shape (2, E)
        unit : Tensor, shape (E, 3)
            (x_i − x_j)/d.
        radial : Tensor, shape (E, 3, F)
            C(d)·P rbf(d) of the three parts.
        self_radial : Tensor, shape (3, F)
            The same at d = 0, for the self pair, which adds to I only.

        Returns
        -------
        Tensor, shape (N, 3, 3, F)
        """
        i, j = edge_index
        weight = self.pair_species(z[i], z[j]).unsqueeze(1) * radial
        eye = torch.eye(3, dtype=unit.dtype, device=unit.device)
        message = (
            weight[:, 0, None, None, :] * eye[None, :, :, None]
            + weight[:, 1, None, None, :] * tensors.skew(unit).unsqueeze(-1)
            + weight[:, 2, None, None, :] * tensors.symmetric_traceless(unit).unsqueeze(-1)
        )
        own = self.pair_species(z, z) * self_radial[0]
        x = own[:, None, None, :] * eye[None, :, :, None]
        x = x.index_add(0, i, message)
        n = self.gates(tensors.squared_norm(x))
        parts = tensors.decompose(x)
        return tensors.compose(
            self.tensor[0](parts[0]) * n[:, 0],
            self.tensor[1](parts[1]) * n[:, 1, None, None],
            self.tensor[2](parts[2]) * n[:, 2, None, None],
        )


class Interaction(Module):
    """One message-passing layer."""

    def __init__(self, config: TensorNetConfig):
        super().__init__()
        f = config.embedding_dimension
        self.group = config.group
        self.radial: Any = nn.ModuleList(
            (nn.Linear(config.layer_inputs, f), nn.Linear(f, 2 * f), nn.Linear(2 * f, 3 * f))
        )
        self.tensor: Any = nn.ModuleList(nn.Linear(f, f, bias=False) for _ in range(6))
        self.activation: Any = ACTIVATIONS[config.activation]()

    def radial_weight(self, rbf: Tensor) -> Tensor:
        """σ(L₂σ(L₁σ(L₀ rbf))), shape (..., 3, F)."""
        for linear in self.radial:
            rbf = self.activation(linear(rbf))
        return rbf.unflatten(-1, (3, -1))

    def forward(
        self, x: Tensor, edge_index: Tensor, radial: Tensor, self_radial: Tensor, charge_factor: Tensor | None = None
    ) -> Tensor:
        """Update the atoms' tensors.

        Parameters
        ----------
        x : Tensor, shape (N, 3, 3, F)
        edge_index : Tensor, shape (2, E)
        radial : Tensor, shape (E, 3, F)
            C(d)·radial_weight.
        self_radial : Tensor, shape (3, F) or (N, 3, F)
            The same at d = 0, for the self pair.
        charge_factor : Tensor, shape (N,), optional
            1 + 0.1q with the total charge q of each atom's replica; one by default.
        """
        i, j = edge_index
        x = x / (tensors.squared_norm(x) + 1)[:, None, None, :]
        parts = tensors.decompose(x)
        y_parts = [linear(part) for linear, part in zip(self.tensor[:3], parts, strict=True)]
        y = tensors.compose(*y_parts)
        m_parts = []
        for k, part in enumerate(y_parts):
            shape = (-1,) + (1,) * (part.dim() - 2) + (part.shape[-1],)
            message = radial[:, k].reshape(shape) * part[j]
            own = self_radial[..., k, :].reshape(shape) * part
            m_parts.append(own.index_add(0, i, message))
        m = tensors.compose(*m_parts)
        factor = 1.0 if charge_factor is None else charge_factor[:, None, None, None]
        if self.group == "O(3)":
            p = factor * (tensors.matmul(y, m) + tensors.matmul(m, y))
        else:
            # The order follows TorchMD-Net's compiled kernels, whose A part has the opposite sign (X there is Xᵀ here,
            # and its 2YM is 2MY); its uncompiled fallback gives 2YM.
            p = 2 * tensors.matmul(m, y)
        p_parts = tensors.decompose(p)
        norm = tensors.squared_norm(p) + 1
        d = tensors.compose(
            self.tensor[3](p_parts[0] / norm),
            self.tensor[4](p_parts[1] / norm[:, None, None, :]),
            self.tensor[5](p_parts[2] / norm[:, None, None, :]),
        )
        return x + d + factor * tensors.matmul(d, d)


class TensorNet(Module):
    """TensorNet with its scalar head, scaling and priors: positions to one energy for each replica.

    Parameters
    ----------
    config : TensorNetConfig
    priors : list of Prior
        Added in this order.
    units : ModelUnits
        The units in which the weights were trained; only conversions outside the model use them.

    Attributes
    ----------
    mean, std : Tensor, 0-d
        Energies are multiplied by `std` before, and shifted by `mean` after the reduction over atoms.
    about : dict
        Plain values that describe what the model was trained for, where its file has them: ``molecule``, a dict with ``name`` and
        ``atomic_numbers``, if it is for one molecule only; ``elements``; and whatever else people should know.
    """

    def __init__(self, config: TensorNetConfig, priors: list[Prior] | None = None, units: ModelUnits | None = None):
        super().__init__()
        f = config.embedding_dimension
        self.config = config
        self.units = units or ModelUnits()
        self.elements: tuple[int, ...] | None = None
        self.source_hash = ""
        self.about: dict[str, Any] = {}
        self.rbf: Any = RADIAL_BASES[config.rbf_type](
            config.num_rbf, config.cutoff_lower, config.cutoff_upper, config.trainable_rbf
        )
        self.embedding = Embedding(config)
        self.layers: Any = nn.ModuleList(Interaction(config) for _ in range(config.num_layers))
        self.out_norm = nn.LayerNorm(3 * f)
        self.out = nn.Linear(3 * f, f)
        sizes = [f] + [f // 2] * (1 + config.head_hidden_layers) + [1]
        self.head: Any = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.activation: Any = ACTIVATIONS[config.activation]()
        self.priors: Any = nn.ModuleList(priors or [])
        self.register_buffer("mean", torch.tensor(0.0))
        self.register_buffer("std", torch.tensor(1.0))

    @property
    def cutoff(self) -> float:
        """Largest distance at which two atoms see each other; model lengths."""
        return self.network_cutoff

    @property
    def network_cutoff(self) -> float:
        """Largest distance at which the network and the priors see two atoms; model lengths."""
        return max([self.config.cutoff_upper] + [prior.cutoff for prior in self.priors])

    @property
    def metadata(self) -> dict:
        """What the model is, as plain values."""
        return {
            "config": asdict(self.config),
            "priors": [type(prior).__name__ for prior in self.priors],
            "units": asdict(self.units),
            "elements": self.elements,
            "source_hash": self.source_hash,
            "about": self.about,
        }

    def radial_functions(self, distance: Tensor) -> Tensor:
        """All functions of the distance that the network uses.

        Parameters
        ----------
        distance : Tensor, shape (...)

        Returns
        -------
        Tensor, shape (..., 1 + num_layers, 3, F)
            C(d)·P rbf(d) of the embedding, then C(d)·radial_weight of each layer; zero from the cutoff on.
        """
        rbf = self.rbf(distance)
        values = torch.stack([part.radial_weight(rbf) for part in (self.embedding, *self.layers)], dim=-3)
        c = cosine_cutoff(distance, self.config.cutoff_lower, self.config.cutoff_upper)
        return c[..., None, None, None] * values

    def atom_energy(
        self,
        z: Tensor,
        edge_index: Tensor,
        distance: Tensor,
        unit: Tensor,
        replicas: Tensor,
        total_charge: Tensor,
    ) -> Tensor:
        """The network's output of each atom, shape (N,), from distances, shape (E,), and directions, shape (E, 3)."""
        radial = self.radial_functions(distance)
        self_radial = self.radial_functions(distance.new_zeros(()))
        charge_factor = 1 + 0.1 * total_charge[replicas]
        x = self.embedding(z, edge_index, unit, radial[:, 0], self_radial[0])
        for k, layer in enumerate(self.layers, start=1):
            x = layer(x, edge_index, radial[:, k], self_radial[k], charge_factor)
        return self.readout(self.invariants(x))

    def invariants(self, x: Tensor) -> Tensor:
        """[3I², ‖A‖², ‖S‖²], shape (N, 3F)."""
        scalar, a, s = tensors.decompose(x)
        return torch.cat(
            (tensors.ONE_THIRD * (3 * scalar) ** 2, tensors.squared_norm(a), tensors.squared_norm(s)), dim=-1
        )

    def readout(self, x: Tensor) -> Tensor:
        """Network energy of each atom, shape (N,), from [3I², ‖A‖², ‖S‖²], shape (N, 3F)."""
        x = self.activation(self.out(self.out_norm(x)))
        for linear in self.head[:-1]:
            x = self.activation(linear(x))
        return self.head[-1](x).squeeze(-1)

    def forward(
        self,
        z: Tensor,
        positions: Tensor,
        replicas: Tensor,
        pairs: Pairs,
        num_replicas: int,
        total_charge: Tensor | None = None,
    ) -> Tensor:
        """Energy of each replica.

        Parameters
        ----------
        z : Tensor of int64, shape (N,)
            Atomic numbers.
        positions : Tensor, shape (N, 3)
            In model lengths.
        replicas : Tensor of int64, shape (N,)
            Replica of each atom; replicas do not see each other.
        pairs : Pairs
            All directed pairs i≠j of one replica closer than :attr:`cutoff`; more do no harm.
        num_replicas : int
            M; a replica may be empty.
        total_charge : Tensor, shape (M,), optional
            Total charge of each replica in e; zero by default.

        Returns
        -------
        Tensor, shape (M,)
            In model energies. Two atoms at the same place give NaN.
        """
        i, j = pairs.edge_index
        distance, unit = pair_geometry(positions, pairs)
        charge = positions.new_zeros(num_replicas) if total_charge is None else total_charge.to(positions.dtype)

        energy = self.std * self.atom_energy(z, pairs.edge_index, distance, unit, replicas, charge)
        for prior in self.priors:
            reference = prior.atom_energy(z)
            if reference is not None:
                energy = energy + reference
        per_replica = energy.new_zeros(num_replicas).index_add(0, replicas, energy)
        if self.config.reduce_op == "mean":
            count = energy.new_zeros(num_replicas).index_add(0, replicas, torch.ones_like(energy))
            per_replica = per_replica / (count + 1)
        per_replica = per_replica + self.mean

        for prior in self.priors:
            d = distance
            if not prior.uses_box:
                d = torch.linalg.vector_norm(positions[i] - positions[j], dim=-1)
            pair = prior.pair_energy(z[i], z[j], d)
            if pair is not None:
                per_replica = per_replica.index_add(0, replicas[i], 0.5 * pair)
        return per_replica

    def energy_and_forces(self, z, positions, replicas, pairs, num_replicas, total_charge=None):
        """Energies, shape (M,), and forces −∂ΣE/∂x, shape (N, 3); arguments as :meth:`forward`.

        The graph is kept in training mode, so that a loss of the forces can be differentiated again, also by
        ``torch.compile``: it follows torch.func.grad, but not torch.autograd.grad with a graph kept.
        """

        def total(x: Tensor) -> tuple[Tensor, Tensor]:
            energy = self(z, x, replicas, pairs, num_replicas, total_charge)
            return energy.sum(), energy

        with torch.set_grad_enabled(self.training and torch.is_grad_enabled()):
            gradient, energy = torch.func.grad(total, has_aux=True)(positions.detach())
        return energy, -gradient
