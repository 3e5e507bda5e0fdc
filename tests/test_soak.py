"""A few tries of each part of tests/soak.py, with fixed seeds."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import openmm
import pytest
import soak
import soak_minimize
import soak_properties
import soak_runs


def soaked(call: str, folder: Path) -> dict[str, int]:
    """Counts of a part, without defects.

    In an interpreter of its own: autograd refuses to work in a fork of a process in which it has threads, and a fork of a large
    process takes long.
    """
    code = f"import json, sys, soak, soak_runs; from pathlib import Path; folder = Path(sys.argv[1]); print(json.dumps({call}))"
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert not [outcome for outcome in outcomes if outcome.startswith("DEFECT")], done.stdout
    return outcomes


def test_mutated_files(tmp_path):
    outcomes = soaked("soak.mutated_files(120, 0, soak.checkpoints(), folder)", tmp_path)
    assert sum(outcomes.values()) == 120
    assert outcomes["checkpoint damaged: refused"] and outcomes["checkpoint edited: refused"]


def test_mutated_checkpoints_of_runs(tmp_path):
    """None runs code or takes half a GB; each is refused in one line with status 2 and files as they were, or resumed."""
    outcomes = soaked("soak.mutated_files(200, 0, [], folder)", tmp_path)
    assert sum(outcomes.values()) == 200
    assert outcomes["run damaged: refused"] and outcomes["run edited: refused"] and outcomes["run edited: the same"]


@pytest.fixture(scope="module")
def run_checkpoint(tmp_path_factory):
    return soak_runs.original(tmp_path_factory.mktemp("original"))


@pytest.mark.parametrize("seed", range(20))
def test_mutations_change_files_and_are_made_again(seed, run_checkpoint):
    data = {"checkpoint": soak.checkpoints()[0].read_bytes(), "run": run_checkpoint.read_bytes()}
    for kind, original in data.items():
        for change in (soak.Damage, soak.EDITS[kind]):
            changed = change(np.random.default_rng(seed))(original)
            if change is not soak.Edit:  # torch's archives are never the same twice
                assert changed == change(np.random.default_rng(seed))(original)


class Attack:
    def __reduce__(self):
        return os.mkdir, ("it-ran",)


@pytest.mark.parametrize("what", ["crash", "hang", "attack", "memory", "wrong"])
def test_the_soak_notices(what, tmp_path, monkeypatch, capsys):
    """A reader that fails in each of the ways is caught."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(soak, "SECONDS", 2)
    monkeypatch.setattr(soak, "originals", lambda _, models: [("checkpoint", path) for path in models])
    ready = []

    def read(path):
        if not ready:
            ready.append(1)  # of the original
            return "right"
        if what == "crash":
            os.kill(os.getpid(), 11)
        elif what == "hang":
            while True:
                pass
        elif what == "attack":
            pickle.loads(pickle.dumps(Attack()))
        elif what == "memory":
            bytearray(1 << 40)
        return "wrong"

    monkeypatch.setattr(soak, "READERS", {"checkpoint": read})
    monkeypatch.setattr(soak, "mutate", lambda seed, files: ("checkpoint", "damaged", b""))
    outcomes = soak.mutated_files(2, 0, soak.checkpoints()[:1], tmp_path)
    expected = {
        "crash": "no answer",
        "hang": "no answer",
        "attack": "Executed",
        "memory": "MemoryError",
        "wrong": "checkpoint",
    }
    assert outcomes == {f"DEFECT {expected[what]}": 2}
    assert not (tmp_path / "it-ran").exists()


def test_killed_runs(tmp_path):
    counts = soaked('soak_runs.killed_runs(2, 0, soak.exported_models(folder / "models"), folder)', tmp_path)
    assert counts["kills"] >= 2
    assert counts["runs equal to the last bit"] == counts["runs"] >= 1


def test_two_runs_at_once(tmp_path):
    """One at most gets through, whichever is killed, and nothing of the other is in the files."""
    counts = soaked('soak_runs.pairs_of_runs(2, 0, soak.exported_models(folder / "models")[0], folder)', tmp_path)
    assert counts["runs equal to the last bit"] == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "examples"), [("potentials", 5), ("lists of pairs", 40), ("creations of small models", 10)]
)
def test_properties(name, examples):
    soak_properties.check_property(name, examples, seed=0)


@pytest.mark.slow
def test_forces_are_always_made():
    """With AceFF, or stand-ins for it, and the bundled model; tables that are wrong are found each time."""
    soak_properties.check_property("creations", 300, seed=0)


@pytest.mark.parametrize("backend", ["torch", "python"])
def test_minimisation_from_distorted_structures(backend):
    alanine = openmm.app.PDBFile(str(Path(__file__).resolve().parent.parent / "examples" / "alanine_dipeptide.pdb"))
    numbers = [atom.element.atomic_number for atom in alanine.topology.atoms()]
    random = np.random.default_rng(0)
    structures = [soak_minimize.distort(alanine.getPositions(asNumpy=True)._value, random) for _ in range(3)]
    closest = [min(np.linalg.norm(x[i] - x[j]) for i in range(22) for j in range(i)) for x in structures]
    assert min(closest) == pytest.approx(0.02)
    found = list(soak_minimize.minimised("alanine-dipeptide-gfn2", backend, numbers, 0, structures))
    assert [one["good"] for one in found] == [True] * 3, found
