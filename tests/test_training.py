"""The training of the example: fast batches against the reference model, and what the checks compute."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
pytest.importorskip("tblite", reason="tblite, of the extra train, is not installed")

from training import batches, fit, gfn2, heldout, physics, report, sampling

from openmm_tensornet import load_model
from openmm_tensornet.models.checkpoint import save_model
from openmm_tensornet.models.tensornet import TensorNet, TensorNetConfig
from openmm_tensornet.neighbors.reference import find_pairs

ROUNDING = 3e-5  # float32, relative


def shaken(count: int, by: float = 0.05) -> np.ndarray:
    rng = np.random.default_rng(0)
    return sampling.START + rng.normal(0, by, (count, *sampling.START.shape))


# ------------------------------------------------------------------------------------------ batches


def reference(model: TensorNet, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    count, n, _ = x.shape
    replicas = torch.arange(count).repeat_interleave(n)
    flat = x.flatten(0, 1)
    pairs = find_pairs(flat, replicas, model.cutoff)
    energy, forces = model.energy_and_forces(torch.tensor(sampling.Z).repeat(count), flat, replicas, pairs, count)
    return energy, forces.view(x.shape)


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_batches_are_the_reference_model(layers):
    """Energies, forces, and the gradient of a loss of both by every weight."""
    config = TensorNetConfig(embedding_dimension=16, num_layers=layers, num_rbf=8, cutoff_upper=4.0, max_z=9)
    model = TensorNet(config).train()
    x = torch.tensor(shaken(3), dtype=torch.float32)
    batch = batches.MoleculeBatch(model, torch.tensor(sampling.Z)).train()
    found, expected = batch.energy_and_forces(x), reference(model, x)
    assert float(expected[1].detach().norm()) > 0.01
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).detach().norm()) <= ROUNDING * float(b.detach().norm())
    weights = [p for p in model.parameters() if p.requires_grad]
    gradients = [torch.autograd.grad(e.square().sum() + f.square().sum(), weights) for e, f in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        assert float((a - b).norm()) <= ROUNDING * float(b.norm()) + 1e-9


def test_forces_of_a_batch_do_not_mix():
    model = fit.new_model(0, 0.0)
    batch = batches.MoleculeBatch(model, torch.tensor(sampling.Z)).eval()
    x = torch.tensor(shaken(2), dtype=torch.float32)
    both, alone = batch.energy_and_forces(x), batch.energy_and_forces(x[1:])
    torch.testing.assert_close(both[0][1], alone[0][0])
    torch.testing.assert_close(both[1][1], alone[1][0])
    assert not both[1].requires_grad


# ------------------------------------------------------------------------------------------ GFN2-xTB


def test_forces_of_gfn2_are_those_of_its_energy():
    potential = gfn2.GFN2(sampling.Z)
    x = shaken(1)[0]
    _, forces = potential(x)
    along = np.random.default_rng(1).normal(size=x.shape)
    step = 1e-3
    slope = (potential(x + step * along)[0] - potential(x - step * along)[0]) / (2 * step)
    assert slope == pytest.approx(-(forces * along).sum(), rel=1e-3)


def test_energy_of_gfn2():
    """−32.94139929868 Hartree: `tblite run` on the example's structure, converted with CODATA 2018."""
    assert gfn2.GFN2(sampling.Z)(sampling.START)[0] == pytest.approx(-32.94139929868 * 27.211386245988, abs=1e-6)


def test_a_trajectory_starts_from_the_electrons_before():
    fresh, following = gfn2.GFN2(sampling.Z), gfn2.GFN2(sampling.Z, trajectory=True)
    for k in range(5):
        x = sampling.START + 0.01 * k * (shaken(1)[0] - sampling.START)
        a, b = fresh(x), following(x)
        assert a[0] == pytest.approx(b[0], abs=1e-6)
        np.testing.assert_allclose(a[1], b[1], atol=1e-3)


def test_heldout_trajectory_goes_on(tmp_path):
    path = tmp_path / "300K-0.npz"
    system = sampling.teacher_system()
    first = heldout.Trajectory(path, 300.0, [1, 2], steps=3)
    first.extend(system)
    again = heldout.Trajectory(path, 300.0, [1, 2], steps=3)
    assert len(again) == 1
    heldout.extend([again], 2)
    data = gfn2.read_arrays(path)
    assert data["positions"].shape == data["forces"].shape == (2, 22, 3)
    energy, forces = gfn2.GFN2(sampling.Z)(data["positions"][1])
    assert data["energies"][1] == pytest.approx(energy, abs=1e-5)
    np.testing.assert_allclose(data["forces"][1], forces, atol=1e-3)
    moved = np.abs(data["positions"][1] - data["positions"][0]).max()
    assert 0 < moved < 0.3  # 6 fs


# ------------------------------------------------------------------------------------------ fitting


