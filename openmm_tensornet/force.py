"""TensorNetForce: a TensorNet as an OpenMM force; the only module that imports openmmtorch."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import re
import warnings
from typing import Any

import numpy as np
import openmm
import torch
from openmm import unit
from torch import Tensor

from .checkpoint import load_model
from .export import Exported, check_supported, compile_potential, load_exported
from .files import is_torchscript
from .model import TensorNet
from .neighbors import check_box, minimum_image
from .potential import DTYPES, MINIMUM_DISTANCE, Atoms, choose_coulomb_cutoff, coulomb_cutoff_of, integers
from .units import positive_in

# Builds of openmmtorch on PyPI, and the versions of torch and OpenMM that each was found to work with (from, below).
_BUILDS = {"1.10": (((2, 10), (2, 13)), ((8, 4), (8, 6)))}


def _import_openmmtorch():
    try:
        logging.disable(logging.WARNING)  # it imports OpenMM under its former name, which logs a warning
        import openmmtorch
    except ImportError as error:
        raise ImportError(
            f"TensorNetForce needs openmmtorch, which cannot be imported ({error}); install it with "
            "`pip install openmm-tensornet[cpu]` (or [cuda12], [cuda13]), or `conda install -c conda-forge openmm-torch`"
        ) from error
    finally:
        logging.disable(logging.NOTSET)
    for name in importlib.metadata.packages_distributions().get("openmmtorch", ()):
        check_versions(name, importlib.metadata.version(name), torch.__version__, openmm.__version__)
    return openmmtorch


def check_versions(distribution: str, version: str, torch_version: str, openmm_version: str) -> None:
    """Refuse a torch or an OpenMM that an openmmtorch build from PyPI is known not to fit.

    Raises
    ------
    ImportError
        Which version is installed, and which ones fit.
    """
    if version not in _BUILDS or not distribution.startswith("acellera-openmmtorch"):
        return
    for package, installed, (first, below) in zip(
        ("torch", "openmm"), (torch_version, openmm_version), _BUILDS[version], strict=True
    ):
        match = re.match(r"(\d+)\.(\d+)", installed)
        if match and not first <= (int(match[1]), int(match[2])) < below:
            bounds = f">={first[0]}.{first[1]},<{below[0]}.{below[1]}"
            raise ImportError(
                f"{distribution} {version} works with {package}{bounds}, but {package} {installed} is installed; "
                f"run `pip install '{package}{bounds}'`"
            )


openmmtorch = _import_openmmtorch()


class TensorNetForce(openmmtorch.TorchForce):  # type: ignore[name-defined]
    """A TensorNet potential that `System.addForce` takes.

    Parameters
    ----------
    model : path or TensorNet
        A TorchMD-Net checkpoint, a file written by :func:`~openmm_tensornet.export.export_torchscript`, or a loaded model.
        An exported file keeps its precision, molecules and charges; arguments that contradict it are errors.
    topology : openmm.app.Topology, optional
        Gives the elements and the box.
    atomic_numbers : sequence of int, optional
        Instead of a topology: the atomic number of each atom that the force acts on.
    atoms : sequence of int, optional
        Indices in the System of the atoms that the force acts on, in any order; all particles by default. The others get
        zero force.
    molecules : sequence of int, optional
        For each of the atoms, the index of a *system that does not see the others* (replicas, say); one by default.
    total_charge : number or sequence of numbers
        In elementary charges: of the one molecule, or one for each molecule.
    periodic : bool, optional
        Whether nearest images interact; by default whether `box_vectors` is given or the topology has a box.
    positions : Quantity or array, shape (particles, 3), optional
        nm. Of all particles; checked for overlapping atoms, and used to check the accuracy of the force.
    box_vectors : Quantity or array, shape (3, 3), optional
        nm; the topology's by default. Checked against the cutoffs.
    coulomb_cutoff : Quantity or number, optional
        nm. Of a model with a Coulomb interaction of partial charges (AceFF-2.0), beyond which a reaction field stands; at most half
        the box. By default the model's own; where it has none, 1.2 nm with periodic boundaries and no cutoff in vacuum.
    precision : str
        Arithmetic of the network, "single" (IEEE float32) or "double".
    cuda_graphs : bool
        Whether TorchForce captures a CUDA graph; platforms without CUDA ignore it.
    warmup_steps : int
        Evaluations before the capture, at least 10 (fewer let a fuser compile during the capture).

    Attributes
    ----------
    metadata : dict
        What the module says of itself; see :func:`~openmm_tensornet.export.export_torchscript`.

    Raises
    ------
    ValueError, TypeError, FileNotFoundError
        If an argument does not fit.
    ImportError
        If openmmtorch is missing or does not fit the installed torch or OpenMM.
    """

    def __init__(
        self,
        model: str | os.PathLike | TensorNet,
        topology: Any = None,
        *,
        atomic_numbers: Any = None,
        atoms: Any = None,
        molecules: Any = None,
        total_charge: Any = 0,
        periodic: bool | None = None,
        positions: Any = None,
        box_vectors: Any = None,
        coulomb_cutoff: Any = None,
        precision: str = "single",
        cuda_graphs: bool = True,
        warmup_steps: int = 10,
    ):
        _check_options(precision, cuda_graphs, warmup_steps, periodic)
        numbers, labels, particles = _select(topology, atomic_numbers, atoms)
        topology_box = None if topology is None else topology.getPeriodicBoxVectors()
        if periodic is None:
            periodic = box_vectors is not None or topology_box is not None
        box = (
            _in_nm("box_vectors", box_vectors if box_vectors is not None else topology_box, (3, 3))
            if periodic
            else None
        )
        if periodic and box is None:
            raise ValueError(
                "periodic: expected a box with periodic=True, received none; pass box_vectors or a topology that has one"
            )
        own_positions = _own_positions(positions, particles, len(numbers))
        if coulomb_cutoff is not None:
            coulomb_cutoff = positive_in("coulomb_cutoff", coulomb_cutoff, unit.nanometer)

        exported = _open(model)
        if isinstance(exported, Exported):
            given = None if molecules is None else Atoms.make(numbers, molecules, total_charge)
            _check_exported(
                exported.metadata, numbers, given, total_charge, particles, periodic, precision, coulomb_cutoff
            )
            specification = Atoms.make(numbers, exported.metadata["molecules"], exported.metadata["total_charge"])
            cutoff, long_range = exported.metadata["cutoff_nm"], exported.metadata["coulomb_cutoff_nm"]
        else:
            specification = Atoms.make(numbers, molecules, total_charge)
            check_supported(exported, specification, labels)
            exported = choose_coulomb_cutoff(exported, periodic, coulomb_cutoff)
            cutoff, long_range = exported.cutoff * exported.units.nm_per_length, coulomb_cutoff_of(exported)
            if any(specification.charges) and not exported.config.charge:
                warnings.warn(
                    f"total_charge: the model was trained without total charges, received {total_charge!r}; "
                    "the energy depends on it nevertheless",
                    stacklevel=2,
                )
        if periodic and len(specification.charges) > 1:
            warnings.warn(
                "molecules: with periodic boundaries, received several molecules that do not see each other; the molecules of a "
                "liquid must see each other: leave `molecules` out",
                stacklevel=2,
            )
        if box is not None:
            _check_coulomb_cutoff(box, long_range)
            check_box(box, cutoff, "box_vectors", " nm")
        if own_positions is not None:
            _check_positions(own_positions, specification, labels, box)
        if not isinstance(exported, Exported):
            exported = compile_potential(
                exported,
                specification,
                particles=particles,
                periodic=periodic,
                precision=precision,
                positions=own_positions,
                box=box,
            )
        _keep_float32()
        properties = {
            "useCUDAGraphs": "true" if cuda_graphs else "false",
            "CUDAGraphWarmupSteps": str(warmup_steps),
        }
        super().__init__(exported.module, properties)
        self.setOutputsForces(True)
        self.setUsesPeriodicBoundaryConditions(periodic)
        self.setName("TensorNetForce")
        self.metadata = exported.metadata

    def partial_charges(self, context: openmm.Context) -> np.ndarray:
        """Partial charges at the positions of a Context; see :func:`partial_charges`."""
        return partial_charges(self, context)


def charged_particles(force: openmm.Force, num_particles: int) -> list[int] | None:
    """Particles of the System whose partial charges a force predicts, in its order; None if it predicts none."""
    module = _module(force)
    if getattr(module, "charges", None) is None:
        return None
    return json.loads(module.metadata)["particles"] or list(range(num_particles))


def _module(force: openmm.Force) -> Any:
    """The TorchScript module of a TorchForce, also of one read back from XML; None of another force."""
    return openmmtorch.TorchForce.cast(force).getModule() if openmmtorch.TorchForce.isinstance(force) else None


def partial_charges(force: Any, context: openmm.Context) -> np.ndarray:
    """Partial charges that a TensorNet2 predicts for the positions, and the box, of a Context.

    The mean over the charge channels of the network's last layer; those of a molecule sum to its total charge. They are evaluated
    anew, on the CPU.

    Parameters
    ----------
    force : TensorNetForce or openmm.Force
        A force read back from XML or taken from a System will do.
    context : openmm.Context

    Returns
    -------
    array of float64, shape (atoms,)
        Of the force's atoms, in elementary charges.

    Raises
    ------
    ValueError
        If the force has no model with partial charges.
    """
    charges = getattr(_module(force), "charges", None)
    if charges is None:
        raise ValueError(
            "force: expected a TensorNetForce of a model with partial charges (TensorNet2, such as AceFF-2.0), received "
            f"another {type(force).__name__}"
        )
    state = context.getState(positions=True)
    arguments = [torch.tensor(state.getPositions(asNumpy=True).value_in_unit(unit.nanometer))]
    if force.usesPeriodicBoundaryConditions():
        arguments.append(torch.tensor(state.getPeriodicBoxVectors(asNumpy=True).value_in_unit(unit.nanometer)))
    with torch.no_grad():
        return charges(*arguments).numpy()


def _check_options(precision: Any, cuda_graphs: Any, warmup_steps: Any, periodic: Any) -> None:
    if precision not in DTYPES:
        raise ValueError(f"precision: expected one of {', '.join(DTYPES)}, received {precision!r}")
    if not isinstance(cuda_graphs, bool):
        raise TypeError(f"cuda_graphs: expected True or False, received {cuda_graphs!r}")
    if periodic is not None and not isinstance(periodic, bool):
        raise TypeError(f"periodic: expected True, False or None, received {periodic!r}")
    if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 10:
        raise ValueError(f"warmup_steps: expected an integer of at least 10, received {warmup_steps!r}")


def _select(topology: Any, atomic_numbers: Any, atoms: Any) -> tuple[list[int], list[str], list[int] | None]:
    """Atomic numbers and labels of the force's atoms, and their indices in the System (None for all)."""
    if (topology is None) == (atomic_numbers is None):
        given = "neither" if topology is None else "both"
        raise ValueError(f"topology, atomic_numbers: expected one of them, received {given}")
    particles = None
    if atoms is not None:
        particles = list(integers("atoms", atoms))
        if not particles:
            raise ValueError("atoms: expected at least one index, received none; leave it out to take all particles")
        repeated = (
            sorted({a for a in particles if particles.count(a) > 1}) if len(set(particles)) < len(particles) else []
        )
        if repeated:
            raise ValueError(f"atoms: expected each index once, received {repeated[0]} more than once")
        if min(particles) < 0:
            raise ValueError(f"atoms: expected indices of at least 0, received {min(particles)}")
    if atomic_numbers is not None:
        numbers = list(integers("atomic_numbers", atomic_numbers))
        if particles is not None and len(numbers) != len(particles):
            raise ValueError(
                f"atomic_numbers: expected one for each of the {len(particles)} atoms, received {len(numbers)}"
            )
        return numbers, [f"atom {k} (atomic number {z})" for k, z in enumerate(numbers)], particles
    if not hasattr(topology, "atoms") or not hasattr(topology, "getPeriodicBoxVectors"):
        raise TypeError(f"topology: expected an openmm.app.Topology, received {type(topology).__name__}")
    chosen = list(topology.atoms())
    if particles is not None:
        if max(particles) >= len(chosen):
            raise ValueError(
                f"atoms: expected indices below the topology's number of atoms, {len(chosen)}, received {max(particles)}"
            )
        chosen = [chosen[a] for a in particles]
    numbers, labels = [], []
    for atom in chosen:
        where = f"atom {atom.index} ({atom.name}, residue {atom.residue.name} {atom.residue.id}"
        if atom.element is None:
            raise ValueError(
                f"topology: {where}): expected an atom with an element, received one without (a virtual site or an unreadable "
                "name); leave it out with atoms="
            )
        numbers.append(atom.element.atomic_number)
        labels.append(f"{where}, {atom.element.symbol})")
    return numbers, labels, particles


