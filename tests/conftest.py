"""Models and reference numbers that many tests use.

AceFF's weights are another project's and may be missing. Tests that need no more than a model of that size take a stand-in with
random weights; only comparisons with AceFF's own numbers have the marker `published`, which skips them.
"""

from __future__ import annotations

import os
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openmm
import pytest
import seeded
import torch

from openmm_tensornet.common.atoms import Atoms
from openmm_tensornet.models.registry import find_model

DATA = seeded.DATA
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


def _find_published(name: str) -> tuple[Path, str]:
    """The file of a published model, and why there is none."""
    try:
        return find_model(name, download=False), ""
    except (FileNotFoundError, ImportError, ValueError) as error:
        return Path(name), str(error)


def _seeded(name: str) -> Path:
    path = Path(_FOLDER.name) / f"{name}.ckpt"
    seeded.write(name, path)
    return path


def _aceff(name: str, system: dict, checkpoint: Path, energy: float, forces: list, cutoff: float | None) -> Case:
    box = system["box_angstrom"]
    return Case(
        name,
        checkpoint,
        Atoms.make(system["atomic_numbers"], None, system["total_charge"]),
        np.array(system["positions_angstrom"]) / 10,
        None if box is None else np.array(box) / 10,
        np.array([energy]),
        np.array(forces),
        None if cutoff is None else cutoff / 10,
    )


def _aceff_cases(model: str, suffix: str = "") -> tuple[dict[str, Case], dict[str, Case]]:
    """The systems with a stand-in and its numbers, and with the published model and its."""
    stand_ins, published = {}, {}
    for system_name, system in seeded.read("aceff_references.json")["systems"].items():
        reference = system["reference"][model]
        cutoff = reference.get("coulomb_cutoff_angstrom")
        found = seeded.read("stand_in_references.json")["cases"][model][system_name]
        name = f"{system_name}{suffix}"
        stand_ins[name] = _aceff(name, system, SEEDED[model], found["energy"][0], found["forces"], cutoff)
        numbers = reference["energy_eV"], reference["forces_eV_per_angstrom"]
        name = f"published-{name}"
        published[name] = _aceff(name, system, WEIGHTS[model][0], *numbers, cutoff)
    return stand_ins, published


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
    """A small TensorNet2 on the systems of the other variants."""
    plain = next(iter(VARIANTS.values()))
    return Case(
        name,
        SEEDED[name],
        Atoms.make(plain.atoms.numbers, plain.atoms.replicas, seeded.TOTAL_CHARGE),
        plain.positions,
        None,
        np.array(reference["energy"]),
        np.array(reference["forces"]),
    )


_FOLDER = tempfile.TemporaryDirectory()
SEEDED = {name: _seeded(name) for name in seeded.CASES}
WEIGHTS = {name: _find_published(name) for name in seeded.STAND_INS}
ACEFF, PUBLISHED = _aceff_cases("aceff-1.1")
VARIANTS = {name: _variant(name, case) for name, case in seeded.read("variant_references.json")["cases"].items()}
CASES = ACEFF | VARIANTS
# Models with charges
ACEFF2, PUBLISHED2 = _aceff_cases("aceff-2.0", "-2.0")
CHARGE_VARIANTS = {
    name: _charge_variant(name, reference) for name, reference in seeded.read("charge_references.json")["cases"].items()
}
CHARGE_CASES = ACEFF2 | CHARGE_VARIANTS
SMALL = {name: case for name, case in CASES.items() if case.box is None}


def published(cases: dict[str, Case], quick: tuple[str, ...] | None = None) -> list:
    """Parameters of a test, for names of published cases; with `quick`, systems but these belong to `make test-slow`."""
    model = "aceff-2.0" if cases is PUBLISHED2 else "aceff-1.1"
    marks = {name: [pytest.mark.published(model)] for name in cases}
    for name in marks:
        if quick is not None and not any(system in name for system in quick):
            marks[name].append(pytest.mark.slow)
    return [pytest.param(name, marks=marks[name]) for name in cases]


def some(cases: dict[str, Case], quick: tuple[str, ...]) -> list:
    """Parameters of a test, for names of cases; stand-ins but those of the systems `quick` belong to `make test-slow`."""
    return [
        pytest.param(
            name, marks=() if name not in ACEFF | ACEFF2 or any(s in name for s in quick) else pytest.mark.slow
        )
        for name in cases
    ]


# Small systems: a second thread gains little, and on a busy machine spinning threads cost a lot.
torch.set_num_threads(1)

PLATFORMS = ["Reference", "CPU"]


def checkpoint_path(name: str) -> Path:
    """Path of a checkpoint by name: "variants/zero-layers", a small one of `seeded`, or "aceff-1.1" for its stand-in."""
    return DATA / f"{name}.ckpt" if name.startswith("variants/") else SEEDED[name]


@pytest.fixture(scope="session")
def model_path():
    return checkpoint_path


@pytest.fixture(scope="session", params=PLATFORMS)
def platform(request) -> openmm.Platform:
    return openmm.Platform.getPlatformByName(request.param)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# ------------------------------------------------------------------------------------- AceFF's own numbers

_REMEDY = "`make models` fetches its weights"


def pytest_addoption(parser):
    parser.addoption(
        "--require-models",
        action="store_true",
        help="fail, not skip, where the weights of a published model are missing",
    )


def pytest_configure():
    """Runs keep the key of their checkpoints in a folder of the tests, for other processes too, and not with the user's own."""
    os.environ["XDG_STATE_HOME"] = str(Path(_FOLDER.name) / "state")
    # A shell lets what it starts in the background, and all that this starts, ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Files that take a minute come first, so that no process has one left when the others are done.
LONGEST = tuple(
    f"test_{name}.py"
    for name in ("zoo", "charge_force", "force", "triton", "lowering", "replica_exchange", "potential", "simulation")
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_runtest_setup(item):
    for marker in item.iter_markers("published"):
        for name in marker.args:
            if WEIGHTS[name][1]:
                stop = pytest.fail if item.config.getoption("--require-models") else pytest.skip
                stop(f"compares with the numbers of {name}: {_REMEDY} ({WEIGHTS[name][1]})")


def pytest_terminal_summary(terminalreporter):
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if _REMEDY in str(r.longrepr)]
    if skipped:
        missing = " and ".join(name for name, (_, problem) in WEIGHTS.items() if problem)
        terminalreporter.write_line(
            f"{len(skipped)} tests that compare with published numbers were skipped: the weights of {missing} are not here. "
            f"To run them: make models, or name their folder in OPENMM_TENSORNET_MODELS."
        )
