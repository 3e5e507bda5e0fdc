"""OpenMM Systems around a TensorNet potential, and molecular dynamics with them.

OpenMM's vocabulary and units throughout: nm, ps, kJ/mol, K, dalton. Plain numbers are in the unit that
the docstring names; a Quantity is converted before any arithmetic.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import math
import os
import secrets
import struct
import sys
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import openmm
    from openmm.app import Simulation, Topology

CSV_COLUMNS = (
    "step",
    "time_ps",
    "potential_energy_kJ_per_mol",
    "kinetic_energy_kJ_per_mol",
    "total_energy_kJ_per_mol",
    "temperature_K",
)
CHECKPOINT_FORMAT = 1
# A checkpoint costs a few ms, most of them waiting for the disk: not after every report of a fast run.
CHECKPOINT_SECONDS = 1.0
# Platforms and precisions differ by far less for one geometry, models and total charges by far more.
RESUME_ENERGY_TOLERANCE = 0.01  # kJ/mol an atom
DCD_HEADER_BYTES = 276
EQUILIBRATION_STAGES = 10
MAX_MINIMIZER_ITERATIONS = 1000
# TorchScript settles on its final program within the first calls, so they are neither timed nor
# allowed to differ between a run and its resumption.
WARMUP_EVALUATIONS = 3


class SimulationError(RuntimeError):
    """A run that had to stop; the text says at which step and why."""


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
    """

    start: Path
    trajectory: Path
    energies: Path
    checkpoint: Path
    final: Path

    @classmethod
    def in_directory(cls, directory: str | os.PathLike[str]) -> RunFiles:
        """The files of a run in `directory`."""
        d = Path(directory)
        return cls(
            d / "start.pdb", d / "trajectory.dcd", d / "energies.csv", d / "checkpoint.zip", d / "final.pdb"
        )

    def clear(self) -> None:
        """Make the directory, and remove what an earlier run left in it."""
        self.start.parent.mkdir(parents=True, exist_ok=True)
        for file in (self.checkpoint, self.trajectory, self.energies, self.start, self.final):
            file.unlink(missing_ok=True)


@dataclass(frozen=True)
class RunSummary:
    """What a run did.

    Attributes
    ----------
    files : RunFiles
        Where its output is.
    steps : int
        Steps of production in the output, those before a resumption included.
    frames : int
        Frames in the trajectory, and rows in the CSV.
    ns_per_day : float
        Speed of this call, reports included, preparation and warm-up excluded; NaN if no step was left.
    """

    files: RunFiles
    steps: int
    frames: int
    ns_per_day: float


# --------------------------------------------------------------------------------------------- system


def atomic_numbers(topology: Topology) -> list[int]:
    """Atomic number of every atom; ValueError where one has no element."""
    numbers = []
    for atom in topology.atoms():
        if atom.element is None:
            raise ValueError(
                f"topology: expected an element for every atom, but {_atom_name(atom)} has none "
                "(an extra particle or an unknown symbol); remove it or give it an element"
            )
        numbers.append(atom.element.atomic_number)
    return numbers


def _atom_name(atom: Any) -> str:
    return f"atom {atom.index} ({atom.name} of {atom.residue.name} {atom.residue.id})"


