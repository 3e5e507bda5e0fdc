"""OpenMM Systems around a TensorNet potential: masses, box, bonds that make the molecules, and the force.

Plain numbers are in the unit that the docstring names; a Quantity is converted before any arithmetic.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..common.checks import either_order, flag, one_of
from ..common.units import positive_in

if TYPE_CHECKING:
    import openmm
    from openmm.app import Topology

    from .base import PotentialForce

with contextlib.suppress(
    ImportError
):  # a System in a file or from another process needs what registers its force and operators
    from . import torchforce as _force  # noqa: F401

# Module and class of each back end's force, and the module without which a System can hold none.
BACKENDS = {
    "torch": ("torchforce", "TensorNetForce", "openmmtorch"),
    "python": ("pythonforce", "TensorNetPythonForce", "openmm_tensornet.forces.pythonforce"),
}


def force_class(backend: str | None = None) -> Any:
    """The force of a back end.

    Parameters
    ----------
    backend : {"torch", "python"}, optional
        TensorNetForce, which needs openmmtorch, or TensorNetPythonForce, which needs OpenMM 8.5. By default the former, and the
        latter where openmmtorch is not installed.
    """
    if backend is None:
        backend = "torch" if find_spec("openmmtorch") else "python"
    return _class_of(one_of("backend", backend, BACKENDS))


def _class_of(backend: str) -> Any:
    from importlib import import_module

    module, name, _ = BACKENDS[backend]
    return getattr(import_module(f"{__package__}.{module}"), name)


def tensornet_forces(system: openmm.System) -> Iterator[PotentialForce]:
    """The TensorNet forces of a System, also of one that was copied or read from XML."""
    classes = [_class_of(backend) for backend, (*_, needed) in BACKENDS.items() if sys.modules.get(needed) is not None]
    for force in system.getForces():
        for kind in classes:
            try:
                yield kind.cast(force)
            except TypeError:
                continue


def atomic_numbers(topology: Topology) -> list[int]:
    """Atomic number of every atom; ValueError where one has no element."""
    numbers = []
    for atom in topology.atoms():
        if atom.element is None:
            raise ValueError(
                f"topology: expected an element for every atom, but {atom_name(atom)} has none "
                "(an extra particle or an unknown symbol); remove it or give it an element"
            )
        numbers.append(atom.element.atomic_number)
    return numbers


def atom_name(atom: Any) -> str:
    """An atom of a topology, for people."""
    return f"atom {atom.index} ({atom.name} of {atom.residue.name} {atom.residue.id})"


@either_order
def create_system(
    model: Any,
    topology: Topology,
    *,
    hydrogen_mass: Any = None,
    remove_cm_motion: bool = True,
    box_vectors: Any = None,
    backend: str | None = None,
    **options: Any,
) -> openmm.System:
    """Build a System in which all atoms of a topology interact through a TensorNet potential.

    Beside the potential it has the masses of the elements, the box, and bonds of zero strength: they add
    no energy, but tell OpenMM which atoms form a molecule, so that a barostat scales molecules as a
    whole and periodic wrapping does not tear them apart.

    Parameters
    ----------
    model : path, str or TensorNet
        A TorchMD-Net checkpoint, an exported file, the name of a known model, or a loaded model.
    topology : openmm.app.Topology
        The atoms, their elements and bonds, and the box. May also come before the model.
    hydrogen_mass : float or Quantity, optional
        In dalton. Every hydrogen gets this mass, taken from the heavy atom it is bonded to.
    remove_cm_motion : bool
        Add a CMMotionRemover.
    box_vectors : (3, 3) array or Quantity, optional
        In nm; replaces the topology's box.
    backend : {"torch", "python"}, optional
        See :func:`force_class`.
    **options
        Everything else that :class:`~openmm_tensornet.TensorNetForce` takes: `positions`, `total_charge`, `precision`,
        `replicas`, `periodic`, `scale_parameter`, ...; another name is a TypeError.

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
    from openmm import CMMotionRemover, System
    from openmm.app import Topology

    from .arguments import is_placeholder

    if not isinstance(topology, Topology):
        raise TypeError(f"topology: expected an openmm.app.Topology, received {type(topology).__name__}")
    remove_cm_motion = flag("remove_cm_motion", remove_cm_motion)
    masses = _masses(topology, hydrogen_mass)
    force = force_class(backend)(model, topology, box_vectors=box_vectors, **options)
    system = System()
    for mass in masses:
        system.addParticle(mass)
    box = topology.getPeriodicBoxVectors() if box_vectors is None else box_vectors
    if box is not None and (box_vectors is not None or not is_placeholder(box)):
        system.setDefaultPeriodicBoxVectors(*box)
    _warn_about_missing_bonds(topology)
    system.addForce(molecule_bonds(topology.bonds(), force.usesPeriodicBoundaryConditions()))
    system.addForce(force)
    if remove_cm_motion:
        system.addForce(CMMotionRemover())
    return system


def molecule_bonds(bonds: Iterable[Any], periodic: bool) -> openmm.HarmonicBondForce:
    """Bonds of zero strength, from which OpenMM knows the molecules."""
    from openmm import HarmonicBondForce

    force = HarmonicBondForce()
    for first, second in bonds:
        force.addBond(first.index, second.index, 0.1, 0.0)
    force.setUsesPeriodicBoundaryConditions(periodic)
    return force


def has_energy(force: openmm.Force) -> bool:
    """False for a CMMotionRemover and for bonds of zero strength."""
    from openmm import CMMotionRemover, HarmonicBondForce

    if isinstance(force, HarmonicBondForce):
        return any(force.getBondParameters(k)[3]._value != 0 for k in range(force.getNumBonds()))
    return not isinstance(force, CMMotionRemover)


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
                f"hydrogen_mass: expected every hydrogen bonded to a heavy atom, but {atom_name(atoms[i])} "
                "is not; add the bond (CONECT records in a PDB file) or leave hydrogen_mass out"
            )
        masses[heavy_neighbor[i]] -= target - masses[i]
        masses[i] = target
    for i in set(heavy_neighbor.values()):
        if masses[i] < target:
            raise ValueError(
                f"hydrogen_mass: {target:g} would leave {atom_name(atoms[i])} with {masses[i]:.3f} dalton, "
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
            f"{atom_name(alone[0])}), so OpenMM takes each for a molecule of its own, and a barostat or "
            "periodic wrapping would tear molecules apart; add bonds (CONECT records in a PDB file)",
            stacklevel=4,
        )
