"""Forces of models with charges in an OpenMM Context, their partial charges, and what a run writes of them."""

from __future__ import annotations

from functools import cache

import numpy as np
import openmm
import pytest
import torch
from conftest import ACEFF2, CHARGE_VARIANTS, KJ_PER_EV, PUBLISHED2, VARIANTS, published, some
from openmm import unit
from test_force import ENERGY, adopting_system, context_of, evaluate, make_system
from test_simulation import EXAMPLE, killed_run, run

from openmm_tensornet.export.exported import export_potential, read_metadata
from openmm_tensornet.forces.system import create_system
from openmm_tensornet.forces.torchforce import TensorNetForce
from openmm_tensornet.md import cli
from openmm_tensornet.models.checkpoint import load_model
from openmm_tensornet.models.tensornet2 import TensorNet2, TensorNet2Config
from openmm_tensornet.neighbors.reference import find_pairs
from openmm_tensornet.static import program
from openmm_tensornet.static.potential import copy_double


@cache
def cached_system(name: str, precision: str) -> openmm.System:
    """Making a force takes long; every platform uses the same System."""
    case = (ACEFF2 | PUBLISHED2)[name]
    force = TensorNetForce(
        case.checkpoint,
        atomic_numbers=case.atoms.numbers,
        total_charge=case.atoms.charges[0],
        positions=case.positions,
        box_vectors=case.box,
        coulomb_cutoff=case.coulomb_cutoff,
        precision=precision,
    )
    system = make_system(None, len(case.atoms.numbers), case.box)
    system.addForce(force)
    return system


@pytest.mark.parametrize("precision", ["double", "single"])
@pytest.mark.parametrize(
    "name", [*some(ACEFF2, quick=("acetate", "triclinic")), *published(PUBLISHED2, quick=("acetate",))]
)
def test_oracle(name, precision, platform):
    case = (ACEFF2 | PUBLISHED2)[name]
    system = cached_system(name, precision)
    context = context_of(system, platform)
    energy, forces = evaluate(context, case.positions)
    energy_error = abs(energy - case.energies.sum()) / len(forces)
    force_error = np.abs(forces - case.forces).max()
    relative = np.linalg.norm(forces - case.forces) / np.linalg.norm(case.forces)
    print(f"\n{name} {precision}: {energy_error:.1e} eV/atom, {force_error:.1e} eV/Å, {relative:.1e} relative")
    assert energy_error < ENERGY[precision]
    if precision == "double":
        assert force_error < 1e-6
    else:
        assert relative < (1e-5 if case.box is None else 3e-5)
    charges = TensorNetForce.cast(system.getForce(0)).partial_charges(context)
    assert abs(charges.sum() - case.atoms.charges[0]) < 1e-6
    z, replicas, total = case.atoms.tensors()
    model = load_model(case.checkpoint).double()
    x, box = torch.tensor(case.positions) * 10, None if case.box is None else torch.tensor(case.box) * 10
    with torch.no_grad():
        expected = model.partial_charges(z, x, replicas, find_pairs(x, replicas, 5.0, box), 1, total)
    assert np.abs(charges - expected.numpy()).max() < {"double": 1e-6, "single": 1e-5}[precision]


@pytest.mark.slow
@pytest.mark.published("aceff-2.0")
def test_toluene_with_a_reaction_field_in_vacuum():
    case = PUBLISHED2["published-toluene-2.0"]
    force = TensorNetForce(case.checkpoint, atomic_numbers=case.atoms.numbers, coulomb_cutoff=12 * unit.angstrom)
    assert force.metadata["coulomb_cutoff_nm"] == pytest.approx(1.2)
    context = context_of(make_system(force, 15), openmm.Platform.getPlatformByName("CPU"))
    energy, _ = evaluate(context, case.positions)
    assert energy * KJ_PER_EV == pytest.approx(-362.4612, abs=1e-3)


def small_model(group: str = "O(3)", coulomb: bool = True) -> TensorNet2:
    torch.manual_seed(5)
    config = TensorNet2Config(
        embedding_dimension=8,
        num_layers=1,
        num_rbf=6,
        max_z=10,
        cutoff_upper=3.0,
        q_dim=2,
        group=group,
        coulomb=coulomb,
    )
    return TensorNet2(config).eval()


WATER = np.array([[0.0, 0, 0], [0.096, 0, 0], [-0.024, 0.093, 0]])


@pytest.fixture(scope="module")
def water() -> TensorNetForce:
    return TensorNetForce(small_model(), atomic_numbers=[8, 1, 1], total_charge=1)


