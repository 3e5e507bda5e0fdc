"""TensorNetForce in an OpenMM Context, against the oracle's numbers, on every platform at hand."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import openmm
import pytest
import safetensors.torch
import torch
from conftest import CASES, KJ_PER_EV, PUBLISHED, PUBLISHED2, VARIANTS, WEIGHTS, Case, published, some
from openmm import unit
from openmm.app import Element, PDBFile, Topology

pytest.importorskip("openmmtorch", reason="TensorNetForce: openmmtorch is not installed")

from openmm_tensornet.common.atoms import Atoms
from openmm_tensornet.export.exported import export_potential, read_metadata
from openmm_tensornet.export.specification import read_texts, with_texts
from openmm_tensornet.forces.torchforce import TensorNetForce, check_versions, openmmtorch
from openmm_tensornet.models.accuracy import TOLERANCES, reference_energy_and_forces
from openmm_tensornet.models.checkpoint import load_model
from openmm_tensornet.models.registry import MODELS, KnownModel
from openmm_tensornet.static import program
from openmm_tensornet.static.potential import copy_double

# Energy: eV an atom. Force: eV/Å for "double", relative to the norm for "single" (large boxes have a longer sum).
ENERGY = {"single": 2e-6, "double": 1e-7}
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "alanine_dipeptide.pdb"
SMALL_VARIANT = "atomref-old-layout-old-head"


@cache
def cached_system(name: str, precision: str) -> openmm.System:
    """Building a force takes seconds, and copying one copies its tables; every platform uses the same System."""
    case = (CASES | PUBLISHED)[name]
    atoms = case.atoms
    replicas = atoms.replicas if len(atoms.charges) > 1 else None
    charge = atoms.charges if replicas else atoms.charges[0]
    force = TensorNetForce(
        load_model(case.checkpoint),
        atomic_numbers=atoms.numbers,
        replicas=replicas,
        total_charge=charge,
        positions=case.positions,
        box_vectors=case.box,
        precision=precision,
    )
    return adopting_system(force, len(atoms.numbers), case.box)


def adopting_system(force: openmm.Force, particles: int, box: np.ndarray | None = None) -> openmm.System:
    """A System that takes the force itself, which lives no longer than it: a copy takes seconds."""
    system = make_system(None, particles, box)
    system.addForce(force)
    return system


@cache
def shared_system(force: openmm.Force, particles: int, kind: str | None = None) -> openmm.System:
    """The same, for all platforms."""
    return adopting_system(force, particles, None if kind is None else box_of(kind))


def make_system(force: openmm.Force | None, particles: int, box: np.ndarray | None = None) -> openmm.System:
    """A System with a copy of the force."""
    system = openmm.System()
    for _ in range(particles):
        system.addParticle(12.0)
    if box is not None:
        system.setDefaultPeriodicBoxVectors(*(openmm.Vec3(*row) for row in box))
    if force is not None:
        system.addForce(copy.deepcopy(force))
    return system


def context_of(system: openmm.System, platform: openmm.Platform) -> openmm.Context:
    return openmm.Context(system, openmm.VerletIntegrator(0.0005), platform)


def evaluate(context: openmm.Context, positions: np.ndarray) -> tuple[float, np.ndarray]:
    """Energy in eV and forces in eV/Å."""
    context.setPositions(positions)
    state = context.getState(energy=True, forces=True)
    energy = state.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole)
    forces = state.getForces(asNumpy=True).value_in_unit(unit.kilojoule_per_mole / unit.nanometer)
    return energy / KJ_PER_EV, forces / KJ_PER_EV / 10


@pytest.mark.filterwarnings("ignore:.*trained without total charges")
@pytest.mark.parametrize("precision", ["double", "single"])
@pytest.mark.parametrize(
    "name", [*some(CASES, quick=("acetate", "triclinic")), *published(PUBLISHED, quick=("acetate",))]
)
def test_oracle(name, precision, platform):
    case = (CASES | PUBLISHED)[name]
    energy, forces = evaluate(context_of(cached_system(name, precision), platform), case.positions)
    energy_error = abs(energy - case.energies.sum()) / len(forces)
    force_error = np.abs(forces - case.forces).max()
    relative = np.linalg.norm(forces - case.forces) / np.linalg.norm(case.forces)
    print(f"\n{name} {precision}: {energy_error:.1e} eV/atom, {force_error:.1e} eV/Å, {relative:.1e} relative")
    if "zbl" in name:  # the oracle rounds ZBL's screening length to float32
        assert energy_error < 1e-5
        assert force_error < 1e-5 * max(1, np.abs(case.forces).max())
        return
    assert energy_error < ENERGY[precision]
    if precision == "double":
        assert force_error < 1e-6
    else:
        assert relative < (1e-5 if case.box is None else 3e-5)


@pytest.mark.published("aceff-1.1")
def test_toluene_has_the_published_energy(platform):
    context = context_of(cached_system("published-toluene", "double"), platform)
    energy, _ = evaluate(context, PUBLISHED["published-toluene"].positions)
    assert energy * KJ_PER_EV == pytest.approx(-6976.5704, abs=1e-3)


@pytest.fixture(scope="module")
def variant() -> tuple[Case, TensorNetForce]:
    """A small model and three molecules in one System that see each other: 20 atoms in one molecule."""
    case = VARIANTS[SMALL_VARIANT]
    spread = case.positions + np.array(case.atoms.replicas)[:, None] * np.array([0.35, 0.1, 0.0])
    force = TensorNetForce(load_model(case.checkpoint), atomic_numbers=case.atoms.numbers, precision="double")
    return Case(case.name, case.checkpoint, case.atoms, spread, None, case.energies, case.forces), force


@cache
def small_force(*numbers: int, **options) -> TensorNetForce:
    """A force of the small model in double precision; every platform uses the same."""
    return TensorNetForce(VARIANTS[SMALL_VARIANT].checkpoint, atomic_numbers=numbers, precision="double", **options)


@cache
def box_of(kind: str) -> np.ndarray:
    box = np.diag([1.4, 1.3, 1.2])
    if kind == "triclinic":
        box[1, 0], box[2, 0], box[2, 1] = 0.5, -0.4, 0.6
    return box


@cache
def boxed_force(kind: str) -> TensorNetForce:
    case = VARIANTS[SMALL_VARIANT]
    return TensorNetForce(
        case.checkpoint, atomic_numbers=case.atoms.numbers, box_vectors=box_of(kind), precision="double"
    )


@cache
def copies_force() -> TensorNetForce:
    """Four molecules at the same place."""
    numbers = first_molecule()[0]
    return small_force(*numbers * 4, replicas=tuple(k for k in range(4) for _ in numbers))


@cache
def first_molecule() -> tuple[tuple[int, ...], np.ndarray, float, np.ndarray]:
    """Atomic numbers, positions, and the oracle's energy and forces of the small model for one molecule."""
    case = VARIANTS[SMALL_VARIANT]
    n = case.atoms.replicas.count(0)
    return tuple(case.atoms.numbers[:n]), case.positions[:n], case.energies[0], case.forces[:n]