def _in_nm(name: str, value: Any, shape: tuple[int | None, int]) -> Tensor | None:
    """A Quantity, array or list in nm as a float64 tensor; a Quantity is converted before anything else."""
    if value is None:
        return None
    try:
        if unit.is_quantity(value):
            value = value.value_in_unit(unit.nanometer)
        else:
            value = [v.value_in_unit(unit.nanometer) if unit.is_quantity(v) else v for v in value]
        tensor = torch.tensor([[float(c) for c in row] for row in value], dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name}: expected lengths (a Quantity, or numbers in nm), received {type(value).__name__} ({error})"
        ) from None
    expected = tuple("particles" if s is None else s for s in shape)
    if tensor.dim() != 2 or tensor.shape[1] != shape[1] or (shape[0] is not None and tensor.shape[0] != shape[0]):
        raise ValueError(f"{name}: expected shape ({expected[0]}, {expected[1]}), received {tuple(tensor.shape)}")
    return tensor


def _check_coulomb_cutoff(box: Tensor, cutoff: float | None) -> None:
    """Refuse a box that is too small for the Coulomb interaction, though not for the network."""
    fits = float(box.diagonal().min()) / 2
    if cutoff is not None and cutoff > fits > 0:
        raise ValueError(
            f"coulomb_cutoff: expected at most half the smallest width of the box, {fits:.6g} nm, received {cutoff:.6g} nm; pass "
            f"coulomb_cutoff={math.floor(fits * 1e4) / 1e4:g} (the energy depends on it) or use a larger box"
        )


