"""Models and reference numbers that many tests use, from tests/data and, for AceFF's weights, a folder of models."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import charge_variants
import numpy as np
import openmm
import pytest
import torch

from openmm_tensornet.atoms import Atoms

DATA = Path(__file__).parent / "data"
MODELS = Path(os.environ.get("OPENMM_TENSORNET_MODELS", Path(__file__).parents[2] / "shared" / "models"))
KJ_PER_EV = 96.48533212331


@dataclass(frozen=True)
class Case:
    """One system with the oracle's numbers (torchmd-net 3.1.0, float64).

    positions in nm, energies (M,) in eV, forces in eV/Å, box and Coulomb cutoff in nm or None.
    """

    name: str
    checkpoint: Path
    atoms: Atoms
    positions: np.ndarray
    box: np.ndarray | None
    energies: np.ndarray
    forces: np.ndarray
    coulomb_cutoff: float | None = None

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.tensor(self.positions), None if self.box is None else torch.tensor(self.box)


def _load(name: str) -> dict:
    return json.loads((DATA / name).read_text())


def _aceff(name: str, system: dict, model: str) -> Case:
    reference = system["reference"][model]
    box = system["box_angstrom"]
    cutoff = reference.get("coulomb_cutoff_angstrom")
    return Case(
        name,
        MODELS / f"{model}.ckpt",
        Atoms.make(system["atomic_numbers"], None, system["total_charge"]),
        np.array(system["positions_angstrom"]) / 10,
        None if box is None else np.array(box) / 10,
        np.array([reference["energy_eV"]]),
        np.array(reference["forces_eV_per_angstrom"]),
        None if cutoff is None else cutoff / 10,
    )


def _variant(name: str, case: dict) -> Case:
    return Case(
        name,
        DATA / "variants" / case["checkpoint"],
        Atoms.make(case["atomic_numbers"], case["molecule_index"], case["total_charge"] or [0, 0, 0]),
        np.array(case["positions_angstrom"]) / 10,
        None,
        np.array(case["energy"]),
        np.array(case["forces"]),
    )


def _charge_variant(name: str, reference: dict) -> Case:
    """A small TensorNet2, written down for the tests, on the systems of the other variants."""
    content = charge_variants.checkpoint(name)
    content["state_dict"] = {key: torch.tensor(value) for key, value in content["state_dict"].items()}
    path = Path(_FOLDER.name) / f"{name}.ckpt"
    torch.save(content, path)
    plain = next(iter(VARIANTS.values()))
    return Case(
        name,
        path,
        Atoms.make(plain.atoms.numbers, plain.atoms.molecules, charge_variants.TOTAL_CHARGE),
        plain.positions,
        None,
        np.array(reference["energy"]),
        np.array(reference["forces"]),
    )


_SYSTEMS = _load("aceff_references.json")["systems"]
_FOLDER = tempfile.TemporaryDirectory()
ACEFF = {name: _aceff(name, system, "aceff-1.1") for name, system in _SYSTEMS.items()}
VARIANTS = {name: _variant(name, case) for name, case in _load("variant_references.json")["cases"].items()}
CASES = ACEFF | VARIANTS
# Models with charges
ACEFF2 = {f"{name}-2.0": _aceff(f"{name}-2.0", system, "aceff-2.0") for name, system in _SYSTEMS.items()}
CHARGE_VARIANTS = {
    name: _charge_variant(name, reference) for name, reference in _load("charge_references.json")["cases"].items()
}
CHARGE_CASES = ACEFF2 | CHARGE_VARIANTS
SMALL = {name: case for name, case in CASES.items() if case.box is None}

# Small systems: a second thread gains little, and on a busy machine spinning threads cost a lot.
torch.set_num_threads(1)

PLATFORMS = ["Reference", "CPU"]


def checkpoint_path(name: str) -> Path:
    """Path of a checkpoint by name: "aceff-1.1" or "variants/zero-layers"."""
    return (DATA if name.startswith("variants/") else MODELS) / f"{name}.ckpt"


@pytest.fixture(scope="session")
def model_path():
    return checkpoint_path


@pytest.fixture(scope="session", params=PLATFORMS)
def platform(request) -> openmm.Platform:
    return openmm.Platform.getPlatformByName(request.param)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
