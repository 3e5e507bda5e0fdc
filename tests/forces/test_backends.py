"""Whatever OpenMM does with a built-in force it does with ours: both back ends, every platform at hand."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import openmm
import pytest
import torch
from conftest import VARIANTS
from openmm import unit
from pretended_cuda import pretended

from openmm_tensornet import export_potential, load_model
from openmm_tensornet.common.atoms import Atoms
from openmm_tensornet.export import programs
from openmm_tensornet.export.exported import load_exported
from openmm_tensornet.forces.system import force_class
from openmm_tensornet.graph.capture import check_graph_safety
from openmm_tensornet.models.accuracy import reference_energy_and_forces
from openmm_tensornet.static.potential import copy_double

WATER = np.array([[0.0, 0.0, 0.0], [0.096, 0.0, 0.0], [-0.024, 0.093, 0.0]])
PAIR = np.concatenate([WATER, WATER @ [[0, 1, 0], [-1, 0, 0], [0, 0, 1]] + [0.3, 0.05, 0.02]])
BOX = np.eye(3) * 1.2


@pytest.fixture(scope="module", params=["torch", "python"])
def backend(request) -> str:
    if request.param == "torch":
        pytest.importorskip("openmmtorch", reason="TensorNetForce: openmmtorch is not installed")
    elif not hasattr(openmm, "PythonForce"):
        pytest.skip("TensorNetPythonForce: this OpenMM has no PythonForce")
    return request.param


@pytest.fixture(scope="module", params=["Reference", "CPU", "CUDA"])
def platform(request) -> openmm.Platform:
    names = [openmm.Platform.getPlatform(i).getName() for i in range(openmm.Platform.getNumPlatforms())]
    if request.param not in names:
        pytest.skip(f"{request.param}: OpenMM has no such platform here")
    platform = openmm.Platform.getPlatformByName(request.param)
    for name, value in (("Precision", "double"), ("Threads", "1"), ("DeterministicForces", "true")):
        if name in platform.getPropertyNames():
            platform.setPropertyDefaultValue(name, value)
    return platform


@cache
def the_model(name: str = "zero-layers"):
    return load_model(VARIANTS[name].checkpoint)


@pytest.fixture(scope="module", autouse=True)
def _folder(tmp_path_factory):
    _exported.folder = tmp_path_factory.mktemp("exported")


@cache
def _exported(numbers: tuple, atoms: tuple | None, replicas: tuple | None, boxed: bool) -> Path:
    """A file from which both back ends make their forces, since making one anew takes seconds."""
    path = _exported.folder / f"{len(list(_exported.folder.iterdir()))}.pt"
    box = BOX if boxed else None
    particles = None if atoms is None else list(atoms)
    what = {"replicas": replicas, "particles": particles, "periodic": boxed, "box_vectors": box, "tabulate": False}
    export_potential(the_model(), path, atomic_numbers=numbers, precision="double", **what)
    return path


def make_force(backend: str, numbers=(8, 1, 1), *, atoms=None, replicas=None, boxed=False, **options) -> openmm.Force:
    key = tuple(None if v is None else tuple(v) for v in (atoms, replicas))
    box = BOX if boxed else None
    path = _exported(tuple(numbers), *key, boxed)
    kwargs = {"atoms": atoms, "replicas": replicas, "box_vectors": box}
    return force_class(backend)(path, atomic_numbers=numbers, **kwargs, **options)


def make_system(particles: int, *forces: openmm.Force, box: np.ndarray | None = None) -> openmm.System:
    system = openmm.System()
    for _ in range(particles):
        system.addParticle(12.0)
    if box is not None:
        system.setDefaultPeriodicBoxVectors(*box)
    for force in forces:
        system.addForce(force)
    return system


def make_context(system: openmm.System, platform: openmm.Platform, positions=None, integrator=None) -> openmm.Context:
    context = openmm.Context(system, integrator or openmm.VerletIntegrator(0.0005), platform)
    if positions is not None:
        context.setPositions(positions)
    return context


def energy_of(context: openmm.Context, groups: int = -1) -> float:
    return context.getState(energy=True, groups=groups).getPotentialEnergy()._value


def evaluate(context: openmm.Context, positions=None, groups: int = -1) -> tuple[float, np.ndarray]:
    """kJ/mol and kJ/mol/nm."""
    if positions is not None:
        context.setPositions(positions)
    state = context.getState(energy=True, forces=True, groups=groups)
    return state.getPotentialEnergy()._value, state.getForces(asNumpy=True)._value


def reference(positions, numbers=(8, 1, 1)) -> tuple[float, np.ndarray]:
    """The reference model's energy and forces of one molecule without a box."""
    energy, forces = reference_energy_and_forces(
        copy_double(the_model()), Atoms.make(numbers), torch.tensor(np.asarray(positions))
    )
    return float(energy), forces.numpy()


