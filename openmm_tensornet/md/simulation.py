"""Molecular dynamics of an OpenMM System: minimise, equilibrate, run, write, resume.

OpenMM's vocabulary and units throughout: nm, ps, kJ/mol, K, dalton. Plain numbers are in the unit that
the docstring names; a Quantity is converted before any arithmetic.
"""

from __future__ import annotations

import math
import os
import secrets
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..common.checks import flag, integer, one_of
from ..common.files import open_own
from ..common.interrupts import terminable
from ..common.units import lengths_in_nm, number_in, positive_in
from ..forces.system import atom_name, has_energy, tensornet_forces
from .runfiles import Checkpoint, RunFiles, describe_system, evaluate, find_checkpoint, refuse_existing_run

if TYPE_CHECKING:
    import openmm
    from openmm.app import Simulation, Topology

from .reports import CSV_COLUMNS, ProgressBar, csv_row, write_pdb
from .sentinels import Bonds, Sentinels, SimulationError, last_checkpoint

# A checkpoint costs a few ms, most of them waiting for the disk: not after every report of a fast run.
CHECKPOINT_SECONDS = 1.0
EQUILIBRATION_STAGES = 10
MAX_MINIMIZER_ITERATIONS = 1000
# TorchScript settles on its final program within the first calls, so they are neither timed nor
# allowed to differ between a run and its resumption.
WARMUP_EVALUATIONS = 3
# A period of the O-H vibration is 9 fs.
LONGEST_TIMESTEP = 1.0  # fs
HEAVY_HYDROGEN = 1.5  # dalton


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
    charges: bool = False,
    stop_at_broken_bond: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> RunSummary:
    """Minimise, equilibrate, and run molecular dynamics at constant temperature.

    Every `report_interval` steps a row of energies and a frame of the trajectory are written, and, at most
    once a second and at the end, a checkpoint. A resumed run first cuts both files back to what the
    checkpoint knows, so they have neither a gap nor a doubled frame, however the run was stopped. SIGINT (Ctrl-C) and SIGTERM
    (a job scheduler's notice; only in the main thread, and unless the process has a handler for it) end the run in a
    KeyboardInterrupt, before which the checkpoint of the last report is written. On the
    platform and device where it was started it continues from the complete state (on the Reference platform
    to the last bit), elsewhere from positions and velocities with new random numbers.

    Parameters
    ----------
    topology : openmm.app.Topology
        The atoms of `system`.
    system : openmm.System
        For example from :func:`create_system`.
    positions : (n, 3) array or Quantity
        In nm. When resuming only bonds are compared with it.
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
        OpenMM platform. By default its fastest, but Reference in place of CPU where the System has TensorNet forces alone, which
        PyTorch computes on either.
    platform_properties : dict of str, optional
        For example ``{"DeviceIndex": "1"}``. ``Precision``, where the platform has it, is ``mixed`` by
        default.
    seed : int, optional
        Of velocities and thermostat; drawn and printed by default.
    charges : bool
        With every frame of the trajectory, write the partial charges that the potential predicts.
    stop_at_broken_bond : bool
        Stop the run where a bond of the topology is longer than 1.6 times its length in `positions`.
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
        If `output` holds a run, and neither `resume` nor `overwrite` is set, or another run writes there.
    FileNotFoundError
        If there is nothing to resume.
    SimulationError
        With the step, the frame and the cause, if energy, positions or velocities are not finite (the cause may be that atoms are
        too close, the box too small, or a list of pairs full), the temperature is far above what fluctuations reach, or a bond
        is broken and `stop_at_broken_bond` set. The frame is not written, and the last good checkpoint is kept.
    KeyboardInterrupt
        On SIGINT or SIGTERM; the text names the checkpoint that resumes the run, or says that there is none.
    """
    from openmm import LangevinMiddleIntegrator, OpenMMException, System, unit
    from openmm.app import Simulation, Topology

    time_ps = positive_in("time", time, unit.picosecond)
    timestep_fs = positive_in("timestep", timestep, unit.femtosecond)
    temperature_K = positive_in("temperature", temperature, unit.kelvin)
    friction_per_ps = positive_in("friction", friction, unit.picosecond**-1)
    equilibration_ps = number_in("equilibration_time", equilibration_time, unit.picosecond)
    if equilibration_ps < 0:
        raise ValueError(f"equilibration_time: expected 0 ps or more, received {equilibration_ps:g}")
    report_interval = integer("report_interval", report_interval, 1, 2**31 - 1)
    if seed is not None:
        seed = integer("seed", seed, 1, 2**31 - 1)
    for name, value in (
        ("minimize", minimize),
        ("charges", charges),
        ("stop_at_broken_bond", stop_at_broken_bond),
        ("resume", resume),
        ("overwrite", overwrite),
        ("quiet", quiet),
    ):
        flag(name, value)
    if resume and overwrite:
        raise ValueError("resume, overwrite: expected at most one of them, received both")
    for name, thing, kind in (("topology", topology, Topology), ("system", system, System)):
        if not isinstance(thing, kind):
            raise TypeError(f"{name}: expected an OpenMM {kind.__name__}, received {type(thing).__name__}")
    positions = lengths_in_nm("positions", positions, (None, 3))
    if not topology.getNumAtoms() == system.getNumParticles() == len(positions):
        raise ValueError(
            "topology, system, positions: expected the same number of atoms, received "
            f"{topology.getNumAtoms()}, {system.getNumParticles()} and {len(positions)}"
        )
    if timestep_fs > LONGEST_TIMESTEP and _has_free_hydrogens(system):
        warnings.warn(
            f"timestep: expected at most {LONGEST_TIMESTEP:g} fs where hydrogens of their own mass vibrate, received {timestep_fs:g} fs; "
            "the run may become unstable: make the hydrogens heavier (hydrogen_mass of create_system, --hydrogen-mass 3)",
            stacklevel=2,
        )
    # The subtraction keeps 5 ps / 0.5 fs from becoming 10001 steps through rounding.
    num_reports = max(1, math.ceil(time_ps * 1000 / timestep_fs / report_interval - 1e-6))
    say = (lambda _: None) if quiet else partial(print, flush=True)

    charges_of = _partial_charges(system) if charges else None
    bonds = Bonds.of(topology, system, positions) if stop_at_broken_bond else None
    names, forces = [atom_name(a) for a in topology.atoms()], list(tensornet_forces(system))
    sentinels = Sentinels(temperature_K, _degrees_of_freedom(system), bonds, names, forces)
    settings = {
        "timestep_fs": timestep_fs,
        "temperature_K": temperature_K,
        "friction_per_ps": friction_per_ps,
        "report_interval": report_interval,
        **describe_system(topology, system),
        **({"charges": True} if charges else {}),
    }
    files = RunFiles.in_directory(output)
    checkpoint = find_checkpoint(files, settings, seed, len(positions)) if resume else None
    if checkpoint is not None:
        start_step, seed = checkpoint.run["step"], checkpoint.run["seed"]
    else:
        if not overwrite:
            refuse_existing_run(files, resume)
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
    phase, held = "", ExitStack()
    try:
        held.enter_context(terminable())
        if checkpoint is None:
            phase = "input structure, "
            context.setPositions(positions)
            sentinels.check(context, evaluate(context), f"{phase}step 0", minimized=not minimize)
            held.enter_context(files.sole_writer(checkpoint, resume, overwrite))
            files.clear()
            if minimize:
                phase = "minimisation, "
                say("minimising")
                simulation.minimizeEnergy(maxIterations=MAX_MINIMIZER_ITERATIONS)
                sentinels.check(context, evaluate(context), f"{phase}step 0")
            phase = "equilibration, "
            _equilibrate(simulation, sentinels, temperature_K, equilibration_ps * 1000 / timestep_fs, seed, quiet)
            phase = ""
            write_pdb(files.start, simulation)
        else:
            held.enter_context(files.sole_writer(checkpoint, resume, overwrite))
            checkpoint.restore(context, files, say)
        for _ in range(WARMUP_EVALUATIONS):
            evaluate(context)
        ns_per_day = _produce(simulation, files, settings, seed, checkpoint, num_reports, quiet, charges_of, sentinels)
        write_pdb(files.final, simulation)
    except OpenMMException as error:
        where = f"{phase}step {context.getStepCount()}"
        raise SimulationError(f"{where}: {error}{sentinels.cause(context)}{last_checkpoint(files)}") from error
    except KeyboardInterrupt:
        known = f"; resuming continues from {files.checkpoint}" if not phase and files.checkpoint.exists() else ""
        raise KeyboardInterrupt(f"interrupted{known or f': {phase}before the first checkpoint; start again'}") from None
    finally:
        held.close()
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
    charges_of: tuple[list[int], Callable[[openmm.Context], Any]] | None,
    sentinels: Sentinels,
) -> float:
    """The production loop: steps, row, frame, charges, checkpoint. Returns ns/day."""
    from openmm import OpenMMException
    from openmm.app import DCDFile

    context, system = simulation.context, simulation.system
    interval, dt = settings["report_interval"], simulation.integrator.getStepSize()
    periodic = system.usesPeriodicBoundaryConditions()
    columns = (*CSV_COLUMNS, "box_volume_nm3") if periodic else CSV_COLUMNS
    first = 0 if checkpoint is None else checkpoint.run["frames"]
    mode = "x" if checkpoint is None else "r+"
    with (
        open_own(files.energies, mode, encoding="ascii", newline="\n") as energies,
        open_own(files.trajectory, f"{mode}b") as frames,
        ExitStack() as stack,
        ProgressBar(num_reports * interval, quiet, first * interval, "running") as bar,
    ):
        open_files: dict[str, Any] = {"energies": energies, "trajectory": frames}
        if charges_of is not None:
            opened = open_own(files.charges, mode, encoding="ascii", newline="\n")
            open_files["charges"] = stack.enter_context(opened)

        def reached(frame: int, state: openmm.State) -> Checkpoint:
            for file in open_files.values():
                file.flush()
            sizes = {name: os.fstat(file.fileno()).st_size for name, file in open_files.items()}
            return Checkpoint.of(context, state, settings, seed, frame, sizes)

        def save(last: Checkpoint) -> None:
            for file in open_files.values():
                os.fsync(file.fileno())
            last.write(files.checkpoint)

        if checkpoint is None:
            energies.write(",".join(columns) + "\n")
            if charges_of is not None:
                open_files["charges"].write(",".join(["step", *map(str, charges_of[0])]) + "\n")
        else:
            checkpoint.cut_back(open_files)
        trajectory = DCDFile(frames, simulation.topology, dt, interval, interval, append=checkpoint is not None)
        last = reached(first, evaluate(context))
        if checkpoint is None:
            save(last)
        started = saved = perf_counter()
        try:
            for report in range(first + 1, num_reports + 1):
                try:
                    simulation.step(interval)
                    state = evaluate(context, periodic)
                    sentinels.check(context, state, f"step {report * interval}, frame {report}", files)
                except (OpenMMException, SimulationError):
                    _find_step(simulation, last.image, report, interval, sentinels, files)
                    raise
                row = csv_row(report * interval, state, sentinels.degrees_of_freedom, periodic)
                energies.write(",".join(row) + "\n")
                trajectory.writeModel(
                    state.getPositions(asNumpy=True), periodicBoxVectors=state.getPeriodicBoxVectors()
                )
                if charges_of is not None:
                    values = charges_of[1](context)
                    open_files["charges"].write(",".join([row[0], *(f"{q:.8f}" for q in values)]) + "\n")
                last = reached(report, state)
                if perf_counter() - saved >= CHECKPOINT_SECONDS or report == num_reports:
                    save(last)
                    saved = perf_counter()
                bar.update(interval, f"{row[5]} K")
        except (KeyboardInterrupt, SystemExit):  # a signal, which may have come in the middle of a step
            save(last)
            raise
        elapsed = perf_counter() - started
    simulated_ns = (num_reports - first) * interval * settings["timestep_fs"] * 1e-6
    return simulated_ns / elapsed * 86400 if simulated_ns > 0 else math.nan


