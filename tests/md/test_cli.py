"""The program: what it does, and what it says when it cannot."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from openmm_tensornet import __version__
from openmm_tensornet.common.atoms import formal_charge
from openmm_tensornet.md import cli, quantities
from openmm_tensornet.md.structures import read_structure, total_charge

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "alanine_dipeptide.pdb"
MODEL = "variants/zero-layers"
BUNDLED = "alanine-dipeptide-gfn2"
PLATFORMS = ["Reference", "CPU"]
SHORT = ["--time", "10 fs", "--equilibration-time", "10 fs", "--report-interval", "5", "--seed", "3"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The bundled model exported for alanine dipeptide: made once and read fast."""
    from openmm.app import PDBFile

    from openmm_tensornet.export.exported import export_potential
    from openmm_tensornet.models.checkpoint import load_model

    path = tmp_path_factory.mktemp("model") / "alanine.safetensors"
    numbers = [atom.element.atomic_number for atom in PDBFile(str(EXAMPLE)).topology.atoms()]
    export_potential(load_model(BUNDLED), path, atomic_numbers=numbers)
    return path


def refused(capsys, *arguments):
    """The one line that the program says to bad input."""
    try:
        status = cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:  # argparse
        status = stop.code
    text = capsys.readouterr()
    assert status == 2, text.err
    assert text.out == ""
    assert text.err.startswith("openmm-tensornet") and ": error: " in text.err
    assert text.err.count("\n") == 1 and text.err.endswith("\n")
    return text.err


def edited(tmp_path, edit, name="edited.pdb"):
    """A copy of the example's lines, changed by `edit`."""
    path = tmp_path / name
    path.write_text("\n".join(edit(EXAMPLE.read_text().splitlines())) + "\n")
    return path


# ------------------------------------------------------------------------------------------------ general


def test_help_needs_nothing_but_the_standard_library():
    code = (
        "import sys\n"
        "from openmm_tensornet.md.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit as stop:\n"
        "    assert stop.code == 0\n"
        "assert not {'torch', 'openmm', 'openmmtorch', 'numpy'} & set(sys.modules)\n"
    )
    for arguments in (["--help"], ["simulate", "--help"], ["info", "--help"], ["--version"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"openmm-tensornet {__version__}\n"


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "openmm_tensornet", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"openmm-tensornet {__version__}\n")


def test_help_names_the_defaults(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["simulate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for default in ("10 ps", "0.5 fs", "300 K", "1 ps", "single", "200", "the fastest", "STRUCTURE-md"):
        assert f"(default: {default}" in text


@pytest.mark.parametrize(
    ("unit", "text", "value"),
    [
        ("ps", "5", 5),
        ("ps", "5 ps", 5),
        ("ps", "5ps", 5),
        ("ps", " 2.5e-3  ns ", 2.5),
        ("ps", "1e3fs", 1),
        ("fs", "0.001 ps", 1),
        ("K", "310.5 K", 310.5),
        ("amu", "3 Da", 3),
    ],
)
def test_quantities(unit, text, value):
    from openmm import unit as units

    quantity = quantities._quantity_in(unit)(text)
    assert quantity.value_in_unit(getattr(units, quantities.UNITS[unit])) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("text", ["", "ps", "5 K", "5 s", "five ps", "5 PS", "5,5 ps", "5 ps ps", "1 2", "5 p s"])
def test_quantities_that_are_none(capsys, text):
    line = refused(capsys, "simulate", "--model", "m", EXAMPLE, f"--time={text}")
    assert f"--time: expected a number, with or without a unit, such as '2 ps', received '{text}'" in line


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "required: COMMAND"),
        (["simulat"], "invalid choice: 'simulat'"),
        (["simulate", EXAMPLE], "required: --model"),
        (["simulate", "--model", "m"], "required: STRUCTURE"),
        (["simulate", "--model", "m", EXAMPLE, "--tiem", "3"], "unrecognized arguments: --tiem"),
        (["simulate", "--model", "m", EXAMPLE, "--charge", "0.5"], "--charge: invalid int value: '0.5'"),
        (
            ["simulate", "--model", "m", EXAMPLE, "--threads", "0"],
            "--threads: expected a whole number, 1 or more",
        ),
        (["simulate", "--model", "m", EXAMPLE, "--precision", "half"], "--precision: invalid choice: 'half'"),
        (
            ["simulate", "--model", "m", EXAMPLE, "--resume", "--overwrite"],
            "not allowed with argument --resume",
        ),
        (["simulate", "--model", "m", "missing.pdb"], "missing.pdb: no such file"),
        (
            ["simulate", "--model", "m", "structure.gro"],
            "expected a file named .pdb, .ent, .cif, .mmcif, .sdf, .mol, .xyz",
        ),
        (["export", EXAMPLE, "--model", "missing.ckpt"], "missing.ckpt"),
        (
            ["benchmark", EXAMPLE, "--model", "alanine-dipeptide-gfn2", "--platform", "CUDDA"],
            "--platform: CUDDA: There is no",
        ),
        (["simulate", "--model", "missing.ckpt", EXAMPLE], "missing.ckpt"),
        (["info", "missing.ckpt"], "received 'missing.ckpt', which does not exist"),
        (["info", "."], ".: expected a checkpoint or an exported file, received a directory"),
    ],
)
def test_bad_arguments(capsys, monkeypatch, tmp_path, arguments, text):
    monkeypatch.chdir(tmp_path)
    assert text in refused(capsys, *arguments)