@cache
def serialized_force() -> TensorNetForce:
    """In single precision, with properties and a force group of its own."""
    case = VARIANTS[SMALL_VARIANT]
    force = TensorNetForce(
        case.checkpoint,
        atomic_numbers=case.atoms.numbers,
        box_vectors=box_of("rectangular"),
        cuda_graphs=False,
        warmup_steps=17,
    )
    force.setForceGroup(5)
    return force


class TestInvariances:
    def test_rotation_and_translation(self, variant, platform):
        case, force = variant
        context = context_of(shared_system(force, len(case.positions)), platform)
        energy, forces = evaluate(context, case.positions)
        q, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(3, 3)))
        for matrix in (q, -q):  # O(3): a reflection too
            turned, turned_forces = evaluate(context, case.positions @ matrix + [1.0, -2.0, 3.0])
            assert turned == pytest.approx(energy, abs=1e-8)
            assert np.allclose(turned_forces, forces @ matrix, rtol=0, atol=1e-7)

    def test_permutation_of_like_atoms(self, variant, platform):
        case, force = variant
        context = context_of(shared_system(force, len(case.positions)), platform)
        energy, forces = evaluate(context, case.positions)
        numbers = np.array(case.atoms.numbers)
        order = np.arange(len(numbers))
        for z in set(numbers):
            order[numbers == z] = np.roll(np.flatnonzero(numbers == z), 1)
        assert (order != np.arange(len(order))).sum() > 10
        permuted, permuted_forces = evaluate(context, case.positions[order])
        assert permuted == pytest.approx(energy, abs=1e-8)
        assert np.allclose(permuted_forces, forces[order], rtol=0, atol=1e-7)

    def test_finite_differences(self, variant, platform):
        case, force = variant
        context = context_of(shared_system(force, len(case.positions)), platform)
        _, forces = evaluate(context, case.positions)
        step = 1e-4  # nm
        for atom, axis in ((0, 0), (4, 1), (13, 2), (19, 0)):
            shifted = []
            for sign in (1, -1):
                x = case.positions.copy()
                x[atom, axis] += sign * step
                shifted.append(evaluate(context, x)[0])
            slope = (shifted[0] - shifted[1]) / (2 * step * 10)
            assert forces[atom, axis] == pytest.approx(-slope, abs=2e-5)

    @pytest.mark.parametrize("box_kind", ["rectangular", "triclinic"])
    def test_lattice_translation(self, variant, platform, box_kind):
        case, _ = variant
        box, force = box_of(box_kind), boxed_force(box_kind)
        context = context_of(shared_system(force, len(case.positions), box_kind), platform)
        energy, forces = evaluate(context, case.positions)
        turns = np.random.default_rng(2).integers(-3, 4, size=(len(forces), 3))
        moved, moved_forces = evaluate(context, case.positions + turns @ box)
        assert moved == pytest.approx(energy, abs=1e-7)
        assert np.allclose(moved_forces, forces, rtol=0, atol=1e-6)

    def test_subset_of_a_larger_system(self, platform):
        x = np.array([[0.0, 0.0, 0.0], [0.096, 0.0, 0.0], [-0.024, 0.093, 0.0]])
        alone = small_force(8, 1, 1)
        energy, forces = evaluate(context_of(shared_system(alone, 3), platform), x)
        part = small_force(8, 1, 1, atoms=(4, 1, 7))
        everywhere = np.random.default_rng(3).normal(size=(9, 3))
        everywhere[[4, 1, 7]] = x
        part_energy, part_forces = evaluate(context_of(shared_system(part, 9), platform), everywhere)
        assert part_energy == pytest.approx(energy, abs=1e-9)
        assert np.allclose(part_forces[[4, 1, 7]], forces, rtol=0, atol=1e-9)
        assert (part_forces[[0, 2, 3, 5, 6, 8]] == 0).all()

    def test_overlapping_copies(self, platform):
        numbers, positions, expected, expected_forces = first_molecule()
        n = len(numbers)
        context = context_of(shared_system(copies_force(), 4 * n), platform)
        energy, forces = evaluate(context, np.tile(positions, (4, 1)))
        assert energy / 4 == pytest.approx(expected, abs=n * 1e-7)
        assert np.allclose(forces, np.tile(expected_forces, (4, 1)), rtol=0, atol=1e-6)