def assert_same(found: tuple, expected: tuple, tolerance: float = 1e-6) -> None:
    assert np.isfinite(found[0]) and abs(found[0]) > 1e-3
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    assert np.allclose(found[1], expected[1], rtol=0, atol=tolerance * np.abs(expected[1]).max())


@pytest.fixture(scope="module")
def alone() -> tuple[float, np.ndarray]:
    """Energy and forces of one water by itself."""
    return reference(WATER)


def moved(step: int) -> np.ndarray:
    return WATER + 0.01 * np.random.default_rng(step).normal(size=(3, 3))


class TestComposition:
    def test_both_back_ends_are_the_same(self, platform):
        if not hasattr(openmm, "PythonForce"):
            pytest.skip("TensorNetPythonForce: this OpenMM has no PythonForce")
        pytest.importorskip("openmmtorch", reason="TensorNetForce: openmmtorch is not installed")
        for options in ({}, {"boxed": True, "atoms": [2, 0, 1]}, {"replicas": [0, 0, 1]}):
            found = [
                evaluate(make_context(make_system(3, make_force(b, **options), box=BOX), platform, WATER))
                for b in ("torch", "python")
            ]
            assert_same(*found, 1e-12)

    def test_inside_a_custom_cv_force(self, backend, platform, alone):
        cv = openmm.CustomCVForce("3*E + 1")
        cv.addCollectiveVariable("E", make_force(backend))
        context = make_context(make_system(3, cv), platform, WATER)
        assert_same(evaluate(context), (3 * alone[0] + 1, 3 * alone[1]))
        assert cv.getCollectiveVariableValues(context)[0] == pytest.approx(alone[0], rel=1e-6)

    def test_two_forces_and_their_groups(self, backend, platform, alone):
        first, second = make_force(backend, atoms=[0, 1, 2]), make_force(backend, atoms=[5, 3, 4])
        first.setForceGroup(1)
        second.setForceGroup(4)
        context = make_context(make_system(6, first, second), platform, np.concatenate([WATER, WATER[[1, 2, 0]] + 1]))
        forces = np.zeros((6, 3))
        forces[:3] = alone[1]
        assert_same(evaluate(context, groups=1 << 1), (alone[0], forces))
        forces[:3], forces[[5, 3, 4]] = 0, alone[1]
        assert_same(evaluate(context, groups=1 << 4), (alone[0], forces))
        forces[:3] = alone[1]
        assert_same(evaluate(context), (2 * alone[0], forces))
        assert evaluate(context, groups=1)[0] == 0

    @pytest.mark.parametrize("kind", ["MTSIntegrator", "MTSLangevinIntegrator"])
    def test_multiple_time_steps(self, backend, platform, kind):
        """With equal steps for both groups the trajectory is that of one group."""
        trajectories = []
        for group, groups in ((1, [(0, 1), (1, 1)]), (0, [(0, 1)])):
            force = make_force(backend)
            force.setForceGroup(group)
            bonds = openmm.HarmonicBondForce()
            bonds.addBond(0, 1, 0.1, 1000.0)
            # Without friction there is no noise.
            arguments = (0.0005, groups) if kind == "MTSIntegrator" else (300, 0, 0.0005, groups)
            integrator = getattr(openmm, kind)(*arguments)
            context = make_context(make_system(3, force, bonds), platform, WATER, integrator)
            context.setVelocitiesToTemperature(300, 3)
            integrator.step(10)
            trajectories.append(context.getState(positions=True).getPositions(asNumpy=True)._value)
        assert np.abs(trajectories[0] - WATER).max() > 1e-4
        assert np.allclose(*trajectories, rtol=0, atol=1e-9)

    def test_minimiser_as_the_first_call(self, backend, platform, alone):
        context = make_context(make_system(3, make_force(backend)), platform, WATER)
        openmm.LocalEnergyMinimizer.minimize(context, 0.1, 20)
        energy, forces = evaluate(context)
        assert energy < alone[0] - 1e-3
        assert np.isfinite(forces).all()

    def test_an_integrator_that_asks_for_energies_only(self, backend, platform):
        """Metropolis Monte Carlo: its own energies are those of the positions that it leaves."""
        integrator = openmm.CustomIntegrator(0.001)
        for name in ("old", "new", "accepted"):
            integrator.addGlobalVariable(name, 0)
        integrator.addPerDofVariable("start", 0)
        integrator.addComputePerDof("start", "x")
        integrator.addComputeGlobal("old", "energy")
        integrator.addComputePerDof("x", "x + 0.003*gaussian")
        integrator.addComputeGlobal("new", "energy")
        integrator.beginIfBlock("uniform > exp(-(new - old)/0.5)")
        integrator.addComputePerDof("x", "start")
        integrator.endBlock()
        integrator.addComputeGlobal("accepted", "energy")
        context = make_context(make_system(3, make_force(backend)), platform, WATER, integrator)
        seen = set()
        for _ in range(10):
            integrator.step(1)
            positions = context.getState(positions=True).getPositions(asNumpy=True)
            energy = reference(positions._value)[0]
            assert integrator.getGlobalVariableByName("accepted") == pytest.approx(energy, rel=1e-6)
            seen |= {integrator.getGlobalVariableByName("new"), energy}
        assert len(seen) > 10  # some trials were refused, some accepted

    def test_energy_only_and_energy_with_forces_in_turns(self, backend, platform):
        context = make_context(make_system(3, make_force(backend)), platform, WATER)
        for step in range(10):
            both, only = reference(moved(2 * step)), reference(moved(2 * step + 1))
            assert both[0] != pytest.approx(only[0], rel=1e-4)
            assert_same(evaluate(context, moved(2 * step)), both)
            context.setPositions(moved(2 * step + 1))
            assert energy_of(context) == pytest.approx(only[0], rel=1e-6)
            assert_same(evaluate(context), only)

    def test_contexts_and_molecules_in_turns(self, backend, platform):
        kinds = ((8, 1, 1), (8, 1), (6, 1, 1, 1))
        systems = [make_system(len(z), make_force(backend, z)) for z in kinds]
        places = [np.random.default_rng(1).normal(size=(len(z), 3)) * 0.15 for z in kinds]
        expected = [reference(x, z) for x, z in zip(places, kinds, strict=True)]
        contexts = [make_context(s, platform, x) for s, x in zip(systems, places, strict=True)] + [
            make_context(systems[0], platform, places[0])
        ]
        for _ in range(3):
            for context, values in zip(contexts, [*expected, expected[0]], strict=True):
                assert_same(evaluate(context), values)
        contexts[0].setPositions(places[0] * 1.1)
        assert_same(evaluate(contexts[0]), reference(places[0] * 1.1))
        assert_same(evaluate(contexts[3]), expected[0])

    def test_rigid_water_virtual_sites_and_massless_particles_beside(self, backend, platform, alone):
        """Particles 0-2 rigid water, 3 its virtual site, 4 massless, 5-7 the molecule."""
        bonds = openmm.HarmonicBondForce()
        bonds.addBond(4, 0, 0.5, 100.0)
        system = make_system(8, make_force(backend, atoms=[5, 6, 7]), bonds)
        system.setParticleMass(3, 0)
        system.setParticleMass(4, 0)
        system.setVirtualSite(3, openmm.ThreeParticleAverageSite(0, 1, 2, 0.5, 0.25, 0.25))
        rigid = {(0, 1): 0.09572, (0, 2): 0.09572, (1, 2): 0.15139}
        for pair, length in rigid.items():
            system.addConstraint(*pair, length)
        water = np.array([[0, 0, 0], [0.09572, 0, 0], [-0.023997, 0.092663, 0]])
        site = 0.5 * water[0] + 0.25 * (water[1] + water[2])
        positions = np.concatenate([water, [site], [[0, 0, 0.6]], WATER + 1.0])
        context = make_context(system, platform, positions, openmm.LangevinMiddleIntegrator(300, 5, 0.0005))
        energy, forces = evaluate(context)
        bond_energy = 0.5 * 100 * 0.1**2
        assert energy == pytest.approx(alone[0] + bond_energy, rel=1e-6)
        assert np.allclose(forces[5:], alone[1], rtol=0, atol=1e-6 * np.abs(alone[1]).max())
        context.setVelocitiesToTemperature(300, 1)
        context.getIntegrator().step(20)
        x = context.getState(positions=True).getPositions(asNumpy=True)._value
        for (i, j), length in rigid.items():
            assert np.linalg.norm(x[i] - x[j]) == pytest.approx(length, rel=1e-4)
        assert np.allclose(x[3], 0.5 * x[0] + 0.25 * (x[1] + x[2]), atol=1e-6)
        assert (x[4] == positions[4]).all()
        assert np.abs(x[5:] - positions[5:]).max() > 1e-4

    def test_device_index(self, backend, platform):
        if platform.getName() != "CUDA":
            pytest.skip(f"DeviceIndex: the {platform.getName()} platform has none")
        expected = evaluate(make_context(make_system(3, make_force(backend)), platform, WATER))
        for index in ("0", "0,0"):
            system = make_system(3, make_force(backend))
            context = openmm.Context(system, openmm.VerletIntegrator(0.0005), platform, {"DeviceIndex": index})
            assert_same(evaluate(context, WATER), expected)