def _partial_charges(system: openmm.System) -> tuple[list[int], Callable[[openmm.Context], Any]]:
    """The atoms that have partial charges, and what gives them for a Context."""
    for force in tensornet_forces(system):
        if "q_dim" in force.metadata["model"]["config"]:
            return force.metadata["particles"] or list(range(system.getNumParticles())), force.partial_charges
    raise ValueError(
        "charges: expected a System with a force of a model that predicts partial charges (TensorNet2, such as AceFF-2.0), "
        "received one without; leave charges out"
    )


def _equilibrate(
    simulation: Simulation, sentinels: Sentinels, temperature: float, steps: float, seed: int, quiet: bool
) -> None:
    """Raise the temperature to `temperature` (K) within `steps`; leaves step count and time at 0."""
    context, integrator = simulation.context, simulation.integrator
    if steps == 0:
        context.setVelocitiesToTemperature(temperature, seed)
    else:
        stage_steps = math.ceil(steps / EQUILIBRATION_STAGES)
        with ProgressBar(stage_steps * EQUILIBRATION_STAGES, quiet, name="equilibrating") as bar:
            for stage in range(1, EQUILIBRATION_STAGES + 1):
                target = temperature * stage / EQUILIBRATION_STAGES
                integrator.setTemperature(target)
                # New velocities at every stage: half of them goes into the potential within a few fs.
                context.setVelocitiesToTemperature(target, (seed + stage) % 2**31)
                simulation.step(stage_steps)
                sentinels.check(context, evaluate(context), f"equilibration, step {context.getStepCount()}")
                bar.update(stage_steps)
    integrator.setTemperature(temperature)
    context.setTime(0)
    context.setStepCount(0)


