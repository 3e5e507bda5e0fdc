"""A model specialised to fixed atoms, molecules and charges: positions in nm to energies and forces in OpenMM's units."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import DenseBlocks, PairSums, part_scales
from .flatten import flatten
from .kernels.functions import FusedOperators, FusedSums
from .model import TensorNet
from .module import Module
from .neighbors import AllPairs, CellPairs, Grid, SelectedPairs, choose_grid, pair_capacity
from .network import PortableOperators, StaticNetwork
from .tabulate import Functions, RadialTable
from .testing import TABULATION, Deviation, deviation, reference_energy_and_forces

# Two atoms closer than this make energy and forces NaN. Nothing that a TensorNet was trained on comes near it.
MINIMUM_DISTANCE = 0.05  # nm
KERNELS = ("portable", "fused")
DTYPES = {"single": torch.float32, "double": torch.float64}
RANK = {"single": 1e-9, "double": 1e-12}  # see RadialTable
TABLE_SIZES = (1024, 2048, 4096, 8192)
# Of the table's functions on a grid ten times finer, relative to each one's largest value: value, derivative.
FUNCTION_ERROR = (1e-5, 1e-3)
# Up to this many slots a molecule, all pairs as dense blocks are cheaper than a list (benchmarks/).
DENSE_ATOMS = 48
# Up to this many atoms a potential is checked against the reference model itself.
REFERENCE_ATOMS = 100
# Pairs of a list that are gathered at a time.
CHUNK = 1024


@dataclass(frozen=True)
class Atoms:
    """The fixed part of what is evaluated.

    Attributes
    ----------
    numbers : tuple of int
        Atomic number of each atom.
    molecules : tuple of int
        Molecule of each atom.
    charges : tuple of float
        Total charge of each molecule; its length is the number of molecules (a molecule may be empty).
    """

    numbers: tuple[int, ...]
    molecules: tuple[int, ...]
    charges: tuple[float, ...]

    @classmethod
    def make(
        cls,
        numbers: Sequence[int],
        molecules: Sequence[int] | None = None,
        total_charge: float | Sequence[float] = 0,
        num_molecules: int | None = None,
    ) -> Atoms:
        """Check and complete.

        Parameters
        ----------
        numbers : sequence of int
        molecules : sequence of int, optional
            One molecule by default.
        total_charge : number or sequence of numbers
            Of the one molecule, or one for each molecule.
        num_molecules : int, optional
            Needed only if the last molecules are empty and `total_charge` is zero.

        Raises
        ------
        ValueError, TypeError
            If lengths or values do not fit.
        """
        z = integers("atomic_numbers", numbers)
        if not z:
            raise ValueError("atomic_numbers: expected at least one atom, received none")
        if min(z) < 1:
            raise ValueError(
                f"atomic_numbers: expected numbers of at least 1, received {min(z)} for atom {z.index(min(z))}"
            )
        m = integers("molecules", molecules) if molecules is not None else (0,) * len(z)
        if len(m) != len(z):
            raise ValueError(f"molecules: expected one index for each of {len(z)} atoms, received {len(m)}")
        if min(m) < 0:
            raise ValueError(f"molecules: expected indices of at least 0, received {min(m)}")
        scalar = not hasattr(total_charge, "__len__") and not hasattr(total_charge, "__iter__")
        given = None if scalar else [float(q) for q in total_charge]  # type: ignore[union-attr]
        count = num_molecules if num_molecules is not None else max(max(m) + 1, len(given or ()))
        if max(m) >= count:
            raise ValueError(f"molecules: expected indices below the number of molecules, {count}, received {max(m)}")
        if given is None:
            charge = float(total_charge)  # type: ignore[arg-type]
            if charge != 0 and count > 1:
                raise ValueError(
                    f"total_charge: expected one charge for each of {count} molecules, received the single number {charge:g}; "
                    "pass a list"
                )
            given = [charge] * count
        if len(given) != count:
            raise ValueError(f"total_charge: expected one charge for each of {count} molecules, received {len(given)}")
        for charge in given:
            if charge != round(charge):
                raise ValueError(f"total_charge: expected whole numbers of elementary charges, received {charge!r}")
        return cls(z, m, tuple(given))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """numbers, molecules (int64) and charges (float64)."""
        return (
            torch.tensor(self.numbers),
            torch.tensor(self.molecules),
            torch.tensor(self.charges, dtype=torch.float64),
        )


def integers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Check a sequence of integers, of numpy's too, and make plain ones of them."""
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise TypeError(f"{name}: expected a sequence of integers, received {values!r}")
    values = list(values)
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name}: expected integers, received {value!r}")
    return tuple(value.__index__() for value in values)


