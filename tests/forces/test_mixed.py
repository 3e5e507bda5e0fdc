"""A TensorNet potential for a part of a System, the force field for the rest."""

from __future__ import annotations

import configparser
import copy
import importlib
import importlib.util
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import openmm
import pytest
from conftest import PUBLISHED, SEEDED, VARIANTS, WEIGHTS
from openmm import app, unit

openmmml = pytest.importorskip("openmmml", reason="openmm-ml is not installed")

from openmm_tensornet import create_mixed_system, load_model  # noqa: E402
from openmm_tensornet.export.compiled import model_hash  # noqa: E402
from openmm_tensornet.export.exported import export_potential  # noqa: E402
from openmm_tensornet.forces.system import force_class, tensornet_forces  # noqa: E402
from openmm_tensornet.models.registry import MODELS, find_model  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
WATER = np.array([[0.0, 0.0, 0.0], [0.09572, 0.0, 0.0], [-0.023997, 0.092663, 0.0]])
PEPTIDE = list(range(22))
EMBEDDINGS = hasattr(openmmml.MLPotential, "getSupportedEmbeddings")  # of openmm-ml 1.8 and newer


@pytest.fixture(scope="module")
def model():
    return load_model(VARIANTS["zero-layers"].checkpoint)


@pytest.fixture(scope="module")
def solution() -> app.Modeller:
    """Alanine dipeptide and three waters near it."""
    pdb = app.PDBFile(str(ROOT / "examples" / "alanine_dipeptide.pdb"))
    modeller = app.Modeller(pdb.topology, pdb.positions)
    low = np.min(pdb.getPositions(asNumpy=True)._value, axis=0)
    for k in range(3):
        topology = app.Topology()
        residue = topology.addResidue("HOH", topology.addChain())
        oxygen, *hydrogens = [
            topology.addAtom(name, app.Element.getBySymbol(name[0]), residue) for name in ("O", "H1", "H2")
        ]
        for hydrogen in hydrogens:
            topology.addBond(oxygen, hydrogen)
        modeller.add(topology, (WATER + low + [0.3 * k, -0.3, 0.1 * k]) * unit.nanometer)
    return modeller


@pytest.fixture(scope="module")
def forcefield() -> app.ForceField:
    return app.ForceField("amber14-all.xml", "amber14/tip3p.xml")


@pytest.fixture(scope="module")
def mm_system(solution, forcefield) -> openmm.System:
    return forcefield.createSystem(solution.topology, constraints=app.HBonds, rigidWater=True)


@pytest.fixture(scope="module")
def mixed(solution, mm_system, model) -> openmm.System:
    return create_mixed_system(
        model, solution.topology, mm_system, PEPTIDE, interpolate=True, precision="double", name="the peptide"
    )


def evaluate(system, positions, platform, **parameters) -> tuple[float, np.ndarray]:
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), platform)
    context.setPositions(positions)
    for name, value in parameters.items():
        context.setParameter(name, value)
    state = context.getState(energy=True, forces=True)
    return state.getPotentialEnergy()._value, state.getForces(asNumpy=True)._value


@pytest.fixture(scope="module")
def parts(solution, forcefield, mm_system, model, platform):
    """Energies and forces of all by the force field, of the peptide by it, of the peptide by the network."""
    alone = app.Modeller(solution.topology, solution.positions)
    alone.delete([r for r in solution.topology.residues() if r.name == "HOH"])
    inside = forcefield.createSystem(alone.topology, constraints=app.HBonds)
    network = openmm.System()
    for _ in PEPTIDE:
        network.addParticle(1.0)
    network.addForce(force_class()(model, alone.topology, precision="double"))
    return (
        evaluate(mm_system, solution.positions, platform),
        evaluate(inside, alone.positions, platform),
        evaluate(network, alone.positions, platform),
    )


def close(found: tuple, energy: float, forces: np.ndarray, platform) -> None:
    exact = platform.getName() == "Reference"  # the CPU platform evaluates the force field in single precision
    assert found[0] == pytest.approx(energy, abs=1e-4 if exact else 0.1)
    assert np.abs(found[1] - forces).max() < (1e-4 if exact else 1e-4 * np.abs(forces).max())