class TestBox:
    def test_below_twice_the_cutoff_nothing_is_finite(self, backend, platform):
        force = make_force(backend, boxed=True)
        context = make_context(make_system(3, force, box=BOX), platform, WATER)
        twice = 2 * force.metadata["cutoff_nm"]
        for edge in (twice * 1.001, twice * 0.999, twice * 1.002):
            context.setPeriodicBoxVectors(*np.diag([1.2, edge, 1.2]))
            energy, forces = evaluate(context)
            cause = force.diagnose(context)
            if edge > twice:
                assert np.isfinite(energy) and np.isfinite(forces).all() and cause is None
            else:
                assert np.isnan(energy) and np.isnan(forces).all()
                assert f"at least twice the cutoff, {twice:.6g} nm, received {edge:.6g} nm" in cause

    def test_a_barostat_that_shrinks_it_too_far(self, backend, platform):
        """The platform stops at NaN coordinates, except Reference: there the energy stays NaN."""
        force = make_force(backend, boxed=True)
        barostat = openmm.MonteCarloBarostat(1e7, 300, 1)
        barostat.setRandomNumberSeed(2)
        edge = 2.01 * force.metadata["cutoff_nm"]
        context = make_context(make_system(3, force, barostat, box=np.eye(3) * edge), platform, WATER)
        assert np.isfinite(energy_of(context))
        if platform.getName() == "Reference":
            context.getIntegrator().step(200)
        else:
            with pytest.raises(openmm.OpenMMException, match="NaN"):
                context.getIntegrator().step(200)
        box = context.getState().getPeriodicBoxVectors()
        assert box[0][0]._value < 2 * force.metadata["cutoff_nm"]
        assert "box_vectors: expected a width of at least twice the cutoff" in force.diagnose(context)