class _DirectRadial(Module):
    """The radial functions themselves, behind the interface of :class:`RadialTable`."""

    def __init__(self, model: TensorNet, dtype: torch.dtype, share: slice = slice(None)):
        super().__init__()
        self.model, self.share = model.to(dtype), share
        self.per_nm = 1 / model.units.nm_per_length
        self.register_buffer("nan", torch.tensor(torch.nan, dtype=dtype))
        self.register_buffer("scales", _function_scales(model).to(dtype))

    def forward(self, distance: Tensor) -> Tensor:
        distance = torch.where(distance < MINIMUM_DISTANCE, self.nan, distance)
        return (self.model.radial_functions(distance * self.per_nm) * self.scales)[:, self.share].flatten(1)

    def evaluate(self, distance: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self(distance), (distance,)

    def slope(self, saved: tuple[Tensor, ...], gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            distance = saved[0].detach().requires_grad_(True)
            return torch.autograd.grad(self(distance), distance, gradient)[0]

    def split(self, parts: int) -> list[nn.Module]:
        return [_DirectRadial(self.model, self.scales.dtype, slice(k, k + 1)) for k in range(parts)]


def _function_scales(model: TensorNet) -> Tensor:
    """Factors of the radial functions in the orthonormal basis, shape (1 + layers, 3, 1); float64."""
    scales = torch.ones(1 + len(model.layers), 3, 1, dtype=torch.float64)
    scales[0, :, 0] = part_scales()
    return scales


class StaticProgram(Module):
    """The potential as written, before it is flattened; :class:`StaticPotential` is what users call."""

    def __init__(
        self,
        model: TensorNet,
        atoms: Atoms,
        periodic: bool,
        dtype: torch.dtype,
        radial: Any,
        capacity: int | None,
        grid: Grid | None,
        fused: bool = False,
    ):
        super().__init__()
        z, molecules, charges = atoms.tensors()
        units = model.units
        self.periodic = periodic
        self.cutoff = model.cutoff * units.nm_per_length
        self.dtype = dtype
        self.num_molecules = len(atoms.charges)

        zero = torch.zeros(1, dtype=torch.float64)
        self_functions = (model.radial_functions(zero) * _function_scales(model)).flatten().to(dtype)
        if capacity is None:
            self.pairs: nn.Module = AllPairs(molecules, periodic, self.cutoff)
        elif grid is None:
            self.pairs = SelectedPairs(molecules, periodic, self.cutoff, capacity)
        else:
            self.pairs = CellPairs(molecules, periodic, self.cutoff, capacity, grid)
        sums: nn.Module
        if capacity is None and not fused:
            places, occupied = _slots(molecules, self.num_molecules)
            n = occupied.shape[1]
            slot_z = torch.zeros(occupied.numel(), dtype=torch.long)
            slot_z[places] = z
            species = _pair_species(model, slot_z.view(-1, n), occupied).to(dtype)
            sums = DenseBlocks(radial, places[self.pairs.index], occupied, species, self_functions)
            slot_charge = charges.repeat_interleave(n)
        else:
            places, slot_charge = torch.arange(len(z)), charges[molecules]
            receiver, sender = (half.to(dtype) for half in _species_halves(model, z))
            if fused:
                sums = FusedSums(radial, receiver, sender, self_functions)
            else:
                parts = radial.split(1 + len(model.layers))
                sums = PairSums(parts, receiver, sender, self_functions, CHUNK)
        self.guarded = capacity is not None or bool((torch.bincount(molecules) == 1).any())
        operators = (FusedOperators if fused else PortableOperators)(model, slot_charge, dtype)
        self.network = StaticNetwork(model, sums, operators, dtype)

        # E = R[std·head + atomref] + mean + pair terms; the reduction is a sum with a weight for each molecule.
        count = torch.bincount(molecules, minlength=self.num_molecules).double()
        weight = torch.ones_like(count) if model.config.reduce_op == "sum" else 1 / (count + 1)
        reference = torch.zeros(len(z), dtype=torch.float64)
        for prior in model.priors:
            energy = prior.atom_energy(z)
            if energy is not None:
                reference = reference + energy
        constant = weight * torch.zeros_like(count).index_add(0, molecules, reference) + model.mean
        kj = units.kj_per_mol_per_energy
        self.register_buffer("constant", constant * kj)
        atom_weight = torch.zeros(len(slot_charge), dtype=torch.float64)
        atom_weight[places] = kj * model.std * weight[molecules]
        slot_molecules = torch.zeros(len(slot_charge), dtype=torch.long)
        slot_molecules[places] = molecules
        self.register_buffer("atom_weight", atom_weight)
        self.register_buffer("slot_molecules", slot_molecules)
        self.register_buffer("molecules", molecules)
        # Derivatives of −E by the head's outputs and the pair energies: what flows back is the force.
        self.register_buffer("head_seed", -atom_weight.to(dtype))
        self.register_buffer("pair_seed", torch.tensor(-kj, dtype=dtype))
        self.register_buffer("pair_weight", torch.tensor(kj, dtype=torch.float64))
        self.register_buffer("no_force", torch.zeros(len(z), 3, dtype=torch.float64))
        self.per_nm = 1 / units.nm_per_length
        self.priors: Any = nn.ModuleList(p for p in model.priors if p.cutoff > 0).to(dtype)
        self.register_buffer("z", z)

    def forward(self, positions: Tensor, box: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Energies, shape (M,), kJ/mol, and forces, shape (N, 3), kJ/mol/nm; both float64."""
        with torch.no_grad():
            pairs, vector, overflow = self.pairs(positions, box)
            # Subtracted in the dtype they arrive in, then cast; an operator also where the dtypes agree while tracing.
            r = torch.ops.aten._to_copy(vector, dtype=self.dtype)
        r.requires_grad_(True)
        distance, head = self.network(r, pairs)
        pair_energy = self._pair_energy(distance, pairs)
        if pair_energy is None:
            (force,) = torch.autograd.grad(head, r, self.head_seed)
        else:
            seeds = (self.head_seed, self.pair_seed.expand(pair_energy.shape))
            (force,) = torch.autograd.grad((head, pair_energy), r, seeds)
        with torch.no_grad():
            i, j = pairs.unbind(0)
            energy = self._add(self.constant, self.slot_molecules, head.double(), self.atom_weight)
            if pair_energy is not None:
                molecules = self.molecules.index_select(0, i)
                kj = self.pair_weight.expand(pair_energy.shape)
                energy = self._add(energy, molecules, pair_energy.double(), kj)
            if self.guarded:  # an atom at NaN that has no pair would go unnoticed
                energy = torch.add(energy, positions.sum(), alpha=0)
            if overflow is not None:
                energy = torch.where(overflow, torch.nan, energy)  # a dropped pair would be a wrong number
            if box is not None:
                # A box below twice the cutoff would miss pairs.
                energy = torch.where(box.diagonal().amin() < 2 * self.cutoff, torch.nan, energy)
            force = force.double()
            forces = self.no_force.index_add(0, i, force).index_add(0, j, force, alpha=-1)
            # Zero times the energy: whatever makes it NaN makes all forces NaN.
            return energy, torch.add(forces, energy if self.num_molecules == 1 else energy.sum(), alpha=0)

    def _add(self, start: Tensor, molecules: Tensor, values: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of the values of each molecule, added to `start`, shape (M,)."""
        if self.num_molecules == 1:
            return torch.addmv(start, weights.unsqueeze(0), values)
        return start.index_add(0, molecules, values * weights)

    def _pair_energy(self, distance: Tensor, pairs: Tensor) -> Tensor | None:
        """Energy of the priors for each pair, model units."""
        if not self.priors:
            return None
        z_i, z_j = (self.z.index_select(0, k) for k in pairs.unbind(0))
        return torch.stack([prior.pair_energy(z_i, z_j, distance * self.per_nm) for prior in self.priors]).sum(0)


def _room(
    model: TensorNet, atoms: Atoms, max_pairs: int | None, check: Sequence[tuple]
) -> tuple[int | None, Grid | None]:
    """Pairs that a list holds and its cells; None, None where all pairs are evaluated."""
    _, molecules, _ = atoms.tensors()
    sizes = torch.bincount(molecules)
    if int(sizes.max()) <= DENSE_ATOMS:
        return None, None
    cutoff = model.cutoff * model.units.nm_per_length
    known = [(x, molecules, box) for x, box, _ in check]
    if max_pairs is None:
        max_pairs = pair_capacity(sizes, cutoff, known)
    elif isinstance(max_pairs, bool) or not isinstance(max_pairs, int) or max_pairs < 1:
        raise ValueError(f"max_pairs: expected an integer of at least 1, received {max_pairs!r}")
    everything = int((sizes * (sizes - 1) // 2).sum())
    # Without a geometry nothing is known of the box, and all pairs are compared.
    grid = choose_grid(len(molecules), cutoff, known[0][2], known) if known else None
    return max(1, min(max_pairs, everything)), grid


def _slots(molecules: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Slot of each atom, shape (N,), and which slots are occupied, shape (B, n)."""
    sizes = torch.bincount(molecules, minlength=count)
    n = int(sizes.max())
    order = torch.argsort(molecules, stable=True)
    start = torch.cumsum(sizes, 0) - sizes
    place = torch.empty_like(molecules)
    place[order] = torch.arange(len(molecules)) - start[molecules[order]]
    places = molecules * n + place
    occupied = torch.arange(n)[None, :] < sizes[:, None]
    return places, occupied


def _species_halves(model: TensorNet, z: Tensor) -> tuple[Tensor, Tensor]:
    """What receiver and sender contribute to Z_ij, each of shape (N, F)."""
    linear, embedded = model.embedding.species_pair, model.embedding.species(z)
    receiver, sender = (torch.mm(embedded, half.T) for half in linear.weight.chunk(2, dim=1))
    return receiver + linear.bias, sender


def _pair_species(model: TensorNet, z: Tensor, occupied: Tensor) -> Tensor:
    """Z_ij of each slot with each slot of its molecule, shape (A, n, F); zero where one is empty."""
    blocks, n = z.shape
    z_i = z[:, :, None].expand(blocks, n, n)
    z_j = z[:, None, :].expand(blocks, n, n)
    both = (occupied[:, :, None] & occupied[:, None, :]).unsqueeze(-1)
    species = model.embedding.pair_species(z_i.reshape(-1), z_j.reshape(-1)).unflatten(0, (blocks, n, n))
    return (species * both).flatten(0, 1)


class StaticPotential(Module):
    """A flat, static-shape, synchronisation-free program for fixed atoms, without autograd.

    Parameters
    ----------
    model : TensorNet
    atoms : Atoms
    periodic : bool
        Whether :meth:`forward` takes box vectors.
    precision : str
        "single" (float32) or "double" (float64), the arithmetic of the network.
    tabulate : bool
        True evaluates radial functions from tables, refined until they are good enough (:meth:`_refine`); False
        evaluates the functions themselves, which takes several times as long.
    max_pairs : int, optional
        Pairs i<j that the list of a large molecule holds; chosen with a margin by default. If there are ever more,
        energy and forces are NaN. Small molecules hold all pairs and ignore it.
    kernels : str
        "portable" (PyTorch's own operators) or "fused" (:mod:`openmm_tensornet.kernels`).
    check : list of (positions, box or None, (energies, forces))
        Geometries for the refinement, with what the reference model gives for them.

    Attributes
    ----------
    cutoff : float
        In nm.
    capacity : int or None
        Pairs that the list holds; None where all pairs are evaluated.
    grid : Grid or None
        Cells in which the pairs are looked for; None where all pairs are compared.
    tabulation : dict or None
        The tables' size and the errors reached.
    """

    def __init__(
        self,
        model: TensorNet,
        atoms: Atoms,
        *,
        periodic: bool = False,
        precision: str = "single",
        tabulate: bool = True,
        max_pairs: int | None = None,
        kernels: str = "portable",
        check: Sequence[tuple] = (),
    ):
        super().__init__()
        if kernels not in KERNELS:
            raise ValueError(f"kernels: expected one of {', '.join(KERNELS)}, received {kernels!r}")
        if kernels == "fused" and not tabulate:
            raise ValueError(
                "kernels: expected 'portable' with tabulate=False, received 'fused', which needs the tables"
            )
        if precision not in DTYPES:
            raise ValueError(f"precision: expected one of {', '.join(DTYPES)}, received {precision!r}")
        for prior in model.priors:
            if periodic and not prior.uses_box:
                raise ValueError(
                    f"periodic: expected False for a model with the prior {type(prior).__name__}, received True; TorchMD-Net "
                    "ignores the box in it, so its energy would depend on how molecules are wrapped"
                )
        reference = copy_double(model)
        self.capacity, self.grid = _room(model, atoms, max_pairs, check)
        self.atoms, self.periodic, self.precision, self.fused = atoms, periodic, precision, kernels == "fused"
        self.tabulation: dict | None = None
        radial: nn.Module
        if tabulate:
            functions = scaled_radial_functions(reference)
            intervals = self._refine(reference, functions, check)
            dtype = torch.float64 if self.fused else DTYPES[precision]
            radial = radial_table(reference, functions, intervals, RANK[precision], dtype)
        else:
            radial = _DirectRadial(copy_double(model), DTYPES[precision])
        program = self._program(reference, DTYPES[precision], radial)
        self.cutoff = program.cutoff
        generator = torch.Generator().manual_seed(0)
        example: tuple[Tensor, ...] = (torch.rand(len(atoms.numbers), 3, dtype=torch.float64, generator=generator),)
        if periodic:
            example = (*example, torch.eye(3, dtype=torch.float64) * 3 * self.cutoff)
        self.program = flatten(program, example)

    def _program(self, model: TensorNet, dtype: torch.dtype, radial: nn.Module) -> StaticProgram:
        return StaticProgram(model, self.atoms, self.periodic, dtype, radial, self.capacity, self.grid, self.fused)

    def _refine(self, model: TensorNet, functions: Functions, check: Sequence[tuple]) -> int:
        """Number of intervals at which a float64 table meets :data:`TABULATION` on all geometries and on its own grid."""
        worst, error = Deviation(0.0, 0.0), None
        for intervals in TABLE_SIZES:
            table = radial_table(model, functions, intervals, RANK[self.precision], torch.float64)
            program = self._program(model, torch.float64, table)
            found = [deviation(program(x, box), expected) for x, box, expected in check]
            worst = Deviation(max((d.energy for d in found), default=0.0), max((d.force for d in found), default=0.0))
            if not worst.within(TABULATION[self.precision]):
                continue
            error = table.error(functions)
            if error.value <= FUNCTION_ERROR[0] and error.derivative <= FUNCTION_ERROR[1]:
                self.tabulation = {
                    "intervals": intervals,
                    "basis_functions": len(table.modes),
                    "trusted_from_nm": MINIMUM_DISTANCE,
                    "largest_value_error": error.value,
                    "largest_derivative_error": error.derivative,
                    "energy_eV_per_atom": worst.energy,
                    "relative_force": worst.force,
                }
                return intervals
        raise RuntimeError(
            f"tabulate: expected radial functions that {TABLE_SIZES[-1]} intervals describe to "
            f"{TABULATION[self.precision]}, reached {worst} with {error}; pass tabulate=False to evaluate the functions themselves"
        )

    def forward(self, positions: Tensor, box: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Evaluate.

        Parameters
        ----------
        positions : Tensor, shape (N, 3)
            nm, float32 or float64.
        box : Tensor, shape (3, 3)
            Box vectors in rows, nm; only for a periodic potential.

        Returns
        -------
        energies : Tensor of float64, shape (M,)
            kJ/mol.
        forces : Tensor of float64, shape (N, 3)
            kJ/mol/nm, float64. Both are NaN if two atoms of a molecule are closer than
            :data:`MINIMUM_DISTANCE`, or the box is below twice the cutoff.
        """
        return self.program(positions, box) if self.periodic else self.program(positions)


def copy_double(model: TensorNet) -> TensorNet:
    """A frozen copy in float64, from which everything static is made."""
    return copy.deepcopy(model).double().eval().requires_grad_(False)


def expected_energy_and_forces(
    model: TensorNet, atoms: Atoms, positions: Tensor, box: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What a static potential is checked against: energies (M,), kJ/mol, and forces (N, 3), kJ/mol/nm.

    The reference model; above :data:`REFERENCE_ATOMS` its memory would be several GB, and the float64 program without
    tables takes its place, which the tests compare with the reference model at such sizes.
    """
    model = copy_double(model)
    if len(positions) <= REFERENCE_ATOMS:
        return reference_energy_and_forces(model, atoms, positions, box)
    capacity, grid = _room(model, atoms, None, [(positions, box, None)])
    radial = _DirectRadial(copy_double(model), torch.float64)
    program = StaticProgram(model, atoms, box is not None, torch.float64, radial, capacity, grid)
    return program(positions, box)


def scaled_radial_functions(model: TensorNet) -> Functions:
    """The radial functions of a float64 model as the static network takes them: distances in nm, (K,), to (K, G·F)."""
    units = model.units
    scales = _function_scales(model)

    def functions(distance: Tensor) -> Tensor:
        return (model.radial_functions(distance / units.nm_per_length) * scales).flatten(1)

    return functions


def radial_table(
    model: TensorNet, functions: Functions, intervals: int, rank: float, dtype: torch.dtype
) -> RadialTable:
    """Table from the closest trusted distance to the network's cutoff."""
    upper = model.config.cutoff_upper * model.units.nm_per_length
    return RadialTable(functions, MINIMUM_DISTANCE, upper, intervals, rank, dtype)
