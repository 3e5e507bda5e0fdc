"""The script for a GPU, as far as it runs without one."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import openmm
import pytest
import torch

from benchmarks import gpu, gpu_worker
from benchmarks.measure import WorkerFailed
from benchmarks.systems import CASES
from openmm_tensornet.models.accuracy import Tolerance
from openmm_tensornet.models.registry import MODELS


class FakeWorker:
    """Answers with the results that it was given, by system; an exception is raised, and spoils the worker if it says so."""

    def __init__(self, answers: dict):
        self.answers, self.called, self.spoilt = answers, [], False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.called.append("exit")

    def kill(self):
        self.called.append("kill")

    def call(self, do, **arguments):
        self.called.append(do)
        if do == "prepare":
            return None
        if do == "alive":
            if self.spoilt:
                raise WorkerFailed("spoilt")
            return None
        answer = self.answers[arguments["system"]]
        if isinstance(answer, WorkerFailed):
            self.spoilt = "ended" in str(answer)
            raise answer
        return answer


def checked(passed: bool) -> dict:
    return {
        "checks": [
            {"name": "c", "energy_eV_per_atom": math.nan, "relative_force": 1.0, "tolerance": {}, "passed": passed}
        ]
    }


def run(answers: dict, seconds: float = 60.0) -> tuple[list[dict], list[FakeWorker]]:
    workers: list[FakeWorker] = []
    records: list[dict] = []

    def start() -> FakeWorker:
        workers.append(FakeWorker(answers))
        return workers[-1]

    commands = [gpu.Command("capture", {"system": system}) for system in answers]
    gpu.run(commands, start, {}, seconds, records.append)
    return records, workers


def test_goes_on_after_failures():
    """In the same process where that still works, else in a new one."""
    answers = {"a": checked(True), "b": checked(False), "c": WorkerFailed("no kernel"), "d": WorkerFailed("it ended")}
    records, workers = run({**answers, "e": checked(True), "f": {"checks": []}})
    assert [r["passed"] for r in records] == [True, False, False, False, True, False]
    assert [r["name"] for r in records] == [f"capture / {s}" for s in "abcdef"]
    assert records[2]["error"] == "after 0 s: no kernel"
    first, second = (w.called for w in workers)
    assert first == ["prepare", "capture", "capture", "capture", "alive", "capture", "alive", "exit"]
    assert second == ["prepare", "capture", "capture", "exit"]


def test_a_case_that_hangs_is_stopped(monkeypatch):
    monkeypatch.setattr(gpu, "CASE_SECONDS", 0.01)

    class Hanging(FakeWorker):
        def call(self, do, **arguments):
            while do == "capture" and "kill" not in self.called:
                pass
            if do == "capture":
                raise WorkerFailed("it ended (status -9)")

    records: list[dict] = []
    gpu.run([gpu.Command("capture", {"system": "a"})], lambda: Hanging({}), {}, 60, records.append)
    assert "status -9" in records[0]["error"]


def test_what_there_is_no_time_for_is_recorded():
    records, workers = run({"a": checked(True)}, seconds=0)
    assert (records[0]["passed"], records[0]["error"]) == (False, "not run: 0 s are over")
    assert not workers


def test_table_names_what_failed():
    records, _ = run({"a": checked(False), "b": WorkerFailed("no kernel\nTraceback")})
    text = gpu.render(
        {
            "cases": records,
            "rehearsal": False,
            "date": "2026-01-02T03:04:05+00:00",
            "commit": "abc",
            "model": {"file": "some.ckpt"},
            "machine": {"cpu": "Some CPU"},
            "settings": {"platform": "CUDA", "integrator": "VerletIntegrator", "timestep_fs": 0.5},
        }
    )
    assert "| capture / a | WRONG | nan | 1.0e+00 | 0 |" in text
    assert "\n- capture / a: c: beyond {}\n- capture / b: after 0 s: no kernel\n" in text


def test_folders_are_left_out():
    assert gpu._without_folders({"a": ['File "/home/me/lib/b/c.py", line 1', "kJ/mol/nm"]}) == {
        "a": ['File "/b/c.py", line 1', "kJ/mol/nm"]
    }


def test_plan():
    commands = list(gpu.plan(charges=True))
    names = [c.name for c in commands]
    assert len(set(names)) == len(names)
    kinds = list(dict.fromkeys(c.do for c in commands))
    assert kinds == ["capture", "dynamics", "elsewhere", "contexts", "kernels", "module", "steps"]
    timed = [c.do in gpu.TIMED for c in commands]
    assert timed == sorted(timed), "checks come first"
    captured = {c.arguments["system"] for c in commands if c.do == "capture"}
    assert captured >= {"1", "2", "3", "21", "alanine-dipeptide", "23", "water", "64 x alanine-dipeptide"}
    assert {c.arguments["system"] for c in commands if c.do == "steps"} == {*CASES, "64 x alanine-dipeptide"}
    assert not any("charges" in c.name for c in gpu.plan(charges=False))


def test_check_fails_on_nan():
    result = ([1.0], torch.ones(2, 3))
    tolerance = Tolerance(1e-6, 1e-6)
    assert gpu_worker.check("same", [result], [result], tolerance)["passed"]
    found = gpu_worker.check("NaN", [result, ([math.nan], torch.ones(2, 3))], [result, result], tolerance)
    assert not found["passed"] and math.isnan(found["energy_eV_per_atom"])


def test_replicas_and_packings():
    replicas = gpu_worker.System.named("3 x alanine-dipeptide", "some.ckpt")
    assert len(replicas.structure.positions) == 66 and set(replicas.atoms.replicas) == {0, 1, 2}
    assert len(gpu_worker.System.named("23", "some.ckpt").atoms.numbers) == 23
    boxed = gpu_worker.System.named("23 in a box", "some.ckpt")
    assert len(boxed.atoms.numbers) == 23 and boxed.structure.box.diagonal().min() == gpu_worker.EDGE


@pytest.mark.parametrize("stale", [False, True])
def test_dynamics_with_wrong_forces_are_found(monkeypatch, tmp_path, stale):
    """Contexts with graphs whose forces are another's."""

    def context(*_, graphs=True, barostat=False, **__):
        system = openmm.System()
        for _ in range(4):
            system.addParticle(12.0)
        system.setDefaultPeriodicBoxVectors(*(gpu_worker.EDGE * np.eye(3)))
        force = openmm.CustomExternalForce(f"{100 if stale and graphs else 200}*(x^2 + y^2 + z^2)")
        for k in range(4):
            force.addParticle(k)
        system.addForce(force)
        made = openmm.VerletIntegrator(0.0005)
        return openmm.Context(system, made, openmm.Platform.getPlatformByName("Reference"))

    device = gpu_worker.Device("cpu")
    device.prepare("some.ckpt", str(tmp_path), 1)
    monkeypatch.setattr(device, "_context", context)
    checks = device.dynamics("4 in a box", "portable", "torch", steps=20)["checks"]
    assert [check["passed"] for check in checks[::2]] == [not stale] * 4


