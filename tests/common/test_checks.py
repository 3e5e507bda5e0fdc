"""Plain arguments: numpy's truth values and integers are what they look like, and no other kind passes for them."""

import json

import numpy as np
import openmm
import pytest
from openmm import unit
from openmm.app import Element, Topology

import openmm_tensornet
from openmm_tensornet.common.atoms import Atoms, integers
from openmm_tensornet.common.checks import LARGEST_LENGTH, array, flag, integer
from openmm_tensornet.common.units import number_in
from openmm_tensornet.forces.system import force_class, tensornet_forces


@pytest.mark.parametrize("value", [True, False, np.True_, np.False_, np.array([1.0, 2.0])[0] > 1])
def test_truth_values(value):
    found = flag("periodic", value)
    assert type(found) is bool and found == value


@pytest.mark.parametrize("value", [0, 1, np.int64(1), 1.0, "no", None, [True], np.array([True])])
def test_what_is_no_truth_value(value):
    with pytest.raises(TypeError, match=r"^periodic: expected True or False, received"):
        flag("periodic", value)


@pytest.mark.parametrize("value", [True, np.True_])
def test_truth_values_are_no_numbers(value):
    with pytest.raises(ValueError, match=r"^n: expected an integer"):
        integer("n", value, 0)
    with pytest.raises(TypeError, match=r"^n: expected integers"):
        integers("n", [0, value])
    with pytest.raises(TypeError, match=r"^n: expected a number or Quantity in nanometer"):
        number_in("n", value, unit.nanometer)
    with pytest.raises(ValueError, match=r"^total_charge: expected whole numbers"):
        Atoms.make([8, 1, 1], None, value)


def test_flags_of_numpy_reach_the_metadata_as_plain_ones(model_path):
    force = force_class()(
        model_path("variants/zero-layers"),
        atomic_numbers=np.array([8, 1, 1]),
        periodic=np.False_,
        cuda_graphs=np.True_,
        kernels="portable",
    )
    assert json.loads(json.dumps(force.metadata))["periodic"] is False


def test_lengths_up_to_the_largest():
    assert array("x", [[LARGEST_LENGTH, -LARGEST_LENGTH, 0]], (None, 3)).tolist() == [[1e6, -1e6, 0]]
    with pytest.raises(ValueError, match=r"^x: expected lengths of at most 1e\+06 nm, received 2e\+06 nm"):
        array("x", [[np.nan, 0, -2 * LARGEST_LENGTH]], (None, 3))


def test_charges_up_to_the_number_of_protons():
    assert Atoms.make([8, 1, 1], None, 10).charges == (10.0,)
    assert Atoms.make([1, 1], [0, 1], [1, -1]).charges == (1.0, -1.0)  # proton and hydride
    with pytest.raises(ValueError, match=r"^total_charge: expected -1 to 1 elementary charges.*received 2$"):
        Atoms.make([8, 1, 1, 1], [0, 0, 0, 1], [0, 2])


@pytest.mark.parametrize("kind", ["TensorNetForce", "TensorNetPythonForce", "create_system"])
def test_model_and_topology_in_either_order(model_path, kind):
    """Recognised by type, and never taken for something else."""
    if kind == "TensorNetForce":
        pytest.importorskip("openmmtorch", reason="TensorNetForce: openmmtorch is not installed")
    elif kind == "TensorNetPythonForce" and not hasattr(openmm, "PythonForce"):
        pytest.skip("TensorNetPythonForce: this OpenMM has no PythonForce")
    make = getattr(openmm_tensornet, kind)
    model, topology = str(model_path("variants/zero-layers")), Topology()
    topology.addAtom("H", Element.getBySymbol("H"), topology.addResidue("H", topology.addChain()))
    made = [
        make(model, topology),
        make(topology, model),
        make(topology, model=model),
        make(model, topology=topology),
    ]
    forces = made if kind != "create_system" else [force for system in made for force in tensornet_forces(system)]
    assert len(forces) == 4 and len({json.dumps(force.metadata) for force in forces}) == 1
    for arguments, text in {
        (topology,): "missing 1 required positional argument: 'model'",
        (topology, topology): "model: expected a path, a name or a TensorNet, received Topology",
        (model, model): r"topology: expected an openmm\.app\.Topology, received str",
        (topology, model, 1): "positional arguments but",
    }.items():
        with pytest.raises(TypeError, match=text):
            make(*arguments)