def test_no_graph_with_a_scale_parameter():
    """A CUDA graph would keep the value that the parameter had at its capture."""
    options = {"atomic_numbers": [8, 1, 1], "kernels": "portable"}
    model = VARIANTS["zero-layers"].checkpoint
    for scale, captured in ((None, "true"), ("lambda_ml", "false")):
        force = TensorNetForce(model, scale_parameter=scale, **options)
        assert dict(force.getProperties())["useCUDAGraphs"] == captured


@pytest.fixture(scope="module")
def exported(variant, tmp_path_factory) -> tuple[Path, dict]:
    """A file of the small model's force, and its metadata."""
    (case, force), path = variant, tmp_path_factory.mktemp("exported") / "exported.safetensors"
    numbers, kernels = case.atoms.numbers, force.metadata["kernels"]
    model = load_model(case.checkpoint)
    return path, export_potential(model, path, atomic_numbers=numbers, precision="double", kernels=kernels)


class TestSerialization:
    @pytest.mark.parametrize("way", ["deepcopy", "XML"])
    def test_round_trip(self, variant, platform, way):
        case, _ = variant
        force = serialized_force()
        system = shared_system(force, len(case.positions), "rectangular")
        energy, forces = evaluate(context_of(system, platform), case.positions)
        if way == "deepcopy":
            again = copy.deepcopy(system)
        else:
            again = openmm.XmlSerializer.deserialize(openmm.XmlSerializer.serialize(system))
        plain = again.getForce(0)
        back = openmmtorch.TorchForce.cast(plain)
        assert plain.getForceGroup() == 5
        assert plain.usesPeriodicBoundaryConditions()
        assert back.getOutputsForces()
        assert dict(back.getProperties()) == {"useCUDAGraphs": "false", "CUDAGraphWarmupSteps": "17"}
        assert json.loads(back.getModule().metadata) == force.metadata
        again_energy, again_forces = evaluate(context_of(again, platform), case.positions)
        assert again_energy == energy
        assert (again_forces == forces).all()

    def test_exported_file(self, variant, exported, platform):
        case, force = variant
        path, metadata = exported
        assert read_metadata(path) == metadata
        assert [p.name for p in path.parent.iterdir()] == ["exported.safetensors"]
        loaded = TensorNetForce(path, atomic_numbers=case.atoms.numbers)
        assert loaded.metadata == metadata | {"name": "TensorNetForce", "scale_parameter": None}
        n = len(case.positions)
        expected = evaluate(context_of(shared_system(force, n), platform), case.positions)
        energy, forces = evaluate(context_of(adopting_system(loaded, n), platform), case.positions)
        assert energy == expected[0]
        assert (forces == expected[1]).all()


