"""Short scripts as users write them, each in a process of its own: what once crashed must not take the tests with it."""

import subprocess
import sys

import pytest

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
