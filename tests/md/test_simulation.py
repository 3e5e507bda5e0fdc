"""Building Systems, and runs that can be stopped anywhere."""

import copy
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import openmm
import pytest
from conftest import DATA
from openmm import app, unit

from openmm_tensornet.forces.system import create_system
from openmm_tensornet.md import runfiles, sentinels, simulation
from openmm_tensornet.md.reports import CSV_COLUMNS
from openmm_tensornet.md.sentinels import IMPROBABILITY, Sentinels, SimulationError
from openmm_tensornet.md.simulation import simulate
from openmm_tensornet.static import program

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "alanine_dipeptide.pdb"
PLATFORMS = ["Reference", "CPU"]
# A run of the model-free System below: 10 reports of 5 steps.
RUN = dict(time=0.025, report_interval=5, equilibration_time=0.01, seed=11, quiet=True)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """More gain nothing for so few atoms, and lose much where the cores are busy."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def alanine():
    return app.PDBFile(str(EXAMPLE))


@pytest.fixture(scope="module")
def model(model_path, tmp_path_factory):
    """An exported file for alanine dipeptide, which is made once and read fast."""
    from openmm_tensornet.export.exported import export_potential
    from openmm_tensornet.models.checkpoint import load_model

    path = tmp_path_factory.mktemp("model") / "alanine.pt"
    numbers = [atom.element.atomic_number for atom in app.PDBFile(str(EXAMPLE)).topology.atoms()]
    export_potential(load_model(model_path("variants/zero-layers")), path, atomic_numbers=numbers)
    return path


def spring_system(topology, *, stiffness=2e4, periodic=False):
    """Every atom on a spring to one place: fast, and no model."""
    system = openmm.System()
    x0 = 2.5 if periodic else 0.5  # outside of the box
    springs = openmm.CustomExternalForce(f"{stiffness}/2*((x-{x0})^2+(y-0.3)^2+(z-0.5)^2)")
    for atom in topology.atoms():
        system.addParticle(atom.element.mass)
        springs.addParticle(atom.index)
    system.addForce(springs)
    if periodic:
        box = unit.Quantity([openmm.Vec3(2, 0, 0), openmm.Vec3(0, 2.5, 0), openmm.Vec3(0, 0, 3)], unit.nanometer)
        topology.setPeriodicBoxVectors(box)
        system.setDefaultPeriodicBoxVectors(*box)
        bonds = openmm.HarmonicBondForce()
        for first, second in topology.bonds():
            bonds.addBond(first.index, second.index, 0.1, 0)
        bonds.setUsesPeriodicBoundaryConditions(True)
        system.addForce(bonds)
    return system


def run(alanine, output, platform="Reference", **options):
    system = options.pop("system", None) or spring_system(alanine.topology)
    return simulate(alanine.topology, system, alanine.positions, output=output, platform=platform, **(RUN | options))


def rows(files):
    with open(files.energies, newline="") as file:
        return list(csv.DictReader(file))


def frames(files):
    """Frames of the trajectory, without its header, which has the date in it."""
    return files.trajectory.read_bytes()[runfiles.DCD_HEADER_BYTES :]


def assert_same_run(first, second):
    assert first.energies.read_text() == second.energies.read_text()
    assert frames(first) == frames(second)
    assert first.trajectory.read_bytes()[:96] == second.trajectory.read_bytes()[:96]  # number of frames
    assert first.final.read_text() == second.final.read_text()


def water_topology(num_replicas, box=None):
    topology = app.Topology()
    chain = topology.addChain()
    for _ in range(num_replicas):
        residue = topology.addResidue("HOH", chain)
        atoms = [topology.addAtom(name, app.element.get_by_symbol(name[0]), residue) for name in ("O", "H1", "H2")]
        topology.addBond(atoms[0], atoms[1])
        topology.addBond(atoms[0], atoms[2])
    if box is not None:
        topology.setPeriodicBoxVectors(unit.Quantity([openmm.Vec3(*v) for v in box], unit.nanometer))
    return topology


@pytest.fixture(scope="module")
def water(model_path):
    """System and positions (nm) of eight waters in a box of 1.24 nm."""
    data = json.loads((DATA / "aceff_references.json").read_text())
    data = data["systems"]["water-64-rectangular"]
    positions = np.array(data["positions_angstrom"]).reshape(64, 3, 3)[::8].reshape(-1, 3) / 10
    topology = water_topology(8, np.array(data["box_angstrom"]) / 10)
    return create_system(topology, model_path("variants/zero-layers"), positions=positions), positions


def masses(system):
    return [system.getParticleMass(i).value_in_unit(unit.dalton) for i in range(system.getNumParticles())]


# ------------------------------------------------------------------------------------------ the example


def test_example_structure_is_alanine_dipeptide(alanine):
    data = json.loads((DATA / "aceff_references.json").read_text())
    data = data["systems"]["alanine-dipeptide"]
    atoms = list(alanine.topology.atoms())
    assert [atom.element.atomic_number for atom in atoms] == data["atomic_numbers"]
    np.testing.assert_allclose(
        alanine.getPositions(asNumpy=True).value_in_unit(unit.angstrom), data["positions_angstrom"], atol=1e-9
    )
    assert [r.name for r in alanine.topology.residues()] == ["ACE", "ALA", "NME"]
    assert alanine.topology.getNumBonds() == 21
    x = alanine.getPositions(asNumpy=True).value_in_unit(unit.nanometer)
    lengths = [np.linalg.norm(x[a.index] - x[b.index]) for a, b in alanine.topology.bonds()]
    assert 0.09 < min(lengths) and max(lengths) < 0.16


# -------------------------------------------------------------------------------------------- create_system


@pytest.mark.parametrize("platform", PLATFORMS)
def test_energy_and_forces_are_those_of_the_force(alanine, model, platform):
    from openmm_tensornet.forces.system import force_class

    system = create_system(alanine.topology, model)
    bare = openmm.System()
    for _ in range(22):
        bare.addParticle(1)
    bare.addForce(force_class()(model, alanine.topology))
    energies, forces = [], []
    for s in (system, bare):
        context = openmm.Context(s, openmm.VerletIntegrator(0.001), openmm.Platform.getPlatformByName(platform))
        context.setPositions(alanine.positions)
        state = context.getState(energy=True, forces=True)
        energies.append(state.getPotentialEnergy()._value)
        forces.append(state.getForces(asNumpy=True)._value)
    assert energies[0] == pytest.approx(energies[1], rel=1e-12)
    np.testing.assert_allclose(forces[0], forces[1], rtol=1e-9, atol=1e-9)
    assert np.abs(forces[0]).max() > 1


def test_masses_and_parts(alanine, model):
    system = create_system(alanine.topology, model)
    assert masses(system) == [a.element.mass.value_in_unit(unit.dalton) for a in alanine.topology.atoms()]
    assert not system.usesPeriodicBoundaryConditions()
    names = [type(force).__name__ for force in system.getForces()]
    assert names.count("CMMotionRemover") == 1
    (bonds,) = (f for f in system.getForces() if isinstance(f, openmm.HarmonicBondForce))
    assert bonds.getNumBonds() == 21
    assert all(bonds.getBondParameters(i)[3]._value == 0 for i in range(21))
    without = create_system(alanine.topology, model, remove_cm_motion=False)
    assert without.getNumForces() == system.getNumForces() - 1


@pytest.mark.parametrize("value", [3.0, 3 * unit.dalton, 3e-3 * unit.kilogram / unit.mole])
def test_hydrogen_mass_is_taken_from_the_bonded_atom(alanine, model, value):
    if unit.is_quantity(value) and not value.unit.is_compatible(unit.dalton):
        with pytest.raises(ValueError, match="hydrogen_mass: expected a Quantity in dalton"):
            create_system(alanine.topology, model, hydrogen_mass=value)
        return
    plain = masses(create_system(alanine.topology, model))
    system = create_system(alanine.topology, model, hydrogen_mass=value)
    moved = masses(system)
    assert sum(moved) == pytest.approx(sum(plain), abs=1e-9)
    for atom, before, after in zip(alanine.topology.atoms(), plain, moved, strict=True):
        hydrogens = sum(
            {a.element.symbol, b.element.symbol} >= {"H"} and atom in (a, b) for a, b in alanine.topology.bonds()
        )
        expected = 3.0 if atom.element.symbol == "H" else before - hydrogens * (3.0 - plain[0])
        assert after == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (5.0, ValueError, r"hydrogen_mass: 5 would leave atom 1 \(CH3 of ACE 1\) with 0\.\d+ dalton"),
        (-1.0, ValueError, r"hydrogen_mass: expected more than 0 dalton, received -1"),
        (float("nan"), ValueError, r"hydrogen_mass: expected a finite number in dalton, received nan"),
        ("heavy", TypeError, r"hydrogen_mass: expected a number or Quantity in dalton, received 'heavy'"),
    ],
)
def test_hydrogen_mass_that_cannot_be(alanine, model, value, error, text):
    with pytest.raises(error, match=text):
        create_system(alanine.topology, model, hydrogen_mass=value)


def test_hydrogen_mass_needs_bonds():
    topology = app.Topology()
    residue = topology.addResidue("H2", topology.addChain())
    atoms = [topology.addAtom(name, app.element.hydrogen, residue) for name in ("HA", "HB")]
    topology.addBond(*atoms)
    with pytest.raises(ValueError, match=r"hydrogen_mass: .* atom 0 \(HA of H2 1\) is not; add the bond"):
        create_system(topology, "unused", hydrogen_mass=2)


def context_of_water(water, *, tear=False):
    system = copy.deepcopy(water[0])
    if tear:
        system.removeForce(next(i for i, f in enumerate(system.getForces()) if isinstance(f, openmm.HarmonicBondForce)))
    system.addForce(openmm.MonteCarloBarostat(3e4, 300, 1))
    integrator = openmm.LangevinMiddleIntegrator(300, 1, 1e-9)  # nothing moves but through the barostat
    context = openmm.Context(system, integrator, openmm.Platform.getPlatformByName("CPU"))
    context.setPositions(water[1])
    return context


def oh_vectors(positions):
    x = np.asarray(positions).reshape(-1, 3, 3)
    return x[:, 1:] - x[:, :1]


def test_molecules_are_known(water):
    context = context_of_water(water)
    assert context.getSystem().usesPeriodicBoundaryConditions()
    (bonds,) = (f for f in context.getSystem().getForces() if isinstance(f, openmm.HarmonicBondForce))
    assert bonds.usesPeriodicBoundaryConditions()
    assert [sorted(m) for m in context.getMolecules()] == [[i, i + 1, i + 2] for i in range(0, 24, 3)]
    box = context.getSystem().getDefaultPeriodicBoxVectors()
    np.testing.assert_allclose([v._value for v in box], 1.24 * np.eye(3))


@pytest.mark.parametrize("tear", [False, True])
def test_wrapping_keeps_molecules_whole(water, tear):
    """And without the bonds it would not: the test can fail."""
    context = context_of_water(water, tear=tear)
    positions = water[1] - water[1][0] + 2 * 1.24 + 1e-4  # the first oxygen at the corner of the box
    context.setPositions(positions)
    wrapped = context.getState(positions=True, enforcePeriodicBox=True).getPositions(asNumpy=True)._value
    assert np.abs(wrapped - positions).max() > 1  # something was wrapped
    whole = np.abs(oh_vectors(wrapped) - oh_vectors(positions)).max() < 1e-5
    assert whole == (not tear)


@pytest.mark.parametrize("tear", [False, True])
def test_barostat_scales_molecules_as_a_whole(water, tear):
    context = context_of_water(water, tear=tear)
    integrator = context.getIntegrator()
    for _ in range(50):
        integrator.step(1)
        state = context.getState(positions=True)
        if abs(state.getPeriodicBoxVolume()._value - 1.24**3) > 1e-3:
            break
    else:
        raise AssertionError("the barostat never moved")
    change = np.abs(oh_vectors(state.getPositions(asNumpy=True)._value) - oh_vectors(water[1])).max()
    assert (change < 1e-5) == (not tear)


@pytest.fixture
def seen(monkeypatch):
    """What the force's class is called with; in its place stands a force that does nothing."""
    from openmm_tensornet.forces import system

    calls = {}

    def record(model, topology, **options):
        calls.update(options, model=model, topology=topology)
        nothing = openmm.CustomNonbondedForce("0")
        for _ in topology.atoms():
            nothing.addParticle()
        if options.get("periodic") or topology.getPeriodicBoxVectors() is not None:
            nothing.setNonbondedMethod(nothing.CutoffPeriodic)
        return nothing

    monkeypatch.setattr(system, "force_class", lambda backend: record)
    return calls