def expected(parts, share: float) -> tuple[float, np.ndarray]:
    (energy, forces), inside, network = parts
    forces = forces.copy()
    forces[PEPTIDE] += share * (network[1] - inside[1])
    return energy + share * (network[0] - inside[0]), forces


def test_the_inside_of_the_region_is_replaced(solution, mm_system, model, parts, platform):
    system = create_mixed_system(
        model, solution.topology, mm_system, PEPTIDE, precision="double", force_group=3, name="the peptide"
    )
    (force,) = tensornet_forces(system)
    assert force.getName() == "the peptide"
    assert force.getForceGroup() == 3
    assert force.metadata["particles"] == PEPTIDE
    assert system.getNumConstraints() == 9  # the three waters'
    close(evaluate(system, solution.positions, platform), *expected(parts, 1.0), platform)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_interpolation_is_linear(solution, mixed, parts, platform, share):
    assert abs(parts[1][0] - parts[2][0]) > 10
    found = evaluate(mixed, solution.positions, platform, lambda_interpolate=share)
    close(found, *expected(parts, share), platform)


def test_by_its_name_in_openmm_ml(solution, model, parts, platform):
    alone = app.Modeller(solution.topology, solution.positions)
    alone.delete([r for r in solution.topology.residues() if r.name == "HOH"])
    potential = openmmml.MLPotential("tensornet", modelPath=VARIANTS["zero-layers"].checkpoint)
    system = potential.createSystem(alone.topology, precision="double")
    close(evaluate(system, alone.positions, platform), *parts[2], platform)


def test_the_bundled_model_by_its_name(solution, platform):
    alone = app.Modeller(solution.topology, solution.positions)
    alone.delete([r for r in solution.topology.residues() if r.name == "HOH"])
    system = openmmml.MLPotential("alanine-dipeptide-gfn2").createSystem(alone.topology)
    (force,) = tensornet_forces(system)
    assert force.metadata["model_hash"] == model_hash(load_model(find_model("alanine-dipeptide-gfn2")))
    assert np.isfinite(evaluate(system, alone.positions, platform)[0])


@pytest.mark.parametrize(
    ("name", "options", "given"),
    [
        ("tensornet", {}, "none"),
        ("alanine-dipeptide-gfn2", {"modelPath": "a.ckpt"}, "'a.ckpt' beside the model 'alanine-"),
    ],
)
def test_no_model_or_two(name, options, given):
    with pytest.raises(ValueError, match=f"modelPath: expected a model .*, received {given}"):
        openmmml.MLPotential(name, **options)


def test_names_that_openmm_ml_has_are_left_alone():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options.entry_points"]["openmmml.potentials"].strip().splitlines()
    ours = dict(line.split(" = ") for line in lines)
    assert set(ours) - {"tensornet"} == {name for name, known in MODELS.items() if not known.repository}
    theirs = {e.name for e in entry_points(group="openmmml.potentials") if e.value.startswith("openmmml.")}
    assert len(theirs) > 10
    assert not theirs & set(ours)
    for value in ours.values():
        module, name = value.split(":")
        impl = getattr(importlib.import_module(module), name)().createImpl("tensornet", modelPath="a.ckpt")
        assert isinstance(impl, openmmml.mlpotential.MLPotentialImpl)


