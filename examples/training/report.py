"""Results of the checks, by the weights they belong to; the checkpoint in the package and its model card."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from openmm_tensornet import create_system, simulate
from openmm_tensornet.common.files import replace_file
from openmm_tensornet.md.analysis import compute_broken_bonds, read_trajectory
from openmm_tensornet.models.checkpoint import load_model, save_model
from openmm_tensornet.models.registry import MODELS
from openmm_tensornet.models.tensornet import TensorNet

from . import heldout, physics
from .batches import MoleculeBatch
from .fit import predict
from .gfn2 import KCAL
from .sampling import PDB, Z

NAME = "alanine-dipeptide-gfn2"
PACKAGE = Path(__file__).resolve().parents[2] / "openmm_tensornet" / "models"
CARD, CHECKPOINT = PACKAGE / "README.md", PACKAGE / MODELS[NAME].file
# Of the model in the package, or of the one that is to take its place.
RESULTS = Path(__file__).with_name("results.json")
MARK = "<!-- results -->"
LONG_RUNS = {300: 1000.0, 500: 200.0}  # K: ps


def weights_hash(model: TensorNet) -> str:
    """A hash of the weights alone, which what a file says beside them does not change."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()[:16]


class Results:
    """The results of the checks of a model, in a JSON file; those of other weights are forgotten."""

    def __init__(self, model: TensorNet, path: Path = RESULTS):
        self.path, self.key = path, weights_hash(model)

    def read(self) -> dict:
        found = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        return found if found.get("weights") == self.key else {"weights": self.key}

    def add(self, name: str, value: dict) -> None:
        text = json.dumps(self.read() | {name: value}, indent=1)
        replace_file(self.path, f"{text}\n".encode())


# -------------------------------------------------------------------------------------------- checks


def _own_folder(folder: Path, model_file: Path) -> Path:
    """Where the runs of one model are kept: none is taken for another's."""
    return folder / "checks" / weights_hash(load_model(model_file))


def check_heldout(model_file: Path, folder: Path, seed: int) -> dict:
    """Errors on the frames of GFN2-xTB's own trajectories, as far as these have come; kcal/mol and kcal/mol/Å."""
    model = load_model(model_file)
    batch = MoleculeBatch(model, torch.tensor(Z)).eval()
    found = {}
    for temperature in heldout.TEMPERATURES:
        data = heldout.frames(folder / "heldout", seed, temperature)
        energies, forces = predict(batch, data["positions"])
        energy_error = (energies - (data["energies"] - float(model.mean))) * KCAL
        force_error = (forces - data["forces"]) * KCAL
        found[str(temperature)] = {
            "frames": len(energies),
            "energy_mae": float(np.abs(energy_error).mean()),
            "force_mae": float(np.abs(force_error).mean()),
            "force_rmse": float(np.sqrt((force_error**2).mean())),
            "largest_energy_error": float(np.abs(energy_error).max()),
        }
    return found


def check_free_energies(model_file: Path, folder: Path, seed: int) -> dict:
    """Free energies of the basins by the model, and reweighted to GFN2-xTB; draws them, with GFN2-xTB's own run where it is done."""
    own = _own_folder(folder, model_file)
    data = physics.sample(model_file, own, seed)
    found = physics.free_energies(data, seed)
    run = Results(load_model(model_file)).read().get("gfn2-run")
    buffer = io.BytesIO()
    physics.plot_free_energies(data, found, run).savefig(buffer, format="png", dpi=120)
    replace_file(own / "free-energies.png", buffer.getvalue())
    return found


def check_long_runs(model_file: Path, folder: Path, seed: int) -> dict:
    """1 ns at 300 K and 200 ps at 500 K, 0.5 fs: time survived (ps) without a broken bond."""
    found = {}
    for temperature, time in LONG_RUNS.items():
        output = _own_folder(folder, model_file) / f"md-{temperature}K"
        system = create_system(model_file, PDB.topology, positions=PDB.positions)
        simulate(
            PDB.topology,
            system,
            PDB.positions,
            output=output,
            time=time,
            temperature=temperature,
            timestep=0.5,
            seed=seed,
            resume=output.exists(),
        )
        broken = compute_broken_bonds(read_trajectory(output))
        first = int(np.argmax(broken > 0)) if broken.any() else len(broken)
        found[str(temperature)] = {"time_ps": time, "survived_ps": time * first / len(broken), "frames": len(broken)}
    return found


