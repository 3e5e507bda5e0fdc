"""The program ``openmm-tensornet``.

Heavy imports stand inside the functions that need them, so that ``--help`` is fast and works where
openmmtorch is missing. Exit status: 0 done, 1 a run that failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import string
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from openmm_tensornet import __version__
from openmm_tensornet.files import is_torchscript

if TYPE_CHECKING:
    import openmm
    from openmm.app import Topology

# Units that a value on the command line may have: what follows the number, and its name in openmm.unit.
UNITS = {
    "fs": "femtosecond",
    "ps": "picosecond",
    "ns": "nanosecond",
    "us": "microsecond",
    "nm": "nanometer",
    "A": "angstrom",
    "K": "kelvin",
    "amu": "dalton",
    "Da": "dalton",
}
# Up to here more threads gain nothing, and lose a factor of 50 where another program uses the same cores
# (alanine dipeptide, AceFF-1.1, two cores: 10 ms a step with one thread, 11 with two, 450 on busy cores).
ONE_THREAD_ATOMS = 100
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
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
        try:
            options.run(options)
            return 0
        except KeyboardInterrupt:
            print("interrupted; --resume continues a run from its last checkpoint", file=sys.stderr)
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
    parser = _Parser(prog="openmm-tensornet", allow_abbrev=False, description="TensorNet neural potentials in OpenMM.")
    parser.add_argument("--version", action="version", version=f"openmm-tensornet {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    simulate = commands.add_parser(
        "simulate",
        parents=[common],
        allow_abbrev=False,
        help="molecular dynamics of a structure",
        description="Minimise, equilibrate and run molecular dynamics at constant temperature. "
        "Writes start.pdb, trajectory.dcd, energies.csv, checkpoint.zip and final.pdb, "
        "with --charges also charges.csv.",
    )
    simulate.set_defaults(run=_simulate)
    simulate.add_argument("structure", metavar="STRUCTURE", help="PDB or PDBx/mmCIF file, hydrogens included")
    simulate.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    simulate.add_argument("--output", metavar="DIR", help="where to write (default: STRUCTURE-md)")
    add_quantity(simulate, "--time", "ps", 10, "length of the run, without preparation")
    add_quantity(simulate, "--timestep", "fs", 0.5, "time step")
    add_quantity(simulate, "--temperature", "K", 300, "temperature")
    add_quantity(simulate, "--equilibration-time", "ps", 1, "length of the equilibration")
    add_quantity(simulate, "--hydrogen-mass", "amu", None, "give hydrogens this mass, taken from their heavy atoms")
    simulate.add_argument(
        "--charge",
        type=int,
        metavar="N",
        help="total charge (default: 0, an error if that makes the electrons odd)",
    )
    simulate.add_argument(
        "--charges", action="store_true", help="write the partial charges of a model that has them to charges.csv"
    )
    add_quantity(
        simulate,
        "--coulomb-cutoff",
        "nm",
        None,
        "cutoff of the Coulomb interaction of a model that has one (default: the model's own, else 1.2 nm if periodic)",
    )
    simulate.add_argument("--platform", metavar="NAME", help="OpenMM platform (default: the fastest)")
    simulate.add_argument(
        "--precision", choices=("single", "double"), default="single", help="of the network (default: single)"
    )
    simulate.add_argument(
        "--threads",
        type=_at_least_one,
        metavar="N",
        help="CPU threads (default: 1 for up to 100 atoms, else all)",
    )
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
    simulate.add_argument("--allow-no-hydrogens", action="store_true", help="accept carbon without any hydrogen")
    existing = simulate.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="continue the run in the output directory")
    existing.add_argument("--overwrite", action="store_true", help="replace the run in the output directory")
    simulate.add_argument("--quiet", action="store_true", help="no messages, no progress bar")

    info = commands.add_parser(
        "info",
        parents=[common],
        allow_abbrev=False,
        help="what a model file is",
        description="Show the architecture, options, units and sizes of a checkpoint or an exported file.",
    )
    info.set_defaults(run=_info)
    info.add_argument("file", metavar="MODEL", help=MODEL_HELP)
    info.add_argument("--json", action="store_true", help="as JSON")

    models = commands.add_parser(
        "models",
        parents=[common],
        allow_abbrev=False,
        help="models that are known by name",
        description="List the model in the package, and published ones that are fetched when they are used.",
    )
    models.set_defaults(run=_models)

    analyze = commands.add_parser(
        "analyze",
        parents=[common],
        allow_abbrev=False,
        help="pictures of a run",
        description="Draw energies, temperature, bond lengths and angles of a run, and for a peptide the map of phi and psi "
        "with the populations of its basins. With --model also runs 2 ps at constant energy and reports the drift.",
    )
    analyze.set_defaults(run=_analyze)
    analyze.add_argument("directory", metavar="DIR", help="directory of a run of `openmm-tensornet simulate`")
    analyze.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    analyze.add_argument("--charge", type=int, default=0, metavar="N", help="total charge (default: 0)")
    return parser


def add_quantity(parser: argparse.ArgumentParser, flag: str, unit: str, default: float | None, what: str) -> None:
    """Add an option that takes a number in `unit`, or a number with a unit of the same dimension."""
    note = "" if default is None else f" (default: {default:g} {unit})"
    parser.add_argument(
        flag,
        type=_quantity_in(unit),
        default=default,
        help=f"{what}, in {unit} unless the unit is given{note}",
    )


def _quantity_in(default_unit: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        from openmm import unit

        number = text.strip().rstrip(string.ascii_letters + " ")
        symbol = text.strip().removeprefix(number).strip()
        try:
            given = getattr(unit, UNITS[symbol or default_unit])
            if not given.is_compatible(getattr(unit, UNITS[default_unit])):
                raise ValueError
            return float(number) * given
        except (KeyError, ValueError):
            raise argparse.ArgumentTypeError(
                f"expected a number, with or without a unit, such as '2 {default_unit}', received '{text}'"
            ) from None

    return parse


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more, received '{text}'")
    return int(text)


# ------------------------------------------------------------------------------------------- simulate


def _simulate(options: argparse.Namespace) -> None:
    from openmm_tensornet.simulation import simulate
    from openmm_tensornet.system import create_system

    topology, positions = read_structure(options.structure, allow_no_hydrogens=options.allow_no_hydrogens)
    _set_threads(options.threads, topology.getNumAtoms())
    if options.output is None:
        options.output = f"{Path(options.structure).stem}-md"
    system = create_system(
        topology,
        options.model,
        positions=positions,
        total_charge=total_charge(topology, options.charge),
        hydrogen_mass=options.hydrogen_mass,
        coulomb_cutoff=options.coulomb_cutoff,
        precision=options.precision,
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


def total_charge(topology: Topology, charge: int | None) -> int:
    """The total charge to use; ValueError if none is given and the number of electrons would be odd."""
    from openmm_tensornet.system import atomic_numbers

    electrons = sum(atomic_numbers(topology)) - (charge or 0)
    if electrons % 2 and charge is None:
        raise ValueError(
            f"--charge: expected a total charge, because the neutral structure has an odd number of "
            f"electrons ({electrons}); give it (0 for a radical), or correct the hydrogens"
        )
    if electrons % 2:
        warnings.warn(f"charge {charge} leaves an odd number of electrons ({electrons})", stacklevel=2)
    return charge or 0


def read_structure(
    path: str | os.PathLike[str], *, allow_no_hydrogens: bool = False
) -> tuple[Topology, openmm.unit.Quantity]:
    """Read a PDB or PDBx/mmCIF file, refusing what OpenMM's readers would guess or drop.

    Parameters
    ----------
    path : path
        A file named ``.pdb``, ``.ent``, ``.cif`` or ``.mmcif``. Of several models the first is used.
    allow_no_hydrogens : bool
        Accept a structure with carbon and without any hydrogen (CO2, CCl4).

    Returns
    -------
    topology : openmm.app.Topology
        With the box of the file, if it has one.
    positions : openmm.unit.Quantity
        (n, 3) in nm.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it cannot be read, has no atoms, atoms without an element, extra particles, several positions of
        one atom, or no hydrogens.
    """
    from openmm.app import PDBFile, PDBxFile

    from openmm_tensornet.system import atomic_numbers

    path = Path(path)
    readers = {".pdb": PDBFile, ".ent": PDBFile, ".cif": PDBxFile, ".mmcif": PDBxFile}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path}: expected a file named {', '.join(readers)}, received '{path.suffix}'")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    num_records = _count_pdb_atoms(path) if reader is PDBFile else None
    if num_records == 0:
        raise ValueError(f"{path}: expected atoms, found none")
    try:
        with open(path) as file, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            structure = reader(file)
    except Exception as error:  # the readers raise whatever their parsing stumbles over
        raise ValueError(
            f"{path}: OpenMM's {reader.__name__} cannot read it: {type(error).__name__}: {error}"
        ) from error
    topology = structure.topology
    if num_records not in (None, topology.getNumAtoms()):
        raise ValueError(
            f"{path}: {num_records} atom records but {topology.getNumAtoms()} distinct atoms; give every "
            "atom of a residue its own name and keep one alternate location"
        )
    for warning in caught:  # only now: the errors above say more
        warnings.warn(str(warning.message), stacklevel=2)
    if structure.getNumFrames() > 1:
        warnings.warn(f"{path}: has {structure.getNumFrames()} models, the first is used", stacklevel=2)
    numbers = atomic_numbers(topology)
    if 6 in numbers and 1 not in numbers and not allow_no_hydrogens:
        raise ValueError(
            f"{path}: has carbon but no hydrogen; the potential needs every atom, so add hydrogens first "
            "(openmm.app.Modeller.addHydrogens or pdbfixer)"
        )
    return topology, structure.getPositions(asNumpy=True)


def _count_pdb_atoms(path: Path) -> int:
    """Number of atoms in the first model of a PDB file; ValueError where an element is missing.

    OpenMM guesses a missing element from the atom's name, and guesses BR as boron.
    """
    from openmm.app import element

    count = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if line.startswith("END"):
                break
            if not line.startswith(("ATOM  ", "HETATM")):
                continue
            count += 1
            symbol = line[76:78].strip()
            try:
                if symbol != "EP":
                    element.get_by_symbol(symbol)
            except KeyError:
                raise ValueError(
                    f"{path}: line {number}: expected the element of atom '{line[12:16].strip()}' in columns "
                    f"77-78, found '{symbol}'; write the element column"
                ) from None
    return count


# -------------------------------------------------------------------------------------------- analyze


def _analyze(options: argparse.Namespace) -> None:
    from openmm_tensornet.analysis import analyze, run_constant_energy
    from openmm_tensornet.runfiles import RunFiles
    from openmm_tensornet.system import create_system

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
    from openmm_tensornet.registry import MODELS

    width = max(map(len, MODELS))
    for name, model in MODELS.items():
        print(f"{name:{width}}  {model.description}\n{'':{width}}  {model.source}")


def _info(options: argparse.Namespace) -> None:
    description = describe_model(options.file)
    if options.json:
        print(json.dumps(description, indent=2))
    else:
        print("\n".join(_lines(description)))


def describe_model(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a model file is, as plain values.

    Parameters
    ----------
    path : path
        A TorchMD-Net checkpoint, an exported file, or the name of a known model.

    Returns
    -------
    dict
        ``file``, ``kind`` ("checkpoint" or "exported"), ``bytes`` and ``sha256``, and the metadata of the
        model or of the export; for a checkpoint also ``dtype``, ``parameters`` (their number) and
        ``cutoff`` of the network in its unit of length.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is neither, or cannot be honoured.
    """
    from openmm_tensornet.registry import find_model

    path = find_model(path)
    if not path.is_file():
        raise ValueError(f"{path}: expected a checkpoint or an exported file, received a directory")
    description: dict[str, Any] = {
        "file": str(path),
        "kind": "exported" if is_torchscript(path) else "checkpoint",
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    if description["kind"] == "exported":
        from openmm_tensornet.export import read_metadata

        return description | read_metadata(path)
    from openmm_tensornet.checkpoint import load_model

    model = load_model(path)
    parameters = list(model.parameters())
    return description | {
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in parameters),
        "cutoff": model.network_cutoff,
        **model.metadata,
    }


def _lines(values: dict[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _lines(value, indent + "  ")
        elif isinstance(value, (list, tuple)):
            yield f"{indent}{name}: {', '.join(map(str, value)) or 'none'}"
        else:
            yield f"{indent}{name}: {'unknown' if value is None else value}"


if __name__ == "__main__":
    sys.exit(main())
