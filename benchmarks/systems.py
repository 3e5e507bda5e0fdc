"""The systems that are timed. Needs NumPy alone, so that every environment can import it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks" / "data"


@dataclass(frozen=True)
class Case:
    """One system of the registry.

    Attributes
    ----------
    name : str
    file : Path
        Extended XYZ (Å) or PDB.
    atoms : int
        How many there are.
    total_charge : int
        In elementary charges.
    periodic : bool
    description : str
        A few words for the table.
    model : str, optional
        Name of a known model, with which this case is timed instead of that of the run.
    """

    name: str
    file: Path
    atoms: int
    total_charge: int
    periodic: bool
    description: str
    model: str | None = None

    def checkpoint(self, model: str | Path) -> str:
        """Path of the checkpoint of this case, given that of the run; errors as `find_model` raises them."""
        if self.model is None:
            return str(model)
        from openmm_tensornet.models.registry import find_model

        return str(find_model(self.model, download=False).resolve())


@dataclass(frozen=True)
class Structure:
    """What a file holds: element symbols, positions (N, 3) in nm, box vectors (rows of (3, 3), nm) or None."""

    symbols: list[str]
    positions: np.ndarray
    box: np.ndarray | None

    def repeated(self, replicas: int) -> Structure:
        """So many copies at the same place."""
        return Structure(self.symbols * replicas, np.tile(self.positions, (replicas, 1)), self.box)


CASES = {
    case.name: case
    for case in (
        Case(
            "alanine-dipeptide",
            ROOT / "examples" / "alanine_dipeptide.pdb",
            22,
            0,
            False,
            "alanine dipeptide",
        ),
        Case(
            "alanine-dipeptide-charges",
            ROOT / "examples" / "alanine_dipeptide.pdb",
            22,
            0,
            False,
            "alanine dipeptide, AceFF-2.0",
            "aceff-2.0",
        ),
        Case("testosterone", DATA / "testosterone.xyz", 49, 0, False, "testosterone"),
        Case("chignolin", DATA / "cln025.xyz", 166, -2, False, "chignolin variant CLN025"),
        Case("water", DATA / "water.xyz", 192, 0, True, "64 waters, periodic"),
        Case("protein-size", DATA / "cln025_in_water.xyz", 2500, -2, True, "CLN025 in 778 waters, periodic"),
    )
}


def load(case: Case) -> Structure:
    """Read a case's file.

    Raises
    ------
    ValueError
        If the file is not what the registry says.
    """
    text = case.file.read_text()
    structure = _parse_pdb(text) if case.file.suffix == ".pdb" else parse_xyz(text)
    if len(structure.symbols) != case.atoms:
        raise ValueError(f"{case.name}: expected {case.atoms} atoms, received {len(structure.symbols)}")
    if (structure.box is not None) != case.periodic:
        raise ValueError(f"{case.name}: expected periodic={case.periodic}, received box {structure.box}")
    return structure


def parse_xyz(text: str) -> Structure:
    """Read one frame of extended XYZ, Å; the box is the key Lattice of the second line."""
    count, comment, *rows = text.splitlines()
    fields = [row.split() for row in rows if row.strip()]
    if len(fields) != int(count):
        raise ValueError(f"expected {int(count)} atoms as the first line says, received {len(fields)}")
    lattice = re.search(r'Lattice="([^"]*)"', comment)
    box = None if lattice is None else np.array([float(c) for c in lattice[1].split()]).reshape(3, 3) / 10
    positions = np.array([[float(c) for c in row[1:4]] for row in fields]) / 10
    return Structure([row[0] for row in fields], positions, box)


def _parse_pdb(text: str) -> Structure:
    """Read the atoms of one PDB model without a box."""
    rows = [line for line in text.splitlines() if line.startswith(("ATOM", "HETATM"))]
    positions = np.array([[float(row[k : k + 8]) for k in (30, 38, 46)] for row in rows]) / 10
    return Structure([row[76:78].strip().capitalize() for row in rows], positions, None)
