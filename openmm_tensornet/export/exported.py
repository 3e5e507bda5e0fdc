"""Potentials that were made and checked: as the module of a force, and as files.

A file that the package reads is data (:mod:`.specification`). A TorchScript file is a program for openmmtorch alone.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import __version__
from ..common import jit
from ..common.atoms import Atoms, check_particles
from ..common.checks import array, flag
from ..common.files import DAMAGED, check_archive, check_file, file_kind, open_archive, replace_file
from ..common.float32 import ieee_float32
from ..common.interrupts import delivered
from ..graph.capture import check_graph_safety
from ..models.accuracy import TOLERANCES, Deviation, deviation, geometries, packing
from ..models.tensornet import TensorNet
from ..neighbors.reference import check_box
from ..static.positions import check_positions
from ..static.potential import (
    KERNELS,
    StaticPotential,
    choose_coulomb_cutoff,
    choose_kernels,
    expected_energies_and_forces,
)
from ..static.program import box_cutoff, coulomb_cutoff_of
from .programs import (
    PartialCharges,
    PeriodicPartialCharges,
    PeriodicPotential,
    Potential,
    cpu_program,
    made,
)
from .specification import Specification, key_of, read_texts, with_texts
from .torchscript import (
    ByDevice,
    Charges,
    Cluster,
    Periodic,
    PeriodicByDevice,
    PeriodicCharges,
    Scaled,
    ScaledPeriodic,
    inlined,
    scriptable,
)

FORMAT = "openmm-tensornet"
FORMAT_VERSION = 2
DESCRIPTION = "metadata"  # the entry of a file with what the specification does not say
_WRITTEN = (
    "format",
    "format_version",
    "package_version",
    "torch_version",
    "key",
    "particles",
    "tabulation",
    "launches",
    "deviation",
)
DEVICES = ("cpu", "cuda")  # in the order in which a potential names what it has for each


def model_hash(model: TensorNet) -> str:
    """SHA-256 of a model's configuration, units and weights."""
    digest = hashlib.sha256(json.dumps([asdict(model.config), asdict(model.units)], sort_keys=True).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().double().contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Exported:
    """A checked module for TorchForce, what it says of itself, and the bytes of the specification where it was made or read."""

    module: torch.jit.ScriptModule
    metadata: dict
    content: bytes = b""

    def describe(self, **entries) -> Exported:
        """The same module, which from now on also says `entries` of itself."""
        metadata = self.metadata | entries
        self.module.metadata = json.dumps(metadata)
        return Exported(self.module, metadata, self.content)

    def scaled(self) -> Exported:
        """A module that takes one more argument, by which it multiplies energy and forces."""
        wrapper = ScaledPeriodic if self.metadata["periodic"] else Scaled
        return Exported(inlined(wrapper(self.module, json.dumps(self.metadata))), self.metadata, self.content)


@torch.enable_grad()  # wherever the user is: the backward pass is recorded
@ieee_float32
@delivered()
def compile_potential(
    model: TensorNet,
    atoms: Atoms,
    *,
    particles: list[int] | None = None,
    periodic: bool = False,
    precision: str = "single",
    tabulate: bool = True,
    max_pairs: int | None = None,
    kernels: str = "portable",
    positions: Tensor | None = None,
    box: Tensor | None = None,
    coulomb_cutoff: float | None = None,
    self_contained: bool = False,
) -> Exported:
    """Make and check the module that TorchForce runs.

    Parameters
    ----------
    model : TensorNet
    atoms : Atoms
    particles : list of int, optional
        Index in the System of each atom; by default the System has these atoms alone.
    periodic : bool
    precision : str
        "single" or "double".
    tabulate : bool
        False evaluates the radial functions themselves.
    max_pairs, kernels
        See :class:`~openmm_tensornet.static.potential.StaticPotential`.
    positions, box : Tensor, optional
        Of the atoms, in nm: geometries for the checks. Random packings otherwise.
    coulomb_cutoff : float, optional
        nm; see :func:`~openmm_tensornet.static.potential.choose_coulomb_cutoff`.
    self_contained : bool
        Whether the module holds its programs, rather than what they are made of.

    Raises
    ------
    RuntimeError
        If the scripted and frozen module disagrees with the reference model.
    GraphSafetyError
        If it could not be captured in a CUDA graph.
    """
    model = choose_coulomb_cutoff(model, periodic, coulomb_cutoff)
    if periodic and box is None:
        edge = max(2.2 * model.cutoff * model.units.nm_per_length, (len(atoms.numbers) / 60) ** (1 / 3))
        box = torch.eye(3, dtype=torch.float64) * edge
    cutoff = model.network_cutoff * model.units.nm_per_length
    cases = geometries(atoms, cutoff, positions, box if periodic else None)
    expected = expected_energies_and_forces(model, atoms, cases)
    potential = StaticPotential(
        model,
        atoms,
        periodic=periodic,
        precision=precision,
        tabulate=tabulate,
        max_pairs=max_pairs,
        kernels=kernels,
        check=[(*cases[k], expected[k]) for k in cases],
    )
    # Where PyTorch's own operators do it, the program for GPUs runs here too; a list would take GBs of memory.
    if (
        potential.gpu_program is not potential.program
        and KERNELS[kernels][1] == "portable"
        and potential.capacity is None
    ):
        for name, case in cases.items():
            _check(potential.gpu_program(*case[: 1 + periodic]), expected[name], name, precision)
    specification = Specification(model, atoms, periodic, precision, kernels, potential.plan)
    content = specification.pack()
    key = key_of(content)
    module = (
        _self_contained(specification, potential, particles)
        if self_contained
        else _module(specification, content, particles)
    )
    with made(key, specification, potential):
        found = check_graph_safety(module, *_example(specification, particles))
        assert found.fixed_results
        metadata = {
            **_describe(specification),
            "key": key,
            "package_version": __version__,
            "torch_version": torch.__version__,
            "particles": particles,
            "tabulation": potential.tabulation,
            "launches": found.kernels,
            "deviation": _compare(module, cases, expected, particles, precision),
        }
    return Exported(module, {}, b"" if self_contained else content).describe(**metadata)


def _example(specification: Specification, particles: list[int] | None) -> list[Tensor]:
    """Positions of all particles, and a box where there is one; in single precision, as CUDA gives them unless told otherwise."""
    atoms, cutoff = specification.atoms, box_cutoff(specification.model)
    positions = packing(atoms, 1)
    if particles is not None:
        positions = positions.new_zeros(max(particles) + 1, 3).index_copy(0, torch.tensor(particles), positions)
    edge = 3 * max(cutoff, float(positions.abs().max()))
    return [positions.float(), torch.eye(3) * edge][: 1 + specification.periodic]


def _describe(specification: Specification) -> dict:
    """What follows from a specification."""
    model, atoms, plan = specification.model, specification.atoms, specification.plan
    room, coulomb = plan.gpu_rooms[0], plan.rooms[1]
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": model.metadata,
        "model_hash": model_hash(model),
        "atomic_numbers": list(atoms.numbers),
        "elements": sorted(set(atoms.numbers)),
        "molecules": list(atoms.molecules),
        "total_charge": list(atoms.charges),
        "cutoff_nm": box_cutoff(model),
        "network_cutoff_nm": model.network_cutoff * model.units.nm_per_length,
        "coulomb_cutoff_nm": coulomb_cutoff_of(model),
        "periodic": specification.periodic,
        "precision": specification.precision,
        "max_pairs": room.capacity,
        "pair_lists": None
        if room.capacity is None
        else dict(zip(DEVICES, (plan.rooms[0].finder, room.finder), strict=True)),
        "max_coulomb_pairs": None if coulomb is None else coulomb.capacity,
        "kernels": specification.kernels,
        "units": {"positions": "nm", "energy": "kJ/mol", "forces": "kJ/mol/nm"},
    }


