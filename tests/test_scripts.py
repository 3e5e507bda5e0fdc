"""Short scripts as users write them, each in a process of its own: what once crashed must not take the tests with it."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "alanine_dipeptide.pdb"

ATOMS_BEYOND = """
import sys
import openmm, openmm_tensornet
model, kind, kernels, platform = sys.argv[1:]
force = getattr(openmm_tensornet, kind)(model, atomic_numbers=[8, 1, 1], atoms=[1, 2, 7], kernels=kernels)
system = openmm.System()
for mass in (16, 1, 1):
    system.addParticle(mass)
system.addForce(force)
try:
    context = openmm.Context(system, openmm.VerletIntegrator(0.0005), openmm.Platform.getPlatformByName(platform))
    context.setPositions([[0, 0, 0], [0.0957, 0, 0], [-0.024, 0.0927, 0]])
    context.getState(energy=True)
except Exception as error:
    print(error)
"""

SPAWNED = """
import multiprocessing, random, sys
from concurrent.futures import ProcessPoolExecutor
import numpy, openmm, torch
from openmm.app import PDBFile
from openmm_tensornet import create_system

def energy(system, file):
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), openmm.Platform.getPlatformByName("Reference"))
    context.setPositions(PDBFile(file).positions)
    return context.getState(energy=True).getPotentialEnergy()._value

def states():
    return torch.random.get_rng_state().tolist(), str(numpy.random.get_state()), random.getstate()

if __name__ == "__main__":
    model, file = sys.argv[1:]
    before = states()
    system = create_system(PDBFile(file).topology, model, kernels="fused")
    print("random numbers kept", states() == before)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        print("same energy", abs(pool.submit(energy, system, file).result(timeout=100) - energy(system, file)) < 1e-3)
"""


def run(script: str, *arguments) -> str:
    """What a script prints; a crash fails the test."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr}"
    return done.stdout


@pytest.mark.parametrize(
    ("kind", "kernels", "platform"),
    [
        ("TensorNetForce", "fused", "CPU"),
        ("TensorNetForce", "portable", "Reference"),
        ("TensorNetPythonForce", "fused", "Reference"),
    ],
)
def test_atoms_that_the_system_has_not(model_path, kind, kernels, platform):
    said = run(ATOMS_BEYOND, model_path("variants/zero-layers"), kind, kernels, platform)
    assert "atoms: expected indices below the number of the System's particles, 3, received 7" in said


def test_a_spawned_worker(model_path, tmp_path):
    """It imports no more than the script does, and has the operators of the fused kernels."""
    script = tmp_path / "script.py"
    script.write_text(SPAWNED)
    command = [sys.executable, script, model_path("variants/zero-layers"), EXAMPLE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stdout == "random numbers kept True\nsame energy True\n", done.stderr
