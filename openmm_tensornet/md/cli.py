"""The program ``openmm-tensornet``.

Heavy imports stand inside the functions that need them, so that ``--help`` is fast and works where
openmmtorch is missing. Exit status: 0 done, 1 a run that failed, 2 bad input, 130 interrupted by SIGINT or SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from openmm_tensornet import __version__
from openmm_tensornet.common.interrupts import terminable

if TYPE_CHECKING:
    from openmm_tensornet.md.structures import Structure
from .description import describe_model, lines
from .quantities import add_quantity

# Up to here more threads gain nothing, and lose a factor of 50 where another program uses the same cores
# (alanine dipeptide, AceFF-1.1, two cores: 10 ms a step with one thread, 11 with two, 450 on busy cores).
ONE_THREAD_ATOMS = 100
THREADS_HELP = "CPU threads (default: 1 for up to 100 atoms, else all)"
KERNELS_HELP = "of the network (default: auto: fused where numba is installed and there is no GPU)"
MODEL_HELP = "TorchMD-Net checkpoint, exported file, or a name that `openmm-tensornet models` lists"
BAD_INPUT = (
    ValueError,
    TypeError,
    ImportError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program.

    Parameters
    ----------
    argv : list of str, optional
        The arguments after the program's name; those of the process by default.

    Returns
    -------
    int
        The exit status.
    """
    options = _parser().parse_args(argv)
    with warnings.catch_warnings(), terminable():
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
        try:
            options.run(options)
            return 0
        except KeyboardInterrupt as interrupt:
            early = ": before the run began, no checkpoint was written" if options.run is _simulate else ""
            print(str(interrupt) or f"interrupted{early}", file=sys.stderr)
            return 130
        except Exception as error:
            if options.debug:
                raise
            bad_input = isinstance(error, BAD_INPUT)
            expected = bad_input or isinstance(error, (RuntimeError, OSError))
            text = str(error) if expected else f"{type(error).__name__}: {error} (--debug shows where)"
            print(f"openmm-tensornet: error: {' '.join(text.split())}", file=sys.stderr)
            return 2 if bad_input else 1


