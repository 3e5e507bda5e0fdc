"""States of openmmtools: the scale parameter in compound ones, and plain ones of one System."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import openmm
import pytest
from conftest import VARIANTS
from openmm import unit

pytest.importorskip("openmmtorch", reason="TensorNetForce: openmmtorch is not installed")
with warnings.catch_warnings():  # of the packages that it imports
    warnings.simplefilter("ignore")
    states = pytest.importorskip("openmmtools.states", reason="openmmtools is not installed")
    from openmmtools import cache

from openmm_tensornet.forces.openmmtools import CompoundState, ScaleParameterState
from openmm_tensornet.forces.system import force_class

WATER = np.array([[0.0, 0.0, 0.0], [0.096, 0.0, 0.0], [-0.024, 0.093, 0.0]])


class MLState(ScaleParameterState):
    lambda_ml = states.GlobalParameterState.GlobalParameter("lambda_ml", standard_value=1.0)


def water(model, backend: str, **options) -> openmm.System:
    system = openmm.System()
    for mass in (16.0, 1.0, 1.0):
        system.addParticle(mass)
    system.addForce(force_class(backend)(model, atomic_numbers=[8, 1, 1], kernels="portable", **options))
    return system


@pytest.fixture(scope="module")
def system() -> openmm.System:
    return water(VARIANTS["zero-layers"].checkpoint, "torch", precision="double", scale_parameter="lambda_ml")


def energy(context: openmm.Context) -> float:
    context.setPositions(WATER)
    return context.getState(energy=True).getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole)


def compound(system: openmm.System, value: float):
    thermodynamic = states.ThermodynamicState(system, 300 * unit.kelvin)
    state = CompoundState(thermodynamic, [MLState.from_system(system)])
    state.lambda_ml = value
    return state


def test_a_compound_state_sets_it(system):
    full, half = compound(system, 1.0), compound(system, 0.5)
    assert full.is_state_compatible(half)
    context = full.create_context(openmm.VerletIntegrator(0.0005), openmm.Platform.getPlatformByName("Reference"))
    whole = energy(context)
    assert abs(whole) > 1
    half.apply_to_context(context)
    assert context.getParameter("lambda_ml") == 0.5
    assert energy(context) == pytest.approx(whole / 2, rel=1e-12)
    other = half.create_context(openmm.VerletIntegrator(0.0005), openmm.Platform.getPlatformByName("Reference"))
    assert energy(other) == pytest.approx(whole / 2, rel=1e-12)


def test_reduced_potentials_and_copies(system):
    state = pickle.loads(pickle.dumps(compound(system, 0.25)))
    assert state.lambda_ml == 0.25
    context = state.create_context(openmm.VerletIntegrator(0.0005), openmm.Platform.getPlatformByName("Reference"))
    expected = energy(context) / (0.00831446261815324 * 300)
    assert state.reduced_potential(context) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("backend", ["torch", "python"])
def test_plain_states_of_one_system_share_a_context(backend, model_path):
    """openmmtools compares the XML of Systems, in which openmmtorch gives the module's archive another name every time."""
    made = water(model_path("variants/zero-layers"), backend)
    whole = openmm.CustomCVForce("E")
    whole.addCollectiveVariable("E", copy.deepcopy(made.getForce(0)))
    for thing in (made, made.getForce(0), whole):
        text = openmm.XmlSerializer.serialize(thing)
        assert text == openmm.XmlSerializer.serialize(thing) and len(text) > 10_000
    assert pickle.dumps(made) == pickle.dumps(made)
    first, *others = (states.ThermodynamicState(made, t * unit.kelvin) for t in (300, 310, 320))
    assert all(first.is_state_compatible(other) for other in others)
    contexts = cache.ContextCache(platform=openmm.Platform.getPlatformByName("Reference"))
    for state in (first, *others):
        contexts.get_context(state, openmm.LangevinMiddleIntegrator(state.temperature, 1, 0.0005))
    assert len(contexts) == 1


def test_states_of_different_models_are_not_compatible(model_path):
    first, second = (
        states.ThermodynamicState(water(model_path(f"variants/{name}"), "torch"), 300 * unit.kelvin)
        for name in ("zero-layers", "atomref-old-layout-old-head")
    )
    assert not first.is_state_compatible(second)


def test_a_system_without_it(system):
    with pytest.raises(states.GlobalParameterError, match="no global parameters controlled by this state"):
        MLState.from_system(openmm.System())
