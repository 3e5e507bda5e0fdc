"""Every bad input that we could think of, and what it gets; tests/test_bad_inputs.py tries them all.

    python tests/bad_inputs.py docs/bad-inputs.md

writes the table of the documentation. In a message "…" stands for any text, FILE for the path that was given.
"""

from __future__ import annotations

import copy
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import openmm
import torch
from openmm import unit
from openmm.app import Element, PDBFile, Topology
from safetensors.torch import save_file

from openmm_tensornet.export.exported import DESCRIPTION, export_potential, export_torchscript, read_metadata
from openmm_tensornet.export.specification import read_texts, with_texts
from openmm_tensornet.forces.system import create_system, force_class
from openmm_tensornet.md import cli
from openmm_tensornet.md.sentinels import SimulationError
from openmm_tensornet.md.simulation import simulate
from openmm_tensornet.models import registry
from openmm_tensornet.models.checkpoint import load_model, save_model

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "alanine_dipeptide.pdb"
WATER = np.array([[0.0, 0.0, 0.0], [0.096, 0.0, 0.0], [-0.024, 0.093, 0.0]])  # nm
NUMBERS = [8, 1, 1]
BOX = np.eye(3) * 1.2
GRID = np.indices((51, 1, 1)).reshape(3, -1).T * 0.11  # nm


class Given:
    """What the inputs are made from, in a folder of their own."""

    def __init__(self, folder: Path, model: Path):
        self.folder, self.model_file = folder, model
        self.file = folder / "given.file"
        self.marker = folder / "code-was-run"

    @cached_property
    def model(self):
        return load_model(self.model_file)

    @cached_property
    def content(self) -> dict:
        return torch.load(self.model_file, weights_only=True)

    @cached_property
    def exported(self) -> Path:
        path = self.folder / "exported.safetensors"
        export_potential(self.model, path, atomic_numbers=NUMBERS)
        return path

    @cached_property
    def torchscript(self) -> Path:
        path = self.folder / "exported.pt"
        export_torchscript(self.model, path, atomic_numbers=NUMBERS)
        return path

    def described(self, change: Callable[[str], str]) -> Path:
        """The exported file with another description."""
        content = self.exported.read_bytes()
        texts = read_texts(content)
        return self.bytes(with_texts(content, texts | {DESCRIPTION: change(texts[DESCRIPTION])}))

    def bytes(self, content: bytes) -> Path:
        self.file.write_bytes(content)
        return self.file

    def saved(self, content: Any) -> Path:
        torch.save(content, self.file)
        return self.file

    def edited(self, edit: Callable[[dict, dict], Any]) -> Path:
        """The checkpoint with changed options and weights."""
        content = copy.deepcopy(self.content)
        edit(content["hyper_parameters"], content["state_dict"])
        return self.saved(content)

    def archive(
        self, source: Path, change: Callable[[str, bytes], bytes] = lambda _, data: data, **options: Any
    ) -> Path:
        """A copy of an archive, members changed and checksums right."""
        with zipfile.ZipFile(source) as old, zipfile.ZipFile(self.file, "w", **options) as new:
            for name in old.namelist():
                new.writestr(name, change(name, old.read(name)))
        return self.file

    def topology(self, symbols: list[str | None], bonds: bool = True) -> Topology:
        topology = Topology()
        residue = topology.addResidue("MOL", topology.addChain())
        atoms = [
            topology.addAtom(f"{s or 'X'}{k}", None if s is None else Element.getBySymbol(s), residue)
            for k, s in enumerate(symbols)
        ]
        for atom in atoms[1:] if bonds else []:
            topology.addBond(atoms[0], atom)
        return topology

    def run(self, **changed: Any) -> dict:
        """Arguments of `simulate` for a System without a model, on springs."""
        topology, system = self.topology(["O", "H", "H"]), openmm.System()
        springs = openmm.CustomExternalForce(changed.pop("energy", "1000*(x^2+y^2+z^2)"))
        for atom in topology.atoms():
            system.addParticle(atom.element.mass)
            springs.addParticle(atom.index)
        system.addForce(springs)
        defaults = dict(
            topology=topology, system=system, positions=WATER, output=self.folder / "run", time=0.01, seed=1,
            equilibration_time=0, report_interval=5, platform="Reference", minimize=False, quiet=True,
        )  # fmt: skip
        return defaults | changed

    def structure(self, edit: Callable[[list[str]], list[str]]) -> Path:
        """The example's PDB file, changed."""
        path = self.folder / "given.pdb"
        path.write_text("\n".join(edit(EXAMPLE.read_text().splitlines())) + "\n")
        return path

    def checkpoint_of_a_run(self, change: Callable[[dict[str, bytes]], Any]) -> dict:
        """Arguments that resume a run whose checkpoint was changed, checksums right."""
        arguments = self.run()
        simulate(**arguments)
        path = arguments["output"] / "checkpoint.zip"
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        change(members)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
        return arguments | {"resume": True, "time": 0.02}


class Attack:
    """Runs code when it is unpickled: makes a folder."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)

    def __call__(self, _):
        return 0.0, np.zeros((3, 3))


def _not_the_published(given: Given) -> str:
    """The name of a model whose file is not the one that is known."""
    name, file = "published-for-a-test", given.bytes(b"other")
    registry.MODELS[name] = registry.KnownModel("", "f.ckpt", "a/b", sha256="0" * 64)
    sys.modules["huggingface_hub"] = type("Hub", (), {"hf_hub_download": lambda *_, **__: str(file)})  # type: ignore[assignment]
    return name


def _evil_state(given: Given) -> bytes:
    """XML of a PythonForce, which unpickles when it is read."""
    force = openmm.PythonForce(_zero)
    text = openmm.XmlSerializer.serialize(force)
    function = text.split('function="')[1].split('"')[0]
    return text.replace(function, pickle.dumps(Attack(given.marker)).hex()).encode()


def _zero(_):
    return 0.0, np.zeros((3, 3))


def _huge(given: Given) -> Path:
    """Holes take no room on the disk."""
    with open(given.file, "wb") as file:
        file.truncate(10**12)
    return file_of(given)


def file_of(given: Given) -> Path:
    return given.file


def _bomb(given: Given, source: Path, declared: int) -> Path:
    """An archive with a member of 64 MB, which declares another size."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(given.file, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
        new.writestr("bomb", bytes(1 << 26))
    data = bytearray(given.file.read_bytes())
    entry = data.rindex(b"PK\x01\x02")
    data[entry + 24 : entry + 28] = declared.to_bytes(4, "little")
    return given.bytes(bytes(data))