@pytest.fixture
def labels(tmp_path):
    """A folder of labels of a made-up potential: springs to the start structure."""
    x = shaken(120)
    forces = -2.0 * (x - sampling.START)
    energies = -900 + ((x - sampling.START) ** 2).sum((1, 2))
    gfn2.write_arrays(tmp_path / "labels" / "0-springs.npz", positions=x, energies=energies, forces=forces)
    return tmp_path


def test_fit_resumes_and_learns(labels):
    training, validation = fit.load_frames(labels / "labels", 1, -900.0, 1)
    assert len(training) + len(validation) == 120 and 0 < len(validation) < 24
    one = fit.Fit(labels, 1, -900.0)
    one.run(6, 12, training, validation, 8)
    weights = {name: value.clone() for name, value in one.average.state_dict().items()}
    again = fit.Fit(labels, 1, -900.0)
    assert again.step == 6 and again.samples == 48 and again.log == one.log
    assert all(torch.equal(value, weights[name]) for name, value in again.average.state_dict().items())
    again.run(12, 12, training, validation, 8)
    one.run(12, 12, training, validation, 8)
    for a, b in zip(one.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    for error in ("energy_mae_kcal", "force_mae_kcal"):
        assert again.log[-1][error] < again.log[0][error]
    assert (labels / "learning.png").read_bytes().startswith(b"\x89PNG")
    assert len((labels / "log.csv").read_text().splitlines()) == 3
    written = load_model(labels / "model.ckpt")
    assert float(written.mean) == -900.0
    assert all(torch.equal(v, again.average.state_dict()[k]) for k, v in written.state_dict().items())


def test_fit_starts_from_a_model(labels):
    started = fit.Fit(labels, 1, -900.0, report.NAME)
    assert report.weights_hash(started.average) == report.weights_hash(load_model(report.NAME))
    assert started.step == 0


def test_strained_frames_are_left_out(labels):
    path = labels / "labels" / "0-springs.npz"
    data = gfn2.read_arrays(path)
    data["forces"][0] *= 1000
    data["energies"][1] += 5
    gfn2.write_arrays(path, **data)
    training, validation = fit.load_frames(labels / "labels", 1, -900.0, 1)
    assert len(training) + len(validation) == 118


# ------------------------------------------------------------------------------------------ physics


def test_frequencies_of_springs():
    """Every atom on a spring of its own to a fixed place: ω = √(k/m), the six lowest of which are left out."""
    k = 5.0  # eV/Å²
    found = physics.frequencies(lambda x: (0.0, -k * (x - sampling.START)), sampling.START)
    si = np.sqrt(k * 1.602176634e-19 * 1e20 / (physics.MASSES * 1.66053906660e-27)) / (2 * np.pi * 299792458 * 100)
    np.testing.assert_allclose(found, np.sort(np.repeat(si, 3))[6:], rtol=1e-6)


def test_relaxing():
    found = physics.relax(lambda x: (((x - 1) ** 2).sum(), -2 * (x - 1)), np.zeros((2, 3)))
    np.testing.assert_allclose(found, 1, atol=1e-4)


def test_phi_and_psi_are_those_of_the_analysis():
    mdtraj = pytest.importorskip("mdtraj")
    from openmm_tensornet.md.analysis import compute_phi_psi

    frames = shaken(5)
    topology = mdtraj.Topology.from_openmm(sampling.PDB.topology)
    expected = compute_phi_psi(mdtraj.Trajectory(frames / 10, topology))[:, 0]
    np.testing.assert_allclose(physics.phi_psi(frames), expected, atol=0.01)


def frames_in_basins(counts: dict[str, int], monkeypatch) -> np.ndarray:
    """As many stand-ins for frames, whose angles are in the middle of a basin."""
    centre = {"C7eq": (-80, 70), "C5": (-150, 160), "C7ax": (70, -60), "alphaR": (-65, -40)}
    monkeypatch.setattr(physics, "phi_psi", lambda frames: frames)
    return np.concatenate([np.tile(centre[name], (count, 1)) for name, count in counts.items()]).astype(float)


def test_free_energies_of_a_known_shift(monkeypatch):
    """GFN2-xTB lies 2 kJ/mol above the model in C5 and 10 above everywhere: reweighting finds the 2."""
    angles = frames_in_basins({"C7eq": 400, "C5": 200, "C7ax": 100, "alphaR": 100}, monkeypatch)
    gfn2_energy = np.full(800, 10.0)
    gfn2_energy[400:600] += 2.0
    data = {
        "positions": angles,
        "bias": np.zeros(800),
        "model": np.zeros(800),
        "gfn2": gfn2_energy,
        "walker": np.tile(np.arange(8), 100),
    }
    found = physics.free_energies(data, 1)
    kt = 8.31446261815324e-3 * 300
    c5 = found["basins"]["C5"]
    assert c5["model"] == pytest.approx(kt * np.log(2))
    assert c5["change"] == pytest.approx(2.0)
    assert found["basins"]["C7ax"]["change"] == pytest.approx(0.0)
    w = np.exp(-2 / kt)
    assert found["effective_sample_size"] == pytest.approx((600 + 200 * w) ** 2 / (600 + 200 * w**2) / 800)
    assert c5["change_error"] == pytest.approx(0, abs=1e-9)
    run = {"basins": {name: {"share": 0.25, "error": 0.01} for name in found["basins"]}}
    maps = physics.plot_free_energies(data, found, run).axes
    assert [panel.get_title() for panel in maps[:2]] == ["model", "reweighted to GFN2-xTB"]


def test_free_energies_take_the_bias_out(monkeypatch):
    """A bias of 3 kJ/mol on C7eq: its frames stand for e^{3/kT} as many."""
    angles = frames_in_basins({"C7eq": 100, "C5": 100, "C7ax": 100, "alphaR": 100}, monkeypatch)
    bias = np.zeros(400)
    bias[:100] = 3.0
    data = {name: np.zeros(400) for name in ("model", "gfn2")}
    data |= {"positions": angles, "bias": bias, "walker": np.tile(np.arange(4), 100)}
    found = physics.free_energies(data, 1)
    assert found["basins"]["C7ax"]["model"] == pytest.approx(3.0)
    assert found["effective_sample_size"] == pytest.approx(1.0)


@pytest.mark.slow
def test_sampling_goes_on_where_it_was(tmp_path, monkeypatch):
    """A short run of it all with the model of the package: energies of the frames are those of the potentials."""
    for name, value in {"WALKERS": 2, "FRAMES": 3, "STEPS": 5, "METADYNAMICS_STEPS": 1000}.items():
        monkeypatch.setattr(physics, name, value)
    data = physics.sample(report.CHECKPOINT, tmp_path, 1)
    assert data["positions"].shape == (6, 22, 3) and data["walker"].tolist() == [0, 0, 0, 1, 1, 1]
    model = physics.reference_potential(report.CHECKPOINT)
    teacher = gfn2.GFN2(sampling.Z)
    for x, by_model, by_teacher in zip(data["positions"], data["model"], data["gfn2"], strict=True):
        assert by_model == pytest.approx(model(x)[0] * 96.48533212331, abs=0.05)
        assert by_teacher == pytest.approx(teacher(x)[0] * 96.48533212331, abs=0.01)
    table = physics.find_bias(report.CHECKPOINT, tmp_path, 1)
    assert table.shape == (61, 61) and table.min() >= -1e-9 - 30 and table.max() <= 1e-9 and np.ptp(table) > 0
    angles = np.radians(physics.phi_psi(data["positions"]))
    grid = (angles + np.pi) / (2 * np.pi) * 60
    for (phi, psi), bias in zip(grid, data["bias"], strict=True):
        around = table[int(psi) : int(psi) + 2, int(phi) : int(phi) + 2]  # psi is the slow index
        assert around.min() - 0.3 <= bias <= around.max() + 0.3
    (tmp_path / "walker-1.npz").unlink()
    again = physics.sample(report.CHECKPOINT, tmp_path, 1)
    np.testing.assert_array_equal(again["positions"][:3], data["positions"][:3])


# ------------------------------------------------------------------------------------------ the card


def test_results_belong_to_their_weights(tmp_path):
    first, second = fit.new_model(1, 0.0), fit.new_model(2, 0.0)
    path = tmp_path / "results.json"
    report.Results(first, path).add("heldout", {"a": 1})
    report.Results(first, path).add("frequencies", {"b": 2})
    results = report.Results(first, path).read()
    assert results == {"weights": report.weights_hash(first), "heldout": {"a": 1}, "frequencies": {"b": 2}}
    assert report.Results(second, path).read() == {"weights": report.weights_hash(second)}
    first.about = {"name": "x"}
    save_model(first, tmp_path / "model.ckpt")
    assert report.weights_hash(load_model(tmp_path / "model.ckpt")) == report.weights_hash(first)


def test_card_says_what_is_not_measured():
    about = {"training_frames": 6543, "training_steps": 10}
    text = report.table(about, {})
    assert "| frames that it was trained on | 6,543 |" in text
    assert text.count("not measured yet") == len(text.splitlines()) - 4
    heldout_result = {t: {"frames": 7, "energy_mae": 0.123, "force_mae": 0.456} for t in ("300", "500")}
    assert "| 0.12 kcal/mol, 0.46 kcal/mol/Å (7 frames) |" in report.table(about, {"heldout": heldout_result})


def test_card_in_the_package_has_the_numbers_of_its_file():
    model = load_model(report.NAME)
    card = report.CARD.read_text(encoding="utf-8")
    results = report.Results(model).read()
    assert results["heldout"] == model.about["heldout"]
    assert card.split(report.MARK)[1].strip() == report.table(model.about, results).strip()
