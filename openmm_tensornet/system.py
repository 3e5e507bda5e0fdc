"""OpenMM Systems around a TensorNet potential: masses, box, bonds that make the molecules, and the force.

Plain numbers are in the unit that the docstring names; a Quantity is converted before any arithmetic.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import openmm
    from openmm.app import Topology


def atomic_numbers(topology: Topology) -> list[int]:
    """Atomic number of every atom; ValueError where one has no element."""
    numbers = []
    for atom in topology.atoms():
        if atom.element is None:
            raise ValueError(
                f"topology: expected an element for every atom, but {_atom_name(atom)} has none "
                "(an extra particle or an unknown symbol); remove it or give it an element"
            )
        numbers.append(atom.element.atomic_number)
    return numbers


def _atom_name(atom: Any) -> str:
    return f"atom {atom.index} ({atom.name} of {atom.residue.name} {atom.residue.id})"


def create_system(
    topology: Topology,
    model: Any,
    *,
    positions: Any = None,
    total_charge: float | Sequence[float] = 0,
    hydrogen_mass: Any = None,
    precision: str = "single",
    remove_cm_motion: bool = True,
    molecules: Sequence[int] | None = None,
    periodic: bool | None = None,
    box_vectors: Any = None,
    cuda_graphs: bool = True,
    warmup_steps: int = 10,
) -> openmm.System:
    """Build a System in which all atoms of a topology interact through a TensorNet potential.

    Beside the potential it has the masses of the elements, the box, and bonds of zero strength: they add
    no energy, but tell OpenMM which atoms form a molecule, so that a barostat scales molecules as a
    whole and periodic wrapping does not tear them apart.

    Parameters
    ----------
    topology : openmm.app.Topology
        The atoms, their elements and bonds, and the box.
    model : path, str or TensorNet
        A TorchMD-Net checkpoint, an exported file, the name of a known model, or a loaded model.
    positions : (n, 3) array or Quantity, optional
        In nm. Checked, not stored.
    total_charge : number or one for each molecule
        In elementary charges.
    hydrogen_mass : float or Quantity, optional
        In dalton. Every hydrogen gets this mass, taken from the heavy atom it is bonded to.
    precision : {"single", "double"}
        Arithmetic of the network.
    remove_cm_motion : bool
        Add a CMMotionRemover.
    molecules, periodic, box_vectors, cuda_graphs, warmup_steps
        As in :class:`~openmm_tensornet.TensorNetForce`. `box_vectors` (nm) replaces the topology's box.

    Returns
    -------
    openmm.System

    Raises
    ------
    TypeError
        If `topology` is no Topology.
    ValueError
        If an atom has no element, a hydrogen no heavy atom to take mass from, or a heavy atom would become
        lighter than `hydrogen_mass`; and for everything that TensorNetForce refuses.

    Warns
    -----
    UserWarning
        If atoms have no bonds, so that OpenMM cannot know their molecules.
    """
    from openmm import CMMotionRemover, HarmonicBondForce, System
    from openmm.app import Topology

    from openmm_tensornet.force import TensorNetForce

    if not isinstance(topology, Topology):
        raise TypeError(f"topology: expected an openmm.app.Topology, received {type(topology).__name__}")
    masses = _masses(topology, hydrogen_mass)
    force = TensorNetForce(
        model,
        topology,
        positions=positions,
        total_charge=total_charge,
        precision=precision,
        molecules=molecules,
        periodic=periodic,
        box_vectors=box_vectors,
        cuda_graphs=cuda_graphs,
        warmup_steps=warmup_steps,
    )
    system = System()
    for mass in masses:
        system.addParticle(mass)
    box = topology.getPeriodicBoxVectors() if box_vectors is None else box_vectors
    if box is not None:
        system.setDefaultPeriodicBoxVectors(*box)
    _warn_about_missing_bonds(topology)
    bonds = HarmonicBondForce()
    for first, second in topology.bonds():
        bonds.addBond(first.index, second.index, 0.1, 0.0)
    bonds.setUsesPeriodicBoundaryConditions(force.usesPeriodicBoundaryConditions())
    system.addForce(bonds)
    system.addForce(force)
    if remove_cm_motion:
        system.addForce(CMMotionRemover())
    return system


def _masses(topology: Topology, hydrogen_mass: Any) -> list[float]:
    """Masses in dalton, with those of the hydrogens moved over from their heavy atoms if asked for."""
    from openmm import unit

    numbers = atomic_numbers(topology)
    masses = [atom.element.mass.value_in_unit(unit.dalton) for atom in topology.atoms()]
    if hydrogen_mass is None:
        return masses
    target = positive_in("hydrogen_mass", hydrogen_mass, unit.dalton)
    heavy_neighbor: dict[int, int] = {}
    for bond in topology.bonds():
        for atom, other in (bond, bond[::-1]):
            if numbers[atom.index] == 1 and numbers[other.index] != 1:
                heavy_neighbor.setdefault(atom.index, other.index)
    atoms = list(topology.atoms())
    for i, number in enumerate(numbers):
        if number != 1:
            continue
        if i not in heavy_neighbor:
            raise ValueError(
                f"hydrogen_mass: expected every hydrogen bonded to a heavy atom, but {_atom_name(atoms[i])} "
                "is not; add the bond (CONECT records in a PDB file) or leave hydrogen_mass out"
            )
        masses[heavy_neighbor[i]] -= target - masses[i]
        masses[i] = target
    for i in set(heavy_neighbor.values()):
        if masses[i] < target:
            raise ValueError(
                f"hydrogen_mass: {target:g} would leave {_atom_name(atoms[i])} with {masses[i]:.3f} dalton, "
                "less than its hydrogens; choose a smaller value"
            )
    return masses


def _warn_about_missing_bonds(topology: Topology) -> None:
    bonded = {atom.index for bond in topology.bonds() for atom in bond}
    alone = [
        atom
        for atom in topology.atoms()
        if atom.index not in bonded and (not bonded or len(list(atom.residue.atoms())) > 1)
    ]
    if alone and topology.getNumAtoms() > 1:
        warnings.warn(
            f"topology: {len(alone)} of {topology.getNumAtoms()} atoms have no bond (first: "
            f"{_atom_name(alone[0])}), so OpenMM takes each for a molecule of its own, and a barostat or "
            "periodic wrapping would tear molecules apart; add bonds (CONECT records in a PDB file)",
            stacklevel=3,
        )


def number_in(name: str, value: Any, unit: Any) -> float:
    """A plain number or Quantity as a float in `unit`; ValueError if it is not finite."""
    from openmm.unit import is_quantity

    if is_quantity(value):
        if not value.unit.is_compatible(unit):
            raise ValueError(f"{name}: expected a Quantity in {unit.get_name()}, received {value}")
        value = value.value_in_unit(unit)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number or Quantity in {unit.get_name()}, received {value!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number in {unit.get_name()}, received {number}")
    return number


def positive_in(name: str, value: Any, unit: Any) -> float:
    number = number_in(name, value, unit)
    if number <= 0:
        raise ValueError(f"{name}: expected more than 0 {unit.get_name()}, received {number:g}")
    return number
