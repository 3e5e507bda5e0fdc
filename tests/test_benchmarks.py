"""The benchmark itself: its systems, its refusal to time what is wrong, its table. Nothing here asserts a time."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import launches, measure, report, run
from benchmarks.systems import CASES, ROOT, load, parse_xyz
from openmm_tensornet import load_model
from openmm_tensornet.models.registry import find_model

SETTINGS = measure.Settings("some.ckpt", rounds=2, block_seconds=0.01)


class FakeWorker:
    """Answers at once: a fixed energy and forces, and times that a test can recognise."""

    def __init__(self, seconds: float, energy: float = -1000.0, force_error: float = 0.0):
        self.seconds, self.energy, self.force_error = seconds, energy, force_error
        self.called: list[str] = []

    def call(self, do: str, **arguments):
        self.called.append(do)
        return getattr(self, f"_{do}")(**arguments)

    def _start(self, **_):
        return {"first_energy_s": 1.5, "ready_s": 2.5, "versions": {"torch": "2.0"}}

    def _evaluate(self, positions):
        forces = np.sin(np.array(positions))
        forces[0, 0] += self.force_error * np.linalg.norm(forces)
        return {"energy": self.energy, "forces": forces.tolist()}

    def _reference(self, case, model, positions):
        return [{"energy": -1000.0, "forces": np.sin(np.array(x)).tolist()} for x in positions]

    def _time_steps(self, count):
        return self.seconds

    def _time_evaluations(self, count):
        return self.seconds / 2

    def _kernels(self):
        return None

    def _memory(self):
        return {"peak_MB": 1234.0, "present_MB": 1000.0}


def timed(worker: FakeWorker) -> bool:
    return any(name.startswith("time_") for name in worker.called)


def fake_results() -> dict:
    workers = {"ours": FakeWorker(0.002), "peer": FakeWorker(0.02)}
    case = CASES["alanine-dipeptide"]
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "abc",
        "model": {"file": "some.ckpt", "sha256": "0"},
        "machine": {"cpu": "Some CPU", "cores": 2, "load_average_at_start": 0.25},
        "settings": {
            "platform": "CPU",
            "integrator": "VerletIntegrator",
            "timestep_fs": 0.5,
            "precision": "single",
            "threads": 1,
            "rounds": 2,
        },
        "cases": [measure.measure(case, SETTINGS, workers, report=lambda _: None)],
    }


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_systems(case):
    structure = load(case)
    assert len(structure.symbols) == len(structure.positions) == case.atoms
    assert set(structure.symbols) <= set("HCNO")
    x, box = structure.positions, structure.box
    vectors = x[:, None] - x[None]
    if box is not None:
        assert np.array_equal(box, np.diag(box.diagonal()))
        assert box.diagonal().min() >= 1.0, "twice the cutoff"
        assert abs(case.atoms / np.linalg.det(box) - 100) < 10, "atoms/nm³ of a liquid"
        vectors -= np.round(vectors / box.diagonal()) * box.diagonal()
    distances = np.linalg.norm(vectors, axis=2) + 10 * np.eye(case.atoms)
    nearest = distances.min(1)
    assert nearest.min() > 0.09
    assert nearest.max() < 0.16, "an atom without a bond"


def test_registry_covers_the_sizes():
    assert [case.atoms for case in CASES.values()] == [22, 22, 49, 166, 192, 2500]


def test_files_are_small():
    assert sum(case.file.stat().st_size for case in CASES.values()) < 300_000


def test_xyz_with_another_number_of_atoms_is_refused():
    with pytest.raises(ValueError, match="expected 3 atoms as the first line says, received 2"):
        parse_xyz("3\nwater\nO 0 0 0\nH 1 0 0\n")


def test_measures_in_turns():
    case = fake_results()["cases"][0]
    ours, peer = case["backends"].values()
    assert (ours["step_s"], peer["step_s"]) == (0.002, 0.02)
    assert ours["ns_per_day"] == pytest.approx(0.5e-6 * 86400 / 0.002)
    assert len(peer["rounds"]["evaluation_s"]) == SETTINGS.rounds
    assert case["ratios"]["peer"]["step"]["median"] == pytest.approx(10)
    assert case["comparisons"]["peer"] == {"energy_eV_per_atom": 0, "relative_force": 0}


@pytest.mark.parametrize(
    ("wrong", "numbers"),
    [
        ({"energy": -1000.01}, r"energy by 4\.71e-06 eV an atom \(at most 2e-06\)"),
        ({"force_error": 1e-4}, r"forces by 1\.00e-04 of their norm \(at most 3e-05\)"),
        ({"energy": float("nan")}, "energy by nan"),
        ({"force_error": float("nan")}, "forces by nan"),
    ],
)
def test_a_wrong_peer_is_not_timed(wrong, numbers):
    workers = {"ours": FakeWorker(0.1), "peer": FakeWorker(0.1, **wrong)}
    with pytest.raises(measure.WrongResult, match=rf"alanine-dipeptide, peer and ours: not timed.*{numbers}"):
        measure.measure(CASES["alanine-dipeptide"], SETTINGS, workers, report=lambda _: None)
    assert not any(timed(worker) for worker in workers.values())


def test_tolerances_are_those_of_single_precision():
    assert measure.tolerances(22) == measure.tolerances(200) == (2e-6, 3e-5)
    assert measure.tolerances(2500) == pytest.approx((7.1e-6, 7.0e-5), rel=0.02)


def test_ours_is_not_timed_if_its_reference_model_disagrees():
    worker = FakeWorker(0.1, energy=-1000.01)
    with pytest.raises(measure.WrongResult, match="alanine-dipeptide, ours: not timed"):
        measure.measure(CASES["alanine-dipeptide"], SETTINGS, {"ours": worker}, FakeWorker(0.1), report=lambda _: None)
    assert not timed(worker)


def test_table():
    lines = report.render(fake_results()).splitlines()
    assert lines[0].startswith("| system | atoms | backend | MD step (ms) | ns/day |")
    assert {line.count("|") for line in lines[:4]} == {len(report.COLUMNS) + 1}
    assert "| alanine dipeptide | 22 | ours | 2.00 | 21.6 |  | 1.00 |" in lines[2]
    assert "|  |  | peer | 20.0 | 2.16 | 10.0× | 10.0 | 10.0× | 1.50 | 2.50 | 1,234 |  |" in lines[3]
    for part in ("some.ckpt", "1 thread,", "Some CPU", "2026-01-02", "commit abc", "ours: torch 2.0"):
        assert part in lines[5]


def test_breakdown_table_adds_up():
    results = fake_results()
    results["breakdown"] = {
        "case": "alanine-dipeptide",
        "step_s": 0.003,
        "module_s": 0.002,
        "overhead_s": 0.001,
        "operators": [
            {"name": f"op{k}", "calls": 2.0, "share": 0.05, "operations": 1e6, "bytes": 2e6, "floor_s": 1e-5}
            for k in range(20)
        ],
        "machine": {"operations_per_s": 1e11, "bytes_per_s": 2e11},
    }
    text = report.render(results)
    assert "3.00 ms, of which the module 2.00 ms, OpenMM and its plugin 1.00 ms" in text
    assert "| op0 | 2 | 5 % | 0.10 | 1.00 | 2.00 | 0.01 |" in text
    assert "| 10 others | 20 | 50 % | 1.00 | 10.0 | 20.0 | 0.10 |" in text
    assert "| together | 40 | 100 % | 2.00 | 20.0 | 40.0 | 0.20 |" in text


def test_quoting_keeps_the_rest_and_can_be_repeated():
    once = report.quote(f"above\n{report.MARKER}\nbelow\n", "| table |\n")
    assert once == f"above\n{report.MARKER}\n| table |\n{report.MARKER}\nbelow\n"
    assert report.quote(once, "| other |") == once.replace("table |\n", "other |\n")
    with pytest.raises(ValueError, match=r"expected one or two markers .* received 0"):
        report.quote("nothing", "| table |")


def test_readme_has_a_place_for_the_table():
    report.quote((ROOT / "README.md").read_text(), "table")


def work_of_products(model, atoms: int) -> int:
    """Of a TensorNet's matrix products, forward and backward, reckoned from its shape."""
    f, layers = model.config.embedding_dimension, model.config.num_layers
    tensors = 9 * f * f * (1 + 2 * layers)
    gates, readout = f * 2 * f + 2 * f * 3 * f, 3 * f * f + f * (f // 2)
    return 2 * 2 * atoms * (tensors + gates + readout)


def test_worker_failure_shows_its_cause():
    with (
        measure.Worker(sys.executable, "ours") as worker,
        pytest.raises(measure.WorkerFailed, match=r"ours, start: KeyError: 'no such case'"),
    ):
        worker.call("start", case="no such case", model="", precision="single", threads=1, timestep_fs=0.5)


def test_model_that_is_missing_is_named(capsys):
    with pytest.raises(SystemExit):
        run.main(["--model", "missing.ckpt"])
    assert "received 'missing.ckpt', which does not exist" in capsys.readouterr().err


def test_without_the_weights(capsys, monkeypatch, tmp_path):
    """Nothing is downloaded: it says what fetches them, and what needs none."""
    (tmp_path / "aceff_v1.1.ckpt").write_bytes(b"another version")
    (tmp_path / "aceff_v2.0.ckpt").write_bytes(b"another version")
    monkeypatch.setenv("OPENMM_TENSORNET_MODELS", str(tmp_path))
    with pytest.raises(SystemExit):
        run.main([])
    said = capsys.readouterr().err
    assert "another version" in said and "`make models` fetches" in said and "alanine-dipeptide-gfn2" in said
    output = ["--output", str(tmp_path)]
    assert run.main(["--model", "alanine-dipeptide-gfn2", "--cases", "alanine-dipeptide-charges", *output]) == 1
    assert "alanine-dipeptide-charges: left out: " in capsys.readouterr().err


def test_peers_environment_has_what_the_worker_imports():
    """The worker starts without this package and without PyTorch."""
    code = "import sys, benchmarks.worker; print({'torch', 'openmm', 'openmm_tensornet'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "set()"


def test_run_from_end_to_end(tmp_path, capsys, monkeypatch):
    for name, value in {"QUICK_ROUNDS": 1, "QUICK_SECONDS": 0.01, "BREAKDOWN_EVALUATIONS": 3}.items():
        monkeypatch.setattr(run, name, value)
    model = find_model("alanine-dipeptide-gfn2")
    options = ["--quick", "--breakdown", "--cases", "alanine-dipeptide", "--output", str(tmp_path)]
    assert run.main([*options, "--model", str(model)]) == 0
    table = (tmp_path / "quick.md").read_text()
    assert table.strip() == capsys.readouterr().out.strip()
    text = (tmp_path / "quick.json").read_text()
    assert str(model.parent) not in text, "a path of this machine"
    results = json.loads(text)
    (case,) = results["cases"]
    (ours,) = case["backends"].values()
    assert case["comparisons"].keys() == {"reference model"}
    assert ours["kernels"] > 0 and ours["torch_threads"] == 1
    assert ours["memory"]["peak_MB"] >= ours["memory"]["present_MB"] > 0
    assert ours["first_energy_s"] < ours["ready_s"]
    operators = {operator["name"]: operator for operator in results["breakdown"]["operators"]}
    assert sum(operator["share"] for operator in operators.values()) == pytest.approx(1)
    assert operators["linear"]["operations"] == pytest.approx(work_of_products(load_model(model), 22), rel=0.01)


def test_launches():
    """Those of fused kernels are fewer, and counted too."""
    pytest.importorskip("numba", reason="numba, without which nothing is fused, is not installed")
    portable, fused = (launches.launches("alanine-dipeptide-gfn2", kernels, 5) for kernels in ("portable", "fused"))
    assert portable[0] == portable[1] > 2 * fused[0] and fused[0] >= fused[1] > 20