class TestPartialCharges:
    def test_of_some_atoms_in_their_order(self, water):
        """Also of a force read back from XML, which is a plain Force."""
        force = TensorNetForce(small_model(), atomic_numbers=[8, 1, 1], atoms=[3, 1, 4], total_charge=1)
        positions = np.vstack(([[2.0, 2, 2]], WATER[1:2], [[-2.0, 2, 2]], WATER[0:1], WATER[2:3]))
        system = make_system(force, 5)
        context = context_of(system, openmm.Platform.getPlatformByName("Reference"))
        context.setPositions(positions)
        plain = context_of(make_system(water, 3), openmm.Platform.getPlatformByName("Reference"))
        plain.setPositions(WATER)
        expected = water.partial_charges(plain)
        assert expected.sum() == pytest.approx(1, abs=1e-12) and np.ptp(expected) > 0.01
        np.testing.assert_allclose(force.partial_charges(context), expected, atol=1e-6)
        again = openmm.XmlSerializer.deserialize(openmm.XmlSerializer.serialize(system))
        read = TensorNetForce.cast(again.getForce(0))
        np.testing.assert_array_equal(read.partial_charges(context), force.partial_charges(context))

    def test_a_force_without(self):
        force = TensorNetForce(VARIANTS["zero-layers"].checkpoint, atomic_numbers=[8, 1, 1])
        context = context_of(make_system(force, 3), openmm.Platform.getPlatformByName("Reference"))
        context.setPositions(WATER)
        with pytest.raises(ValueError, match=r"expected a force of a model with partial charges"):
            force.partial_charges(context)

    def test_the_module_that_runs_does_not_hold_them(self, water):
        frozen = torch.jit.freeze(water.getModule().eval())
        assert not hasattr(frozen, "charges")
        assert "partial" not in str(frozen.graph)


def test_finite_differences(platform):
    """Of the whole force: network, charges, Coulomb interaction and box."""
    case = ACEFF2["water-64-triclinic-2.0"]
    x, numbers = case.positions[:24], case.atoms.numbers[:24]
    force = TensorNetForce(
        small_model("SO(3)"), atomic_numbers=numbers, box_vectors=case.box, coulomb_cutoff=0.6, precision="double"
    )
    context = context_of(adopting_system(force, 24, case.box), platform)
    energy, forces = evaluate(context, x)
    direction = np.random.default_rng(2).normal(size=x.shape)
    h = 1e-4
    values = [evaluate(context, x + k * h * direction)[0] for k in (1, -1, 2, -2)]
    slope = (8 * (values[0] - values[1]) - values[2] + values[3]) / (12 * h)
    assert slope == pytest.approx(-10 * (forces * direction).sum(), rel=1e-5)
    turned, turned_forces = evaluate(context, x + np.array([3, -1, 2]) @ case.box)
    assert turned == pytest.approx(energy, abs=1e-8)
    np.testing.assert_allclose(turned_forces, forces, atol=1e-8)


class TestCoulombCutoff:
    def test_a_box_that_is_too_small(self):
        case = ACEFF2["water-64-rectangular-2.0"]
        options = {"atomic_numbers": case.atoms.numbers, "box_vectors": case.box}
        with pytest.raises(
            ValueError,
            match=r"half the smallest width of the box, 0\.62 nm, received 1\.2 nm; pass coulomb_cutoff=0\.62 ",
        ):
            TensorNetForce(case.checkpoint, **options)
        with pytest.raises(ValueError, match=r"box, 0\.62 nm, received 0\.7 nm; pass coulomb_cutoff=0\.62 "):
            TensorNetForce(case.checkpoint, coulomb_cutoff=7 * unit.angstrom, **options)
        with pytest.raises(ValueError, match=r"at least twice the cutoff, 1 nm, received 0\.9 nm"):
            TensorNetForce(case.checkpoint, **options | {"coulomb_cutoff": 0.4, "box_vectors": np.eye(3) * 0.9})

    @pytest.mark.parametrize(
        ("value", "error", "text"),
        [
            (0, ValueError, "coulomb_cutoff: expected more than 0 nanometer, received 0"),
            (float("nan"), ValueError, "coulomb_cutoff: expected a finite number in nanometer, received nan"),
            ("far", TypeError, "coulomb_cutoff: expected a number or Quantity in nanometer, received 'far'"),
            (1 * unit.kelvin, ValueError, "coulomb_cutoff: expected a Quantity in nanometer, received 1 K"),
        ],
    )
    def test_wrong_values(self, value, error, text):
        with pytest.raises(error, match=text):
            TensorNetForce(small_model(), atomic_numbers=[8, 1, 1], coulomb_cutoff=value)

    def test_a_model_without_coulomb(self):
        with pytest.raises(
            ValueError, match=r"expected None for a model without a Coulomb interaction, received 0\.9 nm"
        ):
            TensorNetForce(small_model(coulomb=False), atomic_numbers=[8, 1, 1], coulomb_cutoff=0.9)

    def test_exported_files_keep_theirs(self, tmp_path):
        path, box = tmp_path / "water.pt", np.eye(3) * 2.0
        export_potential(
            small_model(), path, atomic_numbers=[8, 1, 1], periodic=True, box_vectors=box, coulomb_cutoff=0.9
        )
        assert read_metadata(path)["coulomb_cutoff_nm"] == pytest.approx(0.9)
        options = {"atomic_numbers": [8, 1, 1], "box_vectors": box}
        TensorNetForce(path, coulomb_cutoff=0.9, **options)
        with pytest.raises(
            ValueError, match=r"coulomb_cutoff: expected 0\.9 as the file was exported with, received 0\.8"
        ):
            TensorNetForce(path, coulomb_cutoff=0.8, **options)
        with pytest.raises(ValueError, match=r"box, 0\.85 nm, received 0\.9 nm"):
            TensorNetForce(path, **options | {"box_vectors": np.eye(3) * 1.7})


