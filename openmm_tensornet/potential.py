"""A model specialised to fixed atoms, molecules and charges: positions in nm to energies and forces in OpenMM's units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import tensors
from .blocks import DenseBlocks, PairSums, part_scales
from .flatten import flatten
from .model import TensorNet
from .neighbors import all_pairs, minimum_image
from .network import StaticNetwork
from .tabulate import RadialTable

# Two atoms closer than this make energy and forces NaN. Nothing that a TensorNet was trained on comes near it.
MINIMUM_DISTANCE = 0.03  # nm
DTYPES = {"single": torch.float32, "double": torch.float64}
# Up to this number of slots a molecule, all pairs as dense blocks are cheaper than a list (benchmarks/).
DENSE_ATOMS = 64


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
        z = _integers("atomic_numbers", numbers)
        if not z:
            raise ValueError("atomic_numbers: expected at least one atom, received none")
        if min(z) < 1:
            raise ValueError(f"atomic_numbers: expected numbers of at least 1, received {min(z)} for atom {z.index(min(z))}")
        m = _integers("molecules", molecules) if molecules is not None else (0,) * len(z)
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


def _integers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise TypeError(f"{name}: expected a sequence of integers, received {values!r}")
    values = list(values)
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name}: expected integers, received {value!r}")
    return tuple(value.__index__() for value in values)


class _DirectRadial(nn.Module):
    """The radial functions themselves, behind the interface of :class:`RadialTable`."""

    def __init__(self, model: TensorNet, lower: float, dtype: torch.dtype):
        super().__init__()
        self.model = model.to(dtype)
        self.lower = lower
        self.per_nm = 1 / model.units.nm_per_length
        self.register_buffer("nan", torch.tensor(torch.nan, dtype=dtype))
        self.register_buffer("scales", _function_scales(model).to(dtype))

    def forward(self, distance: Tensor) -> Tensor:
        distance = torch.where(distance < self.lower, self.nan, distance)
        return (self.model.radial_functions(distance * self.per_nm) * self.scales).flatten(1)


def _function_scales(model: TensorNet) -> Tensor:
    """Factors of the radial functions in the orthonormal basis, shape (1 + layers, 3, 1); float64."""
    scales = torch.ones(1 + len(model.layers), 3, 1, dtype=torch.float64)
    scales[0, :, 0] = part_scales()
    return scales


class StaticProgram(nn.Module):
    """The potential as written, before it is flattened; :class:`StaticPotential` is what users call."""

    def __init__(self, model: TensorNet, atoms: Atoms, periodic: bool, dtype: torch.dtype, radial: nn.Module):
        super().__init__()
        z, molecules, charges = atoms.tensors()
        units = model.units
        self.periodic = periodic
        self.cutoff = model.cutoff * units.nm_per_length
        self.dtype = dtype
        self.num_molecules = len(atoms.charges)
        self.register_buffer("pairs", all_pairs(molecules))
        self.register_buffer("pair_ends", self.pairs.flatten())

        zero = torch.zeros(1, dtype=torch.float64)
        self_functions = (model.radial_functions(zero) * _function_scales(model)).flatten().to(dtype)
        places, occupied = _slots(molecules, self.num_molecules)
        self.dense = occupied.shape[1] <= DENSE_ATOMS
        sums: nn.Module
        if self.dense:
            n = occupied.shape[1]
            slot_z = torch.zeros(occupied.numel(), dtype=torch.long)
            slot_z[places] = z
            species = _pair_species(model, slot_z.view(-1, n), occupied).to(dtype)
            sums = DenseBlocks(places[self.pairs], occupied, species, self_functions)
            slot_charge = charges.repeat_interleave(n)
        else:
            species_pair = model.embedding.species_pair
            halves = model.embedding.species(z), species_pair.weight.chunk(2, dim=1)
            receiver, sender = (torch.mm(halves[0], half.T) for half in halves[1])
            sums = PairSums((receiver + species_pair.bias).to(dtype), sender.to(dtype), self_functions)
            slot_charge = charges[molecules]
            places = torch.arange(len(z))
        self.network = StaticNetwork(model, radial, sums, slot_charge, dtype)

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
        self.register_buffer("molecules", slot_molecules)
        # Derivatives of −E by the head's outputs and the pair energies: what flows back is the force.
        self.register_buffer("head_seed", -atom_weight.to(dtype))
        self.register_buffer("pair_seed", torch.full((self.pairs.shape[1],), -kj, dtype=dtype))
        self.register_buffer("pair_molecules", molecules[self.pairs[0]])
        self.register_buffer("no_force", torch.zeros(len(z), 3, dtype=torch.float64))
        self.kj_per_energy = kj
        self.per_nm = 1 / units.nm_per_length
        self.priors = nn.ModuleList(p for p in model.priors if p.cutoff > 0).to(dtype)
        self.register_buffer("pair_z", z[self.pairs])

    def forward(self, positions: Tensor, box: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Energies, shape (M,), kJ/mol, and forces, shape (N, 3), kJ/mol/nm; both float64."""
        with torch.no_grad():
            ends = positions.index_select(0, self.pair_ends).view(2, -1, 3)
            vector = ends[0] - ends[1]
            if self.periodic:
                assert box is not None
                vector = minimum_image(vector, box)
            r = vector.to(self.dtype)
        r.requires_grad_(True)
        if not self.dense:
            self.network.sums.set_pairs(self.pairs)
        distance, head = self.network(r)
        pair_energy = self._pair_energy(distance)
        if pair_energy is None:
            (force,) = torch.autograd.grad(head, r, self.head_seed)
        else:
            (force,) = torch.autograd.grad((head, pair_energy), r, (self.head_seed, self.pair_seed))
        with torch.no_grad():
            energy = self._sum(self.constant, self.molecules, head.double() * self.atom_weight)
            if pair_energy is not None:
                energy = self._sum(energy, self.pair_molecules, pair_energy.double() * self.kj_per_energy)
            if self.periodic:
                # A box below twice the cutoff would miss pairs: NaN instead.
                energy = energy + torch.where(box.diagonal().amin() < 2 * self.cutoff, torch.nan, 0.0)  # type: ignore[union-attr]
            i, j = self.pairs.unbind(0)
            force = force.double()
            forces = self.no_force.index_add(0, i, force).index_add(0, j, force, alpha=-1)
            # Whatever makes the energy NaN makes all forces NaN.
            return energy, forces + energy.sum() * 0

    def _sum(self, start: Tensor, molecules: Tensor, values: Tensor) -> Tensor:
        """Sum of the values of each molecule, added to `start`, shape (M,)."""
        if self.num_molecules == 1:
            return start + values.sum()
        return start.index_add(0, molecules, values)

    def _pair_energy(self, distance: Tensor) -> Tensor | None:
        terms = [prior.pair_energy(*self.pair_z.unbind(0), distance * self.per_nm) for prior in self.priors]
        return torch.stack(terms).sum(0) if terms else None


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