def topology_of(symbols: list[str | None], box: np.ndarray | None = None) -> Topology:
    topology = Topology()
    residue = topology.addResidue("MOL", topology.addChain())
    for k, symbol in enumerate(symbols):
        element = None if symbol is None else Element.getBySymbol(symbol)
        topology.addAtom(f"{symbol or 'X'}{k}", element, residue)
    if box is not None:
        topology.setPeriodicBoxVectors(box * unit.nanometer)
    return topology


WATER = np.array([[0.0, 0.0, 0.0], [0.096, 0.0, 0.0], [-0.024, 0.093, 0.0]])


@pytest.fixture(scope="module")
def model():
    return load_model(VARIANTS["zero-layers"].checkpoint)


class TestArguments:
    def test_topology_gives_elements_and_box(self, model):
        plain = TensorNetForce(model, topology_of(["O", "H", "H"]))
        assert plain.metadata["atomic_numbers"] == [8, 1, 1]
        assert not plain.usesPeriodicBoundaryConditions()
        boxed = topology_of(["O", "H", "H"], np.eye(3) * 1.5)
        assert TensorNetForce(model, boxed).usesPeriodicBoundaryConditions()
        assert not TensorNetForce(model, boxed, periodic=False).usesPeriodicBoundaryConditions()

    def test_a_force_of_one_atom(self, model, platform):
        force = TensorNetForce(model, atomic_numbers=[8])
        energy, forces = evaluate(context_of(make_system(force, 1), platform), np.array([[1.0, 2.0, 3.0]]))
        assert np.isfinite(energy)
        assert (forces == 0).all()

    def test_quantities_and_plain_numbers_are_the_same(self, model):
        for positions in (WATER, WATER * unit.nanometer, WATER * 10 * unit.angstrom):
            TensorNetForce(model, atomic_numbers=[8, 1, 1], positions=positions)
        with pytest.raises(ValueError, match=r"at least 0\.05 nm, received 0\.0096 nm; are the positions in nm"):
            TensorNetForce(model, atomic_numbers=[8, 1, 1], positions=WATER * unit.angstrom)

    @pytest.mark.parametrize(
        ("options", "error", "text"),
        [
            ({}, ValueError, "topology, atomic_numbers: expected one of them, received neither"),
            ({"topology": topology_of(["O"]), "atomic_numbers": [8]}, ValueError, "received both"),
            ({"topology": "water.pdb"}, TypeError, "topology: expected an openmm.app.Topology, received str"),
            ({"topology": topology_of(["O", None])}, ValueError, r"atom 1 \(X1, residue MOL 1\): expected an atom with an element"),
            ({"topology": topology_of(["O", "Fe"])}, ValueError, r"atom 1 \(Fe1, residue MOL 1, Fe\).*max_z, 20, received 26"),
            ({"topology": topology_of(["O"]), "atoms": [1]}, ValueError, "below the topology's number of atoms, 1, received 1"),
            ({"atomic_numbers": [8], "atoms": [1, 2]}, ValueError, "each of the 2 atoms, received 1"),
            ({"atomic_numbers": [8, 8], "atoms": [1, 1]}, ValueError, "each index once, received 1 more than once"),
            ({"atomic_numbers": [8], "atoms": [-1]}, ValueError, "at least 0, received -1"),
            ({"atomic_numbers": [8], "atoms": []}, ValueError, "at least one index"),
            ({"atomic_numbers": [8], "atoms": [0.5]}, TypeError, "expected integers, received 0.5"),
            ({"atomic_numbers": [8, 1], "replicas": [0]}, ValueError, "each of 2 atoms, received 1"),
            ({"atomic_numbers": [8, 8], "replicas": [0, 1], "total_charge": 1}, ValueError, "single number 1; pass a list"),
            ({"atomic_numbers": [8], "total_charge": 0.3}, ValueError, "whole numbers"),
            ({"atomic_numbers": [8], "precision": "half"}, ValueError, "precision: expected one of single, double, received 'half'"),
            ({"atomic_numbers": [8], "warmup_steps": 3}, ValueError, "from 10 to 10000, received 3"),
            ({"atomic_numbers": [8], "cuda_graphs": "yes"}, TypeError, "cuda_graphs: expected True or False"),
            ({"atomic_numbers": [8], "periodic": 1}, TypeError, "periodic: expected True or False, received 1"),
            ({"atomic_numbers": [8], "periodic": True}, ValueError, "expected a box with periodic=True, received none"),
            ({"atomic_numbers": [8], "box_vectors": np.eye(3) * 0.8}, ValueError, "twice the cutoff, 0.9 nm, received 0.8 nm"),
            ({"atomic_numbers": [8], "box_vectors": np.eye(2)}, ValueError, r"box_vectors: expected shape \(3, 3\)"),
            ({"atomic_numbers": [8], "box_vectors": [[2, 0, 0], [1.5, 2, 0], [0, 0, 2]]}, ValueError, "reduced form"),
            ({"atomic_numbers": [8], "positions": np.zeros((2, 3))}, ValueError, r"each particle \(1\), received 2"),
            ({"atomic_numbers": [8], "positions": "far"}, TypeError, "positions: expected lengths"),
            ({"atomic_numbers": [8], "positions": [[0, np.nan, 0]]}, ValueError, "expected finite coordinates"),
            ({"atomic_numbers": [8, 1], "positions": np.zeros((2, 3))}, ValueError, "received 0.0000 nm"),
        ],
    )  # fmt: skip
    def test_refusals(self, model, options, error, text):
        with pytest.raises(error, match=text):
            TensorNetForce(model, **options)

    @pytest.mark.parametrize(
        ("model", "error", "text"),
        [
            ("nowhere.ckpt", FileNotFoundError, "received 'nowhere.ckpt', which does not exist"),
            (["a.ckpt", "b.ckpt"], ValueError, "ensembles are not supported"),
            (3, TypeError, "expected a path, a name or a TensorNet, received int"),
        ],
    )
    def test_models_that_are_refused(self, model, error, text):
        with pytest.raises(error, match=text):
            TensorNetForce(model, atomic_numbers=[8])

    def test_an_element_that_the_model_was_not_trained_on(self, model_path, monkeypatch):
        digest = hashlib.sha256(model_path("aceff-1.1").read_bytes()).hexdigest()
        monkeypatch.setitem(MODELS, "known", KnownModel("", "f.ckpt", sha256=digest, elements=(1, 6, 8)))
        with pytest.raises(ValueError, match=r"atom 0 \(Fe0, residue MOL 1, Fe\).*trained on .* received 26"):
            TensorNetForce(model_path("aceff-1.1"), topology_of(["Fe", "H"]))

    def test_warnings(self, model):
        with pytest.warns(UserWarning, match="trained without total charges, received 1"):
            TensorNetForce(model, atomic_numbers=[8, 1], total_charge=1)
        with pytest.warns(UserWarning, match="molecules of a liquid must see each other"):
            TensorNetForce(model, atomic_numbers=[8, 8], replicas=[0, 1], box_vectors=np.eye(3) * 1.5)

    def test_options_that_do_not_exist(self, model):
        with pytest.raises(TypeError, match="unexpected keyword argument 'precison'"):
            TensorNetForce(model, atomic_numbers=[8], precison="double")

    def test_where_gradients_are_off(self, model):
        """As around all of a user's inference."""
        with torch.no_grad():
            force = TensorNetForce(model, atomic_numbers=[8, 1, 1])
        assert force.metadata["deviation"]["relative_force"] < 1e-4

    def test_a_system_of_another_size(self, model, platform):
        force = TensorNetForce(model, atomic_numbers=[8, 1, 1])
        context = context_of(make_system(force, 4), platform)
        context.setPositions(np.arange(12).reshape(4, 3) * 0.1)
        with pytest.raises(openmm.OpenMMException, match="another number of particles than the force has atoms"):
            context.getState(energy=True)

    def test_molecules_from_the_first_to_an_empty_last_one(self, model, platform):
        options = {"atomic_numbers": [8, 1, 1], "precision": "double"}
        force = TensorNetForce(model, replicas=[0, 0, 0], total_charge=[0, 0], **options)
        energy, _ = evaluate(context_of(adopting_system(force, 3), platform), WATER)
        alone = TensorNetForce(model, **options)
        assert energy == pytest.approx(evaluate(context_of(adopting_system(alone, 3), platform), WATER)[0], abs=1e-9)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("export") / "water.pt"
    model = load_model(VARIANTS["charged-3layers-mean"].checkpoint)
    export_potential(model, path, atomic_numbers=[8, 1], total_charge=-1)
    return path


