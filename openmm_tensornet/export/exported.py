"""Potentials that were made and checked: as the module of a force, and as files.

A force is made of files that hold data alone (:mod:`.specification`). A TorchScript file is a program for openmmtorch; only
:func:`load_exported`, called by name, loads one.
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import torch

from ..common.atoms import Atoms, check_particles
from ..common.checks import array, flag, renamed
from ..common.files import DAMAGED, check_archive, check_file, file_kind, open_archive, replace_file
from ..models.tensornet import TensorNet
from ..neighbors.reference import check_box
from ..static.positions import check_positions
from ..static.potential import Options, choose_coulomb_cutoff, choose_kernels
from .compiled import (
    FORMAT,
    FORMAT_VERSION,
    Exported,
    check_supported,
    compile_potential,
    describe,
    example_inputs,
)
from .programs import made
from .specification import Specification, key_of, read_texts, with_texts

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


def save(exported: Exported, path: str | os.PathLike) -> None:
    """Write what was made, atomically: as data, or as TorchScript where it holds its programs itself."""
    description = json.dumps({name: exported.metadata[name] for name in _WRITTEN})
    if exported.content:
        content = bytes(exported.content)
        content = with_texts(content, read_texts(content) | {DESCRIPTION: description})
    else:
        from ..common import jit

        buffer = io.BytesIO()
        jit.save(exported.module, buffer, _extra_files={f"{DESCRIPTION}.json": json.dumps(exported.metadata)})
        content = buffer.getvalue()
    replace_file(path, content)


def export_potential(
    model: TensorNet,
    path: str | os.PathLike,
    *,
    atomic_numbers,
    replicas=None,
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
    molecules=None,
) -> dict:
    """Write a file that a force is made of anywhere, without choosing and checking again.

    It is data, not a program: a safetensors file with the model's weights and a description in JSON. Every process that reads it makes the
    programs anew, so it works on any device and is safe to load from untrusted sources.

    Parameters
    ----------
    model : TensorNet
    path : path
        Written atomically, and only if the force agrees with the model and can be captured in a CUDA graph.
    atomic_numbers : sequence of int
    replicas : sequence of int, optional
        Replica of each atom; replicas do not see each other.
    total_charge : number or sequence of numbers
        Of the one replica, or one for each replica.
    particles : list of int, optional
        Index in the System of each atom.
    periodic, precision, tabulate, max_pairs, kernels
        See :class:`~openmm_tensornet.static.potential.Options`. With `tabulate=False` kernels are portable.
    positions, box_vectors : array of shape (N, 3) and (3, 3), optional
        nm; geometries for the checks.
    coulomb_cutoff : float, optional
        nm, of a model with a Coulomb interaction. By default the model's own; where it has none, 1.2 with periodic boundaries and no
        cutoff in vacuum.
    any_molecule : bool
        Take a model that was trained for one molecule for others too, whose energies and forces will be wrong.
    torchscript : bool
        See :func:`export_torchscript`.
    molecules : sequence of int, optional
        Former name of `replicas`.

    Returns
    -------
    dict
        The file's metadata.
    """
    if not isinstance(model, TensorNet):
        raise TypeError(f"model: expected a TensorNet, received {type(model).__name__}; read it with load_model")
    atoms = Atoms.make(atomic_numbers, renamed("replicas", replicas, "molecules", molecules), total_charge)
    check_supported(model, atoms, any_molecule=flag("any_molecule", any_molecule))
    portable = kernels == "auto" and not flag("tabulate", tabulate)
    options = Options(periodic, precision, tabulate, max_pairs, choose_kernels("portable" if portable else kernels))
    if particles is not None:
        particles = check_particles(particles)
        if len(particles) != len(atoms.numbers):
            raise ValueError(
                f"particles: expected one index for each of {len(atoms.numbers)} atoms, received {len(particles)}"
            )
    own = None if positions is None else torch.from_numpy(array("positions", positions, (len(atoms.numbers), 3)))
    box = None if box_vectors is None else torch.from_numpy(array("box_vectors", box_vectors, (3, 3)))
    if box is not None:
        if not options.periodic:
            raise ValueError("box_vectors: expected None with periodic=False, received a box; pass periodic=True")
        chosen = choose_coulomb_cutoff(model, options.periodic, coulomb_cutoff)
        check_box(box, chosen.cutoff * chosen.units.nm_per_length, "box_vectors", " nm")
    if own is not None:
        check_positions(own, atoms, [f"atom {k} (atomic number {z})" for k, z in enumerate(atoms.numbers)], box)
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(f"path: expected a file in a directory that exists, received {os.fspath(path)}")
    exported = compile_potential(
        model,
        atoms,
        options,
        particles=particles,
        positions=own,
        box=box,
        coulomb_cutoff=coulomb_cutoff,
        scripted=True,  # the launches that a file declares are TorchForce's
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
    except (KeyError, AttributeError, *DAMAGED) as error:
        raise _damaged(name, f"{type(error).__name__}: {error}") from None
    metadata = parse_metadata(text, name)
    try:
        specification = Specification.unpack(content)
    except DAMAGED as error:
        raise _damaged(name, f"{type(error).__name__}: {error}") from None
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
    return specification, content, metadata | describe(specification)


def parse_metadata(text: str, name: str) -> dict:
    """Check metadata given as JSON."""
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise ValueError(f"{name}: expected metadata of {FORMAT}, received something else; export the model again")
    version = metadata.get("format_version")
    if version != FORMAT_VERSION:
        older = isinstance(version, int) and version < FORMAT_VERSION
        raise ValueError(
            f"{name}: expected format version {FORMAT_VERSION}, received {version!r}; "
            f"{'make it again' if older else 'update openmm-tensornet'} (it was written by {metadata.get('package_version')})"
        )
    return metadata


def load_exported(path: str | os.PathLike, scripted: bool = False) -> Exported:
    """What :func:`export_potential` wrote, as TorchScript if `scripted`; ValueError as of :func:`read_metadata`.

    A file of :func:`export_torchscript` is loaded too, **and is a program**, which can do anything: only what one wrote oneself.
    """
    name = os.fspath(path)
    _check_exported_file(name)
    if file_kind(name) == "TorchScript":
        from ..common import jit

        return Exported(jit.load(name, map_location="cpu"), _read_torchscript(name))
    specification, content, metadata = _read(name)
    exported = Exported.of_data(metadata, content, scripted)
    try:
        with made(metadata["key"], specification, specification.potential()):
            energies, _ = exported.module.evaluate(*example_inputs(specification, metadata["particles"]))
    except Exception as error:
        raise _damaged(name, error) from None
    if not bool(torch.isfinite(energies).all()):
        raise _damaged(name, "its network gives NaN")
    return exported
