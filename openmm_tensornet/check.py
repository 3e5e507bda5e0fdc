"""Self-test of an installation: ``python -m openmm_tensornet.check``.

Compares the bundled model with energies and forces of torchmd-net, through both back ends and both kinds of kernels, and
verifies that a run without thermostat conserves its energy. Prints a table; the exit status is 1 if anything failed.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__
from .common.units import KJ_PER_MOL_PER_EV
from .models.accuracy import TOLERANCES, Tolerance, deviation

MODEL = "alanine-dipeptide-gfn2"
# Back ends and kernels.
CHOICES = list(product(("TorchForce", "PythonForce"), ("portable", "fused")))
# Of a run without thermostat: kJ/mol and kJ/mol/ps.
LARGEST_DEVIATION, LARGEST_DRIFT = 1.0, 1.0


def read_reference() -> dict[str, Any]:
    """Atomic numbers, positions (N, 3), Å, energy, eV, and forces (N, 3), eV/Å, of the bundled model as torchmd-net computes them."""
    return json.loads((Path(__file__).parent / "models" / f"{MODEL}.json").read_text(encoding="utf-8"))


def make_system(backend: str, reference: dict[str, Any], **options: Any) -> Any:
    """A System with one of the forces; ImportError where a package is missing."""
    import openmm
    from openmm.app import Element

    if backend == "TorchForce":
        from .forces.torchforce import TensorNetForce as Force
    else:
        from .forces.pythonforce import TensorNetPythonForce as Force  # type: ignore[assignment]
    system = openmm.System()
    for number in reference["atomic_numbers"]:
        system.addParticle(Element.getByAtomicNumber(number).mass)
    force = Force(
        MODEL,
        atomic_numbers=reference["atomic_numbers"],
        positions=np.array(reference["positions_angstrom"]) / 10,
        **options,
    )
    system.addForce(force)
    return system


def compare(system: Any, reference: dict[str, Any], tolerance: Tolerance) -> tuple[bool, str]:
    """Whether energy and forces are the reference's, and how far they are from it."""
    import openmm
    import torch
    from openmm import unit

    context = openmm.Context(system, openmm.VerletIntegrator(0.001), openmm.Platform.getPlatformByName("Reference"))
    context.setPositions(np.array(reference["positions_angstrom"]) / 10)
    state = context.getState(energy=True, forces=True)
    energy = state.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole)
    forces = state.getForces(asNumpy=True).value_in_unit(unit.kilojoule_per_mole / unit.nanometer)
    expected = (
        torch.tensor([reference["energy"]], dtype=torch.float64) * KJ_PER_MOL_PER_EV,
        (torch.tensor(reference["forces"], dtype=torch.float64) * (10 * KJ_PER_MOL_PER_EV)),
    )
    found = deviation((torch.tensor([energy], dtype=torch.float64), torch.tensor(forces)), expected)
    return found.within(tolerance), f"{found.energy:.1e} eV/atom, forces {found.force:.1e}"


def conserve(system: Any, reference: dict[str, Any]) -> tuple[bool, str]:
    """Whether half a picosecond at constant energy conserves it."""
    from .md.analysis import compute_drift, run_constant_energy

    positions = np.array(reference["positions_angstrom"]) / 10
    time, energy = run_constant_energy(system, positions, time=0.5, platform="Reference")
    drift, _ = compute_drift(time, energy)
    spread = float(np.std(energy))
    passed = spread < LARGEST_DEVIATION and abs(drift) < LARGEST_DRIFT
    return passed, f"standard deviation {spread:.1e} kJ/mol, drift {drift:+.1e} kJ/mol/ps"


def run() -> Iterator[tuple[str, bool | None, str]]:
    """Name, whether it passed (None where a package is missing), and the numbers of each check."""
    reference = read_reference()
    for backend, kernels in CHOICES:
        for precision, tolerance in TOLERANCES.items():
            name = f"{backend}, {kernels}, {precision}"
            try:
                system = make_system(backend, reference, kernels=kernels, precision=precision)
            except ImportError as error:
                yield name, None, str(error)
                continue
            yield name, *compare(system, reference, tolerance)
            if precision == "single":
                yield f"{name}: constant energy", *conserve(system, reference)


def main() -> int:
    """Print the table."""
    import openmm
    import torch

    torch.set_num_threads(1)
    print(f"openmm-tensornet {__version__}, OpenMM {openmm.__version__}, PyTorch {torch.__version__}, {MODEL}")
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for name, passed, numbers in run():
            results.append(passed)
            word = "missing" if passed is None else "passed" if passed else "FAILED"
            print(f"{word:8} {name:46} {numbers}", flush=True)
    failed, missing = results.count(False), results.count(None)
    if results.count(True) == 0:
        print("nothing could be checked: see what is missing")
        return 1
    print(f"{len(results)} checks: {results.count(True)} passed, {failed} failed, {missing} not possible here")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