class TestExportedFiles:
    def test_keeps_what_it_was_exported_with(self, path):
        force = TensorNetForce(path, atomic_numbers=[8, 1])
        assert force.metadata["total_charge"] == [-1.0]
        assert force.metadata["precision"] == "single"
        assert force.metadata["elements"] == [1, 8]
        assert force.metadata["torch_version"] == torch.__version__
        assert TensorNetForce(path, atomic_numbers=[8, 1], total_charge=-1, replicas=[0, 0]).metadata == force.metadata

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"atomic_numbers": [1, 8]}, r"exported for \(2 atoms\), received 2 that differ from atom 0 on"),
            ({"atomic_numbers": [8, 1, 1]}, "received 3 that differ from atom 2 on"),
            (
                {"atomic_numbers": [8, 1], "total_charge": 1},
                r"expected \[-1.0\] as the file was exported with, received 1",
            ),
            ({"atomic_numbers": [8, 1], "replicas": [0, 1]}, "replicas: expected those"),
            ({"atomic_numbers": [8, 1], "atoms": [0, 2]}, "atoms: expected None"),
            ({"atomic_numbers": [8, 1], "box_vectors": np.eye(3) * 2}, "periodic: expected False"),
            (
                {"atomic_numbers": [8, 1], "precision": "double"},
                "precision: expected 'single' as the file was exported",
            ),
        ],
    )
    def test_refusals(self, path, options, text):
        with pytest.raises(ValueError, match=text):
            TensorNetForce(path, **options)

    def test_damaged_newer_and_foreign_files(self, path, tmp_path):
        whole = path.read_bytes()
        truncated = tmp_path / "truncated.safetensors"
        truncated.write_bytes(whole[: len(whole) // 2])
        damaged = tmp_path / "damaged.safetensors"
        middle = len(whole) // 2
        damaged.write_bytes(whole[:middle] + bytes(64) + whole[middle + 64 :])
        newer, older = tmp_path / "newer.safetensors", tmp_path / "older.safetensors"
        texts = read_texts(whole)
        for file, version in ((newer, 99), (older, 2)):
            description = json.loads(texts["metadata"]) | {"format_version": version}
            file.write_bytes(with_texts(whole, texts | {"metadata": json.dumps(description)}))
        foreign = tmp_path / "foreign.safetensors"
        safetensors.torch.save_file({"weight": torch.zeros(2)}, foreign)
        for file, text in (
            (truncated, "truncated"),
            (damaged, "damaged"),
            (newer, "format version 3, received 99; update openmm-tensornet"),
            (older, "format version 3, received 2; make it again"),
            (foreign, "expected an exported TensorNet file, received another"),
        ):
            with pytest.raises(ValueError, match=text):
                TensorNetForce(file, atomic_numbers=[8, 1])

    def test_a_module_that_disagrees_is_not_written(self, tmp_path, monkeypatch):
        right = program.StaticNetwork.forward

        def wrong(self, *pairs):
            return right(self, *pairs) * 1.001

        model = load_model(VARIANTS["zero-layers"].checkpoint)
        path = tmp_path / "wrong.pt"
        monkeypatch.setattr(program.StaticNetwork, "forward", wrong)
        with pytest.raises(RuntimeError, match="disagrees with the reference model on geometry 'packing 1'"):
            export_potential(model, path, atomic_numbers=[8, 1, 1], tabulate=False)
        with pytest.raises(RuntimeError, match="tabulate"):
            export_potential(model, path, atomic_numbers=[8, 1, 1])
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "model",
    ["alanine-dipeptide-gfn2"]
    + [pytest.param(WEIGHTS[n][0], marks=[pytest.mark.published(n), pytest.mark.slow], id=n) for n in WEIGHTS],
)
def test_a_minimum_of_the_energy_is_no_reason_to_refuse(model):
    """The forces vanish there; rounding of the ones that cancel does not."""
    pdb = PDBFile(str(EXAMPLE))
    system = openmm.System()
    for _ in pdb.positions:
        system.addParticle(1.0)
    system.addForce(TensorNetForce(model, pdb.topology, precision="double"))
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), openmm.Platform.getPlatformByName("Reference"))
    context.setPositions(pdb.positions)
    openmm.LocalEnergyMinimizer.minimize(context, 1e-2)
    state = context.getState(positions=True, forces=True)
    assert np.abs(state.getForces(asNumpy=True)._value).max() < 0.1
    for precision in ("single", "double"):
        force = TensorNetForce(model, pdb.topology, precision=precision, positions=state.getPositions())
        assert force.metadata["deviation"]["relative_force"] < TOLERANCES[precision].force / 5  # with room to spare