def _module(specification: Specification, content: bytes, particles: list[int] | None) -> torch.jit.ScriptModule:
    """What TorchForce calls: operators that find the programs of the specification."""
    periodic, molecules = specification.periodic, len(specification.atoms.charges)
    given = torch.from_numpy(np.frombuffer(content, np.uint8).copy()), key_of(content), molecules
    program = (PeriodicPotential if periodic else Potential)(*given)
    charges = None
    if specification.has_charges:
        charges = (PeriodicPartialCharges if periodic else PartialCharges)(*given)
    return _wrapped(specification, program, charges, particles)


def _self_contained(
    specification: Specification, potential: StaticPotential, particles: list[int] | None
) -> torch.jit.ScriptModule:
    """The same with the programs for CPUs and GPUs themselves."""
    on_cpu, on_gpu = cpu_program(specification, potential, scriptable), scriptable(potential.gpu_program)
    program: nn.Module = (PeriodicByDevice if specification.periodic else ByDevice)(on_gpu, on_cpu)
    charges = None if potential.charge_program is None else scriptable(potential.charge_program)
    return _wrapped(specification, program, charges, particles)


def _wrapped(
    specification: Specification, program: nn.Module, charges: nn.Module | None, particles: list[int] | None
) -> torch.jit.ScriptModule:
    periodic, count = specification.periodic, len(specification.atoms.numbers)
    index = None if particles is None else torch.tensor(particles)
    if charges is not None:
        charges = (PeriodicCharges if periodic else Charges)(charges, index, count)
    return inlined((Periodic if periodic else Cluster)(program, charges, index, count))


