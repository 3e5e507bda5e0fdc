"""Energies and forces of GFN2-xTB (tblite), and files of labelled geometries.

Inside this package lengths are in Å and energies in eV, the units of the model.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
from openmm import unit
from tblite.interface import Calculator, Result

from openmm_tensornet.common.files import replace_file
from openmm_tensornet.common.units import KJ_PER_MOL_PER_EV, NM_PER_ANGSTROM, ModelUnits

_ATOMIC = ModelUnits.from_openmm(unit.bohr, unit.hartree)
BOHR = _ATOMIC.nm_per_length / NM_PER_ANGSTROM  # Å
HARTREE = _ATOMIC.kj_per_mol_per_energy / KJ_PER_MOL_PER_EV  # eV
KCAL = KJ_PER_MOL_PER_EV / 4.184  # kcal/mol in an eV


# Names of the arrays in a file of labels: Å, eV and eV/Å.
LABELS = ("positions", "energies", "forces")


class GFN2:
    """GFN2-xTB of one neutral closed-shell molecule.

    Parameters
    ----------
    z : array of int, shape (n,)
        Atomic numbers.
    trajectory : bool
        Whether geometries follow each other as in a trajectory: then each starts from the electrons of the one before, in half
        the time (forces differ by less than 1e-3 eV/Å).
    """

    def __init__(self, z: np.ndarray, trajectory: bool = False):
        self.z, self.trajectory = np.asarray(z), trajectory
        self._calculator: Calculator | None = None
        self._last: Result | None = None

    def __call__(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """Energy (eV) and forces (eV/Å), shape (n, 3), at positions `x` (Å), shape (n, 3).

        Raises
        ------
        RuntimeError
            If the self-consistent field does not converge.
        """
        positions = np.asarray(x, dtype=np.float64) / BOHR
        if self._calculator is None:
            self._calculator = Calculator("GFN2-xTB", self.z, positions)
            self._calculator.set("verbosity", 0)
        self._calculator.update(positions)
        result = self._calculator.singlepoint(self._last)
        self._last = result if self.trajectory else None
        return float(result.get("energy")) * HARTREE, -np.asarray(result.get("gradient")) * (HARTREE / BOHR)

    def label(self, frames: np.ndarray, progress=iter) -> dict[str, np.ndarray]:
        """Label frames, shape (m, n, 3), Å; those that do not converge are left out.

        Returns
        -------
        dict
            ``positions`` (Å), ``energies`` (eV) and ``forces`` (eV/Å), shapes (k, n, 3), (k,) and (k, n, 3), k ≤ m.
        """
        kept, energies, forces = [], [], []
        for x in progress(frames):
            try:
                energy, force = self(x)
            except RuntimeError:
                continue
            kept.append(x)
            energies.append(energy)
            forces.append(force)
        return {name: np.array(values) for name, values in zip(LABELS, (kept, energies, forces), strict=True)}


def write_arrays(path: str | os.PathLike, **arrays) -> None:
    """Write an ``.npz`` file, the whole of it or nothing."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, buffer.getvalue())


def read_arrays(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """What :func:`write_arrays` wrote."""
    with np.load(path) as file:
        return {name: file[name] for name in file.files}