def create_system(
    topology: Topology,
    model: Any,
    *,
    positions: Any = None,
    total_charge: float | Sequence[float] = 0,
    hydrogen_mass: Any = None,
    precision: str = "single",
    remove_cm_motion: bool = True,
    molecules: Sequence[int] | None = None,
    periodic: bool | None = None,
    box_vectors: Any = None,
    cuda_graphs: bool = True,
    warmup_steps: int = 10,
) -> openmm.System:
    """Build a System in which all atoms of a topology interact through a TensorNet potential.

    Beside the potential it has the masses of the elements, the box, and bonds of zero strength: they add
    no energy, but tell OpenMM which atoms form a molecule, so that a barostat scales molecules as a
    whole and periodic wrapping does not tear them apart.

    Parameters
    ----------
    topology : openmm.app.Topology
        The atoms, their elements and bonds, and the box.
    model : path or TensorNet
        A TorchMD-Net checkpoint, an exported file, or a loaded model.
    positions : (n, 3) array or Quantity, optional
        In nm. Checked, not stored.
    total_charge : number or one for each molecule
        In elementary charges.
    hydrogen_mass : float or Quantity, optional
        In dalton. Every hydrogen gets this mass, taken from the heavy atom it is bonded to.
    precision : {"single", "double"}
        Arithmetic of the network.
    remove_cm_motion : bool
        Add a CMMotionRemover.
    molecules, periodic, box_vectors, cuda_graphs, warmup_steps
        As in :class:`~openmm_tensornet.TensorNetForce`. `box_vectors` (nm) replaces the topology's box.

    Returns
    -------
    openmm.System

    Raises
    ------
    TypeError
        If `topology` is no Topology.
    ValueError
        If an atom has no element, a hydrogen no heavy atom to take mass from, or a heavy atom would become
        lighter than `hydrogen_mass`; and for everything that TensorNetForce refuses.

    Warns
    -----
    UserWarning
        If atoms have no bonds, so that OpenMM cannot know their molecules.
    """
    from openmm import CMMotionRemover, HarmonicBondForce, System
    from openmm.app import Topology

    from openmm_tensornet.force import TensorNetForce

    if not isinstance(topology, Topology):
        raise TypeError(f"topology: expected an openmm.app.Topology, received {type(topology).__name__}")
    masses = _masses(topology, hydrogen_mass)
    force = TensorNetForce(
        model,
        topology,
        positions=positions,
        total_charge=total_charge,
        precision=precision,
        molecules=molecules,
        periodic=periodic,
        box_vectors=box_vectors,
        cuda_graphs=cuda_graphs,
        warmup_steps=warmup_steps,
    )
    system = System()
    for mass in masses:
        system.addParticle(mass)
    box = topology.getPeriodicBoxVectors() if box_vectors is None else box_vectors
    if box is not None:
        system.setDefaultPeriodicBoxVectors(*box)
    _warn_about_missing_bonds(topology)
    bonds = HarmonicBondForce()
    for first, second in topology.bonds():
        bonds.addBond(first.index, second.index, 0.1, 0.0)
    bonds.setUsesPeriodicBoundaryConditions(force.usesPeriodicBoundaryConditions())
    system.addForce(bonds)
    system.addForce(force)
    if remove_cm_motion:
        system.addForce(CMMotionRemover())
    return system


def _masses(topology: Topology, hydrogen_mass: Any) -> list[float]:
    """Masses in dalton, with those of the hydrogens moved over from their heavy atoms if asked for."""
    from openmm import unit

    numbers = atomic_numbers(topology)
    masses = [atom.element.mass.value_in_unit(unit.dalton) for atom in topology.atoms()]
    if hydrogen_mass is None:
        return masses
    target = _positive("hydrogen_mass", hydrogen_mass, unit.dalton)
    heavy_neighbor: dict[int, int] = {}
    for bond in topology.bonds():
        for atom, other in (bond, bond[::-1]):
            if numbers[atom.index] == 1 and numbers[other.index] != 1:
                heavy_neighbor.setdefault(atom.index, other.index)
    atoms = list(topology.atoms())
    for i, number in enumerate(numbers):
        if number != 1:
            continue
        if i not in heavy_neighbor:
            raise ValueError(
                f"hydrogen_mass: expected every hydrogen bonded to a heavy atom, but {_atom_name(atoms[i])} "
                "is not; add the bond (CONECT records in a PDB file) or leave hydrogen_mass out"
            )
        masses[heavy_neighbor[i]] -= target - masses[i]
        masses[i] = target
    for i in set(heavy_neighbor.values()):
        if masses[i] < target:
            raise ValueError(
                f"hydrogen_mass: {target:g} would leave {_atom_name(atoms[i])} with {masses[i]:.3f} dalton, "
                "less than its hydrogens; choose a smaller value"
            )
    return masses