def test_missing_bonds_are_warned_about(alanine, seen):
    bare = app.Topology()
    residue = bare.addResidue("HOH", bare.addChain())
    for name in ("O", "H1", "H2"):
        bare.addAtom(name, app.element.get_by_symbol(name[0]), residue)
    with pytest.warns(UserWarning, match=r"3 of 3 atoms have no bond \(first: atom 0 \(O of HOH 1\)\)") as caught:
        create_system(bare, "model")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    partly = app.Modeller(alanine.topology, alanine.positions)
    partly.add(bare, [openmm.Vec3(3, 3, 3), openmm.Vec3(3.1, 3, 3), openmm.Vec3(3, 3.1, 3)] * unit.nanometer)
    with pytest.warns(UserWarning, match="3 of 25 atoms have no bond"):
        create_system(partly.topology, "model")


def test_ions_need_no_bonds(alanine, seen):
    ion = app.Topology()
    ion.addAtom("NA", app.element.sodium, ion.addResidue("NA", ion.addChain()))
    together = app.Modeller(alanine.topology, alanine.positions)
    together.add(ion, [openmm.Vec3(3, 3, 3)] * unit.nanometer)
    create_system(together.topology, "model")  # warnings are errors


def test_arguments_reach_the_force(alanine, seen):
    box = np.diag([3.0, 3.5, 4.0])
    options = dict(
        positions=alanine.positions,
        total_charge=[1, 0],
        precision="double",
        replicas=[0] * 20 + [1] * 2,
        periodic=True,
        box_vectors=box,
        cuda_graphs=False,
        warmup_steps=20,
    )
    system = create_system(alanine.topology, "model", **options)
    assert seen == options | {"model": "model", "topology": alanine.topology}
    assert system.usesPeriodicBoundaryConditions()
    np.testing.assert_allclose([v._value for v in system.getDefaultPeriodicBoxVectors()], box)


