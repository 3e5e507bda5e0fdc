"""Structures from files, with nothing guessed: PDB and PDBx/mmCIF by OpenMM, SDF and XYZ by RDKit."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from openmm import unit
from openmm.app import Element, PDBFile, PDBxFile, Topology, element
from openmm.app.internal.pdbx.reader.PdbxReader import PdbxReader

from ..common.atoms import formal_charge
from ..forces.arguments import is_placeholder
from ..forces.system import atomic_numbers


class Structure(NamedTuple):
    """What a file says of atoms.

    Attributes
    ----------
    topology : openmm.app.Topology
        With the box of the file, if it has one; a placeholder (1 Å) is left out with a warning.
        With the formal charges of the file, if it has any.
    positions : openmm.unit.Quantity, shape (n, 3)
    """

    topology: Topology
    positions: unit.Quantity


def read_structure(path: str | os.PathLike[str], *, allow_no_hydrogens: bool = False) -> Structure:
    """Read a file, refusing what a reader would guess or drop.

    Parameters
    ----------
    path : path
        A file named as one of :data:`READERS`. Of several models the first is used.
    allow_no_hydrogens : bool
        Accept a structure with carbon and without any hydrogen (CO2, CCl4).

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ImportError
        If its reader is not installed.
    ValueError
        If it cannot be read, has no atoms, atoms without an element, extra particles, several positions of
        one atom, implicit hydrogens or none, or flat coordinates.
    """
    path = Path(path)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path}: expected a file named {', '.join(READERS)}, received '{path.suffix}'")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    structure, models = reader(path)
    if models > 1:
        warnings.warn(f"{path}: has {models} models, the first is used", stacklevel=2)
    if is_placeholder(structure.topology.getPeriodicBoxVectors()):
        warnings.warn(
            f"{path}: the box (CRYST1, _cell) of 1 Å is a placeholder that holds no molecule; left out, as for a molecule in vacuum",
            stacklevel=2,
        )
        structure.topology.setPeriodicBoxVectors(None)
    numbers = atomic_numbers(structure.topology)
    if not numbers:
        raise ValueError(f"{path}: expected atoms, found none")
    if 6 in numbers and 1 not in numbers and not allow_no_hydrogens:
        raise ValueError(
            f"{path}: has carbon but no hydrogen; the potential needs every atom, so add hydrogens first "
            "(openmm.app.Modeller.addHydrogens, pdbfixer or rdkit.Chem.AddHs)"
        )
    return structure


def total_charge(structure: Structure, charge: int | None) -> int:
    """The total charge to use: `charge`, or 0 where nothing speaks against it.

    Raises
    ------
    ValueError
        If none is given and the number of electrons would be odd, or the formal charges do not sum to zero.
    """
    stated = formal_charge(structure.topology.atoms())
    if charge is None and stated:
        raise ValueError(
            f"--charge: expected a total charge, because the formal charges of the file sum to {stated:+d}; "
            f"give it (--charge {stated})"
        )
    electrons = sum(atomic_numbers(structure.topology)) - (charge or 0)
    if electrons % 2 and charge is None:
        raise ValueError(
            f"--charge: expected a total charge, because the neutral structure has an odd number of "
            f"electrons ({electrons}); give it (0 for a radical), or correct the hydrogens"
        )
    if electrons % 2:
        warnings.warn(f"charge {charge} leaves an odd number of electrons ({electrons})", stacklevel=2)
    return charge or 0


# ------------------------------------------------------------------------------------ PDB and PDBx/mmCIF


def _read_with_openmm(path: Path) -> tuple[Structure, int]:
    reader = PDBFile if path.suffix.lower() in (".pdb", ".ent") else PDBxFile
    num_records = _count_pdb_atoms(path) if reader is PDBFile else None  # PDBx/mmCIF: below
    if num_records == 0:
        raise ValueError(f"{path}: expected atoms, found none")
    try:
        with open(path) as file, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            structure = reader(file)
    except Exception as error:  # the readers raise whatever their parsing stumbles over
        raise ValueError(
            f"{path}: OpenMM's {reader.__name__} cannot read it: {type(error).__name__}: {error}"
        ) from error
    topology = structure.topology
    if reader is PDBxFile:
        num_records = _read_mmcif_charges(path, topology)
    if num_records != topology.getNumAtoms():
        raise ValueError(
            f"{path}: {num_records} atom records but {topology.getNumAtoms()} distinct atoms; give every "
            "atom of a residue its own name and keep one alternate location"
        )
    for warning in caught:  # only now: the errors above say more
        warnings.warn(str(warning.message), stacklevel=3)
    return Structure(topology, structure.getPositions(asNumpy=True)), structure.getNumFrames()


def _count_pdb_atoms(path: Path) -> int:
    """Number of atoms in the first model of a PDB file; ValueError where an element is missing.

    OpenMM guesses a missing element from the atom's name, and guesses BR as boron.
    """
    count = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if line.startswith("END"):
                break
            if not line.startswith(("ATOM  ", "HETATM")):
                continue
            count += 1
            symbol = line[76:78].strip()
            try:
                if symbol != "EP":
                    element.get_by_symbol(symbol)
            except KeyError:
                raise ValueError(
                    f"{path}: line {number}: expected the element of atom '{line[12:16].strip()}' in columns "
                    f"77-78, found '{symbol}'; write the element column"
                ) from None
    return count


def _read_mmcif_charges(path: Path, topology: Topology) -> int:
    """Give the atoms of a topology the formal charges of their PDBx/mmCIF file, which OpenMM drops.

    Returns
    -------
    int
        Number of atom records in the first model.
    """
    blocks: list[Any] = []
    with open(path) as file:
        PdbxReader(file).read(blocks)
    table = blocks[0].getObj("atom_site")
    rows, model, charge = (
        table.getRowList(),
        *map(table.getAttributeIndex, ("pdbx_PDB_model_num", "pdbx_formal_charge")),
    )
    if model != -1:
        rows = [row for row in rows if row[model] == rows[0][model]]
    if charge != -1 and len(rows) == topology.getNumAtoms():
        for atom, row in zip(topology.atoms(), rows, strict=True):
            if row[charge] not in (".", "?"):
                atom.formalCharge = int(row[charge])
    return len(rows)


# ------------------------------------------------------------------------------------------- SDF and XYZ


def _read_with_rdkit(path: Path) -> tuple[Structure, int]:
    try:
        from rdkit import Chem, rdBase
    except ImportError as error:
        raise ImportError(
            f"{path}: SDF and XYZ files need rdkit, which cannot be imported ({error}); install it with "
            "`pip install openmm-tensornet[formats]`, or convert the file to PDB"
        ) from error
    sdf = path.suffix.lower() != ".xyz"
    try:
        quiet = rdBase.BlockLogs()  # it writes to the terminal; what is wrong is said below
        if sdf:
            found = Chem.SDMolSupplier(str(path), sanitize=False, removeHs=False)
            molecule, models = (found[0], len(found)) if len(found) else (None, 0)
        else:
            if "lattice" in "".join(path.read_text(errors="replace").splitlines()[1:2]).lower():
                raise ValueError(
                    f"{path}: expected no box in an XYZ file, received one, which would be lost; convert the file to PDB"
                )
            molecule, models = Chem.MolFromXYZFile(str(path)), 1
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{path}: RDKit cannot read it: {error}") from error
    finally:
        del quiet
    if molecule is None:
        kind = "an SDF file" if sdf else "an XYZ file of one geometry"
        raise ValueError(f"{path}: expected {kind}, received one that RDKit cannot read")
    molecule.UpdatePropertyCache(strict=False)
    implicit = sum(atom.GetTotalNumHs() for atom in molecule.GetAtoms())
    if sdf and implicit:
        raise ValueError(
            f"{path}: expected every hydrogen, but {implicit} of them are implicit; write them with coordinates (rdkit.Chem.AddHs)"
        )
    if sdf and not molecule.GetConformer().Is3D():
        raise ValueError(f"{path}: expected three-dimensional coordinates, received a flat drawing; embed the molecule")
    topology = Topology()
    residue = topology.addResidue("MOL", topology.addChain())
    atoms = []
    for k, atom in enumerate(molecule.GetAtoms(), start=1):
        if not atom.GetAtomicNum():
            raise ValueError(f"{path}: atom {k}: expected an element, received '{atom.GetSymbol()}'")
        kind = Element.getByAtomicNumber(atom.GetAtomicNum())
        charge = atom.GetFormalCharge() if sdf else None
        atoms.append(topology.addAtom(f"{kind.symbol}{k}", kind, residue, formalCharge=charge))
    for bond in molecule.GetBonds():
        topology.addBond(atoms[bond.GetBeginAtomIdx()], atoms[bond.GetEndAtomIdx()])
    positions = molecule.GetConformer().GetPositions() * 0.1 * unit.nanometer
    return Structure(topology, positions), models


# What follows a file's name, and what reads it.
READERS: dict[str, Callable[[Path], tuple[Structure, Any]]] = {
    **dict.fromkeys((".pdb", ".ent", ".cif", ".mmcif"), _read_with_openmm),
    **dict.fromkeys((".sdf", ".mol", ".xyz"), _read_with_rdkit),
}
