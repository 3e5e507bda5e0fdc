"""The program of a static potential as it is written: positions to energies and forces, with one call of autograd inside.

:mod:`openmm_tensornet.graph.record` turns it into the program that users run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..common.atoms import Atoms
from ..common.module import Module
from ..models.tensornet import TensorNet
from ..models.tensornet2 import TensorNet2, mean_charges
from ..neighbors.lists import AllPairs, CellPairs, NNPOpsPairs, SelectedPairs
from ..neighbors.plan import Grid, choose_grid, count_pairs, pair_capacity
from .aggregation import DenseBlocks, PairSums, part_scales
from .fused import FusedChargeSums, FusedOperators, FusedPairs, FusedSums
from .fused_gpu import DirectedSums, FusedCoulomb, GPUOperators
from .network import PortableOperators, StaticNetwork
from .network2 import ChargeBlocks, ChargeNetwork, ChargePairSums, StaticCoulomb, charge_radial_functions
from .tables import RadialTable

# Up to this many slots a replica, all pairs as dense blocks are cheaper than a list (benchmarks/).
DENSE_ATOMS = 48
# Pairs of a list that are gathered, in both directions, at a time on a CPU, to whose cache they fit. On a GPU, where launches cost,
# all are.
CHUNK = 512


class _RadialFunctions(Module):
    """The radial functions of a TensorNet as the static network takes them: distances in nm, (D,), to (D, G·F)."""

    def __init__(self, model: TensorNet):
        super().__init__()
        self.model = model
        scales = torch.ones(1 + len(model.layers), 3, 1, dtype=model.mean.dtype)
        scales[0, :, 0] = part_scales()
        self.register_buffer("scales", scales)

    def forward(self, distance: Tensor) -> Tensor:
        return (self.model.radial_functions(distance / self.model.units.nm_per_length) * self.scales).flatten(1)


def radial_functions(model: TensorNet, dense: bool) -> list[nn.Module]:
    """What the static network of a float64 model takes from the distance alone, in groups that are tabulated together."""
    return charge_radial_functions(model, dense) if isinstance(model, TensorNet2) else [_RadialFunctions(model)]


class DirectRadial(Module):
    """Radial functions themselves, behind the interface of :class:`RadialTable`; a share is one of equal parts."""

    def __init__(self, functions: nn.Module, dtype: torch.dtype, share: tuple[int, int] = (0, 1)):
        super().__init__()
        self.functions, self.share = copy.deepcopy(functions).to(dtype), share
        self.dtype = dtype

    def forward(self, distance: Tensor) -> Tensor:
        k, parts = self.share
        return self.functions(distance).chunk(parts, dim=1)[k]

    def evaluate(self, distance: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self(distance), (distance,)

    def slope(self, saved: tuple[Tensor, ...], gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            distance = saved[0].detach().requires_grad_(True)
            return torch.autograd.grad(self(distance), distance, gradient)[0]

    def split(self, parts: int) -> list[nn.Module]:
        return [DirectRadial(self.functions, self.dtype, (k, parts)) for k in range(parts)]


class ListPlan(NamedTuple):
    """Plan of the list of pairs within a cutoff.

    Attributes
    ----------
    capacity : int or None
        Pairs; None where all pairs of each replica are evaluated.
    grid : Grid or None
        Cells in which they are looked for; None where all pairs are compared.
    finder : str
        Who looks for them: "torch", "nnpops" or "fused".
    """

    capacity: int | None
    grid: Grid | None = None
    finder: str = "torch"

    def pairs(self, replicas: Tensor, periodic: bool, cutoff: float) -> nn.Module:
        """The list; cutoff in nm."""
        if self.capacity is None:
            return AllPairs(replicas, periodic, cutoff)
        if self.finder != "torch":
            kind = NNPOpsPairs if self.finder == "nnpops" else FusedPairs
            return kind(replicas, periodic, cutoff, self.capacity)
        if self.grid is None:
            return SelectedPairs(replicas, periodic, cutoff, self.capacity)
        return CellPairs(replicas, periodic, cutoff, self.capacity, self.grid)


class StaticProgram(Module):
    """The potential as written, before it is flattened; :class:`StaticPotential` is what users call.

    Parameters
    ----------
    model, atoms, periodic, dtype
        As there; the model in float64.
    radial : list of RadialTable or DirectRadial
        Of :func:`radial_functions`.
    list_plans : tuple of ListPlan
        Of :func:`plan_lists`.
    fused : bool
        Whether it is made of fused operators.
    gpu : bool
        Whether it is meant for a GPU, where launches cost, or for a CPU, where memory traffic does.
    """

    def __init__(
        self,
        model: TensorNet,
        atoms: Atoms,
        periodic: bool,
        dtype: torch.dtype,
        radial: list[Any],
        list_plans: tuple[ListPlan, ListPlan | None],
        fused: bool = False,
        gpu: bool = False,
    ):
        super().__init__()
        z, replicas, charges = atoms.tensors()
        units = model.units
        self.periodic = periodic
        cutoff = model.network_cutoff * units.nm_per_length
        self.cutoff = box_cutoff(model)
        self.num_replicas = len(atoms.charges)

        zero = torch.zeros(1, dtype=torch.float64)
        list_plan, coulomb_plan = list_plans
        dense = is_dense(model, list_plan, fused)
        own = [functions(zero).flatten().to(dtype) for functions in radial_functions(model, dense)]
        places, occupied = _slots(replicas, self.num_replicas)
        pairs = list_plan.pairs(replicas, periodic, cutoff)
        operators_of = (GPUOperators if gpu else FusedOperators) if fused else PortableOperators
        # Of the network's factors 1 + 0.1q, which a TensorNet2 has not.
        factor_charges = torch.zeros_like(charges) if isinstance(model, TensorNet2) else charges
        receiver, sender = (half.to(dtype) for half in _species_halves(model, z))
        sums: nn.Module
        embedding: FusedSums | None = None
        charge_sums = DirectedSums if gpu else FusedChargeSums
        together = isinstance(model.activation, nn.SiLU)
        chunk = list_plan.capacity if gpu and list_plan.capacity is not None else CHUNK
        if dense:
            n = occupied.shape[1]
            slot_z = torch.zeros(occupied.numel(), dtype=torch.long)
            slot_z[places] = z
            species = _pair_species(model, slot_z.view(-1, n), occupied).to(dtype)
            slots = places[pairs.index]  # type: ignore[index]
            operators = operators_of(model, factor_charges.repeat_interleave(n), dtype, len(z), 2 * self.cutoff)
            if isinstance(model, TensorNet2):
                if fused:
                    spread = torch.zeros(2, len(slot_z), receiver.shape[1], dtype=dtype)
                    spread[:, places] = torch.stack((receiver, sender))
                    embedding = FusedSums(radial[0], spread[0], spread[1], own[0])
                if together and embedding is not None:
                    sums = charge_sums(model, radial, own, embedding, slots)
                else:
                    sums = ChargeBlocks(model, radial, own, operators, embedding, slots, occupied, species)
            else:
                sums = DenseBlocks(radial[0], slots, occupied, species, own[0])
            slot_replicas = torch.arange(self.num_replicas).repeat_interleave(n)
        else:
            operators = operators_of(model, factor_charges[replicas], dtype, len(z), 2 * self.cutoff)
            if isinstance(model, TensorNet2):
                if fused:
                    embedding = FusedSums(radial[0], receiver, sender, own[0])
                if together and embedding is not None:
                    sums = charge_sums(model, radial, own, embedding)
                else:
                    sums = ChargePairSums(model, radial, own, embedding, receiver, sender, chunk)
            elif fused:
                sums = FusedSums(radial[0], receiver, sender, own[0])
            else:
                sums = PairSums(radial[0].split(1 + len(model.layers)), receiver, sender, own[0], chunk)
            slot_replicas, places, occupied = replicas, torch.arange(len(z)), torch.ones(1, len(z), dtype=torch.bool)
        self.guarded = list_plan.capacity is not None or bool((torch.bincount(replicas) == 1).any())
        self.lists: Any = nn.ModuleList([pairs])
        self.coulomb: nn.Module | None = None
        if isinstance(model, TensorNet2):
            self.network: nn.Module = ChargeNetwork(
                model, sums, operators, slot_replicas, occupied.flatten(), charges, dtype
            )
            self.register_buffer("places", places)
            self.register_buffer("total_charge", charges)
            if coulomb_plan is not None and not (dense and pairs.empty):
                coulomb_of = FusedCoulomb if fused and gpu else StaticCoulomb
                self.coulomb = coulomb_of(model, (occupied.shape[0], occupied.shape[1]), dtype)
                if dense:  # the same pairs
                    self.register_buffer("slots", slots)
                else:
                    long_range = coulomb_cutoff_of(model) or self.cutoff  # without one, all pairs
                    self.lists.append(coulomb_plan.pairs(replicas, periodic, long_range))
        else:
            self.network = StaticNetwork(model, sums, operators, dtype)

        # E = R[std·head + atomref] + mean + pair terms; the reduction is a sum with a weight for each replica.
        count = torch.bincount(replicas, minlength=self.num_replicas).double()
        weight = torch.ones_like(count) if model.config.reduce_op == "sum" else 1 / (count + 1)
        reference = torch.zeros(len(z), dtype=torch.float64)
        for prior in model.priors:
            energy = prior.atom_energy(z)
            if energy is not None:
                reference = reference + energy
        constant = weight * torch.zeros_like(count).index_add(0, replicas, reference) + model.mean
        kj = units.kj_per_mol_per_energy
        self.register_buffer("constant", constant * kj)
        atom_weight = torch.zeros(len(slot_replicas), dtype=torch.float64)
        atom_weight[places] = kj * model.std * weight[replicas]
        self.register_buffer("atom_weight", atom_weight)
        self.register_buffer("slot_replicas", slot_replicas)
        self.register_buffer("replicas", replicas)
        # Derivatives of −E by the head's outputs and the pair energies: what flows back is the force.
        self.register_buffer("head_seed", -atom_weight.to(dtype))
        self.register_buffer("pair_seed", torch.tensor(-kj, dtype=dtype))
        self.register_buffer("pair_weight", torch.tensor(kj, dtype=torch.float64))
        self.per_nm = 1 / units.nm_per_length
        self.priors: Any = nn.ModuleList(p for p in model.priors if p.cutoff > 0).to(dtype)
        self.register_buffer("z", z)

    def forward(self, positions: Tensor, box: Tensor | None = None) -> tuple[Tensor, ...]:
        """Energies, shape (M,), kJ/mol, forces, shape (N, 3), kJ/mol/nm, and, where there are any, partial charges, shape (N,)."""
        geometry = self.network.operators.geometry  # type: ignore[union-attr]
        with torch.no_grad():
            found = [pair_list(positions, box) for pair_list in self.lists]
        x = positions.detach().double().requires_grad_(True)  # float64, as the forces are
        distances, units = zip(*(geometry(x, box, pairs, r) for pairs, r, _ in found), strict=True)  # type: ignore[operator]
        pairs, distance, charges = found[0][0], distances[0], None
        head = self.network(distance, units[0], pairs)
        if isinstance(self.network, ChargeNetwork):
            head, charges = head
        if self.coulomb is not None:
            head = head + self.coulomb(charges, distances[-1], self.slots if len(found) == 1 else found[1][0])
        pair_energy = self._pair_energy(distance, pairs)
        if pair_energy is None:
            (forces,) = torch.autograd.grad(head, x, self.head_seed)
        else:
            seeds = (self.head_seed, self.pair_seed.expand(pair_energy.shape))
            (forces,) = torch.autograd.grad((head, pair_energy), x, seeds)
        with torch.no_grad():
            energy = self._add(self.constant, self.slot_replicas, head.double(), self.atom_weight)
            if pair_energy is not None:
                replicas = self.replicas.index_select(0, pairs[0])
                kj = self.pair_weight.expand(pair_energy.shape)
                energy = self._add(energy, replicas, pair_energy.double(), kj)
            if self.guarded:  # an atom at NaN that has no pair would go unnoticed
                energy = torch.add(energy, positions.sum(), alpha=0)
            for _, _, overflow in found:
                if overflow is not None:
                    energy = torch.where(overflow, torch.nan, energy)  # a dropped pair would be a wrong number
            if box is not None:
                # A box below twice the cutoff would miss pairs.
                energy = torch.where(box.diagonal().amin() < 2 * self.cutoff, torch.nan, energy)
            # Zero times the energy: whatever makes it NaN makes all forces NaN.
            total = energy if self.num_replicas == 1 else energy.sum()
            forces = torch.add(forces, total, alpha=0)
            if charges is None:
                return energy, forces
            last = charges[-1].index_select(0, self.places).double()
            partial = mean_charges(last, self.replicas, self.total_charge)
            return energy, forces, torch.add(partial, total, alpha=0)

    def _add(self, start: Tensor, replicas: Tensor, values: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of the values of each replica, added to `start`, shape (M,)."""
        if self.num_replicas == 1:
            return torch.addmv(start, weights.unsqueeze(0), values)
        return start.index_add(0, replicas, values * weights)

    def _pair_energy(self, distance: Tensor, pairs: Tensor) -> Tensor | None:
        """Energy of the priors for each pair, model units."""
        if not self.priors:
            return None
        z_i, z_j = (self.z.index_select(0, k) for k in pairs.unbind(0))
        return torch.stack([prior.pair_energy(z_i, z_j, distance * self.per_nm) for prior in self.priors]).sum(0)


