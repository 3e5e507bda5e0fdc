"""A model specialised to fixed atoms, replicas and charges: positions in nm to energies and forces in OpenMM's units."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, fx

from ..common.atoms import Atoms
from ..common.checks import flag, integer, one_of
from ..common.module import Module
from ..graph.record import flatten, select_outputs, share_buffers
from ..kernels.operators import available
from ..models.accuracy import SMALL_FORCE, TABULATION, Deviation, deviation, reference_energy_and_forces
from ..models.tensornet import TensorNet
from ..models.tensornet2 import TensorNet2
from ..neighbors.lists import import_nnpops
from .program import (
    DirectRadial,
    ListPlan,
    StaticProgram,
    plan_lists,
    radial_functions,
    radial_tables,
)
from .tables import RadialTable

# What runs on a CPU, and what on a GPU. The fused kernels have not been measured on a GPU yet.
KERNELS = {
    "auto": ("fused", "portable"),
    "portable": ("portable", "portable"),
    "fused": ("fused", "fused"),
    "nnpops": ("portable", "nnpops"),
}
FINDERS = {"portable": "torch", "fused": "fused", "nnpops": "nnpops"}  # of pairs
DTYPES = {"single": torch.float32, "double": torch.float64}
RANK = {"single": 1e-10, "double": 1e-12}  # see RadialTable
TABLE_SIZES = (768, 1024, 2048, 4096, 8192)
# Of the table's functions on a grid ten times finer, relative to each one's largest value: value, derivative.
FUNCTION_ERROR = (1e-5, 1e-3)
# Up to this many atoms a potential is checked against the reference model itself.
REFERENCE_ATOMS = 48
# Of the Coulomb interaction with periodic boundaries, where neither the user nor the model says otherwise.
COULOMB_CUTOFF = 1.2  # nm


@dataclass(frozen=True)
class Options:
    """How a potential is to be evaluated: what users choose, in the form in which it travels from their arguments to the programs.

    Attributes
    ----------
    periodic : bool
        Whether box vectors are taken.
    precision : str
        "single" (float32) or "double" (float64), the arithmetic of the network.
    tabulate : bool
        True evaluates radial functions from tables, refined until they are good enough; False evaluates the functions themselves, which
        takes several times as long.
    max_pairs : int, optional
        Pairs i<j that the list of a large molecule holds; chosen with a margin by default. If there are ever more,
        energy and forces are NaN. Small molecules hold all pairs and ignore it.
    kernels : str
        Kernels of the CPU and of the GPU program; every potential has both programs, wherever it is made. "portable": PyTorch's own
        operators. "fused": those of `openmm_tensornet.kernels`. "auto": fused on a CPU, portable on a GPU. "nnpops": portable, and on
        a GPU NNPOps lists the pairs.

    Raises
    ------
    ValueError, TypeError
        If a value is none of these, or fused kernels are to do without tables.
    """

    periodic: bool = False
    precision: str = "single"
    tabulate: bool = True
    max_pairs: int | None = None
    kernels: str = "portable"

    def __post_init__(self) -> None:
        one_of("kernels", self.kernels, KERNELS)
        one_of("precision", self.precision, DTYPES)
        for name in ("periodic", "tabulate"):
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        if self.max_pairs is not None:
            object.__setattr__(self, "max_pairs", integer("max_pairs", self.max_pairs, 1))
        if "fused" in KERNELS[self.kernels] and not self.tabulate:
            raise ValueError(
                f"kernels: expected 'portable' with tabulate=False, received {self.kernels!r}; fused kernels need the tables"
            )

    @property
    def fused(self) -> bool:
        """Whether a CPU runs fused kernels."""
        return KERNELS[self.kernels][0] == "fused"


DEFAULTS = Options()


class Plan(NamedTuple):
    """What was chosen when a potential was made and checked, so that it can be made again without either.

    Attributes
    ----------
    intervals : int or None
        Of its tables; None without tables.
    list_plans, gpu_list_plans : tuple of (ListPlan, ListPlan or None)
        What the lists hold on a CPU and on a GPU: of the network, and of the Coulomb interaction, where there is one.
    """

    intervals: int | None
    list_plans: tuple[ListPlan, ListPlan | None]
    gpu_list_plans: tuple[ListPlan, ListPlan | None]


class StaticPotential(Module):
    """A flat, static-shape, synchronisation-free program for fixed atoms, without autograd: :meth:`make` makes one.

    Attributes
    ----------
    atoms : Atoms
    options : Options
    plan : Plan
        What was chosen.
    tabulation : dict or None
        The tables' size and the errors reached; None where nothing was chosen.
    cutoff : float
        In nm.
    capacity : int or None
        Pairs that the list holds; None where all pairs are evaluated.
    program, gpu_program : GraphModule
        For CPUs and for GPUs; the same object where both are the same.
    charge_program, gpu_charge_program : GraphModule or None
        For partial charges, where the model has them.
    """

    def __init__(
        self,
        atoms: Atoms,
        options: Options,
        plan: Plan,
        tabulation: dict | None,
        cutoff: float,
        programs: Sequence[fx.GraphModule],
        charge_programs: Sequence[fx.GraphModule | None] = (None, None),
    ):
        super().__init__()
        self.atoms, self.options, self.plan, self.tabulation, self.cutoff = atoms, options, plan, tabulation, cutoff
        self.capacity = plan.gpu_list_plans[0].capacity
        self.program, self.gpu_program = programs
        self.charge_program, self.gpu_charge_program = charge_programs

    @classmethod
    def make(
        cls,
        model: TensorNet,
        atoms: Atoms,
        options: Options = DEFAULTS,
        *,
        check: Sequence[tuple] = (),
        plan: Plan | None = None,
    ) -> StaticPotential:
        """Choose tables and lists, and flatten the programs.

        Parameters
        ----------
        model : TensorNet
        atoms : Atoms
        options : Options
        check : list of (positions, box or None, (energies, forces))
            Geometries for the refinement, with what the reference model gives for them.
        plan : Plan, optional
            Of the same potential, made before: nothing is chosen then.

        Raises
        ------
        ValueError
            If the model cannot be evaluated with periodic boundaries.
        RuntimeError
            If no table follows its radial functions.
        """
        periodic, precision = options.periodic, options.precision
        on_cpu, on_gpu = KERNELS[options.kernels]
        for prior in model.priors:
            if periodic and not prior.uses_box:
                raise ValueError(
                    f"periodic: expected False for a model with the prior {type(prior).__name__}, received True; TorchMD-Net "
                    "ignores the box in it, so its energy would depend on how molecules are wrapped"
                )
        if periodic and not math.isfinite(model.cutoff):
            raise ValueError(
                "coulomb_cutoff: expected a cutoff of the Coulomb interaction with periodic boundaries, received None; "
                "see choose_coulomb_cutoff"
            )
        reference = copy_double(model)
        tabulation: dict | None = None
        tables: list[RadialTable] | None = None
        if plan is None:
            # NNPOps lists pairs across replicas too, so its capacity is enough for both programs.
            gpu_list_plans = plan_lists(model, atoms, options.max_pairs, check, FINDERS[on_gpu])
            list_plans = plan_lists(model, atoms, gpu_list_plans[0].capacity, check, FINDERS[on_cpu])
            if options.tabulate:
                tables, tabulation = _refine(reference, atoms, options, list_plans[0].capacity, check)
            plan = Plan(tables[0].intervals if tables else None, list_plans, gpu_list_plans)
        capacity = plan.gpu_list_plans[0].capacity
        functions = radial_functions(reference, capacity is None)
        if plan.intervals is None:
            radial: list = [DirectRadial(group, DTYPES[precision]) for group in functions]
        else:
            # The very tables that were compared with the functions, where that was now.
            tables = tables or radial_tables(reference, functions, plan.intervals, RANK[precision])
            radial = [table.to(DTYPES[precision]) for table in tables]
        given = reference, atoms, periodic, DTYPES[precision], radial
        program = StaticProgram(*given, plan.list_plans, options.fused)
        example: tuple[Tensor, ...] = (torch.zeros(len(atoms.numbers), 3, dtype=torch.float64),)
        if periodic:
            example = (*example, torch.eye(3, dtype=torch.float64))
        programs = [flatten(program, example)]
        if "fused" in (on_cpu, on_gpu) or capacity is not None:
            gpu_program = StaticProgram(*given, plan.gpu_list_plans, on_gpu == "fused", gpu=True)
            programs.append(flatten(gpu_program, example, keep=True))
            share_buffers(*programs)
        outputs = (slice(0, 2), 2) if isinstance(model, TensorNet2) else (slice(0, 2),)
        selected = [[select_outputs(flat, which) for flat in programs] for which in outputs]
        return cls(atoms, options, plan, tabulation, program.cutoff, *((flat[0], flat[-1]) for flat in selected))

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
            kJ/mol/nm, float64. Both are NaN if two atoms of a replica coincide, or the box is below twice the cutoff.
        """
        program = self.gpu_program if positions.is_cuda else self.program
        return program(positions, box) if self.options.periodic else program(positions)

    def partial_charges(self, positions: Tensor, box: Tensor | None = None) -> Tensor:
        """Partial charges, shape (N,), float64, of a model that has them; arguments as :meth:`forward`.

        See :meth:`openmm_tensornet.TensorNet2.partial_charges`.
        """
        program = self.gpu_charge_program if positions.is_cuda else self.charge_program
        assert program is not None
        return program(positions, box) if self.options.periodic else program(positions)