def test_abbreviated_options_are_refused(capsys, model_path):
    """`--temp` would change its meaning with the next option that begins like it."""
    line = refused(capsys, "simulate", "--model", model_path(MODEL), EXAMPLE, "--temp", "300")
    assert "unrecognized arguments: --temp" in line


def test_debug_shows_the_traceback(capsys):
    with pytest.raises(FileNotFoundError, match=r"missing\.pdb"):
        cli.main(["simulate", "--debug", "--model", "m", "missing.pdb"])


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (RuntimeError("step 5: it broke\nhere"), 1, "openmm-tensornet: error: step 5: it broke here\n"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (KeyError("x"), 1, "openmm-tensornet: error: KeyError: 'x' (--debug shows where)\n"),
        (ImportError("openmmtorch is missing"), 2, "openmm-tensornet: error: openmmtorch is missing\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_exit_status(capsys, monkeypatch, error, status, text):
    def fail(_):
        raise error

    monkeypatch.setattr(cli, "describe_model", fail)
    assert cli.main(["info", "x"]) == status
    line = capsys.readouterr().err
    assert text in line and line.count("\n") == 1


# ----------------------------------------------------------------------------------------------- structures


def without_elements(lines):
    return [line[:76] if line.startswith("ATOM") else line for line in lines]


def with_bromine(lines):
    """OpenMM would guess boron."""
    return [line.replace(" O   ACE", "BR   ACE")[:76] if " O   ACE" in line else line for line in lines]


def with_extra_particle(lines):
    return [*lines[:5], lines[4][:12] + " EP1" + lines[4][16:76] + "EP", *lines[5:]]


def with_repeated_atom(lines):
    return [*lines[:5], lines[4][:30] + "   9.000" + lines[4][38:], *lines[5:]]


def with_alternate_locations(lines):
    first, second = (lines[4][:16] + letter + lines[4][17:] for letter in "AB")
    return [*lines[:4], first, second, *lines[5:]]


def without_hydrogens(lines):
    return [line for line in lines if not line.endswith(" H")]


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (without_elements, "line 2: expected the element of atom 'HH31' in columns 77-78, found ''"),
        (with_bromine, "line 7: expected the element of atom 'BR' in columns 77-78, found ''"),
        (with_extra_particle, "atom 4 (EP1 of ACE 1) has none"),
        (with_repeated_atom, "23 atom records but 22 distinct atoms"),
        (with_alternate_locations, "23 atom records but 22 distinct atoms"),
        (without_hydrogens, "has carbon but no hydrogen; the potential needs every atom, so add hydrogens"),
        (lambda lines: lines[:1], "expected atoms, found none"),
        (lambda lines: [line.replace("7.237", "x.237") for line in lines], "OpenMM's PDBFile cannot read it"),
    ],
)
def test_structures_that_cannot_be(capsys, tmp_path, edit, text):
    path = edited(tmp_path, edit)
    line = refused(capsys, "simulate", "--model", "m", path)
    assert text in line
    assert str(path) in line or "topology: expected an element" in line


