"""The files of a run: trajectory, energies and the checkpoint that a run resumes from."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..common.files import DAMAGED, check_file, lock, open_archive, read_members, replace_file
from ..forces.system import tensornet_forces
from .signature import is_signed, sign

if TYPE_CHECKING:
    import openmm
    from numpy.typing import NDArray
    from openmm.app import Topology

CHECKPOINT_FORMAT = 2
# Of the members of a checkpoint, bytes: some times what the largest have.
LARGEST_DESCRIPTION = 1 << 20
LARGEST_IMAGE, LARGEST_IMAGE_PER_ATOM = 1 << 24, 1 << 10
# What diffuses goes far, but not so far: OpenMM would make a list of cells for all of the space between two atoms.
LARGEST_POSITION = 1e5  # nm
# Platforms and precisions differ by far less for one geometry, models and total charges by far more.
RESUME_ENERGY_TOLERANCE = 0.01  # kJ/mol an atom
DCD_HEADER_BYTES, DCD_BOX_BYTES = 276, 56
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

    @contextmanager
    def sole_writer(self, checkpoint: Checkpoint | None, resume: bool, overwrite: bool) -> Iterator[None]:
        """Keep other runs out of the directory, which is made if need be.

        Raises
        ------
        FileExistsError
            If another run writes there, or has written there since the checkpoint was read, or nothing was found.
        """
        directory = self.start.parent
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with lock(directory / ".lock"):
                if (
                    checkpoint is not None
                    and checkpoint.run != Checkpoint.read(self.checkpoint, len(checkpoint.positions)).run
                ):
                    raise BlockingIOError
                if checkpoint is None and not overwrite:
                    refuse_existing_run(self, resume)
                yield
        except BlockingIOError:
            raise FileExistsError(
                f"output: {directory} is in use by another run; wait until it has ended or choose another directory"
            ) from None


def evaluate(context: openmm.Context, wrap: bool = False) -> openmm.State:
    """Positions, energy and forces: always all of them, so that one CUDA graph serves steps and reports."""
    return context.getState(positions=True, energy=True, forces=True, enforcePeriodicBox=wrap)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The content of a checkpoint file: a zip of plain numbers, and an image that OpenMM is given only where this user's run made it.

    Attributes
    ----------
    run : dict
        Settings, seed, platform and OpenMM version of the run, its step, time (ps), box vectors (nm), global parameters and potential
        energy (kJ/mol), the number of frames, and the size of each output file in bytes.
    positions, velocities : array of float64, shape (n, 3)
        nm and nm/ps: with `run` all that a run needs on any platform, except for its random numbers.
    image : bytes
        ``Context.createCheckpoint()``: everything, random numbers included, for the same platform only. Empty if it was not signed
        (:mod:`.signature`) together with the rest of the file.
    """

    run: dict[str, Any]
    positions: NDArray
    velocities: NDArray
    image: bytes

    def write(self, path: Path) -> None:
        """Write to `path` at once or not at all."""
        members = {"run.json": json.dumps(self.run).encode()}
        members |= {"positions": self.positions.tobytes(), "velocities": self.velocities.tobytes()}
        signature = sign([*members.values(), self.image])
        if signature is not None:
            members |= {"context.bin": self.image, "signature": signature}
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        replace_file(path, buffer.getvalue())

    @classmethod
    def read(cls, path: Path, num_atoms: int) -> Checkpoint:
        """Read the checkpoint of a run of so many atoms; ValueError if it is damaged, foreign or of another version's format."""
        import numpy as np

        array = 24 * num_atoms
        largest = {"run.json": LARGEST_DESCRIPTION, "positions": array, "velocities": array, "signature": 32}
        largest["context.bin"] = LARGEST_IMAGE + LARGEST_IMAGE_PER_ATOM * num_atoms
        check_file(path, "the checkpoint of a run", 2 * sum(largest.values()))
        try:
            with open(path, "rb") as file, open_archive(file) as archive:
                members = read_members(archive, largest)
            signed = [members["run.json"], members["positions"], members["velocities"], members.get("context.bin", b"")]
            run = json.loads(signed[0])
            version = run["format"]
            if version == CHECKPOINT_FORMAT:
                arrays = [np.frombuffer(numbers, "<f8").reshape(-1, 3) for numbers in signed[1:3]]
                image = signed[3] if is_signed(signed, members.get("signature", b"")) else b""
                checkpoint = cls(run, arrays[0], arrays[1], image)
                checkpoint.check(num_atoms)
        except (*DAMAGED, KeyError, TypeError) as error:
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

    def check(self, num_atoms: int) -> None:
        """Refuse what no run of so many atoms writes; KeyError, TypeError or ValueError."""
        import numpy as np

        run = self.run
        expected = {
            "settings": dict,
            "seed": int,
            "platform": dict,
            "step": int,
            "time_ps": float,
            "box_nm": list,
            "parameters": dict,
            "potential_energy": float,
            "frames": int,
            "sizes": dict,
        }
        for name, kind in expected.items():
            if not isinstance(run[name], kind) or isinstance(run[name], bool):
                raise TypeError(f"{name} is {run[name]!r:.100}")
        if not (0 < run["seed"] < 2**31 and 0 <= run["step"] < 2**63):
            raise ValueError(f"seed {run['seed']!r:.30}, step {run['step']!r:.30}")
        settings = run["settings"]
        if run["step"] != run["frames"] * settings["report_interval"]:
            raise ValueError(f"step {run['step']} is not that of frame {run['frames']!r:.30}")
        time = run["step"] * settings["timestep_fs"] / 1000
        if not math.isclose(run["time_ps"], time, rel_tol=1e-6, abs_tol=1e-6):
            raise ValueError(f"time {run['time_ps']:g} ps at step {run['step']}")
        outputs = {"energies", "trajectory", *(["charges"] if settings.get("charges") else [])}
        sizes = run["sizes"].values()
        if set(run["sizes"]) != outputs or any(type(size) is not int or size < 0 for size in sizes):
            raise ValueError(f"sizes {run['sizes']!r:.100}")
        frames, frame = run["sizes"]["trajectory"] - DCD_HEADER_BYTES, 3 * (4 * num_atoms + 8)
        if frames not in (run["frames"] * frame, run["frames"] * (frame + DCD_BOX_BYTES)):
            raise ValueError(f"{run['frames']} frames in a trajectory of {run['sizes']['trajectory']} bytes")
        box = np.array(run["box_nm"], dtype=np.float64)
        for name, values, shape in (
            ("positions", self.positions, (num_atoms, 3)),
            ("velocities", self.velocities, (num_atoms, 3)),
            ("box_nm", box, (3, 3)),
        ):
            if values.shape != shape or not (np.abs(values) <= LARGEST_POSITION).all():
                raise ValueError(
                    f"{name}: expected shape {shape} and at most {LARGEST_POSITION:g}, found {values.shape}"
                )
        parameters = run["parameters"].values()
        if not all(type(value) is float and math.isfinite(value) for value in parameters):
            raise ValueError("parameters that are no numbers")

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
        from openmm import unit

        portable = context.getState(positions=True, velocities=True)
        positions, velocities = portable.getPositions(asNumpy=True), portable.getVelocities(asNumpy=True)
        run = {
            "format": CHECKPOINT_FORMAT,
            "settings": settings,
            "seed": seed,
            "platform": _describe_platform(context),
            "step": context.getStepCount(),
            "time_ps": portable.getTime().value_in_unit(unit.picosecond),
            "box_nm": portable.getPeriodicBoxVectors(asNumpy=True).value_in_unit(unit.nanometer).tolist(),
            "parameters": dict(context.getParameters()),
            "potential_energy": state.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole),
            "frames": frames,
            "sizes": sizes,
        }
        return cls(
            run,
            positions.value_in_unit(unit.nanometer).astype("<f8"),
            velocities.value_in_unit(unit.nanometer / unit.picosecond).astype("<f8"),
            context.createCheckpoint(),
        )

    def restore(self, context: openmm.Context, files: RunFiles, say: Any) -> None:
        """Put `context` where the run was, and check that its forces are those of the run.

        Raises
        ------
        ValueError
            If the potential energy is not the one that was written, so the System is another one, or cannot be computed.
        """
        from openmm import OpenMMException, unit

        try:
            missing = self._restore_all(context)
            if missing:
                self._restore_arrays(context)
            energy = evaluate(context).getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole)
        except OpenMMException as error:
            raise ValueError(
                f"{files.checkpoint}: expected a state of this System, but {error}; start a new run"
            ) from None
        saved, num_atoms = self.run["potential_energy"], context.getSystem().getNumParticles()
        if not abs(energy - saved) <= RESUME_ENERGY_TOLERANCE * num_atoms:
            raise ValueError(
                f"{files.checkpoint}: expected a potential energy of {saved:.4f} kJ/mol at its positions, "
                f"found {energy:.4f}: another model or total charge; resume with what the run had or start a "
                "new one"
            )
        how = f"positions and velocities only: {missing}, so new random numbers" if missing else "complete state"
        say(f"resumed at step {self.run['step']} ({how})")

    def _restore_all(self, context: openmm.Context) -> str:
        """Give OpenMM its image back; what stands against it, if something does."""
        from openmm import OpenMMException

        if not self.image:
            return "written by another user, or where no key could be kept"
        # OpenMM does not notice everything that differs, such as the number of threads.
        if self.run["platform"] != _describe_platform(context):
            return "another platform, version or device"
        try:
            context.loadCheckpoint(self.image)
        except OpenMMException as error:
            return str(error)
        return ""

    def _restore_arrays(self, context: openmm.Context) -> None:
        from openmm import OpenMMException

        found, own = set(self.run["parameters"]), set(context.getParameters())
        if found != own:
            raise OpenMMException(
                f"its global parameters are {sorted(found)!r:.200}, those of the System {sorted(own)!r:.200}"
            )
        context.setPeriodicBoxVectors(*self.run["box_nm"])
        context.setPositions(self.positions)
        context.setVelocities(self.velocities)
        for name, value in self.run["parameters"].items():
            context.setParameter(name, value)
        context.setTime(self.run["time_ps"])
        context.setStepCount(self.run["step"])

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


def find_checkpoint(files: RunFiles, settings: dict[str, Any], seed: int | None, num_atoms: int) -> Checkpoint | None:
    """The checkpoint to resume from, None if the run had not come to its first one."""
    if not files.checkpoint.parent.is_dir():
        raise FileNotFoundError(
            f"output: expected the directory of a run to resume, {files.checkpoint.parent} does not exist; "
            "correct it or start without resume"
        )
    if not files.checkpoint.exists():
        return None
    checkpoint = Checkpoint.read(files.checkpoint, num_atoms)
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