def test_more_coulomb_pairs_than_the_list_holds(monkeypatch):
    """Six atoms in a row, made for 0.25 nm apart, then brought closer."""
    monkeypatch.setattr(program, "DENSE_ATOMS", 1)
    monkeypatch.setattr(program, "pair_capacity", lambda *_: 9)
    row = np.arange(6)[:, None] * np.array([[1.0, 0, 0]])
    force = TensorNetForce(
        small_model(),
        atomic_numbers=[8, 1] * 3,
        positions=0.25 * row,
        coulomb_cutoff=0.6,
        max_pairs=15,
        kernels="portable",
    )
    assert force.metadata["max_coulomb_pairs"] == 9
    system = adopting_system(force, 6)
    context = context_of(system, openmm.Platform.getPlatformByName("Reference"))
    assert np.isfinite(evaluate(context, 0.25 * row)[0]) and force.diagnose(context) is None
    energy, forces = evaluate(context, 0.11 * row)
    assert np.isnan(energy) and np.isnan(forces).all()
    assert "expected at most 9 pairs closer than the cutoff of 0.6 nm, found 15" in force.diagnose(context)


def test_a_liquid_model_that_says_its_cutoff():
    """The file's own cutoff holds in vacuum too."""
    case = CHARGE_VARIANTS["reaction-field-deep-old-layout"]
    force = TensorNetForce(case.checkpoint, atomic_numbers=[8, 1, 1])
    assert force.metadata["coulomb_cutoff_nm"] == pytest.approx(0.3)
    assert copy_double(load_model(case.checkpoint)).cutoff == 4.0


# ------------------------------------------------------------------------------------------------- running


@pytest.fixture(scope="module")
def charged_system():
    structure = openmm.app.PDBFile(str(EXAMPLE))
    return create_system(structure.topology, small_model())


def test_charges_of_a_run(charged_system, tmp_path, monkeypatch):
    """A row for each frame, of the charges at its positions, also where a run was killed and resumed."""
    import mdtraj

    alanine = openmm.app.PDBFile(str(EXAMPLE))
    # A random model has no structures to minimise to.
    plain = {"system": charged_system, "minimize": False, "equilibration_time": 0, "temperature": 10}
    options = plain | {"charges": True}
    files = run(alanine, tmp_path / "a", **options).files
    header = files.charges.read_text().splitlines()[0]
    assert header == "step," + ",".join(map(str, range(22)))
    table = np.loadtxt(files.charges, delimiter=",", skiprows=1)
    assert table[:, 0].tolist() == list(range(5, 51, 5))
    assert np.abs(table[:, 1:].sum(1)).max() < 1e-6
    trajectory = mdtraj.load(str(files.trajectory), top=str(files.start))
    context = context_of(charged_system, openmm.Platform.getPlatformByName("Reference"))
    context.setPositions(trajectory.xyz[3])
    found = TensorNetForce.cast(charged_system.getForce(1)).partial_charges(context)
    np.testing.assert_allclose(table[3, 1:], found, atol=1e-5)
    assert np.abs(table[3, 1:] - table[4, 1:]).max() > 1e-5

    killed = killed_run(monkeypatch, alanine, tmp_path / "b", checkpoints=4, **options)
    assert len(killed.charges.read_text().splitlines()) > 5
    with pytest.raises(ValueError, match=r"charges was True, now None"):
        run(alanine, tmp_path / "b", resume=True, seed=None, **plain)
    run(alanine, tmp_path / "b", resume=True, seed=None, **options)
    assert killed.charges.read_text() == files.charges.read_text()
    run(alanine, tmp_path / "b", overwrite=True, **plain)
    assert not killed.charges.exists()


def test_charges_of_a_system_without(tmp_path):
    with pytest.raises(ValueError, match="charges: expected a System with a force of a model that predicts"):
        run(openmm.app.PDBFile(str(EXAMPLE)), tmp_path, charges=True)
    assert not list(tmp_path.iterdir())


def test_command_line(monkeypatch, tmp_path):
    from openmm_tensornet.forces import system
    from openmm_tensornet.md import simulation

    seen = {}
    monkeypatch.setattr(system, "create_system", lambda *_, **options: seen.update(options))
    monkeypatch.setattr(simulation, "simulate", lambda *_, **options: seen.update(options))
    assert cli.main(["simulate", "--model", "m", str(EXAMPLE), "--charges", "--coulomb-cutoff", "9 A"]) == 0
    assert seen["charges"] is True and seen["coulomb_cutoff"].value_in_unit(unit.nanometer) == pytest.approx(0.9)
