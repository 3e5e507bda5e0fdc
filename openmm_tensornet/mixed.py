"""Systems of which a part is a TensorNet potential and the rest a force field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import openmm
    from openmm.app import Topology

ROUNDING = 0.1  # e; how far the sum of a force field's charges may be from a whole number


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
        Everything else that TensorNetForce takes (`total_charge`, by default the rounded sum of the region's charges in the
        NonbondedForce of `mm_system`; `precision`, ...), and `backend` as in
        :func:`~openmm_tensornet.create_system`.

    Returns
    -------
    openmm.System
        With bonds of zero strength inside the region, so that OpenMM knows the same molecules as in `mm_system`.

    Raises
    ------
    ImportError
        If openmm-ml is missing.
    ValueError
        If a bond leaves the ML region: openmm-ml has no link atoms to saturate it with; if `total_charge` contradicts the force
        field's charges, or these do not sum to a whole number. And for everything that
        TensorNetForce refuses.
    """
    try:
        from openmmml import MLPotential
    except ImportError as error:
        raise ImportError(
            f"create_mixed_system needs openmm-ml, which cannot be imported ({error}); install it with `pip install openmmml`"
        ) from error

    from .atoms import integers
    from .system import molecule_bonds

    region = integers("atoms", atoms)
    inside = set(region)
    for pair in topology.bonds():
        if (pair[0].index in inside) != (pair[1].index in inside):
            ends = " and ".join(f"{atom.name} of {atom.residue.name} {atom.residue.id}" for atom in pair)
            raise ValueError(
                f"atoms: expected whole molecules, received a part that the bond of {ends} leaves; "
                "openmm-ml has no link atoms: take the whole molecule"
            )
    charge = _charge_of(mm_system, region)
    if charge is not None:
        options["total_charge"] = _agreed_charge(charge, options.get("total_charge"))
    system = MLPotential("tensornet", modelPath=model).createMixedSystem(
        topology,
        mm_system,
        list(region),
        removeConstraints=remove_constraints,
        forceGroup=force_group,
        interpolate=interpolate,
        **options,
    )
    # openmm-ml takes the region's bonds away, without which OpenMM knows no molecules.
    bonds = [pair for pair in topology.bonds() if pair[0].index in inside]
    system.addForce(molecule_bonds(bonds, mm_system.usesPeriodicBoundaryConditions()))
    return system


def _charge_of(system: openmm.System, region: Sequence[int]) -> float | None:
    """Sum of the force field's charges of the region, e; None where it has no point charges."""
    from openmm import NonbondedForce, unit

    for force in system.getForces():
        if isinstance(force, NonbondedForce):
            charges = [
                force.getParticleParameters(k)[0].value_in_unit(unit.elementary_charge)
                for k in range(force.getNumParticles())
            ]
            return sum(charges[k] for k in region) if any(charges) else None
    return None


def _agreed_charge(charge: float, given: Any) -> Any:
    """The region's total charge: the one that was given, if any, unless the force field's contradicts it."""
    from openmm import unit

    if given is None:
        if abs(charge - round(charge)) > ROUNDING:
            raise ValueError(
                f"total_charge: expected the charge of the region, since the force field's sum to {charge:.3f}; pass a whole number"
            )
        return round(charge)
    value = given.value_in_unit(unit.elementary_charge) if unit.is_quantity(given) else given
    value = sum(value) if hasattr(value, "__iter__") else value
    if abs(charge - value) > 0.5:
        raise ValueError(
            f"total_charge: expected {round(charge)}, the sum of the force field's charges of the region, received {given}; leave it "
            "out, or correct the force field"
        )
    return given