class _Parser(argparse.ArgumentParser):
    """Errors of one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    common = _Parser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    potential = _Parser(add_help=False)  # a structure, and the potential for it
    potential.add_argument(
        "structure", metavar="STRUCTURE", help="PDB, PDBx/mmCIF, SDF or XYZ file, hydrogens included"
    )
    potential.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    potential.add_argument(
        "--charge",
        type=int,
        metavar="N",
        help="total charge (default: 0, an error if that makes the electrons odd or contradicts the file)",
    )
    add_quantity(
        potential,
        "--coulomb-cutoff",
        "nm",
        None,
        "cutoff of the Coulomb interaction of a model that has one (default: the model's own, else 1.2 nm if periodic)",
    )
    potential.add_argument(
        "--precision", choices=("single", "double"), default="single", help="of the network (default: single)"
    )
    potential.add_argument(
        "--any-molecule", action="store_true", help="accept a molecule that the model says it was not trained for"
    )
    potential.add_argument("--vacuum", action="store_true", help="leave out the box of the file")
    potential.add_argument("--allow-no-hydrogens", action="store_true", help="accept carbon without any hydrogen")
    parser = _Parser(prog="openmm-tensornet", allow_abbrev=False, description="TensorNet neural potentials in OpenMM.")
    parser.add_argument("--version", action="version", version=f"openmm-tensornet {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Callable, *parents: _Parser, help: str, description: str) -> _Parser:
        made = commands.add_parser(name, parents=parents, allow_abbrev=False, help=help, description=description)
        made.set_defaults(run=run)
        return made

    simulate = command(
        "simulate",
        _simulate,
        common,
        potential,
        help="molecular dynamics of a structure",
        description="Minimise, equilibrate and run molecular dynamics at constant temperature. "
        "Writes start.pdb, trajectory.dcd, energies.csv, checkpoint.zip and final.pdb, "
        "with --charges also charges.csv.",
    )
    simulate.add_argument("--output", metavar="DIR", help="where to write (default: STRUCTURE-md)")
    add_quantity(simulate, "--time", "ps", 10, "length of the run, without preparation")
    add_quantity(simulate, "--timestep", "fs", 0.5, "time step")
    add_quantity(simulate, "--temperature", "K", 300, "temperature")
    add_quantity(simulate, "--equilibration-time", "ps", 1, "length of the equilibration")
    add_quantity(simulate, "--hydrogen-mass", "amu", None, "give hydrogens this mass, taken from their heavy atoms")
    simulate.add_argument(
        "--charges", action="store_true", help="write the partial charges of a model that has them to charges.csv"
    )
    simulate.add_argument("--platform", metavar="NAME", help="OpenMM platform (default: the fastest)")
    simulate.add_argument("--kernels", choices=("auto", "portable", "fused"), default="auto", help=KERNELS_HELP)
    simulate.add_argument("--threads", type=_at_least_one, metavar="N", help=THREADS_HELP)
    simulate.add_argument("--seed", type=_at_least_one, metavar="N", help="of the random numbers (default: drawn)")
    simulate.add_argument(
        "--report-interval",
        type=_at_least_one,
        default=200,
        metavar="N",
        help="steps between reports (default: 200)",
    )
    simulate.add_argument(
        "--stop-at-broken-bond", action="store_true", help="end the run where a bond of the structure breaks"
    )
    existing = simulate.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="continue the run in the output directory")
    existing.add_argument("--overwrite", action="store_true", help="replace the run in the output directory")
    simulate.add_argument("--quiet", action="store_true", help="no messages, no progress bar")

    export = command(
        "export",
        _export,
        common,
        potential,
        help="write a file that a force for a structure is made of at once",
        description="Specialise a model to the atoms of a structure, check it against the reference model, and write a file "
        "that forces are made of at once, on any machine.",
    )
    export.add_argument(
        "--output",
        metavar="FILE",
        help="where to write (default: STRUCTURE.safetensors, or STRUCTURE.pt with --torchscript)",
    )
    export.add_argument(
        "--torchscript",
        action="store_true",
        help="write a program that OpenMM's TorchForce runs where this package is not installed",
    )
    export.add_argument(
        "--kernels",
        choices=("auto", "portable", "fused", "nnpops"),
        help="(default: auto; portable with --torchscript)",
    )
    export.add_argument("--overwrite", action="store_true", help="replace an existing file")
    export.add_argument("--json", action="store_true", help="print what the file says of itself as JSON")

    check = command(
        "check",
        _check,
        common,
        potential,
        help="check a model on a structure",
        description="Compare what would run with the reference model, prove that a CUDA graph can capture it, and test "
        "symmetries, and forces against differences of the energy. The exit status is 1 if a check fails.",
    )
    check.add_argument("--json", action="store_true", help="as JSON")

    benchmark = command(
        "benchmark",
        _benchmark,
        common,
        potential,
        help="time a structure on this machine",
        description="Time steps of molecular dynamics, on every platform that OpenMM has here or on one, "
        "with the kernels that a force would choose.",
    )
    add_quantity(benchmark, "--timestep", "fs", 0.5, "time step")
    benchmark.add_argument("--platform", metavar="NAME", help="OpenMM platform (default: all)")
    benchmark.add_argument("--kernels", choices=("auto", "portable", "fused"), default="auto", help=KERNELS_HELP)
    benchmark.add_argument("--threads", type=_at_least_one, metavar="N", help=THREADS_HELP)
    benchmark.add_argument(
        "--seconds", type=_at_least_one, default=10, metavar="N", help="for each platform (default: 10)"
    )
    benchmark.add_argument("--json", action="store_true", help="as JSON")

    info = command(
        "info",
        _info,
        common,
        help="what a model file is",
        description="Show the architecture, options, units and sizes of a checkpoint or an exported file.",
    )
    info.add_argument("file", metavar="MODEL", help=MODEL_HELP)
    info.add_argument("--json", action="store_true", help="as JSON")

    command(
        "models",
        _models,
        common,
        help="models that are known by name",
        description="List the model in the package, and published ones that are fetched when they are used.",
    )

    analyze = command(
        "analyze",
        _analyze,
        common,
        help="pictures of a run",
        description="Draw energies, temperature, bond lengths and angles of a run, and for a peptide the map of phi and psi "
        "with the populations of its basins. With --model also runs 2 ps at constant energy and reports the drift.",
    )
    analyze.add_argument("directory", metavar="DIR", help="directory of a run of `openmm-tensornet simulate`")
    analyze.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    analyze.add_argument("--charge", type=int, default=0, metavar="N", help="total charge (default: 0)")
    return parser


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more, received '{text}'")
    return int(text)


# ------------------------------------------------------------------------------------------- simulate


def _structure_and_options(options: argparse.Namespace) -> tuple[Structure, dict[str, Any]]:
    """The structure, and the arguments that make a potential for it."""
    from openmm_tensornet.md.structures import read_structure, total_charge

    structure = read_structure(options.structure, allow_no_hydrogens=options.allow_no_hydrogens)
    if options.vacuum:
        structure.topology.setPeriodicBoxVectors(None)
    return structure, {
        "positions": structure.positions,
        "total_charge": total_charge(structure, options.charge),
        "coulomb_cutoff": options.coulomb_cutoff,
        "precision": options.precision,
        "any_molecule": options.any_molecule,
    }


def _simulate(options: argparse.Namespace) -> None:
    from openmm_tensornet.forces.system import create_system
    from openmm_tensornet.md.simulation import simulate

    structure, potential = _structure_and_options(options)
    topology, positions = structure.topology, structure.positions
    _set_threads(options.threads, topology.getNumAtoms())
    if options.output is None:
        options.output = f"{Path(options.structure).stem}-md"
    system = create_system(
        topology, options.model, hydrogen_mass=options.hydrogen_mass, kernels=options.kernels, **potential
    )
    simulate(
        topology,
        system,
        positions,
        output=options.output,
        time=options.time,
        timestep=options.timestep,
        temperature=options.temperature,
        equilibration_time=options.equilibration_time,
        report_interval=options.report_interval,
        platform=options.platform,
        seed=options.seed,
        charges=options.charges,
        stop_at_broken_bond=options.stop_at_broken_bond,
        resume=options.resume,
        overwrite=options.overwrite,
        quiet=options.quiet,
    )


def _set_threads(threads: int | None, num_atoms: int) -> None:
    """Threads of PyTorch and of OpenMM's CPU platform, for the whole process: it is the program's own."""
    import torch
    from openmm import Platform

    if threads is None:
        if num_atoms > ONE_THREAD_ATOMS:
            return
        threads = 1
    torch.set_num_threads(threads)
    Platform.getPlatformByName("CPU").setPropertyDefaultValue("Threads", str(threads))


# ------------------------------------------------------------------------- export, check and benchmark


def _plain(structure: Structure, potential: dict[str, Any]) -> dict[str, Any]:
    """The same arguments without OpenMM: atomic numbers, and numbers in nm."""
    from openmm import unit

    from openmm_tensornet.common.atoms import formal_charge
    from openmm_tensornet.forces.system import atomic_numbers

    stated = formal_charge(structure.topology.atoms())
    if stated not in (None, potential["total_charge"]):
        warnings.warn(
            f"--charge {potential['total_charge']} contradicts the formal charges of the file, which sum to {stated}",
            stacklevel=2,
        )
    box, cutoff = structure.topology.getPeriodicBoxVectors(), potential["coulomb_cutoff"]
    return {
        "atomic_numbers": atomic_numbers(structure.topology),
        "positions": structure.positions.value_in_unit(unit.nanometer),
        "box_vectors": None if box is None else [list(v) for v in box.value_in_unit(unit.nanometer)],
        "total_charge": potential["total_charge"],
        "coulomb_cutoff": None if cutoff is None else cutoff.value_in_unit(unit.nanometer),
        "precision": potential["precision"],
        "any_molecule": potential["any_molecule"],
    }


def _export(options: argparse.Namespace) -> None:
    from openmm_tensornet.export.exported import export_potential, export_torchscript
    from openmm_tensornet.models.checkpoint import load_model

    suffix = ".pt" if options.torchscript else ".safetensors"
    output = Path(options.output or f"{Path(options.structure).stem}{suffix}")
    if output.exists() and not options.overwrite:
        raise FileExistsError(
            f"--output: {output} exists already; pass --overwrite to replace it or choose another name"
        )
    plain = _plain(*_structure_and_options(options))
    model = load_model(options.model)
    if options.kernels is not None:
        plain["kernels"] = options.kernels
    export = export_torchscript if options.torchscript else export_potential
    metadata = export(model, output, periodic=plain["box_vectors"] is not None, **plain)
    if options.json:
        print(json.dumps(metadata, indent=2))
    else:
        print(
            f"{output}: {len(metadata['atomic_numbers'])} atoms, {metadata['precision']} precision, {metadata['kernels']} kernels"
        )


def _check(options: argparse.Namespace) -> None:
    import torch

    from openmm_tensornet.common.atoms import Atoms
    from openmm_tensornet.export.compiled import check_supported
    from openmm_tensornet.md.validation import check_model
    from openmm_tensornet.models.checkpoint import load_model

    plain = _plain(*_structure_and_options(options))
    box = plain["box_vectors"]
    model, atoms = load_model(options.model), Atoms.make(plain["atomic_numbers"], None, plain["total_charge"])
    check_supported(model, atoms, any_molecule=options.any_molecule)
    checks, metadata = check_model(
        model,
        atoms,
        torch.tensor(plain["positions"], dtype=torch.float64),
        box=None if box is None else torch.tensor(box, dtype=torch.float64),
        precision=options.precision,
        coulomb_cutoff=plain["coulomb_cutoff"],
    )
    failed = [check.name for check in checks if not check.passed]
    if options.json:
        found = {check.name: {"value": check.value, "limit": check.limit, "passed": check.passed} for check in checks}
        print(json.dumps({"kernels": metadata["launches"], "checks": found}, indent=2))
    else:
        print(f"can be captured in a CUDA graph: {metadata['launches']} kernels")
        for check in checks:
            print(
                f"{'ok    ' if check.passed else 'FAILED'} {check.name}: {check.value:.1e} {check.unit} (at most {check.limit:.0e})"
            )
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}")


def _benchmark(options: argparse.Namespace) -> None:
    from openmm import OpenMMException, Platform, unit

    from openmm_tensornet.common.units import positive_in
    from openmm_tensornet.forces.system import create_system, tensornet_forces
    from openmm_tensornet.md.validation import time_steps

    structure, potential = _structure_and_options(options)
    _set_threads(options.threads, structure.topology.getNumAtoms())
    system = create_system(structure.topology, options.model, kernels=options.kernels, **potential)
    (force,) = tensornet_forces(system)
    timestep = positive_in("--timestep", options.timestep, unit.femtosecond)
    names = [Platform.getPlatform(k).getName() for k in range(Platform.getNumPlatforms())]
    found: dict[str, Any] = {}
    for name in [options.platform] if options.platform else names:
        try:
            seconds = time_steps(system, structure.positions, name, timestep, options.seconds)
        except OpenMMException as error:
            if options.platform:
                raise ValueError(f"--platform: {name}: {error}") from error
            print(f"{name}: not here ({' '.join(str(error).split())})", file=sys.stderr)
            continue
        found[name] = {"ms_per_step": 1000 * seconds, "ns_per_day": timestep * 1e-6 * 86400 / seconds}
    if options.json:
        print(
            json.dumps(
                {"atoms": system.getNumParticles(), "kernels": force.metadata["kernels"], "platforms": found}, indent=2
            )
        )
        return
    for name, figures in found.items():
        print(
            f"{name}, {force.metadata['kernels']} kernels: {figures['ms_per_step']:.3g} ms a step, {figures['ns_per_day']:.3g} ns/day"
        )


# -------------------------------------------------------------------------------------------- analyze


def _analyze(options: argparse.Namespace) -> None:
    from openmm_tensornet.forces.system import create_system
    from openmm_tensornet.md.analysis import analyze, run_constant_energy
    from openmm_tensornet.md.runfiles import RunFiles
    from openmm_tensornet.md.structures import read_structure

    constant_energy = None
    if options.model is not None:
        topology, positions = read_structure(RunFiles.in_directory(options.directory).final, allow_no_hydrogens=True)
        _set_threads(None, topology.getNumAtoms())
        system = create_system(topology, options.model, positions=positions, total_charge=options.charge)
        constant_energy = run_constant_energy(system, positions)
    lines, files = analyze(options.directory, constant_energy)
    print("\n".join([*lines, "pictures: " + ", ".join(map(str, files))]))


# ------------------------------------------------------------------------------------- models and info


def _models(options: argparse.Namespace) -> None:
    from openmm_tensornet.models.registry import MODELS

    width = max(map(len, MODELS))
    for name, model in MODELS.items():
        print(f"{name:{width}}  {model.description}\n{'':{width}}  {model.source}")


def _info(options: argparse.Namespace) -> None:
    description = describe_model(options.file)
    if options.json:
        print(json.dumps(description, indent=2))
    else:
        print("\n".join(lines(description)))
