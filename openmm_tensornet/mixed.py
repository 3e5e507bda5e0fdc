"""Systems of which a part is a TensorNet potential and the rest a force field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import openmm
    from openmm.app import Topology


def create_mixed_system(
    topology: Topology,
    mm_system: openmm.System,
    atoms: Sequence[int],
    model: Any,
    *,
    interpolate: bool = False,
    remove_constraints: bool = True,
    force_group: int = 0,
    **options: Any,
) -> openmm.System:
    """Replace what a force field says of the inside of some molecules by a TensorNet potential.

    By openmm-ml's `createMixedSystem`, with mechanical embedding: bonds, angles, torsions and nonbonded interactions among
    `atoms` go, and the potential takes their place; whatever acts between them and the rest stays with the force field.

    Parameters
    ----------
    topology : openmm.app.Topology
    mm_system : openmm.System
        All of it in a force field, as from `ForceField.createSystem`. Is not changed.
    atoms : sequence of int
        The ML region: whole molecules.
    model : path or TensorNet
        As for :class:`~openmm_tensornet.TensorNetForce`.
    interpolate : bool
        Keep both descriptions, and add the Context parameter ``lambda_interpolate``: 0 is the force field, 1 (the default) the
        potential, and the energy between them is linear in it.
    remove_constraints : bool
        Let the bonds of the ML region vibrate.
    force_group : int
        Of the potential; not used with `interpolate`.
    **options
        Everything else that TensorNetForce takes (`total_charge`, `precision`, ...), and `backend` as in
        :func:`~openmm_tensornet.create_system`.

    Returns
    -------
    openmm.System

    Raises
    ------
    ImportError
        If openmm-ml is missing.
    ValueError
        If a bond leaves the ML region: openmm-ml has no link atoms to saturate it with. And for everything that
        TensorNetForce refuses.
    """
    try:
        from openmmml import MLPotential
    except ImportError as error:
        raise ImportError(
            f"create_mixed_system needs openmm-ml, which cannot be imported ({error}); install it with `pip install openmmml`"
        ) from error

    from .atoms import integers

    region = integers("atoms", atoms)
    inside = set(region)
    for pair in topology.bonds():
        if (pair[0].index in inside) != (pair[1].index in inside):
            ends = " and ".join(f"{atom.name} of {atom.residue.name} {atom.residue.id}" for atom in pair)
            raise ValueError(
                f"atoms: expected whole molecules, received a part that the bond of {ends} leaves; "
                "openmm-ml has no link atoms: take the whole molecule"
            )
    return MLPotential("tensornet", modelPath=model).createMixedSystem(
        topology,
        mm_system,
        list(region),
        removeConstraints=remove_constraints,
        forceGroup=force_group,
        interpolate=interpolate,
        **options,
    )
