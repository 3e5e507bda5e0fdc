"""The arguments that every force takes: checked, and made into a module.

Plain lengths are in nm; a Quantity is converted before anything else.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
import sys
import warnings
from typing import Any

import torch
from openmm import unit
from torch import Tensor

from ..common.atoms import Atoms, check_particles, formal_charge, integers
from ..common.checks import flag, is_topology
from ..common.files import file_kind
from ..common.units import lengths_in_nm, positive_in
from ..export.compiled import Exported, check_supported, compile_potential
from ..export.exported import load_exported
from ..models.checkpoint import load_model
from ..models.registry import find_model
from ..models.tensornet import TensorNet
from ..neighbors.reference import check_box
from ..static.positions import check_positions, warn_about_close_atoms, warn_about_lone_atoms
from ..static.potential import Options, choose_coulomb_cutoff, choose_kernels
from ..static.program import coulomb_cutoff_of

PLACEHOLDER = 0.1001  # nm; the edges of 1 Å of CRYST1 records that mean no box
KEPT_MEMORY = 1 << 29  # bytes


def prepare(
    model: str | os.PathLike | TensorNet,
    topology: Any,
    *,
    atomic_numbers: Any,
    atoms: Any,
    replicas: Any,
    total_charge: Any,
    periodic: bool | None,
    positions: Any,
    box_vectors: Any,
    coulomb_cutoff: Any,
    max_pairs: int | None,
    kernels: str,
    precision: str,
    any_molecule: bool,
    scripted: bool,
) -> Exported:
    """The module, TorchScript if `scripted`, for the arguments of :class:`~openmm_tensornet.TensorNetForce`, which says what they are.

    Raises
    ------
    ValueError, TypeError, FileNotFoundError
        If an argument does not fit.
    """
    options = Options(precision=precision, max_pairs=max_pairs, kernels=kernels)
    if unit.is_quantity(total_charge):
        total_charge = _in_elementary_charges(total_charge)
    if periodic is not None:
        periodic = flag("periodic", periodic)
    numbers, labels, particles, stated_charge = _select(topology, atomic_numbers, atoms)
    topology_box = None if topology is None else topology.getPeriodicBoxVectors()
    if is_placeholder(topology_box):
        topology_box = None
        if periodic is None and box_vectors is None:
            warnings.warn(
                "topology: the box of 1 Å is a placeholder (CRYST1 in a PDB file) that holds no molecule; left out, as for a molecule "
                "in vacuum",
                stacklevel=4,
            )
    if periodic is None:
        periodic = box_vectors is not None or topology_box is not None
    box_given = box_vectors if box_vectors is not None else topology_box
    box = (
        torch.from_numpy(lengths_in_nm("box_vectors", box_given, (3, 3)))
        if periodic and box_given is not None
        else None
    )
    if periodic and box is None:
        raise ValueError(
            "periodic: expected a box with periodic=True, received none; pass box_vectors or a topology that has one"
        )
    own_positions = _own_positions(positions, particles, len(numbers))
    if coulomb_cutoff is not None:
        coulomb_cutoff = positive_in("coulomb_cutoff", coulomb_cutoff, unit.nanometer)

    exported = open_model(model, scripted)
    if isinstance(exported, Exported):
        _check_exported(exported.metadata, numbers, replicas, total_charge, particles, periodic)
        _check_exported_options(
            exported.metadata,
            precision=(options.precision, "single"),
            kernels=(options.kernels, "auto"),
            max_pairs=(options.max_pairs, None),
            coulomb_cutoff_nm=(coulomb_cutoff, None),
        )
        specification = Atoms.make(numbers, exported.metadata["replicas"], exported.metadata["total_charge"])
        cutoff, long_range = exported.metadata["cutoff_nm"], exported.metadata["coulomb_cutoff_nm"]
    else:
        specification = Atoms.make(numbers, replicas, total_charge)
        check_supported(exported, specification, labels, any_molecule=any_molecule)
        exported = choose_coulomb_cutoff(exported, periodic, coulomb_cutoff)
        cutoff, long_range = exported.cutoff * exported.units.nm_per_length, coulomb_cutoff_of(exported)
        if any(specification.charges) and not exported.config.charge:
            warnings.warn(
                f"total_charge: the model was trained without total charges, received {total_charge!r}; "
                "the energy depends on it nevertheless",
                stacklevel=4,
            )
    if stated_charge is not None and stated_charge != sum(specification.charges):
        warnings.warn(
            f"total_charge: the formal charges of the topology sum to {stated_charge:+d}, received {total_charge!r}, which is used; pass "
            f"total_charge={stated_charge} unless the file is wrong",
            stacklevel=4,
        )
    if periodic and len(specification.charges) > 1:
        warnings.warn(
            "replicas: with periodic boundaries, received several, which do not see each other; the molecules of a "
            "liquid must see each other: leave it out",
            stacklevel=4,
        )
    if box is not None:
        _check_coulomb_cutoff(box, long_range)
        check_box(box, cutoff, "box_vectors", " nm")
    if own_positions is not None:
        check_positions(own_positions, specification, labels, box)
        warn_about_close_atoms(own_positions, specification, labels, box)
        warn_about_lone_atoms(own_positions, specification, labels, box, cutoff)
    if not isinstance(exported, Exported):
        exported = compile_potential(
            exported,
            specification,
            dataclasses.replace(options, periodic=periodic, kernels=choose_kernels(kernels)),
            particles=particles,
            positions=own_positions,
            box=box,
            scripted=scripted,
        )
    _keep_memory()
    return exported


def is_placeholder(box: Any) -> bool:
    """Whether the box of a topology, if it has one, is the one of 1 Å that programs write for molecules without a box."""
    return box is not None and all(box[k][k].value_in_unit(unit.nanometer) <= PLACEHOLDER for k in range(3))


def has_box(topology: Any) -> bool:
    """Whether a topology has a box that is meant."""
    box = topology.getPeriodicBoxVectors()
    return box is not None and not is_placeholder(box)


def _select(
    topology: Any, atomic_numbers: Any, atoms: Any
) -> tuple[list[int], list[str], list[int] | None, int | None]:
    """Atomic numbers and labels of the force's atoms, their indices in the System (None for all), and the sum of their formal charges."""
    if (topology is None) == (atomic_numbers is None):
        given = "neither" if topology is None else "both"
        raise ValueError(f"topology, atomic_numbers: expected one of them, received {given}")
    particles = None
    if atoms is not None:
        particles = check_particles(atoms)
    if atomic_numbers is not None:
        numbers = list(integers("atomic_numbers", atomic_numbers))
        if particles is not None and len(numbers) != len(particles):
            raise ValueError(
                f"atomic_numbers: expected one for each of the {len(particles)} atoms, received {len(numbers)}"
            )
        return numbers, [f"atom {k} (atomic number {z})" for k, z in enumerate(numbers)], particles, None
    if not is_topology(topology):
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
    return numbers, labels, particles, formal_charge(chosen)