def _refine(
    model: TensorNet, atoms: Atoms, options: Options, capacity: int | None, check: Sequence[tuple]
) -> tuple[list[RadialTable], dict]:
    """The smallest float64 tables that meet :data:`TABULATION` on all geometries and :data:`FUNCTION_ERROR` on their own grid."""
    precision = options.precision
    worst, errors = Deviation(0.0, 0.0), []
    # In the portable program: fused kernels for float64 would have to be compiled for this alone.
    list_plans = plan_lists(model, atoms, capacity, check)
    functions = radial_functions(model, capacity is None)
    for intervals in TABLE_SIZES:
        tables = radial_tables(model, functions, intervals, RANK[precision])
        program = StaticProgram(model, atoms, options.periodic, torch.float64, tables, list_plans)
        found = [deviation(program(x, box)[:2], expected, SMALL_FORCE) for x, box, expected in check]
        worst = Deviation(max((d.energy for d in found), default=0.0), max((d.force for d in found), default=0.0))
        if not worst.within(TABULATION[precision]):
            continue
        errors = [table.error(group) for table, group in zip(tables, functions, strict=True)]
        value, derivative = max(e.value for e in errors), max(e.derivative for e in errors)
        if value <= FUNCTION_ERROR[0] and derivative <= FUNCTION_ERROR[1]:
            return tables, {
                "intervals": intervals,
                "basis_functions": sum(len(table.modes) for table in tables),
                "largest_value_error": value,
                "largest_derivative_error": derivative,
                "energy_eV_per_atom": worst.energy,
                "relative_force": worst.force,
            }
    raise RuntimeError(
        f"model: expected radial functions that a table of {TABLE_SIZES[-1]} intervals describes to "
        f"{TABULATION[precision]}, reached {worst} with {errors}; they are steeper than a table can follow: "
        "`export_torchscript(..., tabulate=False)` writes a file that evaluates the functions themselves"
    )


