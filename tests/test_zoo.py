"""The scripts in tests/zoo, on both back ends and two platforms."""

import json
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import openmm
import pytest
from openmm import app

from openmm_tensornet import export_potential, load_model

ZOO = Path(__file__).parent / "zoo"
EXAMPLE = ZOO.parent.parent / "examples" / "alanine_dipeptide.pdb"
SCRIPTS = sorted(path.stem for path in ZOO.glob("[!_]*.py"))
COMBINATIONS = [(backend, platform) for backend in ("torch", "python") for platform in ("Reference", "CPU")]
NEEDED = ("openmmtorch", "openmmml", "openmmtools")
# Scripts that take seconds: the two other combinations belong to `make test-slow`.
LONG = ("alchemical_transfer", "copies", "custom_cv", "openmmtools_", "processes", "xml_round_trip")
QUICK = (("torch", "Reference"), ("python", "CPU"))


class Interpreter:
    """A process that runs one script after another; a new one takes its place when it has ended."""

    def __init__(self, folder: Path):
        self._folder, self._process = folder, None

    def run(self, combination: tuple[str, str], script: str) -> tuple[str | None, list[str]]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            command = [sys.executable, str(ZOO), str(self._folder)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._process.stdin.write(f"{' '.join(combination)} {script}\n")
        self._process.stdin.flush()
        watch = threading.Timer(300, self._process.kill)
        watch.start()
        line = self._process.stdout.readline()
        watch.cancel()
        assert line, f"the process ended with status {self.close()}"
        return tuple(json.loads(line))

    def close(self) -> int | None:
        """Status of the process, if there is one, after its end."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.communicate()
        return process.returncode


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    """Its folder has the example, and the model of the package exported for it: files are read faster than forces are made."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing or not hasattr(openmm, "PythonForce"):
        pytest.skip(f"the scripts need {', '.join(missing) or 'OpenMM 8.5 or newer'}")
    made = tmp_path_factory.mktemp("files")
    (made / EXAMPLE.name).write_bytes(EXAMPLE.read_bytes())
    model = load_model("alanine-dipeptide-gfn2")
    numbers = [atom.element.atomic_number for atom in app.PDBFile(str(EXAMPLE)).topology.atoms()]
    for suffix, options in (
        ("", {}),
        ("_periodic", {"periodic": True, "box_vectors": [[2, 0, 0], [0, 2, 0], [0, 0, 2]]}),
        ("_among_others", {"particles": list(range(22))}),
    ):
        export_potential(
            model, made / f"alanine_dipeptide{suffix}.safetensors", atomic_numbers=numbers, kernels="auto", **options
        )
    running = Interpreter(made)
    yield running
    running.close()


@pytest.mark.parametrize(
    ("combination", "script"),
    [
        pytest.param(
            combination,
            script,
            marks=pytest.mark.slow if script.startswith(LONG) and combination not in QUICK else (),
            id="-".join([*combination, script]),
        )
        for combination in COMBINATIONS
        for script in SCRIPTS
    ],
)
def test_script(interpreter, combination, script):
    assert interpreter.run(combination, script) == (None, [])
