"""The package as a potential of openmm-ml: `MLPotential("tensornet", modelPath=...)`, and the bundled model by its name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import openmm
from openmm.app import Topology
from openmmml.mlpotential import MLPotentialImpl, MLPotentialImplFactory

from .system import force_class


class TensorNetPotentialFactory(MLPotentialImplFactory):
    """What openmm-ml calls for the names of its entry points."""

    def createImpl(self, name: str, *, modelPath: str | os.PathLike | None = None) -> MLPotentialImpl:
        """The potential for a model.

        Parameters
        ----------
        name : str
            "tensornet", or the name of a model.
        modelPath : path, str or TensorNet
            What :class:`~openmm_tensornet.force.TensorNetForce` takes as its `model`; needed with "tensornet", and with no other name.

        Raises
        ------
        ValueError
            If it is missing, or there are two models.
        """
        if (modelPath is None) == (name == "tensornet"):
            given = "none" if modelPath is None else f"{modelPath!r} beside the model {name!r}"
            raise ValueError(
                f"modelPath: expected a model with MLPotential('tensornet', modelPath=...) alone, received {given}"
            )
        return TensorNetPotential(name if modelPath is None else modelPath)


class TensorNetPotential(MLPotentialImpl):
    """Adds the force to the Systems that openmm-ml makes."""

    def __init__(self, model: Any):
        self.model = model

    def getMLLongRange(self) -> bool:
        """False: with periodic boundaries nothing acts beyond the cutoffs, of which the box is at least twice as wide."""
        return False

    def addForces(
        self,
        topology: Topology,
        system: openmm.System,
        atoms: Iterable[int] | None,
        forceGroup: int,
        backend: str | None = None,
        **options: Any,
    ) -> None:
        """Add the force for some atoms of a topology, or all.

        Parameters
        ----------
        topology, system, atoms, forceGroup
            From openmm-ml.
        backend : {"torch", "python"}, optional
            See :func:`~openmm_tensornet.system.force_class`.
        **options
            As keywords of `createSystem` and `createMixedSystem`: what the force takes (`total_charge`, `precision`, ...).
        """
        force = force_class(backend)(self.model, topology, atoms=atoms, **options)
        force.setForceGroup(forceGroup)
        system.addForce(force)
