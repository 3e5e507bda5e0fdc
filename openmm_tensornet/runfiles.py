"""The files of a run: trajectory, energies and the checkpoint that a run resumes from."""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import xml.etree.ElementTree as ElementTree
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from .files import DAMAGED, check_archive, check_file, replace_file
from .system import tensornet_forces

if TYPE_CHECKING:
    import openmm
    from openmm.app import Topology

CHECKPOINT_FORMAT = 1
# Platforms and precisions differ by far less for one geometry, models and total charges by far more.
RESUME_ENERGY_TOLERANCE = 0.01  # kJ/mol an atom
DCD_HEADER_BYTES = 276
# A bond longer than this multiple of its length at the start is broken: the stretching of a C-H bond at 500 K ends near 1.3.
BROKEN = 1.6


@dataclass(frozen=True)
class RunFiles:
    """The files of a run in one directory.

    Attributes
    ----------
    start : Path
        PDB of the structure that the production run starts from; also the topology for the trajectory.
    trajectory : Path
        DCD, one frame for each report.
    energies : Path
        CSV with the columns `CSV_COLUMNS` (and ``box_volume_nm3`` where periodic), one row a frame.
    checkpoint : Path
        What a run resumes from.
    final : Path
        PDB of the last structure.
    charges : Path
        CSV of partial charges (e), if they were asked for: ``step``, then a column for each atom, named by its index; one row a frame.
    """

    start: Path
    trajectory: Path
    energies: Path
    checkpoint: Path
    final: Path
    charges: Path

    @classmethod
    def in_directory(cls, directory: str | os.PathLike[str]) -> RunFiles:
        """The files of a run in `directory`."""
        d = Path(directory)
        names = ("start.pdb", "trajectory.dcd", "energies.csv", "checkpoint.zip", "final.pdb", "charges.csv")
        return cls(*(d / name for name in names))

    def clear(self) -> None:
        """Make the directory, and remove what an earlier run left in it."""
        self.start.parent.mkdir(parents=True, exist_ok=True)
        for file in (self.checkpoint, self.trajectory, self.energies, self.start, self.final, self.charges):
            file.unlink(missing_ok=True)


