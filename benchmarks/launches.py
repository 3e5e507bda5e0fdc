"""Launches of one evaluation on a GPU, counted on a machine without one: `python -m benchmarks.launches`, in about three minutes.

Prints a table in Markdown: what :func:`openmm_tensornet.graph.capture.check_graph_safety` takes as declared, and what is counted where it
looks inside the fused operators. Forces are made without positions; the largest system is in a box.
"""

from __future__ import annotations

import sys

import torch

from openmm_tensornet import StaticPotential, check_graph_safety, load_model
from openmm_tensornet.common.atoms import Atoms
from openmm_tensornet.models.registry import find_model
from openmm_tensornet.static.potential import Options, choose_coulomb_cutoff

MODELS = {"aceff-1.1": "AceFF-1.1", "aceff-2.0": "AceFF-2.0"}
SIZES = (22, 166, 1029)
LARGEST_IN_VACUUM = 500
EDGE = 3.0  # nm, of the box


def launches(model: str, kernels: str, atoms: int) -> tuple[int, int]:
    """Declared and counted, of a molecule of so many atoms or a box with it."""
    periodic = atoms > LARGEST_IN_VACUUM
    network = choose_coulomb_cutoff(load_model(find_model(model, download=False)), periodic, None)
    potential = StaticPotential.make(
        network, Atoms.make([8] + [1] * (atoms - 1)), Options(periodic=periodic, kernels=kernels)
    )
    inputs = (torch.zeros(atoms, 3), *([torch.eye(3) * EDGE] if periodic else []))
    found = check_graph_safety(potential.gpu_program, *inputs)
    return found.kernels, found.counted


def table(sizes: tuple[int, ...] = SIZES) -> str:
    lines = [f"| model, kernels | {' | '.join(f'{n:,} atoms' for n in sizes)} |", "|---" * (1 + len(sizes)) + "|"]
    for model, title in MODELS.items():
        for kernels in ("portable", "fused"):
            cells = ["{}, {}".format(*launches(model, kernels, n)) for n in sizes]
            lines.append(f"| {title}, {kernels} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