def test_a_case_with_a_model_of_its_own(monkeypatch, tmp_path):
    known = replace(MODELS["aceff-2.0"], sha256="")
    monkeypatch.setitem(MODELS, "aceff-2.0", known)
    monkeypatch.setenv("OPENMM_TENSORNET_MODELS", str(tmp_path))
    (tmp_path / known.file).touch()
    charged = gpu_worker.System.named("alanine-dipeptide-charges", "some.ckpt")
    assert charged.checkpoint == str(tmp_path / known.file)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys, tmp_path):
    assert gpu.main(["--output", str(tmp_path / "gpu.json")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("an NVIDIA GPU is missing: PyTorch") and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_rehearsal(capsys, tmp_path):
    output = tmp_path / "gpu.json"
    assert gpu.main(["--rehearse", "--model", "alanine-dipeptide-gfn2", "--output", str(output)]) == 0
    text = output.read_text()
    assert str(gpu.ROOT) not in text and str(tmp_path) not in text, "a path of this machine"
    results = json.loads(text)
    assert results["rehearsal"] and results["settings"]["platform"] == "CPU"
    environment, *cases = results["cases"]
    assert {"python", "torch", "openmm", "openmm-tensornet"} <= environment["versions"].keys()
    assert [c["do"] for c in cases] == ["capture", "dynamics", "elsewhere", "contexts", "kernels", "module", "steps"]
    assert all(c["passed"] for c in cases)
    capture, dynamics, elsewhere, contexts, kernels, module, steps = cases
    compared = [check for case in (capture, dynamics, elsewhere, contexts) for check in case["checks"]]
    for check in compared:
        if "energy_eV_per_atom" in check:
            assert check["energy_eV_per_atom"] <= check["tolerance"]["energy"]
            assert check["relative_force"] <= check["tolerance"]["force"]
    assert len(capture["checks"]) == 5 and len(contexts["checks"]) == 10
    assert [check["nm"] for check in dynamics["checks"][::2]] == [
        0,
        0,
        0,
        0,
    ]  # with and without a barostat, in either order
    assert kernels["declared"] == kernels["metadata"] > 0 == kernels["counted"]
    assert module["times"].keys() == {"replayed", "eager"} == module["ratios"].keys()
    assert steps["times"]["portable, graphs, mixed"]["step_s"] > 0
    table = output.with_suffix(".md").read_text()
    assert table.strip() == capsys.readouterr().out.strip()
    assert table.startswith("A rehearsal on a CPU") and "| alanine-dipeptide | portable | replayed |" in table