def test_an_option_that_the_force_does_not_have(alanine, model):
    with pytest.raises(TypeError, match="unexpected keyword argument 'hydrogenMass'"):
        create_system(alanine.topology, model, hydrogenMass=3)


def test_topology_that_cannot_be(alanine):
    with pytest.raises(TypeError, match=r"topology: expected an openmm\.app\.Topology, received PDBFile"):
        create_system(alanine, "unused")
    list(alanine.topology.atoms())[4].element = None
    with pytest.raises(ValueError, match=r"topology: .* atom 4 \(C of ACE 1\) has none"):
        create_system(alanine.topology, "unused")


# ---------------------------------------------------------------------------------------------------- runs


def test_a_long_time_step_is_warned_about(alanine, tmp_path):
    """Unless hydrogens are heavier, or in constraints."""
    system = spring_system(alanine.topology, stiffness=1)
    options = dict(timestep=2, minimize=False, equilibration_time=0, time=0.01)
    with pytest.warns(UserWarning, match=r"^timestep: expected at most 1 fs where hydrogens .*, received 2 fs"):
        run(alanine, tmp_path / "a", system=system, **options)
    run(alanine, tmp_path / "b", system=system, **options | {"timestep": 1})
    for atom, other in alanine.topology.bonds():
        if {atom.element.symbol, other.element.symbol} & {"H"}:
            system.addConstraint(atom.index, other.index, 0.1)
    assert not simulation._has_free_hydrogens(system)
    heavy = spring_system(alanine.topology, stiffness=1)
    for atom in alanine.topology.atoms():
        heavy.setParticleMass(atom.index, max(3, atom.element.mass._value))
    run(alanine, tmp_path / "d", system=heavy, **options)


def test_names_of_residues_and_chains_are_kept(alanine, tmp_path):
    for chain in alanine.topology.chains():
        chain.id = "B"
    for residue, number, code in zip(alanine.topology.residues(), ("41", "41", "9999"), ("", "A", ""), strict=True):
        residue.id, residue.insertionCode = number, code
    files = run(alanine, tmp_path / "run").files
    for file in (files.start, files.final):
        written = app.PDBFile(str(file)).topology
        assert [chain.id for chain in written.chains()] == ["B"]
        assert [(r.id, r.insertionCode.strip()) for r in written.residues()] == [("41", ""), ("41", "A"), ("9999", "")]


@pytest.mark.parametrize("strength", [0, 1])
def test_the_package_chooses_reference_in_place_of_cpu(alanine, model, strength):
    """Its own bonds of zero strength are no work for the CPU platform; others are."""
    system = create_system(alanine.topology, model)
    fastest = openmm.Context(system, openmm.VerletIntegrator(0.001)).getPlatform().getName()
    (bonds,) = [force for force in system.getForces() if isinstance(force, openmm.HarmonicBondForce)]
    bonds.setBondParameters(3, *bonds.getBondParameters(3)[:3], strength)
    chosen, _ = simulation._choose_platform(system, None, None)
    assert chosen.getName() == ("Reference" if fastest == "CPU" and not strength else fastest)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_files_of_a_run(alanine, tmp_path, platform):
    import mdtraj

    summary = run(alanine, tmp_path / "a" / "b", platform)
    files = summary.files
    assert (summary.steps, summary.frames) == (50, 10)
    assert summary.ns_per_day > 0
    assert sorted(os.listdir(tmp_path / "a" / "b")) == sorted(
        ["start.pdb", "trajectory.dcd", "energies.csv", "checkpoint.zip", "final.pdb", ".lock"]
    )
    table = rows(files)
    assert tuple(table[0]) == CSV_COLUMNS
    assert [int(row["step"]) for row in table] == list(range(5, 51, 5))
    np.testing.assert_allclose([float(row["time_ps"]) for row in table], np.arange(5, 51, 5) * 0.0005)
    for row in table:
        total = float(row["potential_energy_kJ_per_mol"]) + float(row["kinetic_energy_kJ_per_mol"])
        assert float(row["total_energy_kJ_per_mol"]) == pytest.approx(total, abs=2e-6)
    trajectory = mdtraj.load(str(files.trajectory), top=str(files.start))
    assert trajectory.n_frames == 10 and trajectory.n_atoms == 22
    final = app.PDBFile(str(files.final)).getPositions(asNumpy=True)._value
    np.testing.assert_allclose(trajectory.xyz[-1], final, atol=6e-5)
    assert app.PDBFile(str(files.start)).topology.getNumBonds() == 21