def test_molecule_without_hydrogens(tmp_path):
    path = edited(tmp_path, without_hydrogens)
    topology, positions = read_structure(path, allow_no_hydrogens=True)
    assert topology.getNumAtoms() == len(positions) == 10


def test_first_of_several_models(tmp_path):
    def twice(lines):
        atoms = [line for line in lines if line.startswith("ATOM")]
        moved = [line[:30] + "   0.000" + line[38:] for line in atoms]
        return ["MODEL        1", *atoms, "ENDMDL", "MODEL        2", *moved, "ENDMDL", "END"]

    path = edited(tmp_path, twice)
    with pytest.warns(UserWarning, match="has 2 models, the first is used"):
        topology, positions = read_structure(path)
    assert topology.getNumAtoms() == 22
    assert positions[0][0]._value == pytest.approx(0.7237)


def test_mmcif(tmp_path):
    import numpy as np
    from openmm import app

    pdb = app.PDBFile(str(EXAMPLE))
    path = tmp_path / "alanine.cif"
    with open(path, "w") as file:
        app.PDBxFile.writeFile(pdb.topology, pdb.positions, file)
    topology, positions = read_structure(path)
    assert [a.element for a in topology.atoms()] == [a.element for a in pdb.topology.atoms()]
    assert topology.getNumBonds() == 21
    np.testing.assert_allclose(positions._value, pdb.getPositions(asNumpy=True)._value, atol=1e-6)
    assert formal_charge(topology.atoms()) is None
    path.write_text(path.read_text().replace("_atom_site.type_symbol", "_atom_site.other"))
    with pytest.raises(ValueError, match="topology: expected an element for every atom, but atom 0"):
        read_structure(path)


def with_charges(lines):
    """The oxygens get charges in columns 79-80, in both ways of writing them."""
    charges = iter(("1-", "-1"))
    return [line.ljust(78)[:78] + next(charges) if line[12:16].strip() == "O" else line for line in lines]


def as_mmcif(tmp_path, path):
    """The same structure in PDBx/mmCIF, its formal charges too, which OpenMM does not write."""
    from openmm import app

    pdb, text = app.PDBFile(str(path)), io.StringIO()
    app.PDBxFile.writeFile(pdb.topology, pdb.positions, text)
    lines, atoms = text.getvalue().splitlines(), list(pdb.topology.atoms())
    names = [line.strip() for line in lines if line.startswith("_atom_site.")]
    column = names.index("_atom_site.pdbx_formal_charge")
    rows = [k for k, line in enumerate(lines) if line.startswith(("ATOM", "HETATM"))]
    for k, atom in zip(rows, atoms, strict=True):
        fields = lines[k].split()
        fields[column] = "?" if atom.formalCharge is None else str(atom.formalCharge)
        lines[k] = " ".join(fields)
    written = tmp_path / "charged.cif"
    written.write_text("\n".join(lines) + "\n")
    return written


@pytest.mark.parametrize("kind", ["pdb", "cif"])
def test_formal_charges_of_a_structure(capsys, tmp_path, kind):
    path = edited(tmp_path, with_charges)
    path = as_mmcif(tmp_path, path) if kind == "cif" else path
    assert formal_charge(read_structure(path).topology.atoms()) == -2
    said = refused(capsys, "simulate", "--model", "m", path)
    assert "the formal charges of the file sum to -2; give it (--charge -2)" in said


