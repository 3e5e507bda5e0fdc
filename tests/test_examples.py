"""Every example runs as it stands, shortened by its own options."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from openmm_tensornet.models.registry import find_model

pytest.importorskip("openmmtorch", reason="TensorNetForce: openmmtorch is not installed")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
STRUCTURE = EXAMPLES / "alanine_dipeptide.pdb"
BUNDLED = "alanine-dipeptide-gfn2"
ELSEWHERE = {"replica_exchange", "train_alanine_dipeptide"}  # with test files of their own


def own_checkpoint(folder: Path, text: str) -> None:
    import mdtraj

    assert text.startswith("64 channels, 1 layers, cutoff 0.5 nm, elements [1, 6, 7, 8]")
    assert [row[0] for row in csv.reader(text.splitlines()[2:])] == ["100", "200"]
    assert mdtraj.load(str(folder / "alanine_dipeptide.dcd"), top=str(STRUCTURE)).n_frames == 2


def ml_mm(folder: Path, text: str) -> None:
    values = re.findall(r"^(.+): ([\d.]+) K over 0\.05 ps; .* standard deviation ([\d.]+) kJ/mol", text, re.MULTILINE)
    assert [name for name, *_ in values] == ["ML/MM", "MM alone"]
    assert all(100 < float(kelvin) < 400 and float(deviation) < 20 for _, kelvin, deviation in values)


def replicas(folder: Path, text: str) -> None:
    assert "2 replicas: " in text
    low, high = re.findall(r"potential energy: (\S+) to (\S+) kJ/mol", text)[0]
    assert float(low) < float(high)  # each has random numbers of its own
    assert (folder / "replicas.dcd").exists()


def metadynamics(folder: Path, text: str) -> None:
    found = dict(re.findall(r"^(\w+) +(-?[\d.]+) kJ/mol$", text, re.MULTILINE))
    assert list(found) == ["C7eq", "C5", "C7ax", "alphaR"]
    free_energy = np.load(folder / "metadynamics.npy")
    assert free_energy.shape == (60, 60) and free_energy.min() == 0 < free_energy.max()
    psi, phi = (360 / 59 * k - 180 for k in np.unravel_index(free_energy.argmin(), free_energy.shape))
    # Where the run started: extended, across the borders of both angles.
    assert abs(psi) > 90 and (phi < -90 or phi > 150)


def switch_force_field(folder: Path, text: str) -> None:
    slopes = [float(value) for value in re.findall(r"mean dE/dlambda +(\S+) kJ/mol", text)]
    value, error, offset = re.findall(r"free energy (\S+) ± (\S+) kJ/mol, without (\S+)", text)[0]
    assert len(slopes) == 3 and slopes[0] > slopes[2]  # the free energy is concave in lambda
    assert slopes[2] - 20 < float(value) < slopes[0] + 20
    assert 0 < float(error) < 50 and -87000 < float(offset) < -86000


# Options, packages beside those of the extra cpu, and what must come out.
RUNS = {
    "alanine_dipeptide": (["{checkpoint}", "--time", "0.1"], ["mdtraj"], own_checkpoint),
    "mixed_ml_mm": ([BUNDLED, "--time", "0.05", "--short", "0.02"], ["openmmml"], ml_mm),
    "replicas": ([BUNDLED, "--time", "0.002", "--replicas", "2"], [], replicas),
    "metadynamics": (["--time", "0.2"], [], metadynamics),
    "switch_force_field": (["--windows", "3", "--time", "0.3"], ["pymbar"], switch_force_field),
}


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(RUNS) | ELSEWHERE


@pytest.mark.parametrize("name", RUNS)
def test_example(name, tmp_path):
    arguments, packages, check = RUNS[name]
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    arguments = [text.format(checkpoint=find_model(BUNDLED)) for text in arguments]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    check(tmp_path, done.stdout)


def test_notebook(tmp_path):
    for package in ("nbclient", "ipykernel", "py3Dmol", "mdtraj", "matplotlib"):
        if find_spec(package) is None:
            pytest.skip(f"{package}, of the extra notebook or md, is not installed")
    import nbformat
    from nbclient import NotebookClient

    shutil.copy(STRUCTURE, tmp_path)
    notebook = nbformat.read(EXAMPLES / "alanine_dipeptide.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    (cell,) = (cell for cell in notebook.cells if "picoseconds = 50" in cell.source)
    cell.source = cell.source.replace("picoseconds = 50", "picoseconds = 0.2")
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    kinds = [set(output.data) for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    assert any("image/png" in kind for kind in kinds)
    assert any("application/3dmoljs_load.v0" in kind for kind in kinds)
    assert "C7eq" in notebook.cells[-1].outputs[-1].data["text/plain"]
