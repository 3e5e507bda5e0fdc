"""Shared data: real weights and reference numbers, read in place from the folder `shared` beside the repository."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openmm
import pytest
import torch

from openmm_tensornet.potential import Atoms

SHARED = Path(os.environ.get("OPENMM_TENSORNET_SHARED", Path(__file__).parents[1].parent / "shared"))
KJ_PER_EV = 96.48533212331


@dataclass(frozen=True)
class Case:
    """One system with the oracle's numbers (torchmd-net 3.1.0, float64).

    positions in nm, energies (M,) in eV, forces in eV/Å, box in nm or None; `dense` says whether all pairs are evaluated.
    """

    name: str
    checkpoint: Path
    atoms: Atoms
    positions: np.ndarray
    box: np.ndarray | None
    energies: np.ndarray
    forces: np.ndarray

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.tensor(self.positions), None if self.box is None else torch.tensor(self.box)


def _load(name: str) -> dict:
    path = SHARED / "data" / name
    if not path.exists():
        raise pytest.UsageError(
            f"the shared test data are missing: {path}; set OPENMM_TENSORNET_SHARED to their folder"
        )
    return json.loads(path.read_text())


def _aceff(name: str, system: dict) -> Case:
    reference = system["reference"]["aceff-1.1"]
    box = system["box_angstrom"]
    return Case(
        name,
        SHARED / "models" / "aceff-1.1.ckpt",
        Atoms.make(system["atomic_numbers"], None, system["total_charge"]),
        np.array(system["positions_angstrom"]) / 10,
        None if box is None else np.array(box) / 10,
        np.array([reference["energy_eV"]]),
        np.array(reference["forces_eV_per_angstrom"]),
    )


def _variant(name: str, case: dict) -> Case:
    return Case(
        name,
        SHARED / "models" / "variants" / case["checkpoint"],
        Atoms.make(case["atomic_numbers"], case["molecule_index"], case["total_charge"] or [0, 0, 0]),
        np.array(case["positions_angstrom"]) / 10,
        None,
        np.array(case["energy"]),
        np.array(case["forces"]),
    )


ACEFF = {name: _aceff(name, system) for name, system in _load("aceff_references.json")["systems"].items()}
VARIANTS = {name: _variant(name, case) for name, case in _load("variant_references.json")["cases"].items()}
CASES = ACEFF | VARIANTS
SMALL = {name: case for name, case in CASES.items() if case.box is None}

# Small systems: a second thread gains little, and on a busy machine spinning threads cost a lot.
torch.set_num_threads(1)

PLATFORMS = ["Reference", "CPU"]


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    return SHARED


@pytest.fixture(scope="session")
def model_path():
    """Path of a shared checkpoint by name, as in model_path("aceff-1.1") or model_path("variants/zero-layers")."""
    return lambda name: SHARED / "models" / f"{name}.ckpt"


@pytest.fixture(scope="session", params=PLATFORMS)
def platform(request) -> openmm.Platform:
    return openmm.Platform.getPlatformByName(request.param)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