def _warn_about_missing_bonds(topology: Topology) -> None:
    bonded = {atom.index for bond in topology.bonds() for atom in bond}
    alone = [
        atom
        for atom in topology.atoms()
        if atom.index not in bonded and (not bonded or len(list(atom.residue.atoms())) > 1)
    ]
    if alone and topology.getNumAtoms() > 1:
        warnings.warn(
            f"topology: {len(alone)} of {topology.getNumAtoms()} atoms have no bond (first: "
            f"{_atom_name(alone[0])}), so OpenMM takes each for a molecule of its own, and a barostat or "
            "periodic wrapping would tear molecules apart; add bonds (CONECT records in a PDB file)",
            stacklevel=3,
        )


def _number(name: str, value: Any, unit: Any) -> float:
    """A plain number or Quantity as a float in `unit`; ValueError if it is not finite."""
    from openmm.unit import is_quantity

    if is_quantity(value):
        if not value.unit.is_compatible(unit):
            raise ValueError(f"{name}: expected a Quantity in {unit.get_name()}, received {value}")
        value = value.value_in_unit(unit)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name}: expected a number or Quantity in {unit.get_name()}, received {value!r}"
        ) from None
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number in {unit.get_name()}, received {number}")
    return number


def _positive(name: str, value: Any, unit: Any) -> float:
    number = _number(name, value, unit)
    if number <= 0:
        raise ValueError(f"{name}: expected more than 0 {unit.get_name()}, received {number:g}")
    return number


# ------------------------------------------------------------------------------------------- dynamics