@pytest.mark.parametrize("first", ["openmm_tensornet.mlpotential", "openmmml", "openmmml.mlpotential"])
def test_any_order_of_imports(first):
    code = (
        f"import {first}, openmmml, openmm_tensornet.mlpotential as ours\n"
        "assert isinstance(openmmml.MLPotential._implFactories['tensornet'], ours.TensorNetPotentialFactory)\n"
        "assert issubclass(ours.TensorNetPotential, openmmml.mlpotential.MLPotentialImpl)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(EMBEDDINGS, reason="openmm-ml 1.8 has link atoms")
def test_what_needs_openmm_ml_1_8(solution, mm_system, model):
    with pytest.raises(
        ValueError, match=r"expected whole molecules, received a part that the bond of .* and .* leaves"
    ):
        create_mixed_system(model, solution.topology, mm_system, PEPTIDE[:10])
    for options in ({"embedding": "mechanical"}, {"return_info": True}):
        with pytest.raises(ImportError, match=r"need openmm-ml 1\.8 or newer"):
            create_mixed_system(model, solution.topology, mm_system, PEPTIDE, **options)


@pytest.mark.skipif(not EMBEDDINGS, reason="openmm-ml 1.7 has no embeddings to choose from")
def test_embeddings(solution, mm_system, model, parts, platform):
    arguments = model, solution.topology, mm_system, PEPTIDE
    system = create_mixed_system(*arguments, embedding="mechanical", precision="double")
    close(evaluate(system, solution.positions, platform), *expected(parts, 1.0), platform)
    with pytest.raises(ValueError, match=r"embedding: expected one of .*mechanical.*, received 'electrostatic'"):
        create_mixed_system(*arguments, embedding="electrostatic")


@pytest.mark.skipif(not EMBEDDINGS, reason="openmm-ml 1.7 has no link atoms")
@pytest.mark.parametrize("interpolate", [False, True])
def test_link_atoms(solution, mm_system, model, platform, interpolate):
    """The network sees the region and a hydrogen on the bond that leaves it; moving the atom at its other end acts on neither."""
    region = PEPTIDE[:6]  # the acetyl group
    (inside, outside) = next(
        sorted((a.index, b.index), key=lambda k: k not in region)
        for a, b in solution.topology.bonds()
        if (a.index in region) != (b.index in region)
    )
    distance = 0.11
    found = create_mixed_system(
        model, solution.topology, mm_system, region, interpolate=interpolate, precision="double", total_charge=0,
        return_info=True, linkAtomDistances=[(inside, outside, distance)],
    )  # fmt: skip
    system, count = found["system"], solution.topology.getNumAtoms()
    assert system.getNumParticles() == found["topology"].getNumAtoms() == count + 1
    assert system.isVirtualSite(count) and found["oldToNew"] == list(range(count))
    positions = np.array(solution.getPositions().value_in_unit(unit.nanometer))
    bond = positions[outside] - positions[inside]
    cap = positions[inside] + distance * bond / np.linalg.norm(bond)
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), platform)
    context.setPositions([*positions, cap])
    context.computeVirtualSites()
    assert np.abs(context.getState(positions=True).getPositions(asNumpy=True)._value[count] - cap).max() < 1e-6

    # The force alone, on the same atoms.
    numbers = [atom.element.atomic_number for atom in solution.topology.atoms()]
    alone = openmm.System()
    for _ in range(len(region) + 1):
        alone.addParticle(1.0)
    alone.addForce(force_class()(model, atomic_numbers=[*(numbers[k] for k in region), 1], precision="double"))
    energy, forces = evaluate(alone, [*positions[region], cap], platform)
    if interpolate:
        with_network, without = (
            evaluate(system, [*positions, cap], platform, lambda_interpolate=share)[0] for share in (1.0, 0.0)
        )
        assert without == pytest.approx(evaluate(mm_system, positions, platform)[0], abs=0.1)
        assert abs(with_network - without) > 1
    else:
        force = next(tensornet_forces(system))
        force.setForceGroup(7)
        context.reinitialize(preserveState=True)
        state = context.getState(energy=True, forces=True, groups={7})
        assert state.getPotentialEnergy()._value == pytest.approx(energy, abs=1e-4)
        own = state.getForces(asNumpy=True)._value
        others = [k for k in region if k != inside]
        assert np.abs(own[others] - forces[[region.index(k) for k in others]]).max() < 1e-3


def test_openmm_ml_is_told_of_the_range(model):
    from openmm_tensornet.mlpotential import TensorNetPotentialFactory

    assert TensorNetPotentialFactory().createImpl("tensornet", modelPath=model).getMLLongRange() is False


