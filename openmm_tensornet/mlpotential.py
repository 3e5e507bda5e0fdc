"""The package as a potential of openmm-ml: `MLPotential("tensornet", modelPath=...)`, and the bundled model by its name.

openmm-ml loads its entry points, and so this module, while it is itself imported, which may be from here. So the factory is defined before
openmm-ml is imported, and does without its base class.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from openmm import unit

from .common.checks import flag
from .common.units import positive_in
from .export.compiled import Exported
from .forces.arguments import has_box, open_model
from .forces.base import PotentialForce
from .forces.system import force_class
from .models.checkpoint import load_model
from .models.priors import Atomref
from .models.tensornet import TensorNet
from .models.tensornet2 import TensorNet2
from .static.potential import COULOMB_CUTOFF

if TYPE_CHECKING:
    import openmm
    from openmm.app import Topology

# Options of openmm-ml's own potential for TorchMD-Net by other names.
RENAMED = {"charge": "total_charge", "batch": "replicas", "cudaGraphs": "cuda_graphs"}
OF_EMBEDDINGS = ("linkAtomDistances", "mlLongRange")  # which openmm-ml hands on to the potential too
_KINDS = inspect.signature(PotentialForce.__init__).parameters.values()
OPTIONS = (
    *(p.name for p in _KINDS if p.kind is p.KEYWORD_ONLY and p.name not in ("atoms", "atomic_numbers")), "backend", "device", *RENAMED,
    "useCoulombCutoff", "remove_ref_energy", "max_num_neighbors", *OF_EMBEDDINGS,
)  # fmt: skip


class TensorNetPotentialFactory:
    """What openmm-ml calls for the names of its entry points."""

    def createImpl(
        self,
        name: str,
        *,
        modelPath: str | os.PathLike | TensorNet | None = None,
        lengthScale: Any = None,
        energyScale: Any = None,
        **unknown: Any,
    ) -> MLPotentialImpl:
        """The potential for a model.

        Parameters
        ----------
        name : str
            "tensornet", or the name of a model.
        modelPath : path, str or TensorNet
            What :class:`~openmm_tensornet.TensorNetForce` takes as its `model`; needed with "tensornet", and with no other name.
        lengthScale, energyScale : float, optional
            The units of a checkpoint, in nm and in kJ/mol; by default angstrom (0.1) and eV (96.48533; openmm-ml's own potential takes
            96.4916).

        Raises
        ------
        ValueError
            If the model is missing, or there are two; or if units are given with a model that is loaded already.
        TypeError
            If there is another option.
        """
        _refuse_unknown(unknown, ("modelPath", "lengthScale", "energyScale"))
        if (modelPath is None) == (name == "tensornet"):
            given = "none" if modelPath is None else f"{modelPath!r} beside the model {name!r}"
            raise ValueError(
                f"modelPath: expected a model with MLPotential('tensornet', modelPath=...) alone, received {given}"
            )
        model = name if modelPath is None else modelPath
        units = {}
        if lengthScale is not None:
            units["length_unit"] = _scaled("lengthScale", lengthScale, unit.nanometer)
        if energyScale is not None:
            units["energy_unit"] = _scaled("energyScale", energyScale, unit.kilojoule_per_mole)
        if units and isinstance(model, TensorNet):
            raise ValueError(
                "lengthScale, energyScale: expected None with a model that is loaded, which has its units; pass them to load_model"
            )
        return TensorNetPotential(load_model(model, **units) if units else model)


from openmmml.mlpotential import MLPotentialImpl  # noqa: E402


class TensorNetPotential(MLPotentialImpl):
    """Adds the force to the Systems that openmm-ml makes.

    Parameters
    ----------
    model : path, str or TensorNet
    """

    def __init__(self, model: str | os.PathLike | TensorNet):
        self.model = model

    def getMLLongRange(self) -> bool:
        """False: with periodic boundaries nothing acts beyond the cutoffs, and the box is at least twice as wide."""
        return False

    def addForces(
        self,
        topology: Topology,
        system: openmm.System,
        atoms: Iterable[int] | None,
        forceGroup: int,
        **options: Any,
    ) -> None:
        """Add the force for some atoms of a topology, or all.

        Parameters
        ----------
        topology, system, atoms, forceGroup
            From openmm-ml.
        **options
            Keywords of `createSystem` and `createMixedSystem`:

            - what the force takes (`total_charge`, `precision`, ...), and `backend` (:func:`~openmm_tensornet.forces.system.force_class`);
            - those of openmm-ml's own potential for TorchMD-Net: `charge`, `batch` and `cudaGraphs` for `total_charge`, `replicas` and
              `cuda_graphs`; `useCoulombCutoff`, by default True with periodic boundaries and False in vacuum, where a `coulomb_cutoff`
              then has no effect; `remove_ref_energy=False` adds the reference energies of a model that was trained without them.

            Those that have nothing to do here (`max_num_neighbors`, or `useCoulombCutoff` without a Coulomb interaction) warn.

        Raises
        ------
        TypeError
            If an option is unknown.
        ValueError
            If two options contradict each other; and for everything that the force refuses.
        """
        _refuse_unknown(options, OPTIONS)
        for name, own in RENAMED.items():
            if name in options:
                if own in options:
                    raise ValueError(f"{name}: expected either {name} or {own}, received both")
                options[own] = options.pop(name)
        for name in OF_EMBEDDINGS:
            options.pop(name, None)
        if options.pop("max_num_neighbors", None) is not None:
            _without_effect("max_num_neighbors", "all pairs within the cutoff are evaluated")
        kind = force_class(options.pop("backend", None))
        if "device" in options and "device" not in inspect.signature(kind).parameters:
            del options["device"]
            _without_effect("device", "the platform of the Context decides where a TensorNetForce runs")
        boxed = has_box(topology)
        if not boxed and system.usesPeriodicBoundaryConditions() and options.get("periodic") is None:
            options.setdefault("box_vectors", system.getDefaultPeriodicBoxVectors())
        periodic = options.get("periodic")
        if periodic is None:
            periodic = boxed or options.get("box_vectors") is not None
        force = kind(self._adapted(options, periodic), topology, atoms=atoms, **options)
        force.setForceGroup(forceGroup)
        system.addForce(force)

    def _adapted(self, options: dict[str, Any], periodic: bool) -> str | os.PathLike | TensorNet:
        """The model as openmm-ml's options want it; those that no force takes leave `options`."""
        references = not flag("remove_ref_energy", options.pop("remove_ref_energy", True))
        use = options.pop("useCoulombCutoff", None)
        named = [name for name, given in (
            ("remove_ref_energy", references), ("useCoulombCutoff", use is not None),
            ("coulomb_cutoff", options.get("coulomb_cutoff") is not None),
        ) if given]  # fmt: skip
        if not named:
            return self.model
        model = open_model(self.model)
        if isinstance(model, Exported):
            if named != ["coulomb_cutoff"]:
                raise ValueError(
                    f"{', '.join(named)}: expected none of these with an exported file, which keeps what it was made with; "
                    "pass modelPath=CHECKPOINT, or export it again"
                )
            return self.model
        if references:
            model = _with_reference_energies(model)
        if named == ["remove_ref_energy"]:
            return model
        use = periodic if use is None else flag("useCoulombCutoff", use)
        if not isinstance(model, TensorNet2) or not model.config.coulomb:
            options.pop("coulomb_cutoff", None)
            _without_effect("useCoulombCutoff, coulomb_cutoff", "the model has no Coulomb interaction")
        elif use:
            if options.get("coulomb_cutoff") is None and model.config.coulomb_cutoff is None:
                options["coulomb_cutoff"] = COULOMB_CUTOFF
        elif periodic:
            raise ValueError(
                "useCoulombCutoff: expected True with periodic boundaries, received False; the energy of nearest images without a "
                "cutoff jumps where an atom crosses half the box"
            )
        else:
            if options.pop("coulomb_cutoff", None) is not None:
                _without_effect("coulomb_cutoff", "in vacuum there is a cutoff with useCoulombCutoff=True only")
            model = copy.copy(model)
            model.config = dataclasses.replace(model.config, coulomb_cutoff=None)
        return model


def _refuse_unknown(given: Iterable[str], known: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            raise TypeError(f"{name}: expected one of the options {', '.join(known)}, received an unknown one")


def _without_effect(name: str, why: str) -> None:
    warnings.warn(f"{name}: without effect, since {why}", stacklevel=2)


def _scaled(name: str, factor: Any, base: unit.Unit) -> unit.Unit:
    """The unit that is so many times another one."""
    return unit.Unit({unit.ScaledUnit(positive_in(name, factor, base), base, name, name): 1.0})


def _with_reference_energies(model: TensorNet) -> TensorNet:
    """A copy of a model that adds its atomic reference energies, if it has them."""
    if not any(isinstance(prior, Atomref) for prior in model.priors):
        _without_effect("remove_ref_energy", "the model has no atomic reference energies")
        return model
    model = copy.deepcopy(model)
    for prior in model.priors:
        if isinstance(prior, Atomref):
            prior.enable = True
    return model