def test_formal_charges_that_are_contradicted(capsys, tmp_path, model_path, recwarn):
    """By the force and by commands without one; the charge that was given is used."""
    from openmm import app

    from openmm_tensornet.forces.system import force_class

    path, model = edited(tmp_path, with_charges), model_path(MODEL)
    topology = app.PDBFile(str(path)).topology
    with pytest.warns(
        UserWarning, match=r"^total_charge: the formal charges of the topology sum to -2, received 0, which is used"
    ):
        force_class()(model, topology, kernels="portable")
    with pytest.warns(UserWarning) as caught:
        force_class()(model, topology, kernels="portable", total_charge=-2)
    assert not any("formal charges" in str(warning.message) for warning in caught)
    assert (
        cli.main(
            ["export", "--model", str(model), str(path), "--charge", "0", "--output", str(tmp_path / "e.safetensors")]
        )
        == 0
    )
    assert "warning: --charge 0 contradicts the formal charges of the file, which sum to -2" in capsys.readouterr().err


def test_several_places_of_an_atom_in_mmcif(tmp_path):
    path = as_mmcif(tmp_path, EXAMPLE)
    lines = path.read_text().splitlines()
    at = next(k for k, line in enumerate(lines) if line.startswith(("ATOM", "HETATM")))
    fields = lines[at].split()
    fields[4] = "B"  # label_alt_id
    path.write_text("\n".join([*lines[: at + 1], " ".join(fields), *lines[at + 1 :]]) + "\n")
    with pytest.raises(ValueError, match="23 atom records but 22 distinct atoms"):
        read_structure(path)


CRYST1 = "CRYST1    1.000    1.000    1.000  90.00  90.00  90.00 P 1           1"


def test_a_placeholder_for_a_box(tmp_path, model_path):
    from openmm import app

    from openmm_tensornet.forces.system import create_system

    path = edited(tmp_path, lambda lines: [CRYST1, *lines])
    with pytest.warns(UserWarning, match=r"the box \(CRYST1, _cell\) of 1 Å is a placeholder"):
        assert read_structure(path).topology.getPeriodicBoxVectors() is None
    with pytest.warns(UserWarning, match="^topology: the box of 1 Å is a placeholder"):
        system = create_system(app.PDBFile(str(path)).topology, model_path(MODEL), kernels="portable")
    assert not system.usesPeriodicBoundaryConditions()
    small = edited(tmp_path, lambda lines: [CRYST1.replace("1.000", "3.000"), *lines])
    assert read_structure(small).topology.getPeriodicBoxVectors() is not None


def test_vacuum_leaves_the_box_out(capsys, tmp_path, model_path):
    path = edited(tmp_path, lambda lines: [CRYST1.replace(" 1.000", " 8.000"), *lines])
    arguments = ["export", "--model", model_path(MODEL), path, "--output", tmp_path / "e.safetensors"]
    assert "received 0.8 nm" in (said := refused(capsys, *arguments)) and "--vacuum" in said
    assert cli.main([*map(str, arguments), "--vacuum"]) == 0


ACETATE = """acetate

{comment}
  7  6  0  0  0  0            999 V2000
    0.0000    0.0000    0.0000 C   0  0
    1.5300    0.0000    0.0000 C   0  0
    2.1500    1.0900    0.0000 O   0  0
    2.1500   -1.0900    0.0000 O   0  5
   -0.3900    1.0300    0.0000 H   0  0
   -0.3900   -0.5100    0.8900 H   0  0
   -0.3900   -0.5100   -0.8900 H   0  0
  1  2  1  0
  2  3  2  0
  2  4  1  0
  1  5  1  0
  1  6  1  0
  1  7  1  0
M  CHG  1   4  -1
M  END
"""