@pytest.mark.parametrize("platform", PLATFORMS)
def test_energies_belong_to_the_frames(alanine, tmp_path, platform):
    import mdtraj

    system = spring_system(alanine.topology)
    files = run(alanine, tmp_path, platform, system=system).files
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), openmm.Platform.getPlatformByName("Reference"))
    for row, xyz in zip(rows(files), mdtraj.load(str(files.trajectory), top=str(files.start)).xyz, strict=True):
        context.setPositions(xyz)
        energy = context.getState(energy=True).getPotentialEnergy()._value
        assert float(row["potential_energy_kJ_per_mol"]) == pytest.approx(energy, rel=1e-4)


@pytest.mark.filterwarnings("ignore:timestep")
def test_temperature_is_kept(alanine, tmp_path):
    options = dict(time=40, report_interval=100, equilibration_time=2, timestep=2, friction=5, temperature=250)
    files = run(alanine, tmp_path, **options).files
    table = rows(files)
    assert len(table) == 200
    temperatures = [float(row["temperature_K"]) for row in table]
    assert np.mean(temperatures) == pytest.approx(250, abs=15)
    # springs: as much potential as kinetic energy on average
    potential = np.mean([float(row["potential_energy_kJ_per_mol"]) for row in table])
    assert potential == pytest.approx(np.mean([float(r["kinetic_energy_kJ_per_mol"]) for r in table]), rel=0.1)
    assert np.mean(temperatures[:20]) == pytest.approx(250, abs=40), "not equilibrated"


def test_temperature_counts_the_degrees_of_freedom(alanine):
    system = spring_system(alanine.topology)
    assert simulation._degrees_of_freedom(system) == 66
    system.addForce(openmm.CMMotionRemover())
    assert simulation._degrees_of_freedom(system) == 63
    system.addConstraint(0, 1, 0.1)
    system.setParticleMass(5, 0)
    assert simulation._degrees_of_freedom(system) == 59


def test_minimisation_and_equilibration_can_be_left_out(alanine, tmp_path):
    files = run(alanine, tmp_path / "a", minimize=False, equilibration_time=0, temperature=1e5).files
    start = app.PDBFile(str(files.start)).getPositions(asNumpy=True)._value
    np.testing.assert_allclose(start, alanine.getPositions(asNumpy=True)._value, atol=1e-6)
    minimised = run(alanine, tmp_path / "b", equilibration_time=0).files
    x = app.PDBFile(str(minimised.start)).getPositions(asNumpy=True)._value
    np.testing.assert_allclose(x, np.tile([0.5, 0.3, 0.5], (22, 1)), atol=2e-3)


def test_the_model_in_the_package_is_minimised_from_the_example(alanine):
    """By OpenMM's own minimiser, whose first step puts atoms on top of each other: nothing but positions changes."""
    system = create_system(alanine.topology, "alanine-dipeptide-gfn2", positions=alanine.positions)
    reference = openmm.Platform.getPlatformByName("Reference")
    made = app.Simulation(alanine.topology, system, openmm.VerletIntegrator(0.0005), reference)
    made.context.setPositions(alanine.positions)
    made.context.setVelocitiesToTemperature(300, 1)
    made.step(3)
    before = made.context.getState(energy=True, velocities=True)
    made.minimizeEnergy()
    after = made.context.getState(energy=True, velocities=True)
    assert after.getPotentialEnergy() < before.getPotentialEnergy() - 20 * unit.kilojoule_per_mole
    assert made.context.getStepCount() == 3 and after.getTime() == before.getTime()
    np.testing.assert_array_equal(after.getVelocities(asNumpy=True)._value, before.getVelocities(asNumpy=True)._value)


def test_seeds(alanine, tmp_path):
    first, second, other = (
        run(alanine, tmp_path / name, seed=seed).files for name, seed in (("a", 5), ("b", 5), ("c", 6))
    )
    assert_same_run(first, second)
    assert frames(first) != frames(other)
    drawn = [run(alanine, tmp_path / name, seed=None).files for name in "de"]
    assert frames(drawn[0]) != frames(drawn[1])


def test_quantities_and_numbers_are_the_same(alanine, tmp_path):
    plain = run(alanine, tmp_path / "a", timestep=0.5, temperature=310, friction=2).files
    quantities = run(
        alanine,
        tmp_path / "b",
        time=25 * unit.femtosecond,
        timestep=5e-4 * unit.picosecond,
        temperature=310 * unit.kelvin,
        friction=0.002 / unit.femtosecond,
        equilibration_time=1e-5 * unit.nanosecond,
    ).files
    assert_same_run(plain, quantities)


def test_time_is_rounded_up_to_whole_reports(alanine, tmp_path):
    assert run(alanine, tmp_path / "a", time=0.0251).steps == 55
    assert run(alanine, tmp_path / "b", time=1e-6).steps == 5
    assert run(alanine, tmp_path / "c", time=0.3, timestep=0.3, report_interval=100).steps == 1000


@pytest.mark.parametrize("platform", PLATFORMS)
def test_periodic_run(alanine, tmp_path, platform):
    import mdtraj

    system = spring_system(alanine.topology, periodic=True)
    files = run(alanine, tmp_path, platform, system=system).files
    table = rows(files)
    assert tuple(table[0]) == (*CSV_COLUMNS, "box_volume_nm3")
    assert {float(row["box_volume_nm3"]) for row in table} == {15.0}
    trajectory = mdtraj.load(str(files.trajectory), top=str(files.start))
    np.testing.assert_allclose(trajectory.unitcell_lengths, np.tile([2, 2.5, 3], (10, 1)), rtol=1e-6)
    np.testing.assert_allclose(trajectory.xyz.mean(axis=1), np.tile([0.5, 0.3, 0.5], (10, 1)), atol=0.05)
    final = app.PDBFile(str(files.final)).getPositions(asNumpy=True)._value
    np.testing.assert_allclose(trajectory.xyz[-1], final, atol=6e-5)
    assert "CRYST1   20.000   25.000   30.000" in files.final.read_text()


