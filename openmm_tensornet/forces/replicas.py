"""Many copies of a molecule in one System, which do not see each other."""

from __future__ import annotations

from typing import Any

import numpy as np
from openmm import unit
from openmm.app import Topology

from ..common.checks import integer
from ..common.units import lengths_in_nm


def replicate(topology: Topology, positions: Any, n: int) -> tuple[Topology, unit.Quantity, np.ndarray]:
    """Put copies of everything in one place.

    Parameters
    ----------
    topology : openmm.app.Topology
        Of N atoms, in vacuum.
    positions : Quantity or array, shape (N, 3)
        nm.
    n : int
        How many copies.

    Returns
    -------
    topology : openmm.app.Topology
        Of n·N atoms: all of the first copy, then all of the second one.
    positions : Quantity, shape (n·N, 3)
    replicas : ndarray of int, shape (n·N,)
        Copy of each atom: what :class:`~openmm_tensornet.TensorNetForce` and :func:`~openmm_tensornet.create_system` take as `replicas`.

    Raises
    ------
    ValueError
        If there is a box, of which the copies would be in each other's way, if the positions are not those of the atoms, or if `n` is
        below 1.
    """
    integer("n", n, 1)
    if topology.getPeriodicBoxVectors() is not None:
        raise ValueError(
            "topology: expected none with a box, since replicas in one box would see each other; remove the box vectors"
        )
    count = topology.getNumAtoms()
    own = lengths_in_nm("positions", positions, (count, 3))
    copies = Topology()
    for _ in range(n):
        atoms = {}
        for chain in topology.chains():
            new_chain = copies.addChain(chain.id)
            for residue in chain.residues():
                new_residue = copies.addResidue(residue.name, new_chain, residue.id, residue.insertionCode)
                for atom in residue.atoms():
                    atoms[atom] = copies.addAtom(atom.name, atom.element, new_residue, atom.id, atom.formalCharge)
        for bond in topology.bonds():
            copies.addBond(atoms[bond[0]], atoms[bond[1]], bond.type, bond.order)
    return copies, np.tile(own, (n, 1)) * unit.nanometer, np.repeat(np.arange(n), count)