def _bomb_for_a_run(given: Given) -> dict:
    arguments = given.checkpoint_of_a_run(lambda _: None)
    path = arguments["output"] / "checkpoint.zip"
    path.write_bytes(_bomb(given, path, 3 << 30).read_bytes())
    return arguments


def _flipped(given: Given, source: Path, member: str) -> Path:
    """One bit of a member changed, as a bad disk would."""
    data = bytearray(source.read_bytes())
    with zipfile.ZipFile(source) as archive:
        info = next(m for m in archive.infolist() if member in m.filename and not m.filename.endswith(".debug_pkl"))
    lengths = (
        data[info.header_offset + 26 + 2 * k : info.header_offset + 28 + 2 * k] for k in range(2)
    )  # of name and extra field
    start = info.header_offset + 30 + sum(int.from_bytes(length, "little") for length in lengths)
    data[start + info.compress_size // 2] ^= 1
    return given.bytes(bytes(data))


def _bit(given: Given, source: Path, place: int) -> Path:
    data = bytearray(source.read_bytes())
    data[place] ^= 1
    return given.bytes(bytes(data))


def force(model: Any = None, topology: Any = None, **options: Any):
    return force_class()(model, topology, **options)


@dataclass(frozen=True)
class BadInput:
    """One bad input.

    Attributes
    ----------
    group : str
        Heading in the table.
    what : str
        What is given, for people.
    call : str
        What it is given to, a key of :data:`CALLS`.
    make : callable
        From :class:`Given` to the arguments of the call: a dict, or the only argument.
    error : type
    message : str
        All of it; "…" stands for any text.
    """

    group: str
    what: str
    call: str
    make: Callable[[Given], Any]
    error: type[Exception]
    message: str


def _program(arguments: list[Any]) -> None:
    """The program; raises what it would have printed."""
    options = cli._parser().parse_args([str(argument) for argument in arguments])
    options.run(options)


CALLS: dict[str, Callable] = {
    "load_model": load_model,
    "read_metadata": read_metadata,
    "TensorNetForce": force,
    "create_system": create_system,
    "export_potential": export_potential,
    "save_model": save_model,
    "simulate": simulate,
    "openmm-tensornet": _program,
}
NOT_READ = "FILE: cannot be read as a checkpoint: it is no checkpoint, or truncated or damaged (…)"
NO_EXPORT = "FILE: expected an exported TensorNet file, received another or a damaged or truncated one (…); export the model again"
NO_RUN = "…checkpoint.zip: expected the checkpoint of a run, but it is another file or damaged (…); start a new run"
CODE = "FILE: cannot be read as a checkpoint: it wants code to be run, which is refused; save it again with plain numbers, strings and tensors only (…)"


def option(**values: Any) -> Callable:
    return lambda options, _: options.update(values)


def weight(key: str, change: Callable) -> Callable:
    return lambda _, state: state.update({key: change(state[key])})


def poisoned(value: float) -> Callable:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


EMBEDDING = "model.representation_model.tensor_embedding.emb.weight"

CHECKPOINTS: list[tuple[str, Callable[[Given], Any], type[Exception], str]] = [
    ("an empty file", lambda g: g.bytes(b""), ValueError, NOT_READ),
    ("text", lambda g: g.bytes(b"These are not weights.\n"), ValueError, NOT_READ),
    ("random bytes", lambda g: g.bytes(np.random.default_rng(0).bytes(4096)), ValueError, NOT_READ),
    ("a truncated file", lambda g: g.bytes(g.model_file.read_bytes()[:-1000]), ValueError, NOT_READ),
    ("a file with one wrong bit in its weights", lambda g: _flipped(g, g.model_file, "/data/0"), ValueError, NOT_READ),
    ("a file with one wrong bit in its options", lambda g: _flipped(g, g.model_file, "/data.pkl"), ValueError, NOT_READ),
    (
        "a file of 1 TB", _huge, ValueError,
        "FILE: expected a checkpoint file of at most 2147483648 bytes, received 1000000000000 bytes; name another file",
    ),
    (
        "a directory", lambda g: g.folder, ValueError,
        "…: expected a checkpoint file, received a directory; name the file in it",
    ),
    (
        "a device", lambda g: "/dev/zero", ValueError,
        "/dev/zero: expected a checkpoint file, received a pipe or a device; name a file",
    ),
    (
        "no such file", lambda g: "absent.ckpt", FileNotFoundError,
        "model: expected a checkpoint, an exported file or one of alanine-dipeptide-gfn2, …, received 'absent.ckpt', which does not exist",
    ),
    (
        "a path with a zero byte", lambda g: "a\0b", FileNotFoundError,
        "model: expected a checkpoint, an exported file or one of …, received 'a\\x00b', which does not exist",
    ),
    (
        "a name whose file has another hash", _not_the_published, ValueError,
        "model: published-for-a-test: expected a file with SHA-256 000…000, received … in FILE, another version of the "
        "model; pass the path if you trust it",
    ),
    ("no path", lambda g: 5, TypeError, "model: expected a path or the name of a model, received int"),
    (
        "several files", lambda g: [g.model_file, g.model_file], ValueError,
        "model: expected one checkpoint, received a list; ensembles are not supported, name one file",
    ),
    (
        "a pickle that runs code", lambda g: g.edited(option(lr=Attack(g.marker))), ValueError, CODE,
    ),
    (
        "an object of a class", lambda g: g.edited(option(conf=np.float64(1.0))), ValueError, CODE,
    ),
    (
        "a zip bomb", lambda g: g.archive(g.model_file, lambda name, d: bytes(1 << 26) if name.endswith("/data/0") else d,
        compression=zipfile.ZIP_DEFLATED), ValueError,
        "FILE: expected a checkpoint as torch writes it, received a compressed archive",
    ),
    (
        "an exported file", lambda g: g.exported, ValueError,
        "…: expected a TorchMD-Net checkpoint, received an exported file; give it to TensorNetForce",
    ),
    (
        "a TorchScript file", lambda g: g.torchscript, ValueError,
        "…: expected a TorchMD-Net checkpoint, received TorchScript, which is a program; give it to openmmtorch.TorchForce if you trust it",
    ),
    (
        "another file of torch", lambda g: g.saved({"model": torch.ones(3)}), ValueError,
        "FILE: expected a TorchMD-Net checkpoint with a dictionary 'hyper_parameters', which is missing",
    ),
    (
        "NaN in the weights", lambda g: g.edited(weight(EMBEDDING, poisoned(float("nan")))), ValueError,
        f"FILE: weight {EMBEDDING}: expected finite numbers, received NaN or infinity",
    ),
    (
        "weights of another shape", lambda g: g.edited(weight(EMBEDDING, lambda w: w[:-1].clone())), ValueError,
        f"FILE: weight {EMBEDDING}: expected shape (20, 32), received (19, 32)",
    ),
    (
        "a weight missing", lambda g: g.edited(lambda _, state: state.pop("model.mean")), ValueError,
        "FILE: weight model.mean is missing",
    ),
    (
        "a weight too many", lambda g: g.edited(lambda _, state: state.update({"model.extra": torch.ones(1)})), ValueError,
        "FILE: weight model.extra is not known (1 surplus weights in all)",
    ),
    (
        "an unknown option that is on", lambda g: g.edited(option(dispersion="D4")), ValueError,
        "FILE: option dispersion='D4' is not known and might change the energy; if it does not, pass load_model(..., ignore_options=['dispersion'])",
    ),
    (
        "another architecture", lambda g: g.edited(option(model="transformer")), ValueError,
        "FILE: model: expected the architecture 'tensornet' or 'tensornet2', received 'transformer', which is not supported",
    ),
    (
        "options of a network that the file does not hold", lambda g: g.edited(option(embedding_dimension=10**9)), ValueError,
        "FILE: the options describe a network far larger than the weights in the file: expected at least … numbers, received …",
    ),
    (
        "a word for a flag", lambda g: g.edited(option(trainable_rbf="no")), ValueError,
        "FILE: trainable_rbf: expected True or False, received 'no'",
    ),
    (
        "a tensor for an option", lambda g: g.edited(option(atom_filter=torch.ones(2))), ValueError,
        "FILE: atom_filter: expected numbers, texts, or lists of them, received a tensor",
    ),
    (
        "a cutoff beyond all lengths", lambda g: g.edited(option(cutoff_upper=1e300)), ValueError,
        "FILE: cutoff_upper: expected a length of at most 1e+06, received 1e+300",
    ),
    (
        "a number for a flag", lambda g: g.edited(option(charge=2)), ValueError,
        "FILE: charge: expected True or False, received 2",
    ),
    (
        "a word for remove_ref_energy", lambda g: dict(path=g.model_file, remove_ref_energy="no"), TypeError,
        "remove_ref_energy: expected True or False, received 'no'",
    ),
    (
        "remove_ref_energy where there is none", lambda g: dict(path=g.model_file, remove_ref_energy=True), ValueError,
        "…: remove_ref_energy=True: expected a model with an Atomref prior, received one without; leave it out",
    ),
    (
        "a length for a unit of energy", lambda g: dict(path=g.model_file, energy_unit=unit.bohr), TypeError,
        "energy_unit: expected an OpenMM unit of energy such as openmm.unit.hartree or openmm.unit.kilocalorie_per_mole, received …",
    ),
    (
        "a number for a unit of length", lambda g: dict(path=g.model_file, length_unit=0.1), TypeError,
        "length_unit: expected an OpenMM unit of length such as openmm.unit.bohr, received 0.1",
    ),
]  # fmt: skip

EXPORTED: list[tuple[str, Callable[[Given], Any], type[Exception], str]] = [
    ("an empty file", lambda g: g.bytes(b""), ValueError, NO_EXPORT),
    ("a truncated file", lambda g: g.bytes(g.exported.read_bytes()[:-1000]), ValueError, NO_EXPORT),
    ("a file with one wrong bit in its header", lambda g: _bit(g, g.exported, 20), ValueError, NO_EXPORT),
    ("a file with one wrong bit in its weights", lambda g: _bit(g, g.exported, -1000), ValueError, NO_EXPORT),
    ("a header of 1 EB", lambda g: g.bytes((1 << 60).to_bytes(8, "little") + b"{}"), ValueError, NO_EXPORT),
    ("another safetensors file", lambda g: save_file({"weight": torch.zeros(2)}, g.file) or g.file, ValueError, NO_EXPORT),
    (
        "a checkpoint", lambda g: g.model_file, ValueError,
        "…: expected an exported TensorNet file, received a checkpoint or an archive; read it with load_model",
    ),
    (
        "a file of a newer format", lambda g: g.described(lambda text: text.replace('"format_version": 3', '"format_version": 9')),
        ValueError, "FILE: expected format version 3, received 9; update openmm-tensornet (it was written by …)",
    ),
    (
        "metadata that are no JSON", lambda g: g.described(lambda text: "{"),
        ValueError, "FILE: expected metadata of openmm-tensornet, received something else; export the model again",
    ),
    (
        "TorchScript with one wrong bit in its code", lambda g: _flipped(g, g.torchscript, "/code/__torch__/"), ValueError, NO_EXPORT,
    ),
    ("a TorchScript bomb", lambda g: _bomb(g, g.torchscript, 3 << 30), ValueError, "FILE: expected an exported TensorNet file, received another or a damaged or truncated one (it unpacks to … bytes, and at most 2147483648 are read); export the model again"),
    ("a TorchScript bomb that declares a small size", lambda g: _bomb(g, g.torchscript, 1000), ValueError, NO_EXPORT),
    (
        "another TorchScript file", lambda g: torch.jit.script(torch.nn.Linear(2, 2)).save(str(g.file)) or g.file, ValueError,
        "FILE: expected a file written by export_torchscript, received another TorchScript file; export the model with it",
    ),
    ("no such file", lambda g: "absent.pt", FileNotFoundError, "absent.pt: expected an exported TensorNet file, which does not exist"),
]  # fmt: skip


def of_export(**options: Any) -> Callable[[Given], dict]:
    return lambda g: dict(model=g.exported) | options


def of_model(**options: Any) -> Callable[[Given], dict]:
    return lambda g: dict(model=g.model, atomic_numbers=NUMBERS) | options


FORCES: list[tuple[str, str, Callable[[Given], Any], type[Exception], str]] = [
    # exported files for something else
    ("Exported files", "TorchScript", lambda g: dict(model=g.torchscript, atomic_numbers=NUMBERS), ValueError,
     "model: expected a checkpoint or a file of export_potential, received TorchScript (…exported.pt), which is a program and could do anything; give it to openmmtorch.TorchForce if you trust it"),
    ("Exported files", "a file for other atoms", of_export(atomic_numbers=[7, 1, 1]), ValueError,
     "model: expected atoms as the file was exported for (3 atoms), received 3 that differ from atom 0 on; export the model for this topology"),
    ("Exported files", "a file for another order of atoms", of_export(atomic_numbers=[1, 8, 1]), ValueError,
     "model: expected atoms as the file was exported for (3 atoms), received 3 that differ from atom 0 on; export the model for this topology"),
    ("Exported files", "a file for another number of atoms", of_export(atomic_numbers=[8, 1]), ValueError,
     "model: expected atoms as the file was exported for (3 atoms), received 2 that differ from atom 2 on; export the model for this topology"),
    ("Exported files", "another total charge", of_export(atomic_numbers=NUMBERS, total_charge=1), ValueError,
     "total_charge: expected [0.0] as the file was exported with, received 1; export it again"),
    ("Exported files", "other replicas", of_export(atomic_numbers=NUMBERS, replicas=[0, 1, 2]), ValueError,
     "replicas: expected those that the file was exported with, received others; export it again"),
    ("Exported files", "other particles", of_export(atomic_numbers=NUMBERS, atoms=[3, 4, 5]), ValueError,
     "atoms: expected None as the file was exported with, received [3, 4, 5]; export it again"),
    ("Exported files", "a box", of_export(atomic_numbers=NUMBERS, box_vectors=BOX), ValueError,
     "periodic: expected False as the file was exported with, received True; export it again"),
    ("Exported files", "another precision", of_export(atomic_numbers=NUMBERS, precision="double"), ValueError,
     "precision: expected 'single' as the file was exported with, received 'double'; export it again"),
    # topologies
    ("Topologies", "neither topology nor atomic numbers", lambda g: dict(model=g.model), ValueError,
     "topology, atomic_numbers: expected one of them, received neither"),
    ("Topologies", "a file in place of a topology", lambda g: dict(model=g.model, topology=str(EXAMPLE)), TypeError,
     "topology: expected an openmm.app.Topology, received str"),
    ("Topologies", "no atoms", lambda g: dict(model=g.model, topology=Topology()), ValueError,
     "atomic_numbers: expected at least one atom, received none"),
    ("Topologies", "an atom without an element (an extra particle)", lambda g: dict(model=g.model, topology=g.topology(["O", None])),
     ValueError, "topology: atom 1 (X1, residue MOL 1): expected an atom with an element, received one without (a virtual site or an "
     "unreadable name); leave it out with atoms="),
    ("Topologies", "an element that the model does not know", lambda g: dict(model=g.model, topology=g.topology(["O", "Fe"])), ValueError,
     "atom 1 (Fe1, residue MOL 1, Fe): expected an atomic number below the model's max_z, 20, received 26"),
    ("Topologies", "an atomic number of 0", of_model(atomic_numbers=[0]), ValueError,
     "atomic_numbers: expected numbers of at least 1, received 0 for atom 0"),
    ("Topologies", "symbols in place of atomic numbers", of_model(atomic_numbers="OHH"), TypeError,
     "atomic_numbers: expected a sequence of integers, received 'OHH'"),
    ("Topologies", "fractional atomic numbers", of_model(atomic_numbers=[8.0, 1.0]), TypeError,
     "atomic_numbers: expected integers, received 8.0"),
    ("Topologies", "10⁵ atoms", of_model(atomic_numbers=NUMBERS * 33334), ValueError,
     "atomic_numbers: expected at most 20000 atoms, received 100002; act on a part of them, or spread replicas over several forces"),
    ("Topologies", "10⁵ atoms in replicas", of_model(atomic_numbers=NUMBERS * 33334, replicas=[k // 3 for k in range(100002)]), ValueError,
     "atomic_numbers: expected at most 20000 atoms, received 100002; act on a part of them, or spread replicas over several forces"),
    ("Topologies", "one atom twice", of_model(atoms=[0, 1, 1]), ValueError,
     "atoms: expected each index once, received 1 more than once"),
    ("Topologies", "no atom of many", of_model(atoms=[]), ValueError,
     "atoms: expected at least one index, received none; leave it out to take all particles"),
    ("Topologies", "a negative index", of_model(atoms=[0, 1, -1]), ValueError, "atoms: expected indices of at least 0, received -1"),
    ("Topologies", "an index that no System has", of_model(atoms=[0, 1, 10**9]), ValueError,
     "atoms: expected indices below 10000000, received 1000000000"),
    ("Topologies", "a set, which has no order", of_model(atoms={5, 3, 1}), TypeError,
     "atoms: expected a sequence of integers, received a set; pass a list, whose order counts"),
    ("Topologies", "atoms by their elements", of_model(atoms={0: "O", 1: "H", 2: "H"}), TypeError,
     "atoms: expected a sequence of integers, received a dict; pass a list, whose order counts"),
    ("Topologies", "an atom that the topology has not", lambda g: dict(model=g.model, topology=g.topology(["O", "H"]), atoms=[0, 2]),
     ValueError, "atoms: expected indices below the topology's number of atoms, 2, received 2"),
    ("Topologies", "replicas of other atoms", of_model(replicas=[0, 1]), ValueError,
     "replicas: expected one index for each of 3 atoms, received 2"),
    ("Topologies", "a replica beyond the number of atoms", of_model(replicas=[0, 0, 10**9]), ValueError,
     "replicas: expected indices below the number of atoms, 3, received 1000000000"),
    # charges
    ("Charges", "a fractional charge", of_model(total_charge=0.3), ValueError,
     "total_charge: expected whole numbers of elementary charges, received 0.3"),
    ("Charges", "NaN", of_model(total_charge=float("nan")), ValueError,
     "total_charge: expected whole numbers of elementary charges, received nan"),
    ("Charges", "an infinite charge", of_model(total_charge=[float("inf")]), ValueError,
     "total_charge: expected whole numbers of elementary charges, received inf"),
    ("Charges", "None", of_model(total_charge=None), ValueError,
     "total_charge: expected whole numbers of elementary charges, received None"),
    ("Charges", "a flag", of_model(total_charge=True), ValueError,
     "total_charge: expected whole numbers of elementary charges, received True"),
    ("Charges", "text", of_model(total_charge="1"), TypeError,
     "total_charge: expected a number, or one for each replica, received '1'"),
    ("Charges", "a length", of_model(total_charge=1 * unit.nanometer), TypeError,
     "total_charge: expected a charge (a Quantity, or numbers in e), received 1 nm"),
    ("Charges", "one charge for several replicas", of_model(replicas=[0, 1, 2], total_charge=1), ValueError,
     "total_charge: expected one charge for each of 3 replicas, received the single number 1; pass a list"),
    ("Charges", "a list that is too short", of_model(replicas=[0, 1, 2], total_charge=[1, 0]), ValueError,
     "total_charge: expected one charge for each of 3 replicas, received 2"),
    ("Charges", "more than the replica has protons", of_model(total_charge=40), ValueError,
     "total_charge: expected -10 to 10 elementary charges, as many as the replica has protons, received 40"),
    ("Charges", "a huge charge of one of the replicas", of_model(replicas=[0, 0, 1], total_charge=[0, -1e308]), ValueError,
     "total_charge: expected -1 to 1 elementary charges, as many as the replica has protons, received -1e+308"),
    # positions
    ("Positions", "NaN", of_model(positions=[[0, np.nan, 0], *WATER[1:]]), ValueError,
     "positions: atom 0 (atomic number 8): expected finite coordinates, received [0.0, nan, 0.0]"),
    ("Positions", "infinity", of_model(positions=[*WATER[:2], [np.inf, 0, 0]]), ValueError,
     "positions: atom 2 (atomic number 1): expected finite coordinates, received [inf, 0.0, 0.0]"),
    ("Positions", "two atoms in one place", of_model(positions=WATER * [0, 1, 1]), ValueError,
     "positions: atom 0 (atomic number 8) and atom 1 (atomic number 1): expected a distance of at least 0.05 nm, received 0.0000 nm; are the "
     "positions in nm, and are copies that overlap told apart by `replicas`?"),
    ("Positions", "nm taken for angstrom", of_model(positions=WATER * unit.angstrom), ValueError,
     "positions: atom 0 (atomic number 8) and atom … (atomic number 1): expected a distance of at least 0.05 nm, received 0.009… nm; are the "
     "positions in nm, and are copies that overlap told apart by `replicas`?"),
    ("Positions", "angstrom taken for nm, atoms far apart", of_model(positions=WATER * 10), UserWarning,
     "positions: atom 0 (atomic number 8): expected a neighbour closer than the cutoff of 0.45 nm, the nearest is 0.96 nm away (3 such atoms); "
     "the network takes them for free atoms: are the positions in nm?"),
    ("Positions", "1 cm from the origin", of_model(positions=WATER + 1e7), ValueError,
     "positions: expected lengths of at most 1e+06 nm, received 1e+07 nm"),
    ("Positions", "a temperature", of_model(positions=WATER * unit.kelvin), TypeError,
     "positions: expected lengths (a Quantity, or numbers in nm), received Quantity (Unit \"kelvin\" is not compatible with Unit \"nanometer\".)"),
    ("Positions", "another number of atoms", of_model(positions=WATER[:2]), ValueError,
     "positions: expected one row for each particle (3), received 2"),
    ("Positions", "two coordinates", of_model(positions=WATER[:, :2]), ValueError,
     "positions: expected shape (particles, 3), received (3, 2)"),
    ("Positions", "rows of different lengths", of_model(positions=[[0, 0, 0], [1, 1], [2, 2, 2]]), TypeError,
     "positions: expected lengths in nm, received list (…)"),
    ("Positions", "complex numbers", of_model(positions=WATER * 1j), TypeError,
     "positions: expected lengths in nm, received list of complex128"),
    ("Positions", "a number", of_model(positions=3), TypeError,
     "positions: expected lengths (a Quantity, or numbers in nm), received int ('int' object is not iterable)"),
    # boxes
    ("Boxes", "a box below twice the cutoff", of_model(box_vectors=np.eye(3) * 0.8), ValueError,
     "box_vectors: expected a width of at least twice the cutoff, 0.9 nm, received 0.8 nm; use a larger box or a larger number of molecules in it, or none for a molecule in vacuum (periodic=False, --vacuum)"),
    ("Boxes", "a box of no volume", of_model(box_vectors=np.zeros((3, 3))), ValueError,
     "box_vectors: expected box vectors in OpenMM's reduced form (a along x, b in the xy plane, off-diagonal elements at most half the diagonal "
     "one), received …; openmm.app.internal.unitcell.reducePeriodicBoxVectors brings them there"),
    ("Boxes", "a box that is not reduced", of_model(box_vectors=[[2, 0, 0], [1.5, 2, 0], [0, 0, 2]]), ValueError,
     "box_vectors: expected box vectors in OpenMM's reduced form (…), received …; openmm.app.internal.unitcell.reducePeriodicBoxVectors "
     "brings them there"),
    ("Boxes", "NaN", of_model(box_vectors=np.full((3, 3), np.nan)), ValueError,
     "box_vectors: expected finite box vectors, received …"),
    ("Boxes", "a box without end", of_model(box_vectors=np.eye(3) * 1e300), ValueError,
     "box_vectors: expected lengths of at most 1e+06 nm, received 1e+300 nm"),
    ("Boxes", "three lengths", of_model(box_vectors=[2.0, 2.0, 2.0]), ValueError, "box_vectors: expected shape (3, 3), received (3,)"),
    ("Boxes", "no box with periodic=True", of_model(periodic=True), ValueError,
     "periodic: expected a box with periodic=True, received none; pass box_vectors or a topology that has one"),
    # options
    ("Options", "a misspelt one", of_model(precison="double"), TypeError, "…unexpected keyword argument 'precison'…"),
    ("Options", "an unknown precision", of_model(precision="half"), ValueError,
     "precision: expected one of single, double, received 'half'"),
    ("Options", "a list for a word", of_model(precision=["single"]), ValueError,
     "precision: expected one of single, double, received ['single']"),
    ("Options", "unknown kernels", of_model(kernels="cuda"), ValueError,
     "kernels: expected one of auto, portable, fused, nnpops, received 'cuda'"),
    ("Options", "a word for a flag", of_model(periodic="no"), TypeError, "periodic: expected True or False, received 'no'"),
    ("Options", "a number for a flag", of_model(cuda_graphs=0), TypeError, "cuda_graphs: expected True or False, received 0"),
    ("Options", "a fraction for a count", of_model(max_pairs=2.5), ValueError,
     "max_pairs: expected an integer of at least 1, received 2.5"),
    ("Options", "room for fewer pairs than there are", lambda g: dict(model=g.model, atomic_numbers=NUMBERS * 17, positions=GRID, max_pairs=100),
     ValueError, "max_pairs: expected at least …, as many as there are pairs closer than the cutoff of 0.45 nm where the potential is "
     "checked, received 100; pass more, or leave it out; for a system more dilute than a liquid pass positions too"),
    ("Options", "too few warm-up steps", of_model(warmup_steps=3), ValueError,
     "warmup_steps: expected an integer from 10 to 10000, received 3"),
    ("Options", "more warm-up steps than a run has time for", of_model(warmup_steps=10**30), ValueError,
     "warmup_steps: expected an integer from 10 to 10000, received 1000000000000000000000000000000"),
    ("Options", "a Coulomb cutoff for a model without charges", of_model(coulomb_cutoff=1.0), ValueError,
     "coulomb_cutoff: expected None for a model without a Coulomb interaction, received 1 nm; leave it out"),
    ("Options", "a temperature for a length", of_model(coulomb_cutoff=1 * unit.kelvin), ValueError,
     "coulomb_cutoff: expected a Quantity in nanometer, received 1 K"),
    ("Options", "a flag for a length", of_model(coulomb_cutoff=True), TypeError,
     "coulomb_cutoff: expected a number or Quantity in nanometer, received True"),
    ("Options", "text for a length", of_model(coulomb_cutoff="1.2"), TypeError,
     "coulomb_cutoff: expected a number or Quantity in nanometer, received '1.2'"),
    ("Options", "several models", of_model(model=["a.ckpt", "b.ckpt"]), ValueError,
     "model: expected one model, received a list; ensembles are not supported"),
    ("Options", "no model", of_model(model=None), TypeError, "model: expected a path, a name or a TensorNet, received NoneType"),
]  # fmt: skip


def of_water(**options: Any) -> Callable[[Given], dict]:
    return lambda g: dict(model=g.model, path=g.file, atomic_numbers=NUMBERS) | options


OTHERS: list[tuple[str, str, str, Callable[[Given], Any], type[Exception], str]] = [
    ("Writing files", "a path in place of a model", "export_potential", of_water(model="a.ckpt"), TypeError,
     "model: expected a TensorNet, received str; read it with load_model"),
    ("Writing files", "a directory that does not exist", "export_potential", lambda g: of_water(path=g.folder / "no" / "file.pt")(g),
     FileNotFoundError, "path: expected a file in a directory that exists, received …file.pt"),
    ("Writing files", "particles of other atoms", "export_potential", of_water(particles=[0, 1]), ValueError,
     "particles: expected one index for each of 3 atoms, received 2"),
    ("Writing files", "a Quantity where numbers in nm are expected", "export_potential", of_water(positions=WATER * unit.nanometer),
     TypeError, "positions: expected lengths in nm, received a Quantity; pass value.value_in_unit(nanometer)"),
    ("Writing files", "NaN positions", "export_potential", of_water(positions=np.full((3, 3), np.nan)), ValueError,
     "positions: atom 0 (atomic number 8): expected finite coordinates, received [nan, nan, nan]"),
    ("Writing files", "a box without periodic=True", "export_potential", of_water(box_vectors=BOX), ValueError,
     "box_vectors: expected None with periodic=False, received a box; pass periodic=True"),
    ("Writing files", "a box that is too small", "export_potential", of_water(box_vectors=BOX / 2, periodic=True), ValueError,
     "box_vectors: expected a width of at least twice the cutoff, 0.9 nm, received 0.6 nm; use a larger box or a larger number of molecules "
     "in it, or none for a molecule in vacuum (periodic=False, --vacuum)"),
    ("Writing files", "a word for a flag", "export_potential", of_water(tabulate="no"), TypeError,
     "tabulate: expected True or False, received 'no'"),
    ("Systems", "a structure in place of a topology", "create_system", lambda g: dict(topology=PDBFile(str(EXAMPLE)), model=g.model),
     TypeError, "topology: expected an openmm.app.Topology, received PDBFile"),
    ("Systems", "an atom without an element", "create_system", lambda g: dict(topology=g.topology(["O", None]), model=g.model), ValueError,
     "topology: expected an element for every atom, but atom 1 (X1 of MOL 1) has none (an extra particle or an unknown symbol); remove it or "
     "give it an element"),
    ("Systems", "no bonds", "create_system", lambda g: dict(topology=g.topology(["O", "H", "H"], bonds=False), model=g.exported), UserWarning,
     "topology: 3 of 3 atoms have no bond (first: atom 0 (O0 of MOL 1)), so OpenMM takes each for a molecule of its own, and a barostat or "
     "periodic wrapping would tear molecules apart; add bonds (CONECT records in a PDB file)"),
    ("Systems", "hydrogens heavier than what they are bonded to", "create_system",
     lambda g: dict(topology=g.topology(["O", "H", "H"]), model=g.model, hydrogen_mass=9), ValueError,
     "hydrogen_mass: 9 would leave atom 0 (O0 of MOL 1) with … dalton, less than its hydrogens; choose a smaller value"),
    ("Systems", "an unknown back end", "create_system", lambda g: dict(topology=g.topology(["O"]), model=g.model, backend="jax"), ValueError,
     "backend: expected one of torch, python, received 'jax'"),
    # runs
    ("Runs", "no time", "simulate", lambda g: g.run(time=0), ValueError, "time: expected more than 0 picosecond, received 0"),
    ("Runs", "a temperature for a time", "simulate", lambda g: g.run(time=3 * unit.kelvin), ValueError,
     "time: expected a Quantity in picosecond, received 3 K"),
    ("Runs", "a temperature that is a word", "simulate", lambda g: g.run(temperature="hot"), TypeError,
     "temperature: expected a number or Quantity in kelvin, received 'hot'"),
    ("Runs", "NaN for a time step", "simulate", lambda g: g.run(timestep=float("nan")), ValueError,
     "timestep: expected a finite number in femtosecond, received nan"),
    ("Runs", "a fraction of a step", "simulate", lambda g: g.run(report_interval=2.5), ValueError,
     "report_interval: expected an integer from 1 to 2147483647, received 2.5"),
    ("Runs", "a fraction for a seed", "simulate", lambda g: g.run(seed=1.5), ValueError,
     "seed: expected an integer from 1 to 2147483647, received 1.5"),
    ("Runs", "a word for a flag", "simulate", lambda g: g.run(overwrite="no"), TypeError,
     "overwrite: expected True or False, received 'no'"),
    ("Runs", "a structure in place of a topology", "simulate", lambda g: g.run(topology=PDBFile(str(EXAMPLE))), TypeError,
     "topology: expected an OpenMM Topology, received PDBFile"),
    ("Runs", "positions of other atoms", "simulate", lambda g: g.run(positions=WATER[:2]), ValueError,
     "topology, system, positions: expected the same number of atoms, received 3, 3 and 2"),
    ("Runs", "positions that are none", "simulate", lambda g: g.run(positions=None), TypeError,
     "positions: expected lengths (a Quantity, or numbers in nm), received NoneType (…)"),
    ("Runs", "an unknown platform", "simulate", lambda g: g.run(platform="Quantum"), ValueError,
     "platform: expected one of Reference, …, received 'Quantum'"),
    ("Runs", "an unknown property of the platform", "simulate", lambda g: g.run(platform="CPU", platform_properties={"Speed": "11"}), ValueError,
     "platform_properties: expected one of …, received 'Speed'"),
    ("Runs", "charges of a model that has none", "simulate", lambda g: g.run(charges=True), ValueError,
     "charges: expected a System with a force of a model that predicts partial charges (TensorNet2, such as AceFF-2.0), received one without; "
     "leave charges out"),
    ("Runs", "bonds to watch where there are none", "simulate",
     lambda g: g.run(topology=g.topology(["O", "H", "H"], bonds=False), stop_at_broken_bond=True), ValueError,
     "stop_at_broken_bond: expected a topology with bonds, received one without; add bonds (CONECT records in a PDB file) or leave it out"),
    ("Runs", "nothing to resume", "simulate", lambda g: g.run(resume=True), FileNotFoundError,
     "output: expected the directory of a run to resume, … does not exist; correct it or start without resume"),
    ("Runs", "a directory with another run", "simulate", lambda g: simulate(**g.run()) and g.run(), FileExistsError,
     "output: … already holds a run; resume it, overwrite it or choose another directory"),
    ("Runs", "other settings than those of the run", "simulate", lambda g: simulate(**g.run()) and g.run(resume=True, timestep=1), ValueError,
     "…checkpoint.zip: expected the settings of the run, but timestep_fs was 0.5, now 1.0; resume with what it was or start a new run in "
     "another directory"),
    ("Runs", "a damaged checkpoint of a run", "simulate", lambda g: g.checkpoint_of_a_run(lambda m: m.update({"run.json": b"{"})),
     ValueError, NO_RUN),
    ("Runs", "a checkpoint of a run without its step", "simulate",
     lambda g: g.checkpoint_of_a_run(lambda m: m.update({"run.json": m["run.json"].replace(b'"step"', b'"stop"')})), ValueError, NO_RUN),
    ("Runs", "a checkpoint of a run that runs code", "simulate",
     lambda g: g.checkpoint_of_a_run(lambda m: m.update({"state.xml": _evil_state(g)})), ValueError, NO_RUN),
    ("Runs", "a zip bomb for a checkpoint of a run", "simulate",
     _bomb_for_a_run,
        ValueError,
     "…checkpoint.zip: expected the checkpoint of a run, but it is another file or damaged (its member 'bomb' has … bytes, and no such "
     "member is read); start a new run"),
    ("Runs", "NaN positions", "simulate", lambda g: g.run(positions=WATER * np.nan), SimulationError,
     "input structure, step 0: …NaN…"),
    ("Runs", "an energy that becomes NaN", "simulate", lambda g: g.run(energy="1e-3*log(0.2-x)", temperature=1e5, time=1, timestep=0.1), SimulationError,
     "step …, frame …: …NaN…; the last good checkpoint is …checkpoint.zip"),
    ("Runs", "a temperature that runs away", "simulate", lambda g: g.run(energy="-1e5*x", time=1), SimulationError,
     "step …, frame …: the temperature is … K, expected at most … K with a thermostat of 300 K (time step too long, a bad start, or a "
     "geometry that the model does not know); the time step is 0.5 fs; the last good checkpoint is …checkpoint.zip"),
    ("Runs", "a bond that breaks", "simulate", lambda g: g.run(energy="-10*x^2-10*y^2", time=3, stop_at_broken_bond=True), SimulationError,
     "step …, frame …: the bond between atom 0 (O0 of MOL 1) and atom … (H… of MOL 1) is broken: expected at most 1.6 times its first length, "
     "0.096… nm, found … nm; the time step is 0.5 fs; the last good checkpoint is …checkpoint.zip"),
    # the program
    ("The program", "an odd number of electrons", "openmm-tensornet",
     lambda g: ["simulate", "--model", "m", g.structure(lambda lines: [line for line in lines if " HH31" not in line])], ValueError,
     "--charge: expected a total charge, because the neutral structure has an odd number of electrons (77); give it (0 for a radical), or "
     "correct the hydrogens"),
    ("The program", "a structure without hydrogens", "openmm-tensornet",
     lambda g: ["simulate", "--model", "m", g.structure(lambda lines: [line for line in lines if not line.endswith(" H")])], ValueError,
     "…given.pdb: has carbon but no hydrogen; the potential needs every atom, so add hydrogens first (openmm.app.Modeller.addHydrogens, "
     "pdbfixer or rdkit.Chem.AddHs)"),
    ("The program", "a structure without elements", "openmm-tensornet",
     lambda g: ["simulate", "--model", "m", g.structure(lambda lines: [line[:76] if line.startswith("ATOM") else line for line in lines])],
     ValueError, "…given.pdb: line 2: expected the element of atom 'HH31' in columns 77-78, found ''; write the element column"),
    ("The program", "an atom of a residue twice", "openmm-tensornet",
     lambda g: ["simulate", "--model", "m", g.structure(lambda lines: [*lines[:5], lines[4][:30] + "   9.000" + lines[4][38:], *lines[5:]])],
     ValueError, "…given.pdb: 23 atom records but 22 distinct atoms; give every atom of a residue its own name and keep one alternate location"),
    ("The program", "a structure without atoms", "openmm-tensornet",
     lambda g: ["simulate", "--model", "m", g.structure(lambda lines: ["END"])], ValueError, "…given.pdb: expected atoms, found none"),
    ("The program", "a directory that holds no run", "openmm-tensornet", lambda g: ["analyze", g.folder], FileNotFoundError,
     "…start.pdb…"),
]  # fmt: skip

BAD_INPUTS = [
    *(BadInput("Checkpoints", what, "load_model", *rest) for what, *rest in CHECKPOINTS),
    *(BadInput("Exported files", what, "read_metadata", *rest) for what, *rest in EXPORTED),
    *(BadInput(group, what, "TensorNetForce", *rest) for group, what, *rest in FORCES),
    *(BadInput(*entry) for entry in OTHERS),
]


def table() -> str:
    """The page of the documentation."""
    lines = [
        "# What bad input gets",
        "",
        "Made by `python tests/bad_inputs.py docs/bad-inputs.md`; `tests/test_bad_inputs.py` tries every line. Nothing is written half, and no",
        "code of a file is run. FILE is the path that was given, … any text. `TensorNetPythonForce` says what `TensorNetForce` says.",
    ]
    group = ""
    for entry in sorted(BAD_INPUTS, key=lambda e: list(dict.fromkeys(b.group for b in BAD_INPUTS)).index(e.group)):
        if entry.group != group:
            group = entry.group
            lines += ["", f"## {group}", "", "| given | to | raises | with the text |", "| --- | --- | --- | --- |"]
        text = entry.message.replace("|", "\\|").replace("`", "'")
        lines.append(f"| {entry.what} | `{entry.call}` | {entry.error.__name__} | `{text}` |".replace("\0", "\\0"))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(table(), encoding="utf-8")
