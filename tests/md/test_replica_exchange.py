"""Replica exchange by the example: processes under MPI against one, and runs that are killed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("openmmtorch", reason="TensorNetForce: openmmtorch is not installed")
netCDF4 = pytest.importorskip("netCDF4", reason="netCDF4, of the extra exchange, is not installed")
for package in ("mpi4py", "openmmtools", "pymbar", "mdtraj"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package}, of the extras exchange and md, is not installed", allow_module_level=True)
MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
if MPIEXEC is None:
    pytest.skip("mpiexec, of mpich or openmpi, is not installed", allow_module_level=True)

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "replica_exchange.py"
REPLICAS = 3
ROUNDING = 1e-3  # kT: two programs in float32


def command(folder: Path, iterations: int, *more: str) -> list[str]:
    options = f"--replicas {REPLICAS} --steps 5 --iterations {iterations} --output {folder}"
    return [sys.executable, str(SCRIPT), *options.split(), *more]


def run(arguments: list[str]) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read(folder: Path) -> dict[str, np.ndarray]:
    """All iterations: energies (kT) of the replicas at all temperatures, states, positions."""
    with netCDF4.Dataset(folder / "exchange.nc") as file, netCDF4.Dataset(folder / "exchange_checkpoint.nc") as more:
        last = int(file["last_iteration"][0])
        arrays = {"energies": file["energies"], "states": file["states"], "positions": more["positions"]}
        return {name: array[: last + 1].filled(np.nan) for name, array in arrays.items()}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    text = run(command(folder, 6))
    assert "iteration 6 of 6" in text and "mean energy" in text
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """Of a run by two processes, the first of which was killed after its third iteration."""
    folder = tmp_path_factory.mktemp("two")
    shell = f'echo $$ > {folder}/pid.$PMI_RANK; exec "$@"'
    arguments = [MPIEXEC, "-n", "2", "sh", "-c", shell, "sh", *command(folder, 100000)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as processes:
        assert any(line.startswith("iteration 3 ") for line in processes.stdout)
        first, second = (int((folder / f"pid.{rank}").read_text()) for rank in range(2))
        os.kill(first, signal.SIGKILL)
        processes.communicate(timeout=60)
    assert processes.returncode != 0
    for _ in range(100):
        if not Path(f"/proc/{second}").exists():
            break
        time.sleep(0.1)
    else:
        pytest.fail("the other process did not end")
    return folder


def test_processes_share_the_replicas_and_give_the_same(one_process, killed):
    """To the last bit: all random numbers follow from the seed."""
    alone, together = read(one_process), read(killed / "copy")
    assert len(together["energies"]) >= 4
    both = min(len(alone["energies"]), len(together["energies"]))
    for name, values in alone.items():
        np.testing.assert_array_equal(together[name][:both], values[:both])
    assert len(np.unique(alone["states"], axis=0)) > 1  # there were exchanges
    first, last = alone["energies"][[0, -1]]
    assert len(np.unique(first[:, 0])) == 1 and len(np.unique(last[:, 0])) == REPLICAS


def test_a_killed_run_goes_on(killed):
    before = read(killed / "copy")
    iterations = len(before["energies"]) + 1  # two more; the first in the file is number 0
    text = run([MPIEXEC, "-n", "2", *command(killed, iterations)])
    assert f"iteration {iterations} of {iterations}" in text and f"iteration {iterations - 2} of" not in text
    after = read(killed)
    assert len(after["energies"]) == iterations + 1
    for name, values in before.items():
        np.testing.assert_array_equal(after[name][: len(values)], values)
        assert np.isfinite(after[name]).all()


@pytest.mark.slow
def test_options_stay_as_they_are(killed):
    refused = subprocess.run(command(killed, 10, "--seed", "2"), capture_output=True, text=True, timeout=600)
    assert refused.returncode == 1 and "has a run with other options" in refused.stderr


@pytest.mark.slow
def test_the_other_backend(one_process, tmp_path):
    pytest.importorskip("openmm_tensornet.forces.pythonforce", reason="TensorNetPythonForce: needs OpenMM 8.5")
    run(command(tmp_path, 2, "--backend", "python"))
    np.testing.assert_allclose(read(tmp_path)["energies"], read(one_process)["energies"][:3], rtol=0, atol=ROUNDING)


# ------------------------------------------------------------------------------------------ files


@pytest.fixture(scope="module")
def example():
    with warnings.catch_warnings():  # of the packages that it imports
        warnings.simplefilter("ignore")
        spec = importlib.util.spec_from_file_location("replica_exchange", SCRIPT)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def write(folder: Path, iteration: int | None) -> None:
    """Files that end with an iteration, or None: cut off in the middle."""
    folder.mkdir(exist_ok=True)
    for name in ("exchange.nc", "exchange_checkpoint.nc"):
        with netCDF4.Dataset(folder / name, "w") as file:
            file.createDimension("scalar", 1)
            file.createVariable("last_iteration", int, "scalar")[0] = iteration or 0
        if iteration is None:
            content = (folder / name).read_bytes()
            (folder / name).write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("written", "copied", "expected"),
    [
        (8, 7, 8),  # killed before the copy was made
        (7, 7, 7),
        (None, 7, 7),  # amid writing an iteration
        (8, None, 8),  # amid copying
        (0, None, None),  # before the first iteration
        (None, None, None),
    ],
)
def test_files_are_restored(example, tmp_path, written, copied, expected):
    write(tmp_path, written)
    write(tmp_path / "copy", copied)
    assert example.restore(tmp_path) == (expected is not None)
    assert example.last_iteration(tmp_path) == expected
    if expected is None:  # a new run can begin
        assert not list(tmp_path.glob("*.nc"))