def test_sdf_and_xyz(tmp_path):
    """The same ion from three formats; only one of them knows its charge, and only one has no bonds."""
    pytest.importorskip("rdkit")
    mol, sdf, xyz = (tmp_path / name for name in ("a.mol", "a.SDF", "a.xyz"))
    mol.write_text(ACETATE.format(comment=""))
    sdf.write_text(2 * (ACETATE.format(comment="") + "$$$$\n"))
    atoms = [line.split()[:4] for line in ACETATE.splitlines()[4:11]]
    xyz.write_text("7\nacetate\n" + "".join(f"{symbol} {x} {y} {z}\n" for x, y, z, symbol in atoms))
    found = read_structure(mol)
    with pytest.warns(UserWarning, match=r"a\.SDF: has 2 models, the first is used"):
        several = read_structure(sdf)
    plain = read_structure(xyz)
    for structure, bonds, charge in ((found, 6, -1), (several, 6, -1), (plain, 0, None)):
        assert [a.element.symbol for a in structure.topology.atoms()] == [*"CCOOHHH"]
        assert structure.positions.shape == (7, 3) and structure.positions[2][1]._value == pytest.approx(0.109)
        assert structure.topology.getNumBonds() == bonds and formal_charge(structure.topology.atoms()) == charge
    with pytest.raises(ValueError, match=r"--charge: .* formal charges of the file sum to -1; give it \(--charge -1\)"):
        total_charge(found, None)
    assert total_charge(found, -1) == -1
    with pytest.raises(ValueError, match=r"odd number of electrons \(31\)"):
        total_charge(plain, None)


def implicit(text):
    lines = text.splitlines()
    return "\n".join([*lines[:3], lines[3].replace("  7  6", "  4  3"), *lines[4:8], *lines[11:14], *lines[17:]]) + "\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.sdf", "", "RDKit cannot read it"),
        ("a.sdf", "junk\n", "expected an SDF file, received one that RDKit cannot read"),
        ("a.mol", implicit(ACETATE), "expected every hydrogen, but 3 of them are implicit"),
        (
            "a.mol",
            ACETATE.replace("0.8900", "0.0000"),
            "expected three-dimensional coordinates, received a flat drawing",
        ),
        (
            "a.mol",
            ACETATE.replace("0.0000 H   0  0\n", "0.0000 *   0  0\n", 1),
            "atom 5: expected an element, received '*'",
        ),
        ("a.xyz", "2\n\nH 0 0 0\n", "expected an XYZ file of one geometry"),
        ("a.xyz", 2 * "2\n\nH 0 0 0\nH 0 0 0.7\n", "expected an XYZ file of one geometry"),
        ("a.xyz", '2\nLattice="9 0 0 0 9 0 0 0 9"\nH 0 0 0\nH 0 0 0.7\n', "expected no box in an XYZ file"),
    ],
)
def test_sdf_and_xyz_that_cannot_be(tmp_path, name, text, message, capfd):
    pytest.importorskip("rdkit")
    path = tmp_path / name
    path.write_text(text.format(comment="") if "{comment}" in text else text)
    with pytest.raises(ValueError, match=r"(?s)" + message.replace("*", r"\*")):
        read_structure(path)
    assert capfd.readouterr() == ("", "")


def test_total_charge(tmp_path):
    radical = edited(tmp_path, lambda lines: [line for line in lines if " HH31" not in line])
    structure = read_structure(radical)
    with pytest.raises(ValueError, match=r"--charge: expected a total charge, .* odd number of electrons \(77\)"):
        total_charge(structure, None)
    assert total_charge(structure, -1) == -1
    with pytest.warns(UserWarning, match=r"charge 0 leaves an odd number of electrons \(77\)"):
        assert total_charge(structure, 0) == 0
    assert total_charge(read_structure(EXAMPLE), None) == 0


def test_odd_electrons_ask_for_the_charge(capsys, tmp_path):
    radical = edited(tmp_path, lambda lines: [line for line in lines if " HH31" not in line])
    assert "--charge: expected a total charge" in refused(capsys, "simulate", "--model", "m", radical)