class TestScaleParameter:
    def test_energy_forces_and_their_derivative(self, backend, platform, alone):
        force = make_force(backend, scale_parameter="lambda_ml")
        context = make_context(make_system(3, force), platform, WATER)
        for step, value in enumerate((1, 0.25, 2.5, 0.0, -1.0) * 4):  # beyond the warm-up before a capture
            context.setParameter("lambda_ml", value)
            energy, forces = evaluate(context)
            assert energy == pytest.approx(value * alone[0], rel=1e-6, abs=1e-12), step
            assert np.allclose(forces, value * alone[1], rtol=0, atol=1e-6 * np.abs(alone[1]).max())
            assert force.replica_energies(context)._value == pytest.approx([energy], rel=1e-9, abs=1e-12)

    def test_derivative_is_the_finite_difference(self, backend, platform):
        force = make_force(backend, scale_parameter="lambda_ml")
        if backend == "python":  # PythonForce has no derivatives: CustomCVForce brings them
            cv = openmm.CustomCVForce("lambda_cv*E")
            cv.addGlobalParameter("lambda_cv", 1.0)
            cv.addEnergyParameterDerivative("lambda_cv")
            cv.addCollectiveVariable("E", force)
            force, name = cv, "lambda_cv"
        else:
            name = "lambda_ml"
        context = make_context(make_system(3, force), platform, WATER)
        for value in (1.0, 0.3):
            energies = []
            for shift in (1e-3, -1e-3):
                context.setParameter(name, value + shift)
                energies.append(energy_of(context))
            context.setParameter(name, value)
            state = context.getState(parameterDerivatives=True, energy=True, forces=True)
            slope = (energies[0] - energies[1]) / 2e-3
            assert dict(state.getEnergyParameterDerivatives())[name] == pytest.approx(slope, rel=1e-7)
            assert abs(slope) > 1

    def test_in_a_box(self, backend, platform):
        options = {"boxed": True, "scale_parameter": "lambda_ml"}
        context = make_context(make_system(3, make_force(backend, **options), box=BOX), platform, WATER)
        energy, forces = evaluate(context)
        context.setParameter("lambda_ml", 0.5)
        assert_same(evaluate(context), (energy / 2, forces / 2))

    def test_zero_does_not_hide_nan(self, backend, platform):
        force = make_force(backend, scale_parameter="lambda_ml")
        context = make_context(make_system(3, force), platform, np.zeros((3, 3)))
        context.setParameter("lambda_ml", 0.0)
        assert np.isnan(energy_of(context))
        context.setParameter("lambda_ml", np.nan)
        assert force.diagnose(context) == "lambda_ml: expected a finite number, found nan"

    def test_two_forces_share_one(self, backend, platform, alone):
        forces = [make_force(backend, scale_parameter="lambda_ml", atoms=a) for a in ([0, 1, 2], [5, 3, 4])]
        context = make_context(make_system(6, *forces), platform, np.concatenate([WATER, WATER[[1, 2, 0]] + 1]))
        context.setParameter("lambda_ml", 0.5)
        assert energy_of(context) == pytest.approx(alone[0], rel=1e-6)

    @pytest.mark.parametrize("name", ["", "lambda-ml", 3])
    def test_a_name_that_cannot_be(self, backend, name):
        with pytest.raises(ValueError, match="scale_parameter: expected a name of letters, digits and underscores"):
            force_class(backend)(the_model(), atomic_numbers=[8], scale_parameter=name)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory) -> Iterator[tuple[Path, list[int], list[int]]]:
    path = tmp_path_factory.mktemp("blocks") / "replicas.pt"
    numbers, replicas = [8] * 4 + [1] * 8, [0, 1, 2, 3] * 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "BLOCK_ATOMS", 6)
        export_potential(
            the_model(), path, atomic_numbers=numbers, replicas=replicas, precision="double", tabulate=False
        )
        yield path, numbers, replicas