def _own_positions(positions: Any, particles: list[int] | None, count: int) -> Tensor | None:
    """Positions of the force's atoms from those of all particles."""
    tensor = _in_nm("positions", positions, (None, 3))
    if tensor is None:
        return None
    needed = count if particles is None else max(particles) + 1
    if (particles is None and len(tensor) != count) or len(tensor) < needed:
        raise ValueError(f"positions: expected one row for each particle ({needed}), received {len(tensor)}")
    return tensor if particles is None else tensor[particles]


def _check_positions(positions: Tensor, atoms: Atoms, labels: list[str], box: Tensor | None) -> None:
    """Refuse positions that are not finite, and overlapping atoms."""
    finite = torch.isfinite(positions).all(1)
    if not bool(finite.all()):
        bad = int((~finite).nonzero()[0])
        raise ValueError(f"positions: {labels[bad]}: expected finite coordinates, received {positions[bad].tolist()}")
    molecules = torch.tensor(atoms.molecules)
    for k in range(len(positions) - 1):
        vector = positions[k + 1 :] - positions[k]
        if box is not None:
            vector = minimum_image(vector, box)
        distance = vector.norm(dim=1).masked_fill(molecules[k + 1 :] != molecules[k], torch.inf)
        least = int(distance.argmin())
        if float(distance[least]) < MINIMUM_DISTANCE:
            raise ValueError(
                f"positions: {labels[k]} and {labels[k + 1 + least]}: expected a distance of at least {MINIMUM_DISTANCE} nm, received "
                f"{float(distance[least]):.4f} nm; are the positions in nm, and are molecules that overlap marked by `molecules`?"
            )