@pytest.mark.parametrize(
    ("distribution", "version", "torch_version", "openmm_version", "text"),
    [
        ("acellera-openmmtorch-cpu", "1.10", "2.14.1", "8.5", r"torch>=2\.10,<2\.13, but torch 2\.14\.1"),
        ("acellera-openmmtorch-cu13", "1.10", "2.9.0", "8.5", r"but torch 2\.9\.0 is installed"),
        ("acellera-openmmtorch-cpu", "1.10", "2.12.1", "8.6.1", r"openmm>=8\.4,<8\.6, but openmm 8\.6\.1"),
    ],
)
def test_builds_that_do_not_fit(distribution, version, torch_version, openmm_version, text):
    with pytest.raises(ImportError, match=text):
        check_versions(distribution, version, torch_version, openmm_version)


def test_builds_that_fit():
    check_versions("acellera-openmmtorch-cpu", "1.10", "2.12.1+cpu", "8.5.2")
    check_versions("openmm-torch", "1.5.1", "2.20", "9.0")  # conda: linked against what it was built for


def test_importing_is_quiet():
    code = "import openmm_tensornet.forces.torchforce"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_importing_leaves_logging_as_it_was():
    code = (
        "import logging, sys\nroot = logging.getLogger()\nlogging.disable(int(sys.argv[1]))\nimport openmm_tensornet.forces.torchforce\n"
        "print(root.manager.disable, root.handlers, root.filters, root.level)"
    )
    for level in (logging.CRITICAL, logging.NOTSET):
        done = subprocess.run([sys.executable, "-c", code, str(level)], capture_output=True, text=True, timeout=120)
        assert done.stdout == f"{level} [] [] {logging.WARNING}\n", done.stderr