class TestReplicas:
    def test_energies_of_molecules_are_those_of_each_alone(self, backend, platform):
        replicas = 5
        force = make_force(backend, (8, 1, 1) * replicas, replicas=[k for k in range(replicas) for _ in range(3)])
        positions = np.concatenate([moved(k) for k in range(replicas)])
        context = make_context(make_system(3 * replicas, force), platform, positions)
        expected = [reference(moved(k)) for k in range(replicas)]
        found = force.replica_energies(context)
        assert found.unit == unit.kilojoule_per_mole
        assert found._value == pytest.approx([e for e, _ in expected], rel=1e-6)
        assert len(set(np.round(found._value, 6))) == replicas
        assert_same(evaluate(context), (found._value.sum(), np.concatenate([f for _, f in expected])))

    def test_in_several_blocks(self, backend, platform, blocks):
        """Atoms of four replicas in turns, two replicas in a block; NaN in one of them reaches everything."""
        path, numbers, replicas = blocks
        force = force_class(backend)(path, atomic_numbers=numbers)
        assert force.metadata["replicas"] == replicas
        positions = np.stack([moved(k) for k in range(4)], axis=1).reshape(-1, 3)
        context = make_context(make_system(12, force), platform, positions)
        expected = [reference(moved(k)) for k in range(4)]
        assert force.replica_energies(context)._value == pytest.approx([e for e, _ in expected], rel=1e-6)
        forces = np.stack([f for _, f in expected], axis=1).reshape(-1, 3)
        assert_same(evaluate(context), (sum(e for e, _ in expected), forces))
        positions[1] = positions[5]  # oxygen and hydrogen of the second
        energy, forces = evaluate(context, positions)
        assert np.isnan(energy) and np.isnan(forces).all()
        assert "particle 1 (atomic number 8) and particle 5 (atomic number 1)" in force.diagnose(context)

    def test_which_molecules_are_worked_on_in_blocks(self, monkeypatch):
        monkeypatch.setattr(programs, "BLOCK_ATOMS", 6)
        water = [8, 1, 1]
        found = programs.replica_blocks(Atoms.make(water * 4, [k for k in (3, 0, 2, 1) for _ in water]))
        assert found.tolist() == [[3, 4, 5, 9, 10, 11], [6, 7, 8, 0, 1, 2]]
        for atoms in (
            Atoms.make(water),
            Atoms.make(water * 2, [0] * 3 + [1] * 3),  # one block
            Atoms.make(water * 3 + [1, 8, 1], [k for k in range(4) for _ in water]),
            Atoms.make(water * 4, [k for k in range(4) for _ in water], [0, 0, 1, 0]),
            Atoms.make(water * 3, [0] * 6 + [1] * 3),
        ):
            assert programs.replica_blocks(atoms) is None
        ten = Atoms.make(water * 10, [k for k in range(10) for _ in water])
        assert programs.replica_blocks(ten).shape == (5, 6)

    def test_they_cost_one_evaluation(self, backend, platform, monkeypatch):
        force = make_force(backend, (8, 1, 8, 1), replicas=[0, 0, 1, 1])
        context = make_context(make_system(4, force), platform, np.concatenate([WATER[:2]] * 2))
        calls = []

        class Counted:
            def to(self, device):
                return self

            def evaluate(self, *arguments, module=force._module):
                calls.append(arguments)
                return module.evaluate(*arguments)

        monkeypatch.setattr(force, "_module", Counted())
        monkeypatch.setattr(openmm.Context, "getState", _without_evaluation(openmm.Context.getState))
        assert len(force.replica_energies(context)._value) == 2
        assert len(calls) == 1