CHECKS: dict[str, Callable[[Path, Path, int], dict]] = {
    "heldout": check_heldout,
    "frequencies": lambda model_file, folder, seed: physics.compare_frequencies(model_file),
    "free-energies": check_free_energies,
    "gfn2-run": lambda model_file, folder, seed: physics.teacher_run(folder, seed),
    "long-runs": check_long_runs,
}


def check(names: list[str], model_file: Path, folder: Path, seed: int) -> None:
    """Run checks, print what they found, and keep it."""
    results = Results(load_model(model_file))
    for name in names:
        found = CHECKS[name](model_file, folder, seed)
        results.add(name, found)
        print(json.dumps({name: found}, indent=1))


# ------------------------------------------------------------------------------ the model in the package


def bundle(model_file: Path, folder: Path) -> None:
    """Copy the checkpoint into the package, with what is known of it, and write its numbers into the model card."""
    model = load_model(model_file)
    results = Results(model).read()
    log = np.atleast_1d(np.genfromtxt(folder / "log.csv", delimiter=",", names=True))
    model.about = {
        "name": NAME,
        "molecule": {"name": "alanine dipeptide", "formula": "C6H12N2O2", "atomic_numbers": Z.tolist()},
        "elements": sorted(set(Z.tolist())),
        "total_charge": 0,
        "level_of_theory": f"GFN2-xTB (tblite {importlib.metadata.version('tblite')})",
        "training_frames": int(log["frames"][-1]),
        "training_steps": int(log["step"][-1]),
        "heldout": results.get("heldout", {}),
        "license": "MIT",
    }
    save_model(model, CHECKPOINT)
    before, _, after = CARD.read_text(encoding="utf-8").split(MARK)
    text = f"{before}{MARK}\n{table(model.about, results)}{MARK}{after}"
    replace_file(CARD, text.encode())


def table(about: dict, results: dict) -> str:
    """The model card's numbers; what has not been measured with these weights says so."""
    rows = [
        ("frames that it was trained on", f"{about['training_frames']:,}"),
        ("updates", f"{about['training_steps']:,}"),
    ]

    def row(what: str, name: str, value: Callable[[dict], str]) -> None:
        rows.append((what, value(results[name]) if name in results else "not measured yet"))

    for t in map(str, heldout.TEMPERATURES):
        row(
            f"held-out GFN2-xTB trajectories, {t} K: energy MAE, force MAE",
            "heldout",
            lambda r, t=t: (
                f"{r[t]['energy_mae']:.2f} kcal/mol, {r[t]['force_mae']:.2f} kcal/mol/Å ({r[t]['frames']} frames)"
            ),
        )
    for basin in ("C7eq", "C7ax"):
        row(f"harmonic wavenumbers at {basin}: RMS error", "frequencies", lambda r, b=basin: f"{r[b]['rms']:.1f} cm⁻¹")
    row(
        "effective sample size of model MD reweighted to GFN2-xTB",
        "free-energies",
        lambda r: f"{100 * r['effective_sample_size']:.0f} % of {r['frames']:,} frames",
    )
    for basin in list(physics.BASINS)[1:]:
        row(
            f"free energy of {basin} against C7eq: model, change by reweighting",
            "free-energies",
            lambda r, b=basin: "{model:.2f} ± {model_error:.2f}, {change:+.2f} ± {change_error:.2f} kJ/mol".format(
                **r["basins"][b]
            ),
        )
    row(
        "100 ps of GFN2-xTB itself at 300 K: share of C7eq, C5",
        "gfn2-run",
        lambda r: ", ".join("{share:.3f} ± {error:.3f}".format(**r["basins"][b]) for b in ("C7eq", "C5")),
    )
    for t in map(str, LONG_RUNS):
        row(
            f"MD at {t} K, 0.5 fs: time without a broken bond",
            "long-runs",
            lambda r, t=t: f"{r[t]['survived_ps']:.0f} ps",
        )
    return "".join(f"| {what} | {value} |\n" for what, value in [("what", "value"), ("---", "---:"), *rows])
