"""Many copies of a molecule in one System."""

import numpy as np
import openmm
import pytest
from conftest import VARIANTS
from openmm import unit
from openmm.app import Element, Topology

from openmm_tensornet import TensorNetForce, create_system, export_torchscript, load_model, replicate

POSITIONS = np.array([[0.0, 0, 0], [0.096, 0, 0], [-0.024, 0.093, 0]])


def water() -> Topology:
    topology = Topology()
    residue = topology.addResidue("HOH", topology.addChain("W"), "7", "A")
    atoms = [
        topology.addAtom(name, Element.getBySymbol(name[0]), residue, f"{k + 5}")
        for k, name in enumerate(("O", "H1", "H2"))
    ]
    for atom in atoms[1:]:
        topology.addBond(atoms[0], atom, order=1)
    return topology


def energy_and_forces(system: openmm.System, positions):
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), openmm.Platform.getPlatformByName("Reference"))
    context.setPositions(positions)
    state = context.getState(energy=True, forces=True)
    return state.getPotentialEnergy()._value, state.getForces(asNumpy=True)._value


def test_replicas_are_what_one_is():
    """Names, bonds and positions; energies and forces as if they were alone."""
    topology, positions, replicas = replicate(water(), POSITIONS * unit.nanometer, 3)
    assert replicas.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert positions.value_in_unit(unit.nanometer).tolist() == np.tile(POSITIONS, (3, 1)).tolist()
    described = [
        (a.name, a.element.symbol, a.id, a.residue.name, a.residue.id, a.residue.insertionCode, a.residue.chain.id)
        for a in topology.atoms()
    ]
    assert described == 3 * [(n, n[0], f"{k + 5}", "HOH", "7", "A", "W") for k, n in enumerate(("O", "H1", "H2"))]
    assert [(b[0].index, b[1].index, b.order) for b in topology.bonds()] == [
        (3 * k, 3 * k + h, 1) for k in range(3) for h in (1, 2)
    ]
    model = VARIANTS["zero-layers"].checkpoint
    one, all_of_them = (
        energy_and_forces(create_system(model, t, precision="double", kernels="portable", **options), x)
        for t, x, options in ((water(), POSITIONS, {}), (topology, positions, {"replicas": replicas}))
    )
    assert all_of_them[0] == pytest.approx(3 * one[0], rel=1e-9)
    np.testing.assert_allclose(all_of_them[1], np.tile(one[1], (3, 1)), rtol=0, atol=1e-6)
    assert np.abs(one[1]).max() > 1


def test_what_cannot_be_replicated():
    with pytest.raises(ValueError, match=r"^n: expected .* 1.*received 0"):
        replicate(water(), POSITIONS, 0)
    with pytest.raises(ValueError, match=r"^positions: expected"):
        replicate(water(), POSITIONS[:2], 2)
    topology = water()
    topology.setUnitCellDimensions((3, 3, 3) * unit.nanometer)
    with pytest.raises(ValueError, match=r"^topology: expected none with a box.*remove the box vectors"):
        replicate(topology, POSITIONS, 2)


@pytest.mark.parametrize("periodic", [False, True])
def test_boundaries_of_a_plain_torchforce(tmp_path, model_path, periodic):
    """openmmtorch alone does not know that a file has a box."""
    openmmtorch = pytest.importorskip("openmmtorch", reason="TorchForce: openmmtorch is not installed")
    path = tmp_path / "water.pt"
    export_torchscript(
        load_model(model_path("variants/zero-layers")), path, atomic_numbers=[8, 1, 1], periodic=periodic
    )
    force = openmmtorch.TorchForce(str(path))
    force.setOutputsForces(True)
    force.setUsesPeriodicBoundaryConditions(not periodic)
    system = openmm.System()
    for mass in (16, 1, 1):
        system.addParticle(mass)
    system.setDefaultPeriodicBoxVectors(*np.eye(3) * 3)
    system.addForce(force)
    with pytest.raises(
        openmm.OpenMMException, match=rf"call setUsesPeriodicBoundaryConditions\({periodic}\) on the TorchForce"
    ):
        energy_and_forces(system, POSITIONS)
    force.setUsesPeriodicBoundaryConditions(periodic)
    assert np.isfinite(energy_and_forces(system, POSITIONS)[0])


def test_former_names_still_work_and_warn(model_path):
    path = model_path("variants/zero-layers")
    with pytest.warns(FutureWarning, match="molecules: this argument is called replicas now"):
        force = TensorNetForce(path, atomic_numbers=[8, 8], molecules=[0, 1])
    assert force.metadata["replicas"] == [0, 1]
    with pytest.raises(ValueError, match="molecules: expected replicas alone"):
        TensorNetForce(path, atomic_numbers=[8, 8], molecules=[0, 1], replicas=[0, 1])
    system = openmm.System()
    for _ in range(2):
        system.addParticle(16)
    system.addForce(force)
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), openmm.Platform.getPlatformByName("Reference"))
    context.setPositions([[0, 0, 0], [1, 0, 0]])
    with pytest.warns(FutureWarning, match="replica_energies"):
        found = force.molecule_energies(context)
    assert (found == force.replica_energies(context)).all() and found.shape == (2,)