@pytest.mark.slow
@pytest.mark.published("aceff-1.1", "aceff-2.0")
@pytest.mark.parametrize(
    ("case", "picoseconds", "platform_name"),
    [
        (PUBLISHED["published-alanine-dipeptide"], 5, "Reference"),
        (PUBLISHED["published-alanine-dipeptide"], 5, "CPU"),
        (PUBLISHED2["published-alanine-dipeptide-2.0"], 10, "CPU"),
    ],
    ids=["AceFF-1.1-Reference", "AceFF-1.1-CPU", "AceFF-2.0-CPU"],
)
def test_energy_is_conserved(case, picoseconds, platform_name):
    """NVE at 0.5 fs from 300 K: linear drift below 0.01 kJ/mol/ps."""
    system = openmm.System()
    for z in case.atoms.numbers:
        system.addParticle(Element.getByAtomicNumber(z).mass)
    system.addForce(TensorNetForce(case.checkpoint, atomic_numbers=case.atoms.numbers))
    platform = openmm.Platform.getPlatformByName(platform_name)
    langevin = openmm.LangevinMiddleIntegrator(300, 5, 0.0005)
    langevin.setRandomNumberSeed(1)
    context = openmm.Context(system, langevin, platform)
    context.setPositions(case.positions)
    openmm.LocalEnergyMinimizer.minimize(context, maxIterations=200)
    context.setVelocitiesToTemperature(300, 1)
    langevin.step(2000)
    state = context.getState(positions=True, velocities=True)
    verlet = openmm.VerletIntegrator(0.0005)
    context = openmm.Context(system, verlet, platform)
    context.setState(state)
    times, energies, temperatures = [], [], []
    for _ in range(100 * picoseconds):
        verlet.step(20)
        now = context.getState(energy=True)
        kinetic = now.getKineticEnergy().value_in_unit(unit.kilojoule_per_mole)
        times.append(len(times) * 0.01)
        energies.append(kinetic + now.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole))
        temperatures.append(2 * kinetic / (66 * 0.00831446))
    drift = np.polyfit(times, energies, 1)[0]
    print(
        f"\n{platform_name}: drift {drift:+.5f} kJ/mol/ps over {picoseconds} ps, standard deviation {np.std(energies):.4f} kJ/mol, "
        f"mean temperature {np.mean(temperatures):.0f} K"
    )
    assert abs(drift) < 0.01


@pytest.mark.slow
def test_large_periodic_system_with_cells():
    """1,536 atoms, where pairs are looked for in cells, against the reference model."""
    case = CASES["water-64-rectangular"]
    shifts = [np.array(s) * 1.24 for s in np.ndindex(2, 2, 2)]
    x, box = np.concatenate([case.positions + shift for shift in shifts]), np.eye(3) * 2.48
    numbers = list(case.atoms.numbers) * 8
    model = load_model(VARIANTS["zero-layers"].checkpoint)
    force = TensorNetForce(model, atomic_numbers=numbers, box_vectors=box, positions=x, precision="double")
    context = context_of(make_system(force, len(x), box), openmm.Platform.getPlatformByName("CPU"))
    energy, forces = evaluate(context, x)
    expected = reference_energy_and_forces(copy_double(model), Atoms.make(numbers), torch.tensor(x), torch.tensor(box))
    assert energy * KJ_PER_EV == pytest.approx(float(expected[0]), abs=1e-4)
    assert np.abs(forces * KJ_PER_EV * 10 - expected[1].numpy()).max() < 1e-3