def _check(found, expected, name: str, precision: str) -> Deviation:
    """How far energies and forces are from the reference; raises if that is too far."""
    off = deviation(found, expected)
    if not off.within(TOLERANCES[precision]):
        raise RuntimeError(
            f"the exported module disagrees with the reference model on geometry '{name}': energy off by "
            f"{off.energy:.2e} eV an atom (at most {TOLERANCES[precision].energy:.0e}), forces by {off.force:.2e} of "
            f"their norm (at most {TOLERANCES[precision].force:.0e}); try precision='double', and please report it"
        )
    return off


def _compare(module, cases: dict, expected: dict, particles: list[int] | None, precision: str) -> dict:
    """Largest deviations of the frozen module from the reference; raises if they are too large."""
    frozen = jit.freeze(module.eval())
    worst = {"energy_eV_per_atom": 0.0, "relative_force": 0.0}
    for _ in range(2):  # the profiling executor changes its plan after the first calls
        for name, (x, box) in cases.items():
            if particles is not None:
                full = x.new_zeros(max(particles) + 1, 3)
                full[particles] = x
            else:
                full = x
            with torch.no_grad():
                energy, forces = frozen(full) if box is None else frozen(full, box)
            if particles is not None:
                forces = forces[particles]
            energies, own = expected[name]
            found = _check((energy.reshape(1), forces), (energies.sum().reshape(1), own), name, precision)
            worst["energy_eV_per_atom"] = max(worst["energy_eV_per_atom"], found.energy)
            worst["relative_force"] = max(worst["relative_force"], found.force)
    return worst


def save(exported: Exported, path: str | os.PathLike) -> None:
    """Write what was made, atomically: as data, or as TorchScript where it holds its programs itself."""
    description = json.dumps({name: exported.metadata[name] for name in _WRITTEN})
    if exported.content:
        texts = read_texts(exported.content) | {DESCRIPTION: description}
        content = with_texts(exported.content, texts)
    else:
        buffer = io.BytesIO()
        jit.save(exported.module, buffer, _extra_files={f"{DESCRIPTION}.json": json.dumps(exported.metadata)})
        content = buffer.getvalue()
    replace_file(path, content)