def plan_lists(
    model: TensorNet, atoms: Atoms, max_pairs: int | None, check: Sequence[tuple], finder: str = "torch"
) -> tuple[ListPlan, ListPlan | None]:
    """What the list of the network holds, and that of the Coulomb interaction, where there is one."""
    _, replicas, _ = atoms.tensors()
    sizes = torch.bincount(replicas)
    dense = int(sizes.max()) <= DENSE_ATOMS
    if finder == "nnpops":  # it lists pairs across replicas too
        replicas, sizes = torch.zeros_like(replicas), torch.tensor([len(replicas)])
    everything = int((sizes * (sizes - 1) // 2).sum())
    known = [(x, replicas, box) for x, box, _ in check]

    def plan(cutoff: float, capacity: int | None = None) -> ListPlan:
        if dense or not math.isfinite(cutoff):
            return ListPlan(None)
        cutoff = cutoff * model.units.nm_per_length
        if capacity is None:
            capacity = pair_capacity(sizes, cutoff, known)
        elif capacity < (needed := count_pairs(cutoff, known)):
            raise ValueError(
                f"max_pairs: expected at least {needed}, as many as there are pairs closer than the cutoff of {cutoff:g} nm where the "
                f"potential is checked, received {capacity}; pass more, or leave it out; for a system more dilute than a liquid "
                "pass positions too"
            )
        capacity = max(1, min(capacity, everything))
        if finder != "torch":
            return ListPlan(capacity, finder=finder)
        # Without a geometry nothing is known of the box, and all pairs are compared.
        grid = choose_grid(len(replicas), cutoff, known[0][2], known) if known else None
        return ListPlan(capacity, grid)

    coulomb: ListPlan | None = None
    if isinstance(model, TensorNet2) and model.config.coulomb:
        coulomb = plan(model.config.coulomb_cutoff or math.inf)
    return plan(model.network_cutoff, max_pairs), coulomb


def _slots(replicas: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Slot of each atom, shape (N,), and which slots are occupied, shape (B, n)."""
    sizes = torch.bincount(replicas, minlength=count)
    n = int(sizes.max())
    order = torch.argsort(replicas, stable=True)
    start = torch.cumsum(sizes, 0) - sizes
    place = torch.empty_like(replicas)
    place[order] = torch.arange(len(replicas)) - start[replicas[order]]
    places = replicas * n + place
    occupied = torch.arange(n)[None, :] < sizes[:, None]
    return places, occupied


def _species_halves(model: TensorNet, z: Tensor) -> tuple[Tensor, Tensor]:
    """What receiver and sender contribute to Z_ij, each of shape (N, F)."""
    linear, embedded = model.embedding.species_pair, model.embedding.species(z)
    receiver, sender = (torch.mm(embedded, half.T) for half in linear.weight.chunk(2, dim=1))
    return receiver + linear.bias, sender


def is_dense(model: TensorNet, list_plan: ListPlan, fused: bool) -> bool:
    """Whether sums are over dense blocks; fused ones always go through a list."""
    return list_plan.capacity is None and (not fused or isinstance(model, TensorNet2))


def _pair_species(model: TensorNet, z: Tensor, occupied: Tensor) -> Tensor:
    """Z_ij of each slot with each slot of its replica, shape (A, n, F); zero where one is empty."""
    blocks, n = z.shape
    z_i = z[:, :, None].expand(blocks, n, n)
    z_j = z[:, None, :].expand(blocks, n, n)
    both = (occupied[:, :, None] & occupied[:, None, :]).unsqueeze(-1)
    species = model.embedding.pair_species(z_i.reshape(-1), z_j.reshape(-1)).unflatten(0, (blocks, n, n))
    return (species * both).flatten(0, 1)


def radial_tables(model: TensorNet, functions: list[nn.Module], intervals: int, rank: float) -> list[RadialTable]:
    """Tables, in float64, of what the network takes from the distance, in nm, up to its cutoff."""
    cutoff = model.config.cutoff_upper * model.units.nm_per_length
    return [RadialTable(group, cutoff, intervals, rank) for group in functions]


def box_cutoff(model: TensorNet) -> float:
    """The larger of a model's cutoffs, nm, where it is finite: a box must be twice as wide."""
    return (model.cutoff if math.isfinite(model.cutoff) else model.network_cutoff) * model.units.nm_per_length


def coulomb_cutoff_of(model: TensorNet) -> float | None:
    """Cutoff of a model's Coulomb interaction, nm; None where it has neither."""
    cutoff = model.config.coulomb_cutoff if isinstance(model, TensorNet2) else None
    return None if cutoff is None else cutoff * model.units.nm_per_length