@pytest.mark.parametrize("interpolate", [False, True])
def test_molecules_stay_whole(solution, mm_system, model, mixed, interpolate):
    """The bonds that openmm-ml removes are there at zero strength."""
    system = mixed if interpolate else create_mixed_system(model, solution.topology, mm_system, PEPTIDE)
    replicas = [
        openmm.Context(
            one, openmm.VerletIntegrator(0.001), openmm.Platform.getPlatformByName("Reference")
        ).getMolecules()
        for one in (system, mm_system)
    ]
    assert sorted(map(sorted, replicas[0])) == sorted(map(sorted, replicas[1]))


def with_charges(system: openmm.System, total: float) -> openmm.System:
    """A copy in which the first atom of the peptide has what is missing to `total`."""
    changed = copy.deepcopy(system)
    (force,) = [force for force in changed.getForces() if isinstance(force, openmm.NonbondedForce)]
    charges = [force.getParticleParameters(k)[0]._value for k in PEPTIDE]
    force.setParticleParameters(0, charges[0] + total - sum(charges), *force.getParticleParameters(0)[1:])
    return changed


@pytest.mark.filterwarnings("ignore:.*trained without total charges")
def test_the_charge_is_that_of_the_force_field(solution, mm_system, model):
    system = create_mixed_system(model, solution.topology, with_charges(mm_system, -2.02), PEPTIDE)
    (force,) = tensornet_forces(system)
    assert force.metadata["total_charge"] == [-2.0]
    given = create_mixed_system(model, solution.topology, mm_system, PEPTIDE, total_charge=0 * unit.elementary_charge)
    assert next(tensornet_forces(given)).metadata["total_charge"] == [0.0]


@pytest.mark.parametrize(
    ("field", "options", "text"),
    [
        (-2, {"total_charge": 0}, r"total_charge: expected -2, the sum of the force field's charges .*, received 0; "),
        (0, {"total_charge": [1]}, r"total_charge: expected 0, the sum .* received \[1\]; "),
        (0.4, {}, r"total_charge: expected the charge of the region, since the force field's sum to 0\.400; "),
    ],
)
def test_charges_that_contradict_each_other(solution, mm_system, model, field, options, text):
    with pytest.raises(ValueError, match=text):
        create_mixed_system(model, solution.topology, with_charges(mm_system, field), PEPTIDE, **options)


def test_options_that_do_not_exist(solution, mm_system, model):
    text = r"totalCharge: expected one of the options replicas, total_charge, .*charge, .*useCoulombCutoff.*, received an unknown one"
    with pytest.raises(TypeError, match=text):
        create_mixed_system(model, solution.topology, mm_system, PEPTIDE, totalCharge=1)
    with pytest.raises(TypeError, match="model_path: expected one of the options modelPath, lengthScale, energyScale"):
        openmmml.MLPotential("tensornet", model_path="a.ckpt")


def test_either_order_of_arguments(solution, mm_system, model):
    systems = [
        create_mixed_system(model, solution.topology, mm_system, PEPTIDE),
        create_mixed_system(solution.topology, mm_system, PEPTIDE, model),
        create_mixed_system(solution.topology, mm_system, atoms=PEPTIDE, model=model),
    ]
    assert len({str(next(tensornet_forces(system)).metadata) for system in systems}) == 1
    with pytest.raises(TypeError, match=r"5 were given|5 positional"):
        create_mixed_system(solution.topology, mm_system, PEPTIDE, model, True)


def test_arguments_that_are_something_else(solution, mm_system, model):
    topology = solution.topology
    smaller = openmm.System()
    for arguments, error, text in (
        (
            (topology, model, mm_system, PEPTIDE),
            TypeError,
            r"mm_system: expected an openmm\.System, received TensorNet",
        ),
        (
            (model, mm_system, topology, PEPTIDE),
            TypeError,
            r"topology: expected an openmm\.app\.Topology, received System",
        ),
        (
            (model, topology, smaller, PEPTIDE),
            ValueError,
            "mm_system: expected a particle for each of the .* 31 atoms, received 0",
        ),
        ((model, topology, mm_system, [31]), ValueError, "atoms: expected indices below .* particles, 31, received 31"),
        (
            (model, topology, mm_system, [3, 3]),
            ValueError,
            "atoms: expected each index once, received 3 more than once",
        ),
    ):
        with pytest.raises(error, match=text):
            create_mixed_system(*arguments)