def export_potential(
    model: TensorNet,
    path: str | os.PathLike,
    *,
    atomic_numbers,
    molecules=None,
    total_charge=0,
    particles: list[int] | None = None,
    periodic: bool = False,
    precision: str = "single",
    tabulate: bool = True,
    max_pairs: int | None = None,
    kernels: str = "auto",
    positions=None,
    box_vectors=None,
    coulomb_cutoff: float | None = None,
    any_molecule: bool = False,
    torchscript: bool = False,
) -> dict:
    """Write a file that a force is made of anywhere, without choosing and checking again.

    It is data, not a program: a safetensors file with the model's weights and a description in JSON. Every process that reads it makes the
    programs anew, so that it goes with all kinds of devices, and may come from anybody.

    Parameters
    ----------
    model : TensorNet
    path : path
        Written atomically, and only if the force agrees with the model and can be captured in a CUDA graph.
    atomic_numbers : sequence of int
    molecules : sequence of int, optional
        Molecule of each atom; molecules do not see each other.
    total_charge : number or sequence of numbers
        Of the one molecule, or one for each molecule.
    particles : list of int, optional
        Index in the System of each atom.
    periodic, precision, tabulate, max_pairs, kernels
        See :class:`~openmm_tensornet.static.potential.StaticPotential`. With `tabulate=False` kernels are portable.
    positions, box_vectors : array of shape (N, 3) and (3, 3), optional
        nm; geometries for the checks.
    coulomb_cutoff : float, optional
        nm, of a model with a Coulomb interaction. By default the model's own; where it has none, 1.2 with periodic boundaries and no
        cutoff in vacuum.
    any_molecule : bool
        Take a model that was trained for one molecule for others too, whose energies and forces will be wrong.
    torchscript : bool
        See :func:`export_torchscript`.

    Returns
    -------
    dict
        The file's metadata.
    """
    if not isinstance(model, TensorNet):
        raise TypeError(f"model: expected a TensorNet, received {type(model).__name__}; read it with load_model")
    atoms = Atoms.make(atomic_numbers, molecules, total_charge)
    check_supported(model, atoms, any_molecule=flag("any_molecule", any_molecule))
    periodic, tabulate = flag("periodic", periodic), flag("tabulate", tabulate)
    if particles is not None:
        particles = check_particles(particles)
        if len(particles) != len(atoms.numbers):
            raise ValueError(
                f"particles: expected one index for each of {len(atoms.numbers)} atoms, received {len(particles)}"
            )
    own = None if positions is None else torch.from_numpy(array("positions", positions, (len(atoms.numbers), 3)))
    box = None if box_vectors is None else torch.from_numpy(array("box_vectors", box_vectors, (3, 3)))
    if box is not None:
        if not periodic:
            raise ValueError("box_vectors: expected None with periodic=False, received a box; pass periodic=True")
        chosen = choose_coulomb_cutoff(model, periodic, coulomb_cutoff)
        check_box(box, chosen.cutoff * chosen.units.nm_per_length, "box_vectors", " nm")
    if own is not None:
        check_positions(own, atoms, [f"atom {k} (atomic number {z})" for k, z in enumerate(atoms.numbers)], box)
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(f"path: expected a file in a directory that exists, received {os.fspath(path)}")
    exported = compile_potential(
        model,
        atoms,
        particles=particles,
        periodic=periodic,
        precision=precision,
        tabulate=tabulate,
        max_pairs=max_pairs,
        kernels=choose_kernels(kernels if tabulate or kernels != "auto" else "portable"),
        positions=own,
        box=box,
        coulomb_cutoff=coulomb_cutoff,
        self_contained=torchscript,
    )
    save(exported, path)
    return exported.metadata


def export_torchscript(model: TensorNet, path: str | os.PathLike, **arguments: Any) -> dict:
    """Write a TorchScript file for openmmtorch alone: `openmmtorch.TorchForce(path)` runs it where this package is not installed.

    **TorchScript is a program.** Whoever reads such a file runs what it says, so this package reads none; give
    :class:`~openmm_tensornet.TensorNetForce` a checkpoint, or a file of :func:`export_potential`.

    Parameters
    ----------
    model, path, **arguments
        As of :func:`export_potential`, but that `kernels` is "portable" by default. A file with other kernels needs this package
        imported before it is read.

    Returns
    -------
    dict
        The file's metadata.
    """
    return export_potential(model, path, **{"kernels": "portable", **arguments}, torchscript=True)


def check_supported(
    model: TensorNet, atoms: Atoms, labels: list[str] | None = None, *, any_molecule: bool = False
) -> None:
    """Refuse elements that the model does not know, and molecules that it was not made for.

    Parameters
    ----------
    labels : list of str, optional
        What to call each atom in the message.
    any_molecule : bool
        Take a model that was made for one molecule for others too.
    """
    for k, z in enumerate(atoms.numbers):
        label = f"atom {k} (atomic number {z})" if labels is None else labels[k]
        if z >= model.config.max_z:
            raise ValueError(
                f"{label}: expected an atomic number below the model's max_z, {model.config.max_z}, received {z}"
            )
        if model.elements is not None and z not in model.elements:
            raise ValueError(
                f"{label}: expected an element that the model was trained on (atomic numbers {', '.join(map(str, model.elements))}), "
                f"received {z}; use another model for this molecule"
            )
    if "molecule" in model.about and not any_molecule:
        _refuse_another_molecule(model.about["molecule"], atoms)


def _refuse_another_molecule(meant: dict, atoms: Atoms) -> None:
    for molecule in range(len(atoms.charges)):
        numbers = sorted(z for z, m in zip(atoms.numbers, atoms.molecules, strict=True) if m == molecule)
        if numbers != sorted(meant["atomic_numbers"]):
            raise ValueError(
                f"model: it was trained for {meant['name']} ({len(meant['atomic_numbers'])} atoms) and nothing else, "
                f"received another molecule ({len(numbers)} atoms), whose energies and forces would be wrong; use a general model, or "
                "pass any_molecule=True (--any-molecule)"
            )