def _without_evaluation(original):
    def get_state(self, **what):
        assert not what.get("energy") and not what.get("forces")
        return original(self, **what)

    return get_state


WAYS = {
    "deepcopy of the System": copy.deepcopy,
    "XML of the System": lambda s: openmm.XmlSerializer.deserialize(openmm.XmlSerializer.serialize(s)),
    "deepcopy twice": lambda s: copy.deepcopy(copy.deepcopy(s)),
}


class TestSerialization:
    @pytest.mark.parametrize("way", WAYS)
    def test_everything_comes_back(self, backend, platform, way):
        options = {
            "scale_parameter": "lambda_ml",
            "name": "the potential",
            "atoms": [2, 0, 1],
            "replicas": [0, 0, 0],
            "boxed": True,
        }
        force = make_force(backend, **options)
        force.setForceGroup(5)
        system = make_system(3, force, box=BOX)
        expected = evaluate(make_context(system, platform, WATER))
        again = WAYS[way](system)
        del system
        gc.collect()
        back = force_class(backend).cast(again.getForce(0))
        assert type(back) is force_class(backend)
        assert back.getName() == again.getForce(0).getName() == "the potential"
        assert back.metadata == make_force(backend, **options).metadata
        assert back.metadata["particles"] == [2, 0, 1]
        assert back.metadata["replicas"] == [0, 0, 0]
        assert back.metadata["scale_parameter"] == "lambda_ml"
        assert back.metadata["model"] == the_model().metadata
        assert back.getForceGroup() == 5
        assert back.usesPeriodicBoundaryConditions()
        context = make_context(again, platform, WATER)
        assert_same(evaluate(context), expected, 1e-12)
        context.setParameter("lambda_ml", 0.5)
        assert energy_of(context) == pytest.approx(expected[0] / 2, rel=1e-12)
        assert back.replica_energies(context)._value.sum() == pytest.approx(expected[0] / 2, rel=1e-9)
        assert back.diagnose(context) is None

    @pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])
    def test_copies_of_a_force_live_on_their_own(self, backend, platform, alone, way):
        force = make_force(backend, name="mine")
        again = way(force)
        del force
        gc.collect()
        assert type(again) is force_class(backend)
        assert again.getName() == "mine"
        system = make_system(3, again)
        del again
        gc.collect()
        assert_same(evaluate(make_context(system, platform, WATER)), alone)

    def test_whoever_is_left_keeps_the_object(self, backend):
        plain = openmm.XmlSerializer.deserialize(openmm.XmlSerializer.serialize(make_force(backend)))
        back = force_class(backend).cast(plain)
        assert force_class(backend).cast(back) is back
        assert force_class(backend).cast(plain) is back
        del back
        gc.collect()
        assert plain.getForceGroup() == 0
        back = force_class(backend).cast(plain)
        del plain
        gc.collect()
        back.setForceGroup(3)
        assert back.getForceGroup() == 3
        assert back.metadata["atomic_numbers"] == [8, 1, 1]

    def test_forces_of_another_kind(self, backend):
        with pytest.raises(TypeError, match=r"expected a TensorNet(Python)?Force, received HarmonicBondForce"):
            force_class(backend).cast(openmm.HarmonicBondForce())

    def test_checkpoints_resume_bit_for_bit(self, backend, platform):
        def fresh():
            integrator = openmm.LangevinMiddleIntegrator(300, 5, 0.0005)
            integrator.setRandomNumberSeed(11)
            return make_context(make_system(3, make_force(backend)), platform, WATER, integrator)

        def state(context):
            now = context.getState(positions=True, velocities=True)
            return np.stack([now.getPositions(asNumpy=True)._value, now.getVelocities(asNumpy=True)._value])

        context = fresh()
        context.setVelocitiesToTemperature(300, 7)
        context.getIntegrator().step(15)
        checkpoint, middle = context.createCheckpoint(), state(context)
        context.getIntegrator().step(15)
        expected = state(context)
        assert np.abs(expected - middle).max() > 1e-4
        for resumed in (context, fresh()):
            resumed.getIntegrator().step(4)  # whatever it was doing
            resumed.loadCheckpoint(checkpoint)
            resumed.getIntegrator().step(15)
            assert (state(resumed) == expected).all()