def evaluate(context: openmm.Context, wrap: bool = False) -> openmm.State:
    """Positions, energy and forces: always all of them, so that one CUDA graph serves steps and reports."""
    return context.getState(positions=True, energy=True, forces=True, enforcePeriodicBox=wrap)


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint file: a zip of ``run.json``, ``state.xml`` and ``context.bin``.

    Attributes
    ----------
    run : dict
        Settings, seed, platform and OpenMM version of the run, its step and potential energy (kJ/mol), the
        number of frames, and the size of each output file in bytes.
    state : str
        The State as XML: positions, velocities, box and parameters, for any platform.
    context : bytes
        ``Context.createCheckpoint()``: everything, random numbers included, for the same platform only.
    """

    run: dict[str, Any]
    state: str
    context: bytes

    def write(self, path: Path) -> None:
        """Write to `path` at once or not at all."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr("run.json", json.dumps(self.run))
            archive.writestr("state.xml", self.state)
            archive.writestr("context.bin", self.context)
        replace_file(path, buffer.getvalue())

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Read a checkpoint file; ValueError if it is damaged, foreign or newer than this program."""
        check_file(path, "the checkpoint of a run")
        try:
            with zipfile.ZipFile(path) as archive:
                check_archive(archive)
                checkpoint = cls(
                    json.loads(archive.read("run.json")),
                    archive.read("state.xml").decode(),
                    archive.read("context.bin"),
                )
            version = checkpoint.run["format"]
            if version == CHECKPOINT_FORMAT:
                checkpoint.check()
        except (*DAMAGED, KeyError, TypeError, SyntaxError) as error:
            raise ValueError(
                f"{path}: expected the checkpoint of a run, but it is another file or damaged ({error}); "
                "start a new run"
            ) from error
        if version != CHECKPOINT_FORMAT:
            raise ValueError(
                f"{path}: expected checkpoint format {CHECKPOINT_FORMAT}, found {version}; "
                "resume with the openmm-tensornet that wrote it"
            )
        return checkpoint

    def check(self) -> None:
        """Refuse what is no checkpoint; KeyError, TypeError, ValueError or SyntaxError (of XML)."""
        run = self.run
        expected = {
            "settings": dict,
            "seed": int,
            "platform": dict,
            "step": int,
            "potential_energy": float,
            "frames": int,
        }
        for name, kind in (expected | {"sizes": dict}).items():
            if not isinstance(run[name], kind) or isinstance(run[name], bool):
                raise TypeError(f"{name} is {run[name]!r}")
        if not (0 < run["seed"] < 2**31 and run["step"] >= 0 <= run["frames"]):
            raise ValueError(f"seed {run['seed']}, step {run['step']}, frames {run['frames']}")
        outputs = {"energies", "trajectory", *(["charges"] if run["settings"].get("charges") else [])}
        sizes = run["sizes"].values()
        if set(run["sizes"]) != outputs or any(type(size) is not int or size < 0 for size in sizes):
            raise ValueError(f"sizes {run['sizes']}")
        # OpenMM would make whatever object the XML is of, and a PythonForce runs code when it is made.
        described = ElementTree.fromstring(self.state).get("type")
        if described != "State":
            raise ValueError(f"state.xml is a {described}")

    @classmethod
    def of(
        cls,
        context: openmm.Context,
        state: openmm.State,
        settings: dict[str, Any],
        seed: int,
        frames: int,
        sizes: dict[str, int],
    ) -> Checkpoint:
        """The checkpoint of a context whose energy is in `state`; `sizes` are those of the output files."""
        from openmm import XmlSerializer, unit

        portable = context.getState(positions=True, velocities=True, parameters=True)
        run = {
            "format": CHECKPOINT_FORMAT,
            "settings": settings,
            "seed": seed,
            "platform": _describe_platform(context),
            "step": context.getStepCount(),
            "potential_energy": state.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole),
            "frames": frames,
            "sizes": sizes,
        }
        return cls(run, XmlSerializer.serialize(portable), context.createCheckpoint())

    def restore(self, context: openmm.Context, files: RunFiles, say: Any) -> None:
        """Put `context` where the run was, and check that its forces are those of the run.

        Raises
        ------
        ValueError
            If the potential energy is not the one that was written, so the System is another one.
        """
        from openmm import OpenMMException, XmlSerializer, unit

        how = "complete state"
        try:
            # OpenMM does not notice everything that differs, such as the number of threads.
            if self.run["platform"] != _describe_platform(context):
                raise OpenMMException("another platform")
            context.loadCheckpoint(self.context)
        except OpenMMException:
            context.setState(XmlSerializer.deserialize(self.state))
            how = "positions and velocities only: another platform, version or device, so new random numbers"
        energy = evaluate(context).getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole)
        saved, num_atoms = self.run["potential_energy"], context.getSystem().getNumParticles()
        if not abs(energy - saved) <= RESUME_ENERGY_TOLERANCE * num_atoms:
            raise ValueError(
                f"{files.checkpoint}: expected a potential energy of {saved:.4f} kJ/mol at its positions, "
                f"found {energy:.4f}: another model or total charge; resume with what the run had or start a "
                "new one"
            )
        say(f"resumed at step {self.run['step']} ({how})")

    def cut_back(self, open_files: dict[str, IO]) -> None:
        """Cut the open output files, by their names in `sizes`, back to what they were when the checkpoint was written.

        Raises
        ------
        ValueError
            If one is shorter than it was.
        """
        sizes = self.run["sizes"]
        for name, file in open_files.items():
            expected = sizes[name]
            size = os.fstat(file.fileno()).st_size
            if size < expected:
                raise ValueError(
                    f"{file.name}: expected at least {expected} bytes, which the checkpoint counts on, found "
                    f"{size}; put the file back or start a new run"
                )
        for name, file in open_files.items():
            file.truncate(sizes[name])
            file.seek(0, os.SEEK_END)
        frames = open_files["trajectory"]
        # The header counts the frames and names the last step; DCDFile reads the former when it appends.
        interval = self.run["settings"]["report_interval"]
        frames.seek(8)
        frames.write(struct.pack("<i", self.run["frames"]))
        frames.seek(20)
        frames.write(struct.pack("<i", min(self.run["frames"] * interval, 2**31 - 1)))


def _describe_platform(context: openmm.Context) -> dict[str, str]:
    from openmm import Platform

    platform = context.getPlatform()
    properties = {name: platform.getPropertyValue(context, name) for name in platform.getPropertyNames()}
    return {"name": platform.getName(), "OpenMM": Platform.getOpenMMVersion(), **properties}


def describe_system(topology: Topology, system: openmm.System) -> dict[str, str]:
    """What a resumed run must have in common with the run, beside its settings."""
    from openmm import unit

    masses = [system.getParticleMass(i).value_in_unit(unit.dalton) for i in range(system.getNumParticles())]
    symbols = [atom.element.symbol if atom.element else "-" for atom in topology.atoms()]
    digest = hashlib.sha256(json.dumps([symbols, masses]).encode()).hexdigest()[:12]
    return {"atoms": f"{len(symbols)} with elements and masses {digest}", **_describe_models(system)}


def _describe_models(system: openmm.System) -> dict[str, str]:
    """Hash, charge and precision of the TensorNet potentials in a System."""
    found: dict[str, list[str]] = {}
    for force in tensornet_forces(system):
        for name in ("model_hash", "total_charge", "precision"):
            found.setdefault(name, []).append(str(force.metadata[name]))
    return {name: " ".join(values) for name, values in found.items()}


def find_checkpoint(files: RunFiles, settings: dict[str, Any], seed: int | None) -> Checkpoint | None:
    """The checkpoint to resume from, None if the run had not come to its first one."""
    if not files.checkpoint.parent.is_dir():
        raise FileNotFoundError(
            f"output: expected the directory of a run to resume, {files.checkpoint.parent} does not exist; "
            "correct it or start without resume"
        )
    if not files.checkpoint.exists():
        return None
    checkpoint = Checkpoint.read(files.checkpoint)
    then, now = dict(checkpoint.run["settings"]), dict(settings)
    if seed is not None:
        then["seed"], now["seed"] = checkpoint.run["seed"], seed
    different = [
        f"{name} was {then.get(name)}, now {now.get(name)}" for name in then | now if then.get(name) != now.get(name)
    ]
    if different:
        raise ValueError(
            f"{files.checkpoint}: expected the settings of the run, but {'; '.join(different)}; "
            "resume with what it was or start a new run in another directory"
        )
    return checkpoint


def refuse_existing_run(files: RunFiles, resume: bool) -> None:
    """FileExistsError where starting anew would destroy something."""
    if resume:
        if files.trajectory.exists() and files.trajectory.stat().st_size > DCD_HEADER_BYTES:
            raise FileExistsError(
                f"output: {files.trajectory} has frames, but {files.checkpoint.name} is missing; put it back "
                "or start a new run in another directory"
            )
    elif files.trajectory.exists() or files.checkpoint.exists():
        raise FileExistsError(
            f"output: {files.start.parent} already holds a run; resume it, overwrite it or choose another directory"
        )
