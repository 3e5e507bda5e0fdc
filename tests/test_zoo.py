"""The scripts in tests/zoo, on both back ends and two platforms."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import openmm
import pytest
from openmm import app

from openmm_tensornet import export_torchscript, load_model

ZOO = Path(__file__).parent / "zoo"
EXAMPLE = ZOO.parent.parent / "examples" / "alanine_dipeptide.pdb"
SCRIPTS = sorted(path.stem for path in ZOO.glob("[!_]*.py"))
COMBINATIONS = [(backend, platform) for backend in ("torch", "python") for platform in ("Reference", "CPU")]
NEEDED = ("openmmtorch", "openmmml", "openmmtools")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The example, and the model of the package exported for it: files that are read faster than forces are made."""
    made = tmp_path_factory.mktemp("files")
    (made / EXAMPLE.name).write_bytes(EXAMPLE.read_bytes())
    model = load_model("alanine-dipeptide-gfn2")
    numbers = [atom.element.atomic_number for atom in app.PDBFile(str(EXAMPLE)).topology.atoms()]
    for suffix, options in (
        ("", {}),
        ("_periodic", {"periodic": True, "box_vectors": [[2, 0, 0], [0, 2, 0], [0, 0, 2]]}),
        ("_among_others", {"particles": list(range(22))}),
    ):
        export_torchscript(
            model, made / f"alanine_dipeptide{suffix}.pt", atomic_numbers=numbers, kernels="auto", **options
        )
    return made


@pytest.fixture(scope="module")
def outcomes(folder):
    """For each combination what became of its scripts, all of which run in one interpreter."""
    found = {}

    def of(combination):
        if combination not in found:
            command = [sys.executable, str(ZOO), str(folder), *combination]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            lines = {name: (problem, heard) for name, problem, heard in map(json.loads, done.stdout.splitlines())}
            found[combination] = lines, f"the process ended with status {done.returncode}: {done.stderr[-2000:]}"
        return found[combination]

    return of


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_script(outcomes, combination, script):
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing or not hasattr(openmm, "PythonForce"):
        pytest.skip(f"the scripts need {', '.join(missing) or 'OpenMM 8.5 or newer'}")
    ended, otherwise = outcomes(combination)
    assert script in ended, otherwise
    assert ended[script] == (None, [])
