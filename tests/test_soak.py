"""A few tries of each part of tests/soak.py, with fixed seeds."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soak


def test_mutated_files(tmp_path):
    """In an interpreter of its own: autograd refuses to work in a fork of a process in which it has threads."""
    code = (
        "import json, pathlib, sys, soak\n"
        "print(json.dumps(soak.mutated_files(120, 0, soak.checkpoints(), pathlib.Path(sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert sum(outcomes.values()) == 120
    assert not [outcome for outcome in outcomes if outcome.startswith("DEFECT")], outcomes
    assert outcomes["checkpoint damaged: refused"] and outcomes["checkpoint edited: refused"]


@pytest.mark.parametrize("seed", range(20))
def test_mutations_change_files_and_are_made_again(seed, tmp_path):
    path = soak.checkpoints()[0]
    data = path.read_bytes()
    for kind in (soak.Damage, soak.Edit):
        changed = kind(np.random.default_rng(seed))(data)
        if kind is soak.Damage:
            assert changed == soak.Damage(np.random.default_rng(seed))(data)


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
    counts = soak.killed_runs(2, 0, soak.exported_models(tmp_path / "models"), tmp_path)
    assert counts["kills"] >= 2
    assert counts["runs equal to the last bit"] == counts["runs"] >= 1
    assert not [outcome for outcome in counts if outcome.startswith("DEFECT")], counts


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "examples"), [("potentials", 5), ("lists of pairs", 40)])
def test_properties(name, examples):
    soak.check_property(name, examples, seed=0)