# ------------------------------------------------------------------------- openmm-ml's options for TorchMD-Net


def made(topology: app.Topology, path, **options) -> openmm.System:
    """The System that openmm-ml makes."""
    scales = {name: options.pop(name) for name in ("lengthScale", "energyScale") if name in options}
    return openmmml.MLPotential("tensornet", modelPath=path, **scales).createSystem(topology, **options)


def metadata(system: openmm.System) -> dict:
    (force,) = tensornet_forces(system)
    return force.metadata


@pytest.fixture(scope="module")
def water() -> app.Topology:
    """Three of its atoms are enough for options."""
    topology = app.Topology()
    residue = topology.addResidue("HOH", topology.addChain())
    for symbol in ("O", "H", "H"):
        topology.addAtom(symbol, app.Element.getBySymbol(symbol), residue)
    return topology


@pytest.fixture
def boxed(water) -> app.Topology:
    topology = copy.deepcopy(water)
    topology.setUnitCellDimensions((2.6, 2.6, 2.6) * unit.nanometer)
    return topology


def test_options_by_openmm_mls_names(water):
    path = SEEDED["so3"]
    assert metadata(made(water, path, charge=1))["total_charge"] == [1]
    assert metadata(made(water, path, batch=[0, 1, 1], precision="double"))["replicas"] == [0, 1, 1]
    with pytest.raises(ValueError, match="charge: expected either charge or total_charge, received both"):
        made(water, path, charge=1, total_charge=1)


def test_cuda_graphs_by_openmm_mls_name(water):
    pytest.importorskip("openmmtorch", reason="openmmtorch, whose property it is, is not installed")
    for value in (True, False):
        (force,) = tensornet_forces(system := made(water, SEEDED["so3"], backend="torch", cudaGraphs=value))
        assert force.getProperties()["useCUDAGraphs"] == ("true" if value else "false"), system


@pytest.mark.parametrize(
    ("model", "periodic", "options", "cutoff", "warning"),
    [
        ("so3", False, {}, None, None),
        ("so3", False, {"coulomb_cutoff": 0.9}, None, "coulomb_cutoff: without effect"),
        ("so3", False, {"useCoulombCutoff": True}, 1.2, None),
        ("so3", False, {"useCoulombCutoff": True, "coulomb_cutoff": 0.9}, 0.9, None),
        ("so3", True, {}, 1.2, None),
        ("so3", True, {"coulomb_cutoff": 9 * unit.angstrom}, 0.9, None),
        ("so3", True, {"useCoulombCutoff": True}, 1.2, None),
        ("reaction-field-deep-old-layout", False, {}, 0.3, None),
        ("reaction-field-deep-old-layout", False, {"useCoulombCutoff": False}, None, None),
        ("reaction-field-deep-old-layout", False, {"useCoulombCutoff": True}, 0.3, None),
        ("scalar-gauss", False, {"useCoulombCutoff": True}, None, "useCoulombCutoff, coulomb_cutoff: without effect"),
        ("scalar-gauss", True, {"coulomb_cutoff": 1.0}, None, "useCoulombCutoff, coulomb_cutoff: without effect"),
    ],
)
def test_the_coulomb_cutoff_means_what_it_does_in_openmm_ml(
    water, boxed, recwarn, model, periodic, options, cutoff, warning
):
    found = metadata(made(boxed if periodic else water, SEEDED[model], **options))["coulomb_cutoff_nm"]
    assert found == (cutoff if cutoff is None else pytest.approx(cutoff))
    texts = [str(w.message) for w in recwarn if "without effect" in str(w.message)]
    assert len(texts) == (warning is not None) and all(text.startswith(warning) for text in texts)


