"""`MLPotential("tensornet", modelPath=...)`: the package as a potential of openmm-ml, by its entry point of that name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import openmm
from openmm.app import Topology
from openmmml.mlpotential import MLPotentialImpl, MLPotentialImplFactory

from .system import force_class


class TensorNetPotentialFactory(MLPotentialImplFactory):
    """What openmm-ml calls for ``MLPotential("tensornet", modelPath=...)``."""

    def createImpl(self, name: str, *, modelPath: str | os.PathLike) -> MLPotentialImpl:
        """The potential for a model.

        Parameters
        ----------
        name : str
            Under which openmm-ml knows this factory.
        modelPath : path or TensorNet
            What :class:`~openmm_tensornet.force.TensorNetForce` takes as its `model`.
        """
        return TensorNetPotential(modelPath)


class TensorNetPotential(MLPotentialImpl):
    """Adds the force to the Systems that openmm-ml makes."""

    def __init__(self, model: Any):
        self.model = model

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
