"""Runs that are killed, runs that share a directory, and checkpoints from strangers; a part of tests/soak.py."""

from __future__ import annotations

import io
import os
import shutil
import signal
import time
from collections import Counter
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import openmm
from openmm.app import Element, PDBFile, Topology

from openmm_tensornet.export.exported import load_exported
from openmm_tensornet.forces.system import create_system
from openmm_tensornet.md import cli, runfiles, simulation

# Short, and yet with some hundred reports.
RUN: dict[str, Any] = dict(
    time=0.5, report_interval=5, equilibration_time=0.005, seed=5, quiet=True, platform="Reference", temperature=200
)
OUTPUTS = ("trajectory", "energies", "charges", "final", "start")
IN_USE = 3  # exit status of a process whose run was refused


def water() -> tuple[Topology, np.ndarray]:
    """Topology and positions, nm."""
    topology = Topology()
    residue = topology.addResidue("HOH", topology.addChain())
    atoms = [topology.addAtom(name, Element.getBySymbol(name[0]), residue) for name in ("O", "H1", "H2")]
    topology.addBond(atoms[0], atoms[1])
    topology.addBond(atoms[0], atoms[2])
    return topology, np.array([[0.0, 0.0, 0.0], [0.096, 0.0, 0.0], [-0.024, 0.093, 0.0]])


def add_springs(system: openmm.System) -> openmm.System:
    """With the springs that keep a water whole, and a parameter."""
    springs = openmm.CustomBondForce("k*(r-r0)^2")
    springs.addGlobalParameter("k", 1e5)
    springs.addPerBondParameter("r0")
    for first, second, length in ((0, 1, 0.096), (0, 2, 0.096), (1, 2, 0.15)):
        springs.addBond(first, second, [length])
    system.addForce(springs)
    return system


# ---------------------------------------------------------------------------------------------------- kills


def small_system(model: Path) -> tuple[Topology, openmm.System, np.ndarray]:
    """A water whose energy is a model's plus springs."""
    topology, positions = water()
    return topology, add_springs(create_system(topology, model)), positions


class Undisturbed:
    """A run to compare with, and the arguments that made it; `model` is an exported file."""

    def __init__(self, model: Path, output: Path, **options: Any):
        self.arguments = small_system(model)
        self.options = RUN | options | {"charges": "q_dim" in load_exported(model).metadata["model"]["config"]}
        started = time.perf_counter()
        self.files = simulation.simulate(*self.arguments, output=output, **self.options).files
        self.seconds = time.perf_counter() - started

    def start(self, output: Path, resume: bool, checkpoint_seconds: float, **changed: Any) -> int:
        """Begin or resume the run in a process of its own, whose number is returned."""
        process = os.fork()
        if process == 0:
            simulation.CHECKPOINT_SECONDS = checkpoint_seconds
            status, options = 1, self.options | changed
            try:
                simulation.simulate(*self.arguments, output=output, resume=resume and output.exists(), **options)
                status = 0
            except FileExistsError:
                status = IN_USE
            finally:
                os._exit(status)
        return process

    def equals(self, output: Path) -> bool:
        """Whether the run there is the same to the last bit."""
        found = runfiles.RunFiles.in_directory(output)
        return all(content(getattr(found, name)) == content(getattr(self.files, name)) for name in OUTPUTS)


def kill(process: int, after: float) -> int:
    """Kill a process after some seconds; its exit status, which is -9 if it had not ended by then."""
    time.sleep(after)
    os.kill(process, signal.SIGKILL)
    return wait(process)


def wait(process: int) -> int:
    """Exit status of a process."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def content(path: Path) -> bytes | None:
    """A file without the date in the header of a DCD and in a PDB's remark; None if there is none."""
    if not path.exists():
        return None
    found = path.read_bytes()
    if path.suffix == ".dcd":
        return found[:96] + found[runfiles.DCD_HEADER_BYTES :]
    return b"\n".join(line for line in found.splitlines() if not line.startswith(b"REMARK"))


def killed_runs(kills: int, seed: int, models: list[Path], folder: Path) -> Counter[str]:
    """Kill runs at random moments, again and again until they are done, and compare with undisturbed ones; counts.

    Trajectory, energies and charges must be the same to the last bit.
    """
    random = np.random.default_rng(seed)
    counts: Counter[str] = Counter()
    undisturbed = [Undisturbed(model, folder / f"undisturbed-{k}") for k, model in enumerate(models)]
    output = folder / "killed"
    while counts["kills"] < kills:
        run = undisturbed[counts["runs"] % len(undisturbed)]
        shutil.rmtree(output, ignore_errors=True)
        resume, status, seconds = False, -signal.SIGKILL, run.seconds
        while status == -signal.SIGKILL:
            process = run.start(output, resume, float(random.choice([0, 0.02, 0.1])))
            status = kill(process, random.uniform(0, seconds))
            seconds *= 1.2  # a process that makes its programs first may need more than the run did
            resume = True
            if status == -signal.SIGKILL:
                counts["kills"] += 1
                early = not runfiles.RunFiles.in_directory(output).checkpoint.exists()
                counts["kills before the first checkpoint" if early else "kills during the run"] += 1
        counts["runs"] += 1
        if status != 0:
            counts["DEFECT a run that could not be resumed"] += 1
        counts["runs equal to the last bit" if run.equals(output) else "DEFECT another trajectory"] += 1
        leftover = [path.name for path in output.iterdir() if path.name.endswith(".tmp")]
        counts["half files that a kill left under another name"] += len(leftover)
    return counts