def test_box_of_a_run_at_constant_pressure(alanine, tmp_path):
    """The box of the state, not that of the topology, in all files."""
    import mdtraj

    system = spring_system(alanine.topology, periodic=True)
    system.addForce(openmm.MonteCarloBarostat(1e4, 300, 2))
    files = run(alanine, tmp_path, system=system).files
    volumes = [float(row["box_volume_nm3"]) for row in rows(files)]
    assert volumes[-1] < 14.5
    trajectory = mdtraj.load(str(files.trajectory), top=str(files.start))
    np.testing.assert_allclose(trajectory.unitcell_volumes, volumes, rtol=1e-5)
    assert mdtraj.load(str(files.final)).unitcell_volumes[0] == pytest.approx(volumes[-1], rel=1e-3)
    assert alanine.topology.getUnitCellDimensions()._value == openmm.Vec3(2, 2.5, 3)


def test_what_is_printed(alanine, tmp_path, capsys):
    run(alanine, tmp_path / "a", quiet=False)
    text = capsys.readouterr()
    assert "22 atoms on Reference, 50 steps of 0.5 fs at 300 K, seed 11" in text.out
    assert text.out.splitlines()[-1].endswith("ns/day")
    assert text.err == ""  # not a terminal: no progress bar
    run(alanine, tmp_path / "b", quiet=True)
    assert capsys.readouterr() == ("", "")


def test_progress_bar_on_a_terminal(alanine, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    run(alanine, tmp_path / "a", quiet=False)
    assert "50/50" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as if not installed
    run(alanine, tmp_path / "b", quiet=False)
    assert capsys.readouterr().err == ""


def test_reports_do_not_read_the_module(alanine, model, tmp_path, monkeypatch):
    """OpenMM hands out forces without their module, and to read it takes longer than the steps between reports."""
    from openmm_tensornet.forces.torchforce import TensorNetForce

    read = []
    adopt = TensorNetForce._adopt
    monkeypatch.setattr(TensorNetForce, "_adopt", lambda self, force: read.append(force) or adopt(self, force))
    counts = []
    for reports in (1, 4):
        system = create_system(alanine.topology, model)
        # The model is random, and no step is long enough to bring atoms together.
        options = dict(minimize=False, equilibration_time=0, timestep=1e-4, report_interval=1, time=reports * 1e-7)
        run(alanine, tmp_path / str(reports), system=system, **options)
        counts.append(len(read))
        read.clear()
    assert counts[0] == counts[1] > 0


def test_speed_leaves_preparation_out(alanine, tmp_path, monkeypatch):
    monkeypatch.setattr(app.Simulation, "minimizeEnergy", lambda *_, **__: time.sleep(1))
    summary = run(alanine, tmp_path, temperature=1e5)
    assert summary.ns_per_day > 0.025e-3 * 86400  # what it would be if the second counted


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"time": 0}, ValueError, "time: expected more than 0 picosecond, received 0"),
        ({"time": 3 * unit.kelvin}, ValueError, "time: expected a Quantity in picosecond, received 3 K"),
        ({"timestep": -1}, ValueError, "timestep: expected more than 0 femtosecond, received -1"),
        (
            {"temperature": "hot"},
            TypeError,
            "temperature: expected a number or Quantity in kelvin, received 'hot'",
        ),
        ({"equilibration_time": -1}, ValueError, "equilibration_time: expected 0 ps or more, received -1"),
        (
            {"report_interval": 2.5},
            ValueError,
            "report_interval: expected an integer from 1 to 2147483647, received 2.5",
        ),
        ({"seed": 0}, ValueError, "seed: expected an integer from 1 to 2147483647, received 0"),
        (
            {"platform": "Quantum"},
            ValueError,
            "platform: expected one of Reference, CPU.* received 'Quantum'",
        ),
        ({"resume": True, "overwrite": True}, ValueError, "resume, overwrite: expected at most one"),
        ({"system": openmm.System()}, ValueError, "expected the same number of atoms, received 22, 0 and 22"),
        ({"tiemstep": 1}, TypeError, "tiemstep"),
    ],
)
def test_bad_arguments(alanine, tmp_path, options, error, text):
    with pytest.raises(error, match=text):
        run(alanine, tmp_path / "x", **options)
    assert not (tmp_path / "x").exists()


def test_an_existing_run_is_not_overwritten(alanine, tmp_path):
    files = run(alanine, tmp_path).files
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(FileExistsError, match="already holds a run; resume it, overwrite it"):
        run(alanine, tmp_path)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    run(alanine, tmp_path, overwrite=True, time=0.01)
    assert len(rows(files)) == 4


# -------------------------------------------------------------------------------------------------- resuming


class Killed(Exception):
    """In place of kill -9, at a chosen moment."""


def killed_run(monkeypatch, alanine, output, platform="Reference", *, checkpoints, **options):
    """A run that writes so many checkpoints after the first, then dies before the next one."""
    written = []

    def write(checkpoint, path):
        if len(written) > checkpoints:
            raise Killed
        written.append(path)
        original(checkpoint, path)

    original = simulation.Checkpoint.write
    with monkeypatch.context() as patch:
        patch.setattr(simulation, "CHECKPOINT_SECONDS", 0)
        patch.setattr(simulation.Checkpoint, "write", write)
        with pytest.raises(Killed):
            run(alanine, output, platform, **options)
    return simulation.RunFiles.in_directory(output)


@pytest.mark.parametrize("checkpoints", [0, 1, 4, 9])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_resumed_run_is_the_undisturbed_run(alanine, tmp_path, monkeypatch, platform, checkpoints):
    undisturbed = run(alanine, tmp_path / "a", platform).files
    killed = killed_run(monkeypatch, alanine, tmp_path / "b", platform, checkpoints=checkpoints)
    assert len(rows(killed)) == checkpoints + 1 or checkpoints == 9, "no row to cut off"
    summary = run(alanine, tmp_path / "b", platform, resume=True, seed=None)
    assert (summary.steps, summary.frames) == (50, 10)
    assert_same_run(undisturbed, summary.files)


def test_checkpoints_are_not_written_at_every_report_of_a_fast_run(alanine, tmp_path, monkeypatch):
    killed_run(monkeypatch, alanine, tmp_path / "a", checkpoints=3)
    written = []
    original = simulation.Checkpoint.write
    monkeypatch.setattr(simulation.Checkpoint, "write", lambda *args: (written.append(args[1]), original(*args)))
    run(alanine, tmp_path / "b")
    assert len(written) == 2  # before the first step and after the last