def simulate(
    topology: Topology,
    system: openmm.System,
    positions: Any,
    *,
    output: str | os.PathLike[str],
    time: Any,
    timestep: Any = 0.5,
    temperature: Any = 300.0,
    friction: Any = 1.0,
    minimize: bool = True,
    equilibration_time: Any = 1.0,
    report_interval: int = 200,
    platform: str | None = None,
    platform_properties: dict[str, str] | None = None,
    seed: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> RunSummary:
    """Minimise, equilibrate, and run molecular dynamics at constant temperature.

    Every `report_interval` steps a row of energies and a frame of the trajectory are written, and, at most
    once a second and at the end, a checkpoint. A resumed run first cuts both files back to what the
    checkpoint knows, so they have neither a gap nor a doubled frame, however the run was stopped. On the
    platform and device where it was started it continues from the complete state (on the Reference platform
    to the last bit), elsewhere from positions and velocities with new random numbers.

    Parameters
    ----------
    topology : openmm.app.Topology
        The atoms of `system`.
    system : openmm.System
        For example from :func:`create_system`.
    positions : (n, 3) array or Quantity
        In nm. Not used when resuming.
    output : path
        Directory for the files of :class:`RunFiles`.
    time : float or Quantity
        Length of the production run in ps, in all, rounded up to a whole number of reports. A run
        resumed with a longer time is extended.
    timestep : float or Quantity
        In fs.
    temperature : float or Quantity
        In K.
    friction : float or Quantity
        Of LangevinMiddleIntegrator, in 1/ps.
    minimize : bool
        Minimise the energy first.
    equilibration_time : float or Quantity
        In ps; the temperature is raised to its value in ten stages within that time. It is not part
        of `time`.
    report_interval : int
        Steps between reports.
    platform : str, optional
        OpenMM platform; its fastest by default.
    platform_properties : dict of str, optional
        For example ``{"DeviceIndex": "1"}``. ``Precision``, where the platform has it, is ``mixed`` by
        default.
    seed : int, optional
        Of velocities and thermostat; drawn and printed by default.
    resume : bool
        Continue the run in `output`. A run that ended before its first checkpoint is started anew.
    overwrite : bool
        Replace a run that `output` already holds; otherwise that is an error.
    quiet : bool
        No messages and no progress bar.

    Returns
    -------
    RunSummary

    Raises
    ------
    ValueError, TypeError
        If an argument is wrong, or a checkpoint is damaged or belongs to another run.
    FileExistsError
        If `output` holds a run, and neither `resume` nor `overwrite` is set.
    FileNotFoundError
        If there is nothing to resume.
    SimulationError
        If energy or positions are not finite. The last good checkpoint is kept.
    """
    from openmm import LangevinMiddleIntegrator, OpenMMException, unit
    from openmm.app import Simulation

    time_ps = _positive("time", time, unit.picosecond)
    timestep_fs = _positive("timestep", timestep, unit.femtosecond)
    temperature_K = _positive("temperature", temperature, unit.kelvin)
    friction_per_ps = _positive("friction", friction, unit.picosecond**-1)
    equilibration_ps = _number("equilibration_time", equilibration_time, unit.picosecond)
    if equilibration_ps < 0:
        raise ValueError(f"equilibration_time: expected 0 ps or more, received {equilibration_ps:g}")
    if isinstance(report_interval, bool) or not isinstance(report_interval, int) or report_interval < 1:
        raise ValueError(
            f"report_interval: expected a whole number of steps, 1 or more, received {report_interval!r}"
        )
    if seed is not None and not 0 < seed < 2**31:
        raise ValueError(f"seed: expected a whole number from 1 to {2**31 - 1}, received {seed!r}")
    if resume and overwrite:
        raise ValueError("resume, overwrite: expected at most one of them, received both")
    if not topology.getNumAtoms() == system.getNumParticles() == len(positions):
        raise ValueError(
            "topology, system, positions: expected the same number of atoms, received "
            f"{topology.getNumAtoms()}, {system.getNumParticles()} and {len(positions)}"
        )
    # The subtraction keeps 5 ps / 0.5 fs from becoming 10001 steps through rounding.
    num_reports = max(1, math.ceil(time_ps * 1000 / timestep_fs / report_interval - 1e-6))
    say = (lambda _: None) if quiet else partial(print, flush=True)

    settings = {
        "timestep_fs": timestep_fs,
        "temperature_K": temperature_K,
        "friction_per_ps": friction_per_ps,
        "report_interval": report_interval,
        **_describe_system(topology, system),
    }
    files = RunFiles.in_directory(output)
    checkpoint = _find_checkpoint(files, settings, seed) if resume else None
    if checkpoint is not None:
        start_step, seed = checkpoint.run["step"], checkpoint.run["seed"]
    else:
        if not overwrite:
            _refuse_existing_run(files, resume)
        if resume:
            say(f"{files.checkpoint} is not there yet: starting from the beginning")
        start_step, seed = 0, seed or secrets.randbelow(2**31 - 1) + 1

    integrator = LangevinMiddleIntegrator(temperature_K, friction_per_ps, timestep_fs / 1000)
    # A context restored without its random numbers must not repeat those from the beginning of the run.
    integrator.setRandomNumberSeed((seed + start_step - 1) % (2**31 - 1) + 1)
    chosen, properties = _choose_platform(system, platform, platform_properties)
    simulation = Simulation(topology, system, integrator, chosen, properties)
    context = simulation.context
    say(
        f"{system.getNumParticles()} atoms on {chosen.getName()}, {num_reports * report_interval} steps of "
        f"{timestep_fs:g} fs at {temperature_K:g} K, seed {seed}"
    )
    phase = ""
    try:
        if checkpoint is None:
            phase = "input structure, "
            context.setPositions(positions)
            _check_finite(_evaluate(context), f"{phase}step 0")
            files.clear()
            if minimize:
                phase = "minimisation, "
                say("minimising")
                simulation.minimizeEnergy(maxIterations=MAX_MINIMIZER_ITERATIONS)
                _check_finite(_evaluate(context), f"{phase}step 0")
            phase = "equilibration, "
            _equilibrate(simulation, temperature_K, equilibration_ps * 1000 / timestep_fs, seed, quiet)
            phase = ""
            _write_pdb(files.start, simulation)
        else:
            checkpoint.restore(context, files, say)
        for _ in range(WARMUP_EVALUATIONS):
            _evaluate(context)
        ns_per_day = _produce(simulation, files, settings, seed, checkpoint, num_reports, quiet)
    except OpenMMException as error:
        where = f"{phase}step {context.getStepCount()}"
        raise SimulationError(f"{where}: {error}{_last_checkpoint(files)}") from error
    _write_pdb(files.final, simulation)
    steps = context.getStepCount()
    if math.isnan(ns_per_day):
        say(f"nothing left to do: {files.final.parent} already holds {steps} steps")
    else:
        say(f"{steps * timestep_fs / 1000:g} ps in {files.final.parent}, {ns_per_day:.3g} ns/day")
    return RunSummary(files, steps, steps // report_interval, ns_per_day)


def _produce(
    simulation: Simulation,
    files: RunFiles,
    settings: dict[str, Any],
    seed: int,
    checkpoint: Checkpoint | None,
    num_reports: int,
    quiet: bool,
) -> float:
    """The production loop: steps, row, frame, checkpoint. Returns ns/day."""
    from openmm.app import DCDFile

    context, system = simulation.context, simulation.system
    interval, dt = settings["report_interval"], simulation.integrator.getStepSize()
    periodic = system.usesPeriodicBoundaryConditions()
    dof = _degrees_of_freedom(system)
    columns = (*CSV_COLUMNS, "box_volume_nm3") if periodic else CSV_COLUMNS
    first = 0 if checkpoint is None else checkpoint.run["frames"]
    mode = "w" if checkpoint is None else "r+"
    with (
        open(files.energies, mode, encoding="ascii", newline="\n") as energies,
        open(files.trajectory, f"{mode}b") as frames,
        _ProgressBar(num_reports * interval, quiet, first * interval) as bar,
    ):

        def save(frame: int, state: openmm.State) -> None:
            for file in (energies, frames):
                file.flush()
                os.fsync(file.fileno())
            sizes = {
                "energies": os.path.getsize(files.energies),
                "trajectory": os.path.getsize(files.trajectory),
            }
            Checkpoint.of(context, state, settings, seed, frame, sizes).write(files.checkpoint)

        if checkpoint is None:
            energies.write(",".join(columns) + "\n")
        else:
            checkpoint.cut_back(energies, frames)
        trajectory = DCDFile(
            frames, simulation.topology, dt, interval, interval, append=checkpoint is not None
        )
        if checkpoint is None:
            save(0, _evaluate(context))
        started = saved = perf_counter()
        for report in range(first + 1, num_reports + 1):
            simulation.step(interval)
            state = _evaluate(context, periodic)
            _check_finite(state, f"step {report * interval}", files)
            row = _csv_row(report * interval, state, dof, periodic)
            energies.write(",".join(row) + "\n")
            trajectory.writeModel(
                state.getPositions(asNumpy=True), periodicBoxVectors=state.getPeriodicBoxVectors()
            )
            if perf_counter() - saved >= CHECKPOINT_SECONDS or report == num_reports:
                save(report, state)
                saved = perf_counter()
            bar.update(interval, f"{row[5]} K")
        elapsed = perf_counter() - started
    simulated_ns = (num_reports - first) * interval * settings["timestep_fs"] * 1e-6
    return simulated_ns / elapsed * 86400 if simulated_ns > 0 else math.nan


def _equilibrate(simulation: Simulation, temperature: float, steps: float, seed: int, quiet: bool) -> None:
    """Raise the temperature to `temperature` (K) within `steps`; leaves step count and time at 0."""
    context, integrator = simulation.context, simulation.integrator
    if steps == 0:
        context.setVelocitiesToTemperature(temperature, seed)
    else:
        stage_steps = math.ceil(steps / EQUILIBRATION_STAGES)
        with _ProgressBar(stage_steps * EQUILIBRATION_STAGES, quiet, name="equilibrating") as bar:
            for stage in range(1, EQUILIBRATION_STAGES + 1):
                target = temperature * stage / EQUILIBRATION_STAGES
                integrator.setTemperature(target)
                # New velocities at every stage: half of them goes into the potential within a few fs.
                context.setVelocitiesToTemperature(target, (seed + stage) % 2**31)
                simulation.step(stage_steps)
                _check_finite(_evaluate(context), f"equilibration, step {context.getStepCount()}")
                bar.update(stage_steps)
    integrator.setTemperature(temperature)
    context.setTime(0)
    context.setStepCount(0)


def _evaluate(context: openmm.Context, wrap: bool = False) -> openmm.State:
    """Positions, energy and forces: always all of them, so that one CUDA graph serves steps and reports."""
    return context.getState(positions=True, energy=True, forces=True, enforcePeriodicBox=wrap)


def _check_finite(state: openmm.State, where: str, files: RunFiles | None = None) -> None:
    """Stop where energy or positions are not finite; the Reference platform itself would go on."""
    import numpy as np

    energy = state.getPotentialEnergy()._value
    if not np.isfinite(state.getPositions(asNumpy=True)._value).all():
        cause = "positions are NaN or infinite (time step too long, or atoms too close)"
    elif not math.isfinite(energy):
        value = "NaN" if math.isnan(energy) else "infinite"
        cause = (
            f"the potential energy is {value} (a geometry that the model cannot evaluate, or atoms too close)"
        )
    elif not math.isfinite(state.getKineticEnergy()._value):
        cause = "velocities are NaN or infinite (time step too long)"
    else:
        return
    raise SimulationError(f"{where}: {cause}{_last_checkpoint(files)}")


def _last_checkpoint(files: RunFiles | None) -> str:
    if files is None or not files.checkpoint.exists():
        return ""
    return f"; the last good checkpoint is {files.checkpoint}"


def _csv_row(step: int, state: openmm.State, dof: int, periodic: bool) -> list[str]:
    from openmm import unit

    potential = state.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole)
    kinetic = state.getKineticEnergy().value_in_unit(unit.kilojoule_per_mole)
    temperature = (
        2 * kinetic / (dof * unit.MOLAR_GAS_CONSTANT_R.value_in_unit(unit.kilojoule_per_mole / unit.kelvin))
    )
    row = [
        str(step),
        f"{state.getTime().value_in_unit(unit.picosecond):.6f}",
        f"{potential:.6f}",
        f"{kinetic:.6f}",
        f"{potential + kinetic:.6f}",
        f"{temperature:.3f}",
    ]
    if periodic:
        row.append(f"{state.getPeriodicBoxVolume().value_in_unit(unit.nanometer**3):.6f}")
    return row


def _degrees_of_freedom(system: openmm.System) -> int:
    from openmm import CMMotionRemover, unit

    moving = sum(system.getParticleMass(i) > 0 * unit.dalton for i in range(system.getNumParticles()))
    dof = 3 * moving - system.getNumConstraints()
    if any(isinstance(force, CMMotionRemover) for force in system.getForces()):
        dof -= 3
    return max(dof, 1)  # a single atom whose motion is removed: 0 K, not 0/0


def _choose_platform(
    system: openmm.System, name: str | None, properties: dict[str, str] | None
) -> tuple[openmm.Platform, dict[str, str]]:
    from openmm import Context, OpenMMException, Platform, VerletIntegrator

    if name is None:
        name = Context(system, VerletIntegrator(0.001)).getPlatform().getName()
    try:
        platform = Platform.getPlatformByName(name)
    except OpenMMException:
        known = [Platform.getPlatform(i).getName() for i in range(Platform.getNumPlatforms())]
        raise ValueError(f"platform: expected one of {', '.join(known)}, received {name!r}") from None
    # mixed: forces in single precision, but positions and integration in double
    defaults = {"Precision": "mixed"} if "Precision" in platform.getPropertyNames() else {}
    return platform, {**defaults, **(properties or {})}


class _ProgressBar:
    """tqdm on stderr if it is installed and stderr is a terminal, else nothing."""

    def __init__(self, total: int, quiet: bool, initial: int = 0, name: str | None = None) -> None:
        self._bar: Any = None
        if quiet:
            return
        try:
            from tqdm import tqdm
        except ImportError:
            return
        self._bar = tqdm(
            total=total, initial=initial, unit="step", desc=name, disable=None, dynamic_ncols=True
        )

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, steps: int, text: str = "") -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(steps)