def pairs_of_runs(times: int, seed: int, model: Path, folder: Path) -> Counter[str]:
    """Start two runs at once in one directory, anew and then to go on with it, and kill one of each two at a random moment; counts.

    At most one of the two may get through. A run that resumes alone afterwards finds no lock, and its files are those of a run
    without company.
    """
    random = np.random.default_rng(seed)
    counts: Counter[str] = Counter()
    undisturbed = Undisturbed(model, folder / "alone", time=0.3)
    output = folder / "shared"
    for _ in range(times):
        shutil.rmtree(output, ignore_errors=True)
        for resume, duration in ((False, 0.15), (True, 0.3)):
            both = [undisturbed.start(output, resume, 0.02, time=duration) for _ in range(2)]
            victim = int(random.integers(2))
            statuses = [kill(both[victim], random.uniform(0, undisturbed.seconds)), wait(both[1 - victim])]
            ends = {-signal.SIGKILL: "killed", IN_USE: "refused", 0: "done"}
            outcome = " and ".join(sorted(ends.get(status, f"status {status}") for status in statuses))
            # One that resumes after the end has nothing left to do.
            wrong = "status" in outcome or (outcome == "done and done" and not resume)
            counts[f"DEFECT {outcome}" if wrong else outcome] += 1
        if wait(undisturbed.start(output, True, 0.02)) != 0:
            counts["DEFECT a lock that was left behind"] += 1
        counts["runs equal to the last bit" if undisturbed.equals(output) else "DEFECT mixed files"] += 1
    return counts


# ----------------------------------------------------------------------------------- checkpoints from strangers


def program(structure: Path, output: Path, *more: str) -> tuple[int, str]:
    """Exit status of `openmm-tensornet simulate`, in this process and with springs for a model, and what it says on stderr."""
    command = ["simulate", str(structure), "--model", "springs", "--output", str(output), "--platform", "Reference"]
    command += ["--report-interval", "5", "--equilibration-time", "0.005", "--temperature", "200", "--quiet", *more]

    def create_springs(topology: Topology, *_: Any, **__: Any) -> openmm.System:
        system = openmm.System()
        for atom in topology.atoms():
            system.addParticle(atom.element.mass)
        return add_springs(system)

    said = io.StringIO()
    with mock.patch("openmm_tensornet.forces.system.create_system", create_springs), redirect_stderr(said):
        status = cli.main(command)
    return status, said.getvalue()


def original(folder: Path) -> Path:
    """A run in `folder` / run, and a copy of its checkpoint."""
    topology, positions = water()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "water.pdb", "w") as file:
        PDBFile.writeFile(topology, 10 * positions, file)
    status, said = program(folder / "water.pdb", folder / "run", "--time", "0.02", "--seed", "5")
    assert status == 0, said
    return Path(shutil.copy(runfiles.RunFiles.in_directory(folder / "run").checkpoint, folder / "checkpoint"))


def resume(checkpoint: Path, directory: Path) -> str:
    """Resume the run beside `checkpoint` from it, in `directory`, for two more reports; what that writes.

    Raises
    ------
    ValueError
        With the program's message, if it refuses the checkpoint.
    AssertionError
        If that is not how the program refuses something: status 2, one line, and files as they were.
    """
    directory.mkdir(exist_ok=True)
    before = {path.name: path.read_bytes() for path in (checkpoint.parent / "run").iterdir()}
    before["checkpoint.zip"] = checkpoint.read_bytes()
    for name, data in before.items():
        (directory / name).write_bytes(data)
    status, said = program(checkpoint.parent / "water.pdb", directory, "--time", "0.025", "--resume")
    if status == 0:
        files = runfiles.RunFiles.in_directory(directory)
        return repr([content(getattr(files, name)) for name in OUTPUTS])
    assert said.count("\n") == 1, said
    if status == 1 and said.startswith("openmm-tensornet: error: step "):
        return said  # the run went on, and was stopped
    assert status == 2, said
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before, "a refusal changed files"
    raise ValueError(said.rstrip("\n").replace(str(directory / "checkpoint.zip"), str(checkpoint)))