def _find_step(
    simulation: Simulation, before: bytes, report: int, interval: int, sentinels: Sentinels, files: RunFiles
) -> None:
    """Repeat the steps from the last report on one by one, and stop where the first one fails: later all is NaN and the cause lost."""
    from openmm import OpenMMException

    context = simulation.context
    context.loadCheckpoint(before)
    for step in range((report - 1) * interval + 1, report * interval + 1):
        where = f"step {step}, frame {report}"
        try:
            simulation.step(1)
            state = evaluate(context)
        except OpenMMException as error:
            raise SimulationError(f"{where}: {error}{sentinels.cause(context)}{last_checkpoint(files)}") from None
        sentinels.check(context, state, where, files)


def _degrees_of_freedom(system: openmm.System) -> int:
    from openmm import CMMotionRemover, unit

    moving = sum(system.getParticleMass(i) > 0 * unit.dalton for i in range(system.getNumParticles()))
    dof = 3 * moving - system.getNumConstraints()
    if any(isinstance(force, CMMotionRemover) for force in system.getForces()):
        dof -= 3
    return max(dof, 1)  # a single atom whose motion is removed: 0 K, not 0/0


def _has_free_hydrogens(system: openmm.System) -> bool:
    """Whether a particle of hydrogen's mass is in no constraint."""
    constrained = {p for k in range(system.getNumConstraints()) for p in system.getConstraintParameters(k)[:2]}
    masses = (system.getParticleMass(k)._value for k in range(system.getNumParticles()) if k not in constrained)
    return any(0 < mass < HEAVY_HYDROGEN for mass in masses)


def _choose_platform(
    system: openmm.System, name: str | None, properties: dict[str, str] | None
) -> tuple[openmm.Platform, dict[str, str]]:
    from openmm import Context, OpenMMException, Platform, VerletIntegrator

    if name is None:
        name = Context(system, VerletIntegrator(0.001)).getPlatform().getName()
        # The CPU platform's threads, which have nothing to do here, cost a small molecule half of its time.
        with_energy = sum(map(has_energy, system.getForces()))
        if name == "CPU" and len(list(tensornet_forces(system))) == with_energy:
            name = "Reference"
    try:
        platform = Platform.getPlatformByName(name)
    except OpenMMException:
        known = [Platform.getPlatform(i).getName() for i in range(Platform.getNumPlatforms())]
        raise ValueError(f"platform: expected one of {', '.join(known)}, received {name!r}") from None
    # mixed: forces in single precision, but positions and integration in double
    names = platform.getPropertyNames()
    for given in properties or {}:
        one_of("platform_properties", given, names)
    defaults = {"Precision": "mixed"} if "Precision" in names else {}
    return platform, {**defaults, **(properties or {})}