def _open(model: Any) -> TensorNet | Exported:
    if isinstance(model, TensorNet):
        return model
    if isinstance(model, (str, os.PathLike)):
        if not os.path.exists(model):
            raise FileNotFoundError(
                f"model: expected a checkpoint or an exported file, received {os.fspath(model)!r}, which does not exist"
            )
        return load_exported(model) if is_torchscript(model) else load_model(model)
    if isinstance(model, (list, tuple)):
        raise ValueError("model: expected one model, received a list; ensembles are not supported")
    raise TypeError(f"model: expected a path or a TensorNet, received {type(model).__name__}")


def _check_exported(
    metadata: dict,
    numbers: list[int],
    given: Atoms | None,
    total_charge: Any,
    particles: list[int] | None,
    periodic: bool,
    precision: str,
    coulomb_cutoff: float | None,
) -> None:
    """Refuse an exported file that was made for something else."""
    made = metadata["atomic_numbers"]
    if made != numbers:
        where = next(
            (k for k, (a, b) in enumerate(zip(made, numbers, strict=False)) if a != b),
            min(len(made), len(numbers)),
        )
        raise ValueError(
            f"model: expected atoms as the file was exported for ({len(made)} atoms), received {len(numbers)} that differ from atom "
            f"{where} on; export the model for this topology"
        )
    if metadata["periodic"] != periodic:
        raise ValueError(
            f"periodic: expected {metadata['periodic']} as the file was exported with, received {periodic}; export it again"
        )
    if metadata["particles"] != particles:
        raise ValueError(
            f"atoms: expected {metadata['particles']} as the file was exported with, received {particles}; export it again"
        )
    if given is not None and list(given.molecules) != metadata["molecules"]:
        raise ValueError("molecules: expected those that the file was exported with, received others; export it again")
    if precision != "single" and precision != metadata["precision"]:  # "single" is also what one gets by saying nothing
        raise ValueError(
            f"precision: expected {metadata['precision']!r} as the file was exported with, received {precision!r}; "
            "export it again"
        )
    if coulomb_cutoff is not None and coulomb_cutoff != metadata["coulomb_cutoff_nm"]:
        raise ValueError(
            f"coulomb_cutoff: expected {metadata['coulomb_cutoff_nm']} nm as the file was exported with, received "
            f"{coulomb_cutoff:g} nm; export it again"
        )
    charges = total_charge if hasattr(total_charge, "__iter__") else [total_charge]
    if any(charges) and [float(q) for q in charges] != metadata["total_charge"]:
        raise ValueError(
            f"total_charge: expected {metadata['total_charge']} as the file was exported with, received {total_charge!r}; export it again"
        )


def _keep_float32() -> None:
    """Single precision means IEEE float32: switch TF32 off, which torch can only do for the whole process."""
    if torch.cuda.is_available() and torch.get_float32_matmul_precision() != "highest":
        warnings.warn(
            "TF32 is on in torch; TensorNetForce switches it off for this process (torch.set_float32_matmul_precision('highest'))",
            stacklevel=3,
        )
        torch.set_float32_matmul_precision("highest")