def test_no_coulomb_cutoff_in_a_box(boxed):
    with pytest.raises(ValueError, match="useCoulombCutoff: expected True with periodic boundaries, received False"):
        made(boxed, SEEDED["so3"], useCoulombCutoff=False)


def test_options_without_an_effect(water):
    path = SEEDED["so3"]
    for name, options in {
        "max_num_neighbors": {"max_num_neighbors": 64},
        "remove_ref_energy": {"remove_ref_energy": False},
    }.items():
        with pytest.warns(UserWarning, match=f"{name}: without effect"):
            made(water, path, **options)


def test_an_exported_file_keeps_what_it_was_made_with(water, tmp_path):
    path = tmp_path / "file.tensornet"
    export_potential(load_model(SEEDED["so3"]), path, atomic_numbers=[8, 1, 1])
    assert metadata(made(water, path, charge=0))["coulomb_cutoff_nm"] is None
    with pytest.raises(ValueError, match="useCoulombCutoff: expected none of these with an exported file"):
        made(water, path, useCoulombCutoff=True)


def energy_of(system: openmm.System) -> float:
    return evaluate(system, WATER, openmm.Platform.getPlatformByName("Reference"))[0]


def test_reference_energies(water):
    path = VARIANTS["atomref-old-layout-old-head"].checkpoint
    kept, added, removed = (
        energy_of(made(water, load_model(path, remove_ref_energy=remove))) for remove in (None, False, True)
    )
    assert abs(added - removed) > 1
    assert energy_of(made(water, path, remove_ref_energy=False)) == pytest.approx(added, abs=1e-6)
    assert energy_of(made(water, load_model(path, remove_ref_energy=True), remove_ref_energy=False)) == pytest.approx(
        added, abs=1e-6
    )
    assert energy_of(made(water, path, remove_ref_energy=True)) == pytest.approx(kept, abs=1e-6)


def test_units_as_scales(water):
    path = VARIANTS["zero-layers"].checkpoint
    loaded = load_model(path, length_unit=unit.bohr, energy_unit=unit.kilocalorie_per_mole)
    found = made(water, path, lengthScale=0.0529177210903, energyScale=4.184)
    assert energy_of(found) == pytest.approx(energy_of(made(water, loaded)), rel=1e-6)
    assert abs(energy_of(found) - energy_of(made(water, path))) > 1
    with pytest.raises(ValueError, match="lengthScale, energyScale: expected None with a model that is loaded"):
        openmmml.MLPotential("tensornet", modelPath=loaded, energyScale=1.0)
    with pytest.raises(ValueError, match="energyScale: expected more than 0"):
        openmmml.MLPotential("tensornet", modelPath=path, energyScale=-1.0)


@pytest.mark.parametrize("placeholder", [False, True])
def test_the_box_of_the_system_counts_where_the_topology_has_none(solution, model, placeholder):
    """As in openmm-ml: a System of the force field with periodic boundaries."""
    topology = copy.deepcopy(solution.topology)
    if placeholder:
        topology.setUnitCellDimensions((0.1, 0.1, 0.1) * unit.nanometer)
    mm_system = openmm.System()
    for atom in topology.atoms():
        mm_system.addParticle(atom.element.mass)
    mm_system.setDefaultPeriodicBoxVectors(*(np.eye(3) * 3.0))
    nonbonded = openmm.NonbondedForce()
    for _ in topology.atoms():
        nonbonded.addParticle(0, 0.3, 0)
    nonbonded.setNonbondedMethod(openmm.NonbondedForce.CutoffPeriodic)
    mm_system.addForce(nonbonded)
    mixed = create_mixed_system(model, topology, mm_system, PEPTIDE)
    assert next(tensornet_forces(mixed)).metadata["periodic"]
    interpolated = create_mixed_system(model, topology, mm_system, PEPTIDE, interpolate=True)
    (force,) = [f for f in interpolated.getForces() if isinstance(f, openmm.CustomCVForce)]
    inside = openmm.System()
    inside.addForce(copy.deepcopy(force.getCollectiveVariable(0)))
    assert next(tensornet_forces(inside)).metadata["periodic"]