def _pair_species(model: TensorNet, z: Tensor, occupied: Tensor) -> Tensor:
    """Z_ij of each slot with each slot of its molecule, shape (A, n, F); zero where one is empty."""
    blocks, n = z.shape
    z_i = z[:, :, None].expand(blocks, n, n)
    z_j = z[:, None, :].expand(blocks, n, n)
    both = (occupied[:, :, None] & occupied[:, None, :]).unsqueeze(-1)
    species = model.embedding.pair_species(z_i.reshape(-1), z_j.reshape(-1)).unflatten(0, (blocks, n, n))
    return (species * both).flatten(0, 1)


class StaticPotential(nn.Module):
    """A flat, static-shape, synchronisation-free program for fixed atoms, without autograd.

    Parameters
    ----------
    model : TensorNet
    atoms : Atoms
    periodic : bool
        Whether :meth:`forward` takes box vectors.
    precision : str
        "single" (float32) or "double" (float64), the arithmetic of the network.
    tabulate : int
        Intervals of the tables of radial functions; 0 evaluates the functions themselves.

    Attributes
    ----------
    cutoff : float
        In nm.
    """

    def __init__(
        self, model: TensorNet, atoms: Atoms, *, periodic: bool = False, precision: str = "single", tabulate: int = 1024
    ):
        super().__init__()
        if precision not in DTYPES:
            raise ValueError(f"precision: expected one of {', '.join(DTYPES)}, received {precision!r}")
        reference = copy_double(model)
        dtype = DTYPES[precision]
        with torch.no_grad():
            radial = radial_functions(reference, dtype, tabulate)
            program = StaticProgram(reference, atoms, periodic, dtype, radial)
        self.atoms, self.periodic, self.precision = atoms, periodic, precision
        self.cutoff = program.cutoff
        generator = torch.Generator().manual_seed(0)
        example: tuple[Tensor, ...] = (torch.rand(len(atoms.numbers), 3, dtype=torch.float64, generator=generator),)
        if periodic:
            example = (*example, torch.eye(3, dtype=torch.float64) * 3 * self.cutoff)
        self.program = flatten(program, example)

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
    import copy

    return copy.deepcopy(model).double().eval().requires_grad_(False)


def radial_functions(model: TensorNet, dtype: torch.dtype, intervals: int) -> nn.Module:
    """Radial functions of a float64 model for the static network: a table, or the functions themselves (0 intervals)."""
    if intervals == 0:
        import copy

        return _DirectRadial(copy.deepcopy(model), MINIMUM_DISTANCE, dtype)
    units = model.units
    scales = _function_scales(model)

    def functions(distance: Tensor) -> Tensor:
        return (model.radial_functions(distance / units.nm_per_length) * scales).flatten(1)

    return RadialTable(functions, MINIMUM_DISTANCE, model.config.cutoff_upper * units.nm_per_length, intervals, dtype)