# ---------------------------------------------------------------------------------- files of a run


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
        _replace(path, buffer.getvalue())

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Read a checkpoint file; ValueError if it is damaged, foreign or newer than this program."""
        try:
            with zipfile.ZipFile(path) as archive:
                checkpoint = cls(
                    json.loads(archive.read("run.json")),
                    archive.read("state.xml").decode(),
                    archive.read("context.bin"),
                )
            version = checkpoint.run["format"]
        except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, TypeError, ValueError) as error:
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
        energy = _evaluate(context).getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole)
        saved, num_atoms = self.run["potential_energy"], context.getSystem().getNumParticles()
        if not abs(energy - saved) <= RESUME_ENERGY_TOLERANCE * num_atoms:
            raise ValueError(
                f"{files.checkpoint}: expected a potential energy of {saved:.4f} kJ/mol at its positions, "
                f"found {energy:.4f}: another model or total charge; resume with what the run had or start a "
                "new one"
            )
        say(f"resumed at step {self.run['step']} ({how})")

    def cut_back(self, energies: IO[str], frames: IO[bytes]) -> None:
        """Cut the open output files back to what they were when the checkpoint was written.

        Raises
        ------
        ValueError
            If one is shorter than it was.
        """
        sizes = self.run["sizes"]
        for file, expected in ((energies, sizes["energies"]), (frames, sizes["trajectory"])):
            size = os.fstat(file.fileno()).st_size
            if size < expected:
                raise ValueError(
                    f"{file.name}: expected at least {expected} bytes, which the checkpoint counts on, found "
                    f"{size}; put the file back or start a new run"
                )
        energies.truncate(sizes["energies"])
        energies.seek(0, os.SEEK_END)
        frames.truncate(sizes["trajectory"])
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


def _describe_system(topology: Topology, system: openmm.System) -> dict[str, str]:
    """What a resumed run must have in common with the run, beside its settings."""
    from openmm import unit

    masses = [system.getParticleMass(i).value_in_unit(unit.dalton) for i in range(system.getNumParticles())]
    symbols = [atom.element.symbol if atom.element else "-" for atom in topology.atoms()]
    digest = hashlib.sha256(json.dumps([symbols, masses]).encode()).hexdigest()[:12]
    return {"atoms": f"{len(symbols)} with elements and masses {digest}", **_describe_models(system)}


def _describe_models(system: openmm.System) -> dict[str, str]:
    """Hash, charge and precision of the TensorNet potentials in a System."""
    if "openmmtorch" not in sys.modules:  # then no force can be one, and nothing needs it
        return {}
    from openmm_tensornet.force import openmmtorch

    found: dict[str, list[str]] = {}
    for force in system.getForces():
        if openmmtorch.TorchForce.isinstance(force):
            module = openmmtorch.TorchForce.cast(force).getModule()
            metadata = json.loads(getattr(module, "metadata", "{}"))
            for name in ("model_hash", "total_charge", "precision"):
                if name in metadata:
                    found.setdefault(name, []).append(str(metadata[name]))
    return {name: " ".join(values) for name, values in found.items()}


def _find_checkpoint(files: RunFiles, settings: dict[str, Any], seed: int | None) -> Checkpoint | None:
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
        f"{name} was {then.get(name)}, now {now.get(name)}"
        for name in then | now
        if then.get(name) != now.get(name)
    ]
    if different:
        raise ValueError(
            f"{files.checkpoint}: expected the settings of the run, but {'; '.join(different)}; "
            "resume with what it was or start a new run in another directory"
        )
    return checkpoint


def _refuse_existing_run(files: RunFiles, resume: bool) -> None:
    """FileExistsError where starting anew would destroy something."""
    if resume:
        if files.trajectory.exists() and files.trajectory.stat().st_size > DCD_HEADER_BYTES:
            raise FileExistsError(
                f"output: {files.trajectory} has frames, but {files.checkpoint.name} is missing; put it back "
                "or start a new run in another directory"
            )
    elif files.trajectory.exists() or files.checkpoint.exists():
        raise FileExistsError(
            f"output: {files.start.parent} already holds a run; resume it, overwrite it or choose another "
            "directory"
        )


def _write_pdb(path: Path, simulation: Simulation) -> None:
    from openmm.app import PDBFile

    periodic = simulation.system.usesPeriodicBoundaryConditions()
    state = simulation.context.getState(positions=True, enforcePeriodicBox=periodic)
    topology = copy.copy(simulation.topology)
    if periodic:
        topology.setPeriodicBoxVectors(state.getPeriodicBoxVectors())
    text = io.StringIO()
    PDBFile.writeFile(topology, state.getPositions(), text)
    _replace(path, text.getvalue().encode())


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a crash, finds the old content or the new and nothing between."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
