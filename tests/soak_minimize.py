"""OpenMM's minimiser from distorted structures: pairs of atoms are moved to 0.02 and 0.05 nm from each other.

    python tests/soak_minimize.py [--structures 50] [--models aceff-1.1 aceff-2.0]

Both back ends minimise the same structures of ten molecules. Every energy must be finite and lower than before, within a minute.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import openmm
import torch

from openmm_tensornet.forces.system import BACKENDS, force_class

SECONDS = 60
TOLERANCE = 10  # kJ/mol/nm, where OpenMM's minimiser stops unless told
DISTANCES = (0.02, 0.05)  # nm
MOLECULES = {
    "ethanol": "CCO",
    "benzene": "c1ccccc1",
    "acetamide": "CC(=O)N",
    "acetate": "CC(=O)[O-]",
    "aspirin": "CC(=O)Oc1ccccc1C(=O)O",
    "caffeine": "Cn1cnc2c1c(=O)n(C)c(=O)n2C",
    "dimethyl sulfoxide": "CS(=O)C",
    "chlorofluoromethane": "FCCl",
    "ibuprofen": "CC(C)Cc1ccc(cc1)C(C)C(=O)O",
    "alanine dipeptide": "CC(=O)N[C@@H](C)C(=O)NC",
}


def molecule(name: str) -> tuple[list[int], int, np.ndarray]:
    """Atomic numbers, charge and positions (n, 3), nm, of a molecule."""
    from rdkit import Chem
    from rdkit.Chem import AllChem

    made = Chem.AddHs(Chem.MolFromSmiles(MOLECULES[name]))
    AllChem.EmbedMolecule(made, randomSeed=1)
    AllChem.MMFFOptimizeMolecule(made)
    numbers = [atom.GetAtomicNum() for atom in made.GetAtoms()]
    return numbers, Chem.GetFormalCharge(made), made.GetConformer().GetPositions() / 10


def distort(positions: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Move some atoms to places near others, in random directions."""
    moved = positions.copy()
    chosen = random.permutation(len(moved))
    for first, second in chosen[: 2 * random.integers(1, len(moved) // 4 + 1)].reshape(-1, 2):
        direction = random.standard_normal(3)
        moved[second] = moved[first] + random.choice(DISTANCES) * direction / np.linalg.norm(direction)
    return moved


def minimised(
    model: Any, backend: str, numbers: list[int], charge: int, structures: list[np.ndarray]
) -> Iterator[dict]:
    """Energies (kJ/mol) before and after a minimisation of each structure, root mean square of the forces' components after it
    (kJ/mol/nm), and its time (s); what it raised, if it did."""
    system = openmm.System()
    for number in numbers:
        system.addParticle(openmm.app.Element.getByAtomicNumber(number).mass)
    system.addForce(force_class(backend)(model, atomic_numbers=numbers, total_charge=charge))
    platform = openmm.Platform.getPlatformByName("Reference")
    context = openmm.Context(system, openmm.VerletIntegrator(0.0005), platform)
    for positions in structures:
        context.setPositions(positions)
        before = context.getState(energy=True).getPotentialEnergy()._value
        started, raised = time.monotonic(), ""
        former = signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(SECONDS)
        try:
            openmm.LocalEnergyMinimizer.minimize(context)
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, former)
        seconds = time.monotonic() - started
        state = context.getState(energy=True, forces=True)
        after = state.getPotentialEnergy()._value
        force = float(np.sqrt(np.mean(state.getForces(asNumpy=True)._value ** 2)))
        good = not raised and math.isfinite(before) and math.isfinite(after) and after < before
        yield {"before": before, "after": after, "force": force, "seconds": seconds, "raised": raised, "good": good}


def _too_long(*_: object) -> None:
    raise TimeoutError(f"longer than {SECONDS} s")


def main() -> int:
    """1 if a minimisation failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--structures", type=int, default=50, help="of all ten molecules together (default: 50)")
    parser.add_argument("--models", nargs="*", default=["aceff-1.1", "aceff-2.0"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    for model in options.models:
        for number, name in enumerate(MOLECULES):
            numbers, charge, positions = molecule(name)
            random = np.random.default_rng(number)
            structures = [distort(positions, random) for _ in range(options.structures // len(MOLECULES))]
            for backend in BACKENDS:
                found = list(minimised(model, backend, numbers, charge, structures))
                bad = [one for one in found if not one["good"]]
                failed += len(bad)
                print(
                    f"{model}, {name}, {backend}: {len(found) - len(bad)} of {len(found)} finite and lower, "
                    f"{sum(one['force'] < TOLERANCE for one in found)} with forces below {TOLERANCE} kJ/mol/nm, all below "
                    f"{max(one['force'] for one in found):.0f}; at most {max(one['seconds'] for one in found):.1f} s {bad or ''}",
                    flush=True,
                )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
