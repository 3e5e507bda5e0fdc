"""Systems of which a part is a TensorNet potential and the rest a force field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..common.checks import either_order, is_topology, one_of

if TYPE_CHECKING:
    import openmm
    from openmm.app import Topology

ROUNDING = 0.1  # e; how far the sum of a force field's charges may be from a whole number


@either_order
def create_mixed_system(
    model: Any,
    topology: Topology,
    mm_system: openmm.System,
    atoms: Sequence[int],
    *,
    interpolate: bool = False,
    remove_constraints: bool = True,
    force_group: int = 0,
    embedding: str | None = None,
    return_info: bool = False,
    **options: Any,
) -> openmm.System | dict[str, Any]:
    """Replace what a force field says of the inside of some molecules by a TensorNet potential.

    By openmm-ml's `createMixedSystem`, with mechanical embedding: bonds, angles, torsions and nonbonded interactions among
    `atoms` go, and the potential takes their place; whatever acts between them and the rest stays with the force field. The energy is
    that of the force field, less that of the region in it, plus the potential's.

    Parameters
    ----------
    model : path or TensorNet
        As for :class:`~openmm_tensornet.TensorNetForce`.
    topology : openmm.app.Topology
        May also come first, and the model last.
    mm_system : openmm.System
        All of it in a force field, as from `ForceField.createSystem`. Is not changed.
    atoms : sequence of int
        The ML region. With openmm-ml 1.8 a bond may lead out of it: that gets a link atom, a hydrogen that is a virtual site, after all
        other particles. With 1.7 the region must be whole molecules.
    interpolate : bool
        Keep both descriptions, and add the Context parameter ``lambda_interpolate``: 0 is the force field, 1 (the default) the
        potential, and the energy between them is linear in it.
    remove_constraints : bool
        Let the bonds of the ML region vibrate.
    force_group : int
        Of the potential; not used with `interpolate`.
    embedding : str, optional
        Name of an embedding that openmm-ml 1.8 knows; "mechanical" by default.
    return_info : bool
        Return a dictionary, in which openmm-ml 1.8 has the System as ``system``, the topology with the link atoms as ``topology``, and
        the index of each of the former atoms in it as ``oldToNew``.
    **options
        Everything else that TensorNetForce takes (`total_charge`, by default the rounded sum of the region's charges in the
        NonbondedForce of `mm_system`; `precision`, ...), `backend` as in
        :func:`~openmm_tensornet.create_system`, and what openmm-ml takes (`linkAtomDistances`).

    Returns
    -------
    openmm.System or dict
        With bonds of zero strength inside the region, so that OpenMM knows the same molecules as in `mm_system`.

    Raises
    ------
    ImportError
        If openmm-ml is missing, or older than 1.8 where that is needed.
    TypeError
        If an option is unknown.
    ValueError
        If a bond leaves the ML region and openmm-ml has no link atoms to saturate it with; if `total_charge` contradicts the force
        field's charges, or these do not sum to a whole number; if `embedding` is unknown. And for everything that
        TensorNetForce refuses.
    """
    try:
        from openmmml import MLPotential
    except ImportError as error:
        raise ImportError(
            f"create_mixed_system needs openmm-ml, which cannot be imported ({error}); install it with `pip install openmmml`"
        ) from error

    from ..common.atoms import check_particles
    from .arguments import has_box
    from .system import molecule_bonds

    _check(topology, mm_system)
    region = check_particles(atoms)
    if max(region) >= mm_system.getNumParticles():
        raise ValueError(
            f"atoms: expected indices below the number of the System's particles, {mm_system.getNumParticles()}, received {max(region)}"
        )
    inside = set(region)
    potential = MLPotential("tensornet", modelPath=model)
    newer: dict[str, Any] = {}
    if hasattr(potential, "getSupportedEmbeddings"):
        newer["returnInfo"] = return_info
        if embedding is not None:
            newer["embedding"] = one_of("embedding", embedding, potential.getSupportedEmbeddings())
    elif embedding is not None or return_info:
        raise ImportError(
            "embedding, return_info: need openmm-ml 1.8 or newer, but an older one is installed; run `pip install 'openmmml>=1.8'`"
        )
    else:
        _refuse_bonds_out_of(inside, topology)
    charge = _charge_of(mm_system, region)
    if charge is not None:
        name = "charge" if "charge" in options else "total_charge"  # openmm-ml's name, and ours
        options[name] = _agreed_charge(charge, options.get(name))
    # As for a force, and not for openmm-ml: what is given is used, in vacuum too.
    if options.get("coulomb_cutoff") is not None:
        options.setdefault("useCoulombCutoff", True)
    periodic = mm_system.usesPeriodicBoundaryConditions()
    # To interpolate, openmm-ml asks for the force in a System of its own, which has no box.
    if periodic and not has_box(topology) and options.get("periodic") is None:
        options.setdefault("box_vectors", mm_system.getDefaultPeriodicBoxVectors())
    found = potential.createMixedSystem(
        topology,
        mm_system,
        region,
        removeConstraints=remove_constraints,
        forceGroup=force_group,
        interpolate=interpolate,
        **newer,
        **options,
    )
    # openmm-ml takes the region's bonds away, without which OpenMM knows no molecules.
    bonds = [pair for pair in topology.bonds() if pair[0].index in inside and pair[1].index in inside]
    (found["system"] if return_info else found).addForce(molecule_bonds(bonds, periodic))
    return found


def _check(topology: Topology, mm_system: openmm.System) -> None:
    from openmm import System

    if not is_topology(topology):
        raise TypeError(f"topology: expected an openmm.app.Topology, received {type(topology).__name__}")
    if not isinstance(mm_system, System):
        raise TypeError(f"mm_system: expected an openmm.System, received {type(mm_system).__name__}")
    if mm_system.getNumParticles() != topology.getNumAtoms():
        raise ValueError(
            f"mm_system: expected a particle for each of the topology's {topology.getNumAtoms()} atoms, received "
            f"{mm_system.getNumParticles()}"
        )


def _refuse_bonds_out_of(region: set[int], topology: Topology) -> None:
    for pair in topology.bonds():
        if (pair[0].index in region) != (pair[1].index in region):
            ends = " and ".join(f"{atom.name} of {atom.residue.name} {atom.residue.id}" for atom in pair)
            raise ValueError(
                f"atoms: expected whole molecules, received a part that the bond of {ends} leaves; "
                "this openmm-ml has no link atoms: take the whole molecule, or openmm-ml 1.8 or newer"
            )


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