def test_half_written_output_is_cut_off(alanine, tmp_path, monkeypatch):
    undisturbed = run(alanine, tmp_path / "a").files
    killed = killed_run(monkeypatch, alanine, tmp_path / "b", checkpoints=3)
    for file in (killed.energies, killed.trajectory):
        content = file.read_bytes()
        file.write_bytes(content[:-7])
    (tmp_path / "b" / "checkpoint.zip.tmp").write_bytes(b"half a checkpoint")
    run(alanine, tmp_path / "b", resume=True)
    assert_same_run(undisturbed, killed)


def test_extended_run(alanine, tmp_path):
    long = run(alanine, tmp_path / "a", time=0.05).files
    short = run(alanine, tmp_path / "b").files
    summary = run(alanine, tmp_path / "b", time=0.05, resume=True)
    assert (summary.steps, summary.frames) == (100, 20)
    assert_same_run(long, short)


def test_resumed_with_less_to_do(alanine, tmp_path, monkeypatch):
    short = run(alanine, tmp_path / "a", time=0.01).files
    killed = killed_run(monkeypatch, alanine, tmp_path / "b", checkpoints=4)
    run(alanine, tmp_path / "b", time=0.01, resume=True)
    assert_same_run(short, killed)


def test_nothing_left_to_do(alanine, tmp_path, capsys):
    files = run(alanine, tmp_path).files
    before = {file: file.read_bytes() for file in tmp_path.iterdir() if file != files.checkpoint}
    summary = run(alanine, tmp_path, resume=True, quiet=False)
    assert np.isnan(summary.ns_per_day) and summary.steps == 50
    assert "nothing left to do" in capsys.readouterr().out
    assert {file: file.read_bytes() for file in tmp_path.iterdir() if file != files.checkpoint} == before


@pytest.mark.parametrize(("first", "second"), [("Reference", "CPU"), ("CPU", "Reference"), ("CPU", "CPU")])
def test_resumed_elsewhere(alanine, tmp_path, monkeypatch, capsys, first, second):
    """On another platform, or with another number of threads: same state, new random numbers."""
    import mdtraj

    properties = [{"Threads": str(n)} if p == "CPU" else None for n, p in ((1, first), (2, second))]
    undisturbed = run(alanine, tmp_path / "a", first, platform_properties=properties[0]).files
    killed = killed_run(monkeypatch, alanine, tmp_path / "b", first, checkpoints=4, platform_properties=properties[0])
    run(alanine, tmp_path / "b", second, platform_properties=properties[1], resume=True, quiet=False)
    assert "resumed at step 20 (positions and velocities only" in capsys.readouterr().out
    was, now = (mdtraj.load(str(f.trajectory), top=str(f.start)).xyz for f in (undisturbed, killed))
    assert [int(row["step"]) for row in rows(killed)] == list(range(5, 51, 5))
    np.testing.assert_array_equal(was[:4], now[:4])
    # The first frames after it are close, since the velocities were kept, but not the same.
    assert 0 < np.abs(was[4] - now[4]).max() < 0.6 * np.abs(was[4] - was[3]).max()


def test_random_numbers_are_not_repeated(alanine, tmp_path, monkeypatch):
    """A free particle pushed by the same random numbers again would be pushed in the same direction."""
    import mdtraj

    system = spring_system(alanine.topology, stiffness=0)
    options = dict(system=system, minimize=False, equilibration_time=0, friction=1000, temperature=1e6)
    killed = killed_run(monkeypatch, alanine, tmp_path, checkpoints=1, **options)
    start = app.PDBFile(str(killed.start)).getPositions(asNumpy=True)._value
    monkeypatch.setattr(runfiles, "_describe_platform", lambda _: {"name": "another one"})
    run(alanine, tmp_path, resume=True, **options)
    xyz = mdtraj.load(str(killed.trajectory), top=str(killed.start)).xyz
    first, second = xyz[0] - start, xyz[1] - xyz[0]
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.6


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"timestep": 1.0}, "timestep_fs was 0.5, now 1.0"),
        ({"temperature": 310}, "temperature_K was 300.0, now 310.0"),
        ({"friction": 2}, "friction_per_ps was 1.0, now 2.0"),
        ({"report_interval": 10}, "report_interval was 5, now 10"),
        ({"seed": 12}, "seed was 11, now 12"),
        ({"timestep": 1.0, "temperature": 310}, "timestep_fs was 0.5, now 1.0; temperature_K was 300.0"),
    ],
)
def test_resuming_with_other_settings(alanine, tmp_path, options, text):
    run(alanine, tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=text):
        run(alanine, tmp_path, resume=True, time=0.05, **options)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_resuming_with_another_system(alanine, tmp_path):
    run(alanine, tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    heavier = spring_system(alanine.topology)
    heavier.setParticleMass(3, 2)
    with pytest.raises(ValueError, match="atoms was 22 with elements and masses"):
        run(alanine, tmp_path, resume=True, time=0.05, system=heavier)
    stiffer = spring_system(alanine.topology, stiffness=2.1e4)
    with pytest.raises(ValueError, match=r"expected a potential energy of \d+\.\d+ kJ/mol .* found \d+"):
        run(alanine, tmp_path, resume=True, time=0.05, system=stiffer)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_resuming_with_another_model(alanine, tmp_path, model, model_path):
    import torch

    from openmm_tensornet.models.checkpoint import load_model

    options = dict(minimize=False, equilibration_time=0, time=0.005, platform="CPU")
    run(alanine, tmp_path, system=create_system(alanine.topology, model), **options)
    same = create_system(alanine.topology, load_model(model_path("variants/zero-layers")))
    run(alanine, tmp_path, system=same, resume=True, **options)
    other = load_model(model_path("variants/zero-layers"))
    with torch.no_grad():
        other.out.bias += 1e-6
    other = create_system(alanine.topology, other, precision="double")
    text = r"model_hash was [0-9a-f]{64}, now [0-9a-f]{64}; precision was single, now double"
    with pytest.raises(ValueError, match=text):
        run(alanine, tmp_path, system=other, resume=True, **options)


def test_nothing_to_resume(alanine, tmp_path):
    with pytest.raises(FileNotFoundError, match="output: expected the directory of a run to resume"):
        run(alanine, tmp_path / "missing", resume=True)
    files = run(alanine, tmp_path / "a").files
    files.checkpoint.unlink()
    with pytest.raises(FileExistsError, match=r"has frames, but checkpoint\.zip is missing"):
        run(alanine, tmp_path / "a", resume=True)


def test_run_that_ended_before_its_first_checkpoint(alanine, tmp_path, monkeypatch, capsys):
    undisturbed = run(alanine, tmp_path / "a").files
    with pytest.raises(Killed):
        with monkeypatch.context() as patch:
            patch.setattr(simulation.Checkpoint, "write", lambda *_: (_ for _ in ()).throw(Killed))
            run(alanine, tmp_path / "b")
    summary = run(alanine, tmp_path / "b", resume=True, quiet=False)
    assert "is not there yet: starting from the beginning" in capsys.readouterr().out
    assert_same_run(undisturbed, summary.files)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "text", "empty", "other zip", "newer"])