# --------------------------------------------------------------------------------------- mechanical embedding


SMALL_MODELS = {"zero-layers": VARIANTS["zero-layers"].checkpoint, "so3": SEEDED["so3"]}
# Model, with a box, constraints removed
QUICK = {("zero-layers", False, True), ("zero-layers", True, False), ("so3", True, True), ("so3", False, False)}


def mechanical(published: bool) -> list:
    """Parameters of a test: a model, whether there is a box, whether constraints go."""
    if published:
        names: dict = {f"published-{name}": name for name in WEIGHTS}
    else:
        names = SMALL_MODELS | {f"stand-in-{name}": SEEDED[name] for name in WEIGHTS}
    return [
        pytest.param(
            model, periodic, remove,
            id="-".join((name, "box" if periodic else "vacuum", "constraints removed" if remove else "constraints kept")),
            marks=[
                *([] if (name, periodic, remove) in QUICK else [pytest.mark.slow]),
                *([pytest.mark.published(model)] if published else []),
            ],
        )
        for name, model in names.items() for periodic in (False, True) for remove in (True, False)
    ]  # fmt: skip


@pytest.mark.parametrize(("model", "periodic", "remove_constraints"), mechanical(False) + mechanical(True))
def test_standard_expression_of_mechanical_embedding(solution, forcefield, model, periodic, remove_constraints):
    """E = E(MM) - λ·E(MM of the region) + λ·E(ML), to 0.01 kJ/mol."""
    platform = openmm.Platform.getPlatformByName("Reference")
    copied = app.Modeller(solution.topology, solution.positions)
    copied.delete([])  # makes a topology of its own
    everything = copied.topology
    # The region has no nonbonded pair beyond this cutoff.
    method = dict(nonbondedMethod=app.PME, nonbondedCutoff=1.2) if periodic else {}
    if periodic:
        everything.setUnitCellDimensions((2.6, 2.6, 2.6) * unit.nanometer)
    mm_system = forcefield.createSystem(everything, constraints=app.HBonds, rigidWater=True, **method)
    alone = app.Modeller(everything, solution.positions)
    alone.delete([r for r in everything.residues() if r.name == "HOH"])
    inside = forcefield.createSystem(alone.topology, constraints=app.HBonds)
    network = openmm.System()
    for _ in PEPTIDE:
        network.addParticle(1.0)
    if periodic:
        network.setDefaultPeriodicBoxVectors(*everything.getPeriodicBoxVectors())
    network.addForce(force_class()(model, alone.topology, precision="double"))
    total = evaluate(mm_system, solution.positions, platform)[0]
    inner, learnt = (evaluate(one, alone.positions, platform)[0] for one in (inside, network))
    assert abs(learnt - inner) > 10

    arguments = model, everything, mm_system, PEPTIDE
    options = dict(remove_constraints=remove_constraints, precision="double")
    plain, interpolated = (create_mixed_system(*arguments, interpolate=on, **options) for on in (False, True))
    waters = 9
    for system in (plain, interpolated):
        assert system.getNumConstraints() == (waters if remove_constraints else mm_system.getNumConstraints()) >= waters
    assert evaluate(plain, solution.positions, platform)[0] == pytest.approx(total - inner + learnt, abs=0.01)
    context = openmm.Context(interpolated, openmm.VerletIntegrator(0.001), platform)
    context.setPositions(solution.positions)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        context.setParameter("lambda_interpolate", share)
        energy = context.getState(energy=True).getPotentialEnergy()._value
        assert energy == pytest.approx(total + share * (learnt - inner), abs=0.01)


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.published("aceff-1.1")
def test_the_example_in_water(capsys):
    results = example("mixed_ml_mm").main(str(PUBLISHED["published-toluene"].checkpoint), 20.0)
    with capsys.disabled():
        print(results)
    assert abs(results["ML/MM temperature"] - 300) < 5
    assert results["ML/MM deviation"] < 2 * results["MM alone deviation"] + 0.05
    assert abs(results["ML/MM drift"]) < abs(results["MM alone drift"]) + 0.5