# -------------------------------------------------------------------------------------------------- simulate


@pytest.mark.parametrize("platform", PLATFORMS)
def test_simulate(capsys, tmp_path, model, platform):
    output = tmp_path / "out"
    arguments = ["simulate", "--model", str(model), str(EXAMPLE), "--platform", platform]
    arguments += ["--output", str(output), *SHORT]
    assert cli.main(arguments) == 0
    text = capsys.readouterr()
    assert f"22 atoms on {platform}, 20 steps of 0.5 fs at 300 K, seed 3" in text.out
    assert text.out.rstrip().endswith("ns/day")
    assert text.err == ""
    assert {path.name for path in output.iterdir()} == {
        "start.pdb",
        "trajectory.dcd",
        "energies.csv",
        "checkpoint.zip",
        ".lock",
        "final.pdb",
    }
    assert len((output / "energies.csv").read_text().splitlines()) == 5

    assert "already holds a run" in refused(capsys, *arguments)
    assert cli.main([*arguments, "--resume", "--time", "0.02 ps"]) == 0
    assert "resumed at step 20 (complete state)" in capsys.readouterr().out
    with open(output / "energies.csv") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(5, 41, 5))
    assert "timestep_fs was 0.5, now 1.0" in refused(capsys, *arguments, "--resume", "--timestep", "1")
    assert cli.main([*arguments, "--overwrite", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert len((output / "energies.csv").read_text().splitlines()) == 5


def test_resuming_with_another_model_or_charge(capsys, tmp_path, model, model_path):
    common = ["simulate", EXAMPLE, "--platform", "CPU", "--output", tmp_path / "out", *SHORT]
    assert cli.main([str(a) for a in [*common, "--model", model]]) == 0
    capsys.readouterr()
    line = refused(capsys, *common, "--resume", "--model", model_path(MODEL))
    assert "expected the settings of the run, but model_hash was " in line
    line = refused(capsys, *common, "--resume", "--model", model_path("no-layers"), "--charge", "2")
    assert "total_charge was [0.0], now [2.0]; resume with what it was" in line


def test_options_reach_the_run(monkeypatch, tmp_path, model_path):
    """Each option under its own name, in its own unit."""
    from openmm import unit

    from openmm_tensornet.forces import system
    from openmm_tensornet.md import simulation

    seen = {}
    monkeypatch.setattr(system, "create_system", lambda *_, **options: seen.update(options))
    monkeypatch.setattr(simulation, "simulate", lambda *_, **options: seen.update(options))
    arguments = ["simulate", "--model", "m", str(EXAMPLE)]
    assert cli.main(arguments) == 0
    assert seen.pop("positions").shape == (22, 3)
    assert seen == {
        "total_charge": 0,
        "coulomb_cutoff": None,
        "hydrogen_mass": None,
        "precision": "single",
        "any_molecule": False,
        "charges": False,
        "output": "alanine_dipeptide-md",
        "time": 10,
        "timestep": 0.5,
        "temperature": 300,
        "equilibration_time": 1,
        "report_interval": 200,
        "kernels": "auto",
        "platform": None,
        "seed": None,
        "stop_at_broken_bond": False,
        "resume": False,
        "overwrite": False,
        "quiet": False,
    }
    arguments += "--time 1ns --timestep 1 --temperature 310K --equilibration-time 500fs".split()
    arguments += "--hydrogen-mass 3 --charge -2 --platform CUDA --precision double --seed 7".split()
    arguments += "--report-interval 50 --output o --resume --quiet --charges --coulomb-cutoff 1.1nm --stop-at-broken-bond".split()
    arguments += "--kernels portable --any-molecule".split()
    assert cli.main(arguments) == 0
    del seen["positions"]
    assert seen == {
        "total_charge": -2,
        "coulomb_cutoff": 1.1 * unit.nanometer,
        "hydrogen_mass": 3 * unit.dalton,
        "precision": "double",
        "any_molecule": True,
        "charges": True,
        "output": "o",
        "time": 1 * unit.nanosecond,
        "timestep": 1 * unit.femtosecond,
        "temperature": 310 * unit.kelvin,
        "equilibration_time": 500 * unit.femtosecond,
        "report_interval": 50,
        "kernels": "portable",
        "platform": "CUDA",
        "seed": 7,
        "stop_at_broken_bond": True,
        "resume": True,
        "overwrite": False,
        "quiet": True,
    }


@pytest.mark.parametrize(("options", "threads"), [([], 1), (["--threads", "3"], 3)])
def test_threads(options, threads):
    """In another process, because they belong to the whole process, and without a run."""
    code = (
        "import sys, torch, openmm\n"
        "from openmm_tensornet.forces import system\nfrom openmm_tensornet.md import cli, simulation\n"
        "system.create_system = simulation.simulate = lambda *_, **__: None\n"
        "assert cli.main(sys.argv[1:]) == 0\n"
        "cpu = openmm.Platform.getPlatformByName('CPU')\n"
        "print(torch.get_num_threads(), cpu.getPropertyDefaultValue('Threads'))\n"
    )
    arguments = ["simulate", "--model", "m", EXAMPLE, *options]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.stdout == f"{threads} {threads}\n", done.stderr


def test_threads_of_larger_systems(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "set_num_threads", lambda _: pytest.fail("the default was changed"))
    cli._set_threads(None, 101)


@pytest.mark.filterwarnings("default")  # as outside of the test suite
def test_warnings_are_lines(capsys, monkeypatch):
    import warnings

    from openmm_tensornet.forces import system
    from openmm_tensornet.md import simulation

    monkeypatch.setattr(system, "create_system", lambda *_, **__: warnings.warn("no bond", stacklevel=2))
    monkeypatch.setattr(simulation, "simulate", lambda *_, **__: None)
    assert cli.main(["simulate", "--model", "m", str(EXAMPLE)]) == 0
    assert capsys.readouterr() == ("", "warning: no bond\n")


# ---------------------------------------------------------------------------------------------------- info


def test_info_of_a_checkpoint(capsys, model_path):
    path = model_path("variants/so3-gauss-2layers-meanstd")
    assert cli.main(["info", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "checkpoint"
    assert found["bytes"] == path.stat().st_size
    assert found["sha256"] == found["source_hash"]
    assert found["units"]["length"] == "angstrom" and found["units"]["energy"] == "eV"
    assert (found["config"]["group"], found["config"]["rbf_type"], found["config"]["num_layers"]) == (
        "SO(3)",
        "gauss",
        2,
    )
    assert found["parameters"] > 1000
    assert cli.main(["info", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "kind: checkpoint" in lines and "  group: SO(3)" in lines and "  energy: eV" in lines
    assert "elements: unknown" in lines and "priors: none" in lines


def test_info_of_an_exported_file(capsys, model):
    assert cli.main(["info", str(model), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["precision"], found["periodic"]) == ("exported", "single", False)
    assert len(found["atomic_numbers"]) == 22 and found["total_charge"] == [0.0]
    assert found["model"]["config"]["num_layers"] == 1
    assert found["units"] == {"positions": "nm", "energy": "kJ/mol", "forces": "kJ/mol/nm"}
    assert cli.main(["info", str(model)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "kind: exported" in lines and "atomic_numbers: 1, 6, 1, 1, 6, 8, 7" in "\n".join(lines)


def test_info_of_another_precision_and_its_priors(capsys, model_path):
    assert cli.main(["info", str(model_path("variants/zbl-float64")), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dtype"] == "float64"
    assert "ZBL" in found["priors"]


def test_info_of_something_else(capsys, model_path, tmp_path):
    text = tmp_path / "text.ckpt"
    text.write_text("no checkpoint")
    assert str(text) in refused(capsys, "info", text)


def test_info_of_a_model_with_charges(capsys, model_path):
    assert cli.main(["info", str(model_path("aceff-2.0")), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["q_dim"] == 16 and found["cutoff"] == 5.0


# ----------------------------------------------------------------------------- export, check and benchmark


def test_export(capsys, tmp_path, model_path):
    from openmm.app import PDBFile

    from openmm_tensornet import TensorNetForce

    output = tmp_path / "own.safetensors"
    arguments = [
        "export",
        str(EXAMPLE),
        "--model",
        str(model_path(MODEL)),
        "--output",
        str(output),
        "--kernels",
        "portable",
    ]
    assert cli.main([*arguments, "--json"]) == 0
    metadata = json.loads(capsys.readouterr().out)
    assert len(metadata["atomic_numbers"]) == 22 and metadata["kernels"] == "portable" and metadata["launches"] > 10
    force = TensorNetForce(output, PDBFile(str(EXAMPLE)).topology)
    assert force.metadata["model_hash"] == metadata["model_hash"]
    before = output.read_bytes()
    assert f"--output: {output} exists already; pass --overwrite" in refused(capsys, *arguments)
    assert output.read_bytes() == before
    assert cli.main([*arguments, "--overwrite", "--precision", "double"]) == 0
    assert capsys.readouterr().out == f"{output}: 22 atoms, double precision, portable kernels\n"


def test_export_for_openmmtorch_alone(capsys, tmp_path, model_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["export", str(EXAMPLE), "--model", str(model_path(MODEL)), "--torchscript"]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out == "alanine_dipeptide.pt: 22 atoms, single precision, portable kernels\n"
    assert cli.main(["info", "alanine_dipeptide.pt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "TorchScript"
    assert "received TorchScript" in refused(capsys, "simulate", EXAMPLE, "--model", "alanine_dipeptide.pt", *SHORT)


@pytest.mark.parametrize("kind", ["vacuum", "periodic"])
def test_check(capsys, tmp_path, model_path, kind):
    from openmm.app import PDBFile

    path = tmp_path / "molecule.pdb"
    pdb = PDBFile(str(EXAMPLE))
    if kind == "periodic":
        pdb.topology.setPeriodicBoxVectors([[3, 0, 0], [0.5, 3, 0], [-0.5, 0.7, 3]])
    with open(path, "w") as file:
        PDBFile.writeFile(pdb.topology, pdb.positions, file)
    arguments = ["check", str(path), "--model", str(model_path(MODEL))]
    assert cli.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kernels"] > 10
    names = set(found["checks"])
    assert {"energy against the reference model", "forces, translated", "forces, atoms in another order"} <= names
    assert ("forces, rotated" in names) == ("net torque" in names) == (kind == "vacuum")
    assert ("energy, one atom in another image" in names) == (kind == "periodic")
    assert all(check["passed"] and check["value"] <= check["limit"] for check in found["checks"].values())


def test_a_check_that_fails(capsys, monkeypatch, model_path):
    """Forces that are not those of the energy."""
    from openmm_tensornet.md import validation

    evaluate = validation._evaluate
    monkeypatch.setattr(validation, "_evaluate", lambda *a: (evaluate(*a)[0] * 1.001, evaluate(*a)[1]))
    assert cli.main(["check", str(EXAMPLE), "--model", str(model_path(MODEL))]) == 1
    text = capsys.readouterr()
    assert "FAILED forces against differences of energies" in text.out and "ok     forces, rotated" in text.out
    assert "1 of 15 checks failed: forces against differences of energies" in text.err


def test_benchmark(capsys, model):
    arguments = ["benchmark", str(EXAMPLE), "--model", str(model), "--platform", "Reference", "--seconds", "1"]
    assert cli.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    figures = found["platforms"]["Reference"]
    assert found["atoms"] == 22
    assert figures["ns_per_day"] == pytest.approx(0.5e-6 * 86400 / (figures["ms_per_step"] * 1e-3))
