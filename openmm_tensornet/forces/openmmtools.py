"""The scale parameter of a TensorNetForce in openmmtools' thermodynamic states, as for replica exchange.

    from openmmtools.states import GlobalParameterState, ThermodynamicState
    from openmm_tensornet.forces.openmmtools import CompoundState, ScaleParameterState

    class MLState(ScaleParameterState):
        lambda_ml = GlobalParameterState.GlobalParameter("lambda_ml", standard_value=1.0)

    state = CompoundState(ThermodynamicState(system, 300 * kelvin), [MLState.from_system(system)])
    state.lambda_ml = 0.5

A TensorNetPythonForce goes into a CustomCVForce that has the parameter, which openmmtools' own classes see: PythonForce
offers no way to change a parameter's default value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openmm
from openmmtools import states

from .system import tensornet_forces
from .torchforce import TensorNetForce


class ScaleParameterState(states.GlobalParameterState):
    """A GlobalParameterState that also finds the parameters of TensorNetForces, which a System shows as plain Forces."""

    @classmethod
    def _get_system_controlled_parameters(
        cls, system: openmm.System, parameters_name_suffix: str | None
    ) -> Iterator[tuple[Any, str, int]]:
        yield from super()._get_system_controlled_parameters(system, parameters_name_suffix)
        searched = cls._get_controlled_parameters(parameters_name_suffix)
        for force in tensornet_forces(system):
            parameter = force.metadata["scale_parameter"]
            if isinstance(force, TensorNetForce) and parameter in searched:
                yield force, parameter, 0


class CompoundState(states.CompoundThermodynamicState):
    """A CompoundThermodynamicState that can be sent to another process."""

    def __setstate__(self, serialization: dict) -> None:
        super().__setstate__(serialization)
        self._update_standard_system(self._standard_system)