class TestPythonForce:
    """What only TensorNetPythonForce has."""

    @pytest.fixture(autouse=True)
    def _needed(self):
        if not hasattr(openmm, "PythonForce"):
            pytest.skip("TensorNetPythonForce: this OpenMM has no PythonForce")

    def test_a_device_that_cannot_be(self):
        with pytest.raises(ValueError, match="device: expected 'cpu', 'cuda' or 'cuda:N', received 'gpu'"):
            force_class("python")(the_model(), atomic_numbers=[8], device="gpu")

    def test_another_python_force(self):
        with pytest.raises(TypeError, match="expected a TensorNetPythonForce, received PythonForce"):
            force_class("python").cast(openmm.PythonForce(nothing))

    def test_its_program_stays_where_it_is(self):
        """What is asked of the force moves its module to the device of the platform, which need not be the one that it runs on."""
        force = make_force("python")
        context = openmm.Context(
            make_system(3, force), openmm.VerletIntegrator(0.001), openmm.Platform.getPlatformByName("Reference")
        )
        context.setPositions(WATER)
        before = context.getState(energy=True).getPotentialEnergy()
        force._module.to("meta")
        assert context.getState(energy=True).getPotentialEnergy() == before

    def test_copies_have_the_same_xml(self):
        """Tools that compare Systems by it would else take a copy for another System."""
        first = copy.deepcopy(make_system(3, make_force("python")))
        second = copy.deepcopy(first)
        assert openmm.XmlSerializer.serialize(first) == openmm.XmlSerializer.serialize(second)

    @pytest.mark.parametrize("graphs", [True, False], ids=["graph", "no graph"])
    @pytest.mark.parametrize("boxed", [False, True], ids=["vacuum", "box"])
    def test_a_gpu(self, monkeypatch, boxed, graphs):
        """A pretended one: two Contexts of a force on the second GPU give what the CPU does, with one copy there and one back."""
        reference, box = openmm.Platform.getPlatformByName("Reference"), BOX if boxed else None

        def system(device: str) -> openmm.System:
            force = make_force("python", boxed=boxed, device=device, cuda_graphs=graphs, scale_parameter="scale")
            return make_system(3, force, box=box)

        cpu, first, second = (system(device) for device in ("cpu", "cuda:0", "cuda:1"))
        expected, first, *both = (make_context(s, reference) for s in (cpu, first, second, second))
        with pretended(monkeypatch) as machine:
            evaluate(first, WATER)  # captures on another GPU before
            machine.devices.clear()
            for k in range(3):
                for context in both:
                    shaken = WATER + 0.003 * np.random.default_rng(k).normal(size=WATER.shape)
                    for one in (context, expected):
                        one.setParameter("scale", 1 - 0.4 * k)
                    machine.copies.clear()
                    found = evaluate(context, shaken)
                    assert machine.copies == ["to the GPU", "to the host"]
                    assert_same(found, evaluate(expected, shaken))
        assert machine.devices == {"cuda:1"}
        captured = [(graph.device.index, graph.error_mode) for graph in machine.graphs]
        assert captured == ([(0, "thread_local"), (1, "thread_local")] if graphs else [])

    def test_a_graph_keeps_the_module_whose_weights_it_reads(self, monkeypatch):
        from openmm_tensornet.forces.pythonforce import OnGpu

        class Linear(torch.nn.Linear):
            def forward(self, x):
                return super().forward(x).sum(), x

        module, x = Linear(3, 1, dtype=torch.float64), torch.rand(2, 3, dtype=torch.float64)
        with pretended(monkeypatch), torch.no_grad():
            program, expected = OnGpu(module, [x], torch.device("cuda:1"), 1), float(module(x)[0])
            kept = weakref.ref(module)
            del module
            gc.collect()
            assert kept() is not None
            assert float(program(x)[0]) == expected

    def test_an_older_openmm(self):
        code = "import openmm; del openmm.PythonForce; import openmm_tensornet.forces.pythonforce"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
        assert "TensorNetPythonForce needs OpenMM 8.5 or newer, but OpenMM" in done.stderr
        assert "or use TensorNetForce" in done.stderr


def nothing(state):
    return 0.0, np.zeros((1, 3))


def test_scaled_module_as_on_cuda():
    """There the scale has shape (1,), perhaps in float32: the energy stays float64, and the module can be captured."""
    exported = load_exported(_exported((8, 1, 1), None, None, False)).scaled()
    positions, scale = torch.tensor(WATER).float(), torch.full((1,), 0.5)
    energy, forces = exported.module(positions, scale)
    assert energy.dtype == torch.float64 and energy.numel() == 1
    assert forces.dtype == torch.float32 and forces.is_contiguous()
    assert float(energy) == pytest.approx(reference(WATER)[0] / 2, rel=1e-6)
    assert check_graph_safety(exported.module, positions, scale).kernels > 10


def test_back_ends_that_do_not_exist():
    with pytest.raises(ValueError, match="backend: expected one of torch, python, received 'cuda'"):
        force_class("cuda")