def read_metadata(path: str | os.PathLike) -> dict:
    """Metadata of a file of :func:`export_potential` or :func:`export_torchscript`; nothing of it is run.

    Raises
    ------
    ValueError
        If the file is damaged, was not written by this package, or is of a newer format.
    """
    name = os.fspath(path)
    _check_exported_file(name)
    return _read_torchscript(name) if file_kind(name) == "TorchScript" else _read(name)[2]


def _check_exported_file(name: str) -> None:
    if not os.path.lexists(name):
        raise FileNotFoundError(f"{name}: expected an exported TensorNet file, which does not exist")
    check_file(name, "an exported TensorNet file")


def _damaged(name: str, error: object) -> ValueError:
    return ValueError(
        f"{name}: expected an exported TensorNet file, received another or a damaged or truncated one "
        f"({' '.join(str(error).split())[:300]}); export the model again"
    )


def _read_torchscript(name: str) -> dict:
    try:
        with open(name, "rb") as file, open_archive(file) as archive:
            check_archive(archive)
            text = next((archive.read(n) for n in archive.namelist() if n.endswith(f"/extra/{DESCRIPTION}.json")), None)
    except DAMAGED as error:
        raise _damaged(name, error) from None
    if text is None:
        raise ValueError(
            f"{name}: expected a file written by export_torchscript, received another TorchScript file; export the model with it"
        )
    return parse_metadata(text.decode("utf-8", "replace"), name)


def _read(name: str) -> tuple[Specification, bytes, dict]:
    """Specification, its bytes, and metadata of a file of :func:`export_potential`."""
    with open(name, "rb") as file:
        content = file.read()
    if content.startswith(b"PK"):
        raise ValueError(
            f"{name}: expected an exported TensorNet file, received a checkpoint or an archive; read it with load_model"
        )
    try:
        text = read_texts(content)[DESCRIPTION]
        specification = Specification.unpack(content)
    except (KeyError, AttributeError, *DAMAGED) as error:
        raise _damaged(name, f"{type(error).__name__}: {error}") from None
    metadata = parse_metadata(text, name)
    missing = [entry for entry in _WRITTEN if entry not in metadata]
    if missing:
        raise _damaged(name, f"it does not say {', '.join(missing)}")
    content = specification.pack()  # in the one form that is known by its hash
    if key_of(content) != metadata["key"]:
        raise _damaged(name, "its checksum is wrong")
    particles = metadata["particles"]
    try:
        count = len(specification.atoms.numbers if particles is None else check_particles(particles))
    except (TypeError, ValueError) as error:
        raise _damaged(name, error) from None
    if count != len(specification.atoms.numbers):
        raise _damaged(name, "it has another number of particles than atoms")
    return specification, content, metadata | _describe(specification)


def parse_metadata(text: str, name: str) -> dict:
    """Check metadata given as JSON."""
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise ValueError(f"{name}: expected metadata of {FORMAT}, received something else; export the model again")
    version = metadata.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ValueError(
            f"{name}: expected format version {FORMAT_VERSION} or older, received {version!r}; update openmm-tensornet "
            f"(the file was written by {metadata.get('package_version')})"
        )
    return metadata


def load_exported(path: str | os.PathLike) -> Exported:
    """What :func:`export_potential` wrote; ValueError as of :func:`read_metadata`.

    A file of :func:`export_torchscript` is loaded too, **and is a program**, which can do anything: only what one wrote oneself.
    """
    name = os.fspath(path)
    _check_exported_file(name)
    if file_kind(name) == "TorchScript":
        return Exported(jit.load(name, map_location="cpu"), _read_torchscript(name))
    specification, content, metadata = _read(name)
    module = _module(specification, content, metadata["particles"])
    try:
        with made(key_of(content), specification, specification.potential()):
            energies, _ = module.evaluate(*_example(specification, metadata["particles"]))
    except Exception as error:
        raise _damaged(name, error) from None
    if not bool(torch.isfinite(energies).all()):
        raise _damaged(name, "its network gives NaN")
    return Exported(module, {}, content).describe(**metadata)