def test_damaged_checkpoint(alanine, tmp_path, damage):
    files = run(alanine, tmp_path).files
    content = files.checkpoint.read_bytes()
    text = "expected the checkpoint of a run, but it is another file or damaged"
    if damage == "other zip":
        with zipfile.ZipFile(files.checkpoint, "w") as archive:
            archive.writestr("a.txt", "b")
    elif damage == "newer":
        checkpoint = simulation.Checkpoint.read(files.checkpoint, 22)
        checkpoint.run["format"] = 3
        checkpoint.write(files.checkpoint)
        text = "expected checkpoint format 2, found 3"
    else:
        middle = len(content) // 2
        files.checkpoint.write_bytes(
            {
                "truncated": content[:middle],
                "flipped": content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :],
                "text": b"no zip",
                "empty": b"",
            }[damage]
        )
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=text):
        run(alanine, tmp_path, resume=True, time=0.05)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["energies", "trajectory"])
def test_lost_output(alanine, tmp_path, name):
    files = run(alanine, tmp_path).files
    file = getattr(files, name)
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    before = {other: other.read_bytes() for other in tmp_path.iterdir()}
    text = f"expected at least {len(content)} bytes, which the checkpoint counts on, found {len(content) - 1}"
    with pytest.raises(ValueError, match=text):
        run(alanine, tmp_path, resume=True, time=0.05)
    assert {other: other.read_bytes() for other in tmp_path.iterdir()} == before
    file.unlink()
    with pytest.raises(FileNotFoundError, match=file.name):
        run(alanine, tmp_path, resume=True, time=0.05)


KILL_SCRIPT = """
import sys
from openmm import app
sys.path[:0] = {tests!r}
from test_simulation import run, simulation
simulation.CHECKPOINT_SECONDS = 0
pdb = app.PDBFile({example!r})
print("ready", flush=True)
run(pdb, {output!r}, time={time}, resume={resume})
"""


def test_kill_9(alanine, tmp_path):
    """At three moments of one run, in another process; the whole of it as if nothing had happened."""
    total = 1.5
    undisturbed = run(alanine, tmp_path / "a", time=total).files
    output = tmp_path / "b"
    rng = np.random.default_rng(0)
    kills = 0
    for resume in (False, True, True):
        script = KILL_SCRIPT.format(
            tests=[str(Path(__file__).parent), str(Path(__file__).parents[1])],
            example=str(EXAMPLE),
            output=str(output),
            time=total,
            resume=resume,
        )
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            time.sleep(rng.uniform(0.1, 0.6))
            process.send_signal(signal.SIGKILL)
            kills += process.wait() == -signal.SIGKILL
    assert kills > 0, "every run was over before it was killed"
    summary = run(alanine, output, time=total, resume=True)
    assert_same_run(undisturbed, summary.files)


# ------------------------------------------------------------------------------------------------- faults


def cliff_system(topology):
    """All atoms slide in x; beyond 2 nm the energy is NaN."""
    system = openmm.System()
    force = openmm.CustomExternalForce("-200*x + 1e-6*log(2 - x)")
    for atom in topology.atoms():
        system.addParticle(atom.element.mass)
        force.addParticle(atom.index)
    system.addForce(force)
    return system


@pytest.mark.parametrize("platform", PLATFORMS)
def test_nan_stops_the_run(alanine, tmp_path, monkeypatch, platform):
    monkeypatch.setattr(simulation, "CHECKPOINT_SECONDS", 0)
    options = dict(minimize=False, equilibration_time=0, report_interval=20, time=2, temperature=2e4)
    with pytest.raises(
        SimulationError,
        match=r"step \d+, frame \d+: .*NaN.*; the time step is 0\.5 fs.*; the last good checkpoint is .*\.zip",
    ) as caught:
        run(alanine, tmp_path, platform, system=cliff_system(alanine.topology), **options)
    files = simulation.RunFiles.in_directory(tmp_path)
    table = rows(files)
    step, frame = map(int, re.match(r"step (\d+), frame (\d+):", str(caught.value)).groups())
    assert 0 < int(table[-1]["step"]) < step <= int(table[-1]["step"]) + 20
    assert frame == len(table) + 1
    assert all(np.isfinite(float(value)) for row in table for value in row.values())
    checkpoint = simulation.Checkpoint.read(files.checkpoint, 22)
    assert checkpoint.run["step"] == int(table[-1]["step"])
    assert np.isfinite(checkpoint.positions).all() and np.isfinite(checkpoint.velocities).all()
    assert not files.final.exists()
    # and resuming runs into it again, without a doubled row
    with pytest.raises(SimulationError):
        run(alanine, tmp_path, platform, system=cliff_system(alanine.topology), resume=True, **options)
    assert rows(files) == table


@pytest.mark.parametrize("platform", PLATFORMS)
def test_nan_in_the_input(alanine, tmp_path, platform):
    system = spring_system(alanine.topology)
    system.getForce(0).setEnergyFunction("log(-1 - x*x)")
    with pytest.raises(SimulationError, match=r"input structure, step 0: .* NaN"):
        run(alanine, tmp_path / "x", platform, system=system)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_nan_in_the_equilibration(alanine, tmp_path, platform):
    options = dict(minimize=False, equilibration_time=5, system=cliff_system(alanine.topology))
    with pytest.raises(SimulationError, match=r"equilibration, step \d+: .*NaN"):
        run(alanine, tmp_path, platform, **options)
    assert os.listdir(tmp_path) in ([], [".lock"])


