"""A TensorNet potential for a part of a System, the force field for the rest."""

from __future__ import annotations

import configparser
import copy
import importlib
import importlib.util
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import openmm
import pytest
from conftest import PUBLISHED, VARIANTS
from openmm import app, unit

openmmml = pytest.importorskip("openmmml", reason="openmm-ml is not installed")

from openmm_tensornet import create_mixed_system, load_model  # noqa: E402
from openmm_tensornet.export import model_hash  # noqa: E402
from openmm_tensornet.registry import MODELS, find_model  # noqa: E402
from openmm_tensornet.system import force_class, tensornet_forces  # noqa: E402

ROOT = Path(__file__).parents[1]
WATER = np.array([[0.0, 0.0, 0.0], [0.09572, 0.0, 0.0], [-0.023997, 0.092663, 0.0]])
PEPTIDE = list(range(22))


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
        solution.topology, mm_system, PEPTIDE, model, interpolate=True, precision="double", name="the peptide"
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
        solution.topology, mm_system, PEPTIDE, model, precision="double", force_group=3, name="the peptide"
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
        assert issubclass(getattr(importlib.import_module(module), name), openmmml.mlpotential.MLPotentialImplFactory)


def test_a_bond_that_leaves_the_region(solution, mm_system, model):
    with pytest.raises(
        ValueError, match=r"expected whole molecules, received a part that the bond of .* and .* leaves"
    ):
        create_mixed_system(solution.topology, mm_system, PEPTIDE[:10], model)


def test_openmm_ml_is_told_of_the_range(model):
    from openmm_tensornet.mlpotential import TensorNetPotentialFactory

    assert TensorNetPotentialFactory().createImpl("tensornet", modelPath=model).getMLLongRange() is False


@pytest.mark.parametrize("interpolate", [False, True])
def test_molecules_stay_whole(solution, mm_system, model, mixed, interpolate):
    """The bonds that openmm-ml removes are there at zero strength."""
    system = mixed if interpolate else create_mixed_system(solution.topology, mm_system, PEPTIDE, model)
    molecules = [
        openmm.Context(
            one, openmm.VerletIntegrator(0.001), openmm.Platform.getPlatformByName("Reference")
        ).getMolecules()
        for one in (system, mm_system)
    ]
    assert sorted(map(sorted, molecules[0])) == sorted(map(sorted, molecules[1]))


def with_charges(system: openmm.System, total: float) -> openmm.System:
    """A copy in which the first atom of the peptide has what is missing to `total`."""
    changed = copy.deepcopy(system)
    (force,) = [force for force in changed.getForces() if isinstance(force, openmm.NonbondedForce)]
    charges = [force.getParticleParameters(k)[0]._value for k in PEPTIDE]
    force.setParticleParameters(0, charges[0] + total - sum(charges), *force.getParticleParameters(0)[1:])
    return changed


@pytest.mark.filterwarnings("ignore:.*trained without total charges")
def test_the_charge_is_that_of_the_force_field(solution, mm_system, model):
    system = create_mixed_system(solution.topology, with_charges(mm_system, -2.02), PEPTIDE, model)
    (force,) = tensornet_forces(system)
    assert force.metadata["total_charge"] == [-2.0]
    given = create_mixed_system(solution.topology, mm_system, PEPTIDE, model, total_charge=0 * unit.elementary_charge)
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
        create_mixed_system(solution.topology, with_charges(mm_system, field), PEPTIDE, model, **options)


def test_options_that_do_not_exist(solution, mm_system, model):
    with pytest.raises(TypeError, match="unexpected keyword argument 'totalCharge'"):
        create_mixed_system(solution.topology, mm_system, PEPTIDE, model, totalCharge=1)


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