def _in_elementary_charges(charge: Any) -> Any:
    """A total charge that is a Quantity as plain numbers."""
    if not charge.unit.is_compatible(unit.elementary_charge):
        raise TypeError(f"total_charge: expected a charge (a Quantity, or numbers in e), received {charge}")
    return charge.value_in_unit(unit.elementary_charge)


def _own_positions(positions: Any, particles: list[int] | None, count: int) -> Tensor | None:
    """Positions of the force's atoms from those of all particles."""
    if positions is None:
        return None
    tensor = torch.from_numpy(lengths_in_nm("positions", positions, (None, 3)))
    needed = count if particles is None else max(particles) + 1
    if (particles is None and len(tensor) != count) or len(tensor) < needed:
        raise ValueError(f"positions: expected one row for each particle ({needed}), received {len(tensor)}")
    return tensor if particles is None else tensor[particles]


def open_model(model: Any, scripted: bool = False) -> TensorNet | Exported:
    """A loaded model as it is, a checkpoint or an exported file read, the latter as TorchScript if `scripted`."""
    if isinstance(model, TensorNet):
        return model
    if isinstance(model, (str, os.PathLike)):
        path = find_model(model)
        kind = file_kind(path)
        if kind == "TorchScript":
            raise ValueError(
                f"model: expected a checkpoint or a file of export_potential, received TorchScript ({os.fspath(model)}), which is a "
                "program and could do anything; give it to openmmtorch.TorchForce if you trust it"
            )
        return load_exported(path, scripted) if kind == "exported" else load_model(path)
    if isinstance(model, (list, tuple)):
        raise ValueError("model: expected one model, received a list; ensembles are not supported")
    raise TypeError(f"model: expected a path, a name or a TensorNet, received {type(model).__name__}")


def _check_exported(
    metadata: dict,
    numbers: list[int],
    replicas: Any,
    total_charge: Any,
    particles: list[int] | None,
    periodic: bool,
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
    given = Atoms.make(numbers, metadata["replicas"] if replicas is None else replicas, total_charge)
    if list(given.replicas) != metadata["replicas"]:
        raise ValueError("replicas: expected those that the file was exported with, received others; export it again")
    if any(given.charges) and list(given.charges) != metadata["total_charge"]:
        raise ValueError(
            f"total_charge: expected {metadata['total_charge']} as the file was exported with, received {total_charge!r}; export it again"
        )


def _check_exported_options(metadata: dict, **options: tuple[Any, Any]) -> None:
    """Refuse options, each given with its default, that an exported file was made without; the default goes with any file."""
    for name, (value, default) in options.items():
        if value not in (default, metadata[name]):
            raise ValueError(
                f"{name.removesuffix('_nm')}: expected {metadata[name]!r} as the file was exported with, received {value!r}; "
                "export it again"
            )


def _check_coulomb_cutoff(box: Tensor, cutoff: float | None) -> None:
    """Refuse a box that is too small for the Coulomb interaction, though not for the network."""
    fits = float(box.diagonal().min()) / 2
    if cutoff is not None and cutoff > fits > 0:
        raise ValueError(
            f"coulomb_cutoff: expected at most half the smallest width of the box, {fits:.6g} nm, received {cutoff:.6g} nm; pass "
            f"coulomb_cutoff={math.floor(fits * 1e4) / 1e4:g} (the energy depends on it) or use a larger box"
        )


def _keep_memory() -> None:
    """Tell glibc's malloc to keep freed memory, up to half a GB, rather than to get it anew from Linux at every step.

    An evaluation of thousands of atoms frees and allocates arrays of many MB, and page faults took a sixth of its time.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
            libc.mallopt(m_trim_threshold, KEPT_MEMORY)
            libc.mallopt(m_mmap_threshold, KEPT_MEMORY)