@pytest.mark.parametrize("platform", PLATFORMS)
def test_nan_of_the_network_names_its_cause(water, tmp_path, platform):
    """A barostat shrinks the box below twice the cutoff, and atoms on top of each other are named."""
    system, positions = water
    system = copy.deepcopy(system)
    barostat = openmm.MonteCarloBarostat(1e7, 300, 1)
    barostat.setRandomNumberSeed(1)
    system.addForce(barostat)
    topology = water_topology(8, np.eye(3) * 1.24)
    # A report at every step: the Reference platform goes on, and its barostat may widen the box again.
    options = dict(RUN, minimize=False, equilibration_time=0, time=0.02, timestep=0.01, platform=platform)
    options["report_interval"] = 1
    with pytest.raises(
        SimulationError, match=r"NaN.*; box_vectors: expected a width of at least twice the cutoff, 0\.9 nm"
    ):
        simulate(topology, system, positions, output=tmp_path / "a", **options)
    overlapping = positions.copy()
    overlapping[1] = overlapping[0] + [0.01, 0, 0]
    with pytest.raises(
        SimulationError, match=r"step 0: atom 0 .* and atom 1 .* are 0\.0100 nm apart, closer than the 0\.05 nm"
    ):
        simulate(topology, system, overlapping, output=tmp_path / "b", **options)


def stopped(alanine, output, monkeypatch, text, **options):
    """A run that a sentinel stops: nothing of the frame is written, and the last checkpoint is that before it."""
    monkeypatch.setattr(simulation, "CHECKPOINT_SECONDS", 0)
    options = dict(minimize=False, equilibration_time=0, report_interval=5, time=1) | options
    with pytest.raises(SimulationError, match=text) as caught:
        run(alanine, output, **options)
    step, frame = map(int, re.match(r"step (\d+), frame (\d+): ", str(caught.value)).groups())
    files = simulation.RunFiles.in_directory(output)
    checkpoint = simulation.Checkpoint.read(files.checkpoint, 22)
    assert str(caught.value).endswith(f"; the last good checkpoint is {files.checkpoint}")
    assert len(rows(files)) == checkpoint.run["frames"] == frame - 1 > 0
    assert checkpoint.run["step"] == (frame - 1) * 5 < step <= frame * 5
    assert not files.final.exists()
    # Resuming stops at the same place.
    with pytest.raises(SimulationError, match=text):
        run(alanine, output, **options, resume=True)
    return str(caught.value)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_temperature_that_runs_away(alanine, tmp_path, monkeypatch, platform):
    system = spring_system(alanine.topology)
    system.getForce(0).setEnergyFunction("-500*x")
    text = r"the temperature is \d{4} K, expected at most 1277 K with a thermostat of 300 K"
    stopped(alanine, tmp_path, monkeypatch, text, system=system, platform=platform)


@pytest.mark.parametrize(("dof", "highest"), [(1, 115_000), (3, 42_500), (63, 4_370), (6000, 3_000)])
def test_temperatures_that_fluctuations_do_not_reach(dof, highest):
    from scipy.stats import chi2

    highest_temperature = Sentinels(1000.0, dof, None, [], []).highest_temperature
    assert highest_temperature == pytest.approx(highest, rel=0.01)
    assert chi2.sf(dof * highest_temperature / 1000, dof) < np.exp(-IMPROBABILITY)
    assert Sentinels(10.0, 6000, None, [], []).highest_temperature == 310


@pytest.mark.parametrize("periodic", [False, True])
def test_a_bond_that_breaks(alanine, tmp_path, monkeypatch, periodic):
    """Atom 0 is pulled away; with a box its bond leads across the boundary."""
    system = spring_system(alanine.topology, stiffness=0, periodic=periodic)
    pull = openmm.CustomExternalForce("-300*x")
    pull.addParticle(0)
    system.addForce(pull)
    positions = alanine.getPositions(asNumpy=True)._value
    if periodic:
        positions[0, 0] += 2  # as wrapping may leave it
    alanine.positions = positions
    text = (
        r"the bond between atom 1 \(CH3 of ACE 1\) and atom 0 \(H1 of ACE 1\) is broken: expected at most 1\.6 times its first "
        r"length, 0\.10\d\d nm, found 0\.1\d\d\d nm"
    )
    options = dict(system=system, temperature=1, stop_at_broken_bond=True)
    monkeypatch.setattr(sentinels, "RUNAWAY", 1e9)
    stopped(alanine, tmp_path / "a", monkeypatch, text, **options)
    assert run(
        alanine, tmp_path / "b", **RUN | options | {"stop_at_broken_bond": False, "minimize": False, "time": 0.1}
    ).steps


def test_more_pairs_than_the_list_has_room_for(water, tmp_path, monkeypatch, model_path):
    """Waters that are drawn together; the run says what was full."""
    import torch

    from openmm_tensornet.models.checkpoint import load_model
    from openmm_tensornet.neighbors.reference import find_pairs

    monkeypatch.setattr(program, "DENSE_ATOMS", 1)
    monkeypatch.setattr(sentinels, "RUNAWAY", 1e9)
    monkeypatch.setattr(simulation, "CHECKPOINT_SECONDS", 0)
    topology, positions = water_topology(8), water[1]
    model = load_model(model_path("variants/zero-layers"))
    count = (
        find_pairs(torch.tensor(positions) * 10, torch.zeros(24, dtype=torch.long), model.cutoff).edge_index.shape[1]
        // 2
    )
    system = create_system(topology, model, positions=positions, max_pairs=count + 8, kernels="portable")
    pull = openmm.CustomExternalForce("2000*((x-0.6)^2+(y-0.6)^2+(z-0.6)^2)")
    for k in range(24):
        pull.addParticle(k)
    system.addForce(pull)
    options = dict(
        RUN, minimize=False, equilibration_time=0, time=1, temperature=1, platform="Reference", output=tmp_path
    )
    text = rf"step \d+, frame \d+: .*NaN.*; positions: expected at most {count + 8} pairs closer than the cutoff of 0\.45 nm, found \d+"
    with pytest.raises(SimulationError, match=text + ".*; the last good checkpoint is"):
        simulate(topology, system, positions, **options)