def choose_kernels(kernels: str) -> str:
    """The kernels to take: "auto" is portable where numba is missing, "nnpops" where NNPOps is. GPUs play no part."""
    one_of("kernels", kernels, KERNELS)
    if kernels == "auto" and not available():
        return "portable"
    if kernels == "fused" and not available():
        raise ImportError(
            "kernels: 'fused' needs numba, which is not installed; run `pip install numba`, or pass kernels='portable'"
        )
    if kernels == "nnpops":
        try:
            import_nnpops()
        except Exception as error:  # whatever is wrong with it
            warnings.warn(
                f"kernels: 'nnpops' needs NNPOps, which cannot be imported ({error}); going on with kernels='portable'",
                stacklevel=5,
            )
            return "portable"
    return kernels


def copy_double(model: TensorNet) -> TensorNet:
    """A frozen copy in float64, from which everything static is made."""
    return copy.deepcopy(model).double().eval().requires_grad_(False)


def expected_energies_and_forces(
    model: TensorNet, atoms: Atoms, cases: dict[str, tuple[Tensor, Tensor | None]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """What a static potential is checked against: energies (M,), kJ/mol, and forces (N, 3), kJ/mol/nm, of each geometry.

    The reference model's; above :data:`REFERENCE_ATOMS` it would need hundreds of MB or several GB, and the portable program takes its
    place, in float64 with the finest table (whose functions agree with the model's to about 1e-10). The tests compare it
    with the reference model at such sizes.
    """
    model = copy_double(model)
    if len(atoms.numbers) <= REFERENCE_ATOMS:
        return {name: reference_energy_and_forces(model, atoms, *case) for name, case in cases.items()}
    list_plans = plan_lists(model, atoms, None, [(*case, None) for case in cases.values()])
    functions = radial_functions(model, list_plans[0].capacity is None)
    radial = radial_tables(model, functions, TABLE_SIZES[-1], RANK["double"])
    periodic = any(box is not None for _, box in cases.values())
    program = StaticProgram(model, atoms, periodic, torch.float64, radial, list_plans)
    return {name: program(*case)[:2] for name, case in cases.items()}


def choose_coulomb_cutoff(model: TensorNet, periodic: bool, cutoff: float | None) -> TensorNet:
    """The model with the cutoff of its Coulomb interaction that is to be used; `model` itself is not changed.

    Parameters
    ----------
    model : TensorNet
    periodic : bool
    cutoff : float or None
        nm. By default the model's own; where it has none, :data:`COULOMB_CUTOFF` with periodic boundaries and no cutoff in vacuum.
    """
    if not isinstance(model, TensorNet2) or not model.config.coulomb:
        if cutoff is not None:
            raise ValueError(
                f"coulomb_cutoff: expected None for a model without a Coulomb interaction, received {cutoff:g} nm; leave it out"
            )
        return model
    if cutoff is None:
        if model.config.coulomb_cutoff is not None or not periodic:
            return model
        cutoff = COULOMB_CUTOFF
    chosen = copy.copy(model)
    chosen.config = dataclasses.replace(model.config, coulomb_cutoff=cutoff / model.units.nm_per_length)
    return chosen
