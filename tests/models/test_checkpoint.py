"""Reading checkpoints: layouts, options, and a refusal with its cause for everything that cannot be honoured."""

import argparse
import contextlib
import copy
import hashlib
import json
import os
import pickle
import re
import subprocess
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import DATA, VARIANTS, checkpoint_path
from openmm import unit

from openmm_tensornet import load_model
from openmm_tensornet.export.compiled import model_hash
from openmm_tensornet.models.checkpoint import save_model
from openmm_tensornet.models.priors import D2, ZBL, Atomref
from openmm_tensornet.models.registry import MODELS, KnownModel
from openmm_tensornet.neighbors.reference import find_pairs

NAMES = sorted(path.stem for path in (DATA / "variants").glob("*.ckpt"))
SCALAR = "model.representation_model.tensor_embedding.linears_scalar.1"
HEAD = "model.output_model.output_network"
FLOAT64 = 1e-12


def read(name: str) -> dict:
    return torch.load(checkpoint_path(name), weights_only=True)


def write(path, content, **options):
    torch.save(content, path, **options)
    return path


@pytest.fixture
def edited(tmp_path):
    """A copy of a variant, changed by a function of its options and weights: edited(edit, name) gives the path."""

    def make(edit, name="zero-layers"):
        content = read(f"variants/{name}")
        edit(content["hyper_parameters"], content["state_dict"])
        return write(tmp_path / "edited.ckpt", content)

    return make


def energies(model, case=None):
    """Energies of the three small molecules in the variants' reference data, float64."""
    case = case or VARIANTS["zero-layers"]
    z, replicas, charges = case.atoms.tensors()
    x = torch.tensor(case.positions) * 10
    with torch.no_grad():
        model = copy.deepcopy(model).double()
        return model(z, x, replicas, find_pairs(x, replicas, model.cutoff), 3, charges)


def same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=0, equal_nan=True, msg=name)


# ------------------------------------------------------------------------------------------ what is read


@pytest.mark.parametrize("name", [f"variants/{name}" for name in NAMES] + ["aceff-1.1"])
def test_every_weight_of_the_file_is_in_the_model(name):
    content = read(name)
    options = content["hyper_parameters"]
    model = load_model(checkpoint_path(name))
    dtype = {32: torch.float32, 64: torch.float64}[options["precision"]]
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert not model.training
    assert model.config.trainable_rbf == next(model.rbf.parameters()).requires_grad == options["trainable_rbf"]
    assert model.config.embedding_dimension == options["embedding_dimension"]
    assert model.config.num_layers == len(model.layers) == options["num_layers"]
    assert (model.config.cutoff_lower, model.config.cutoff_upper) == (options["cutoff_lower"], options["cutoff_upper"])
    assert model.config.activation == options["activation"] and model.config.rbf_type == options["rbf_type"]
    # As sets of numbers: names and the order of rows are checked by the energies, in test_model.py.
    ignored = re.compile(r"distances?\.box$|initial_atomref$")
    given = [v.double().flatten() for k, v in content["state_dict"].items() if not ignored.search(k)]
    held = [v.double().flatten() for v in model.state_dict().values()]
    torch.testing.assert_close(torch.cat(held).sort().values, torch.cat(given).sort().values, rtol=0, atol=0)


def test_hash_and_elements(model_path, monkeypatch):
    path = model_path("variants/zero-layers")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert load_model(path).source_hash == digest
    assert load_model(path).elements is None
    monkeypatch.setitem(MODELS, "known", KnownModel("", "f.ckpt", sha256=digest, elements=(1, 8)))
    assert load_model(path).elements == (1, 8)


@pytest.mark.parametrize("kind", [str, os.fspath, lambda path: path], ids=["str", "fspath", "Path"])
def test_kinds_of_path(kind, model_path):
    path = model_path("variants/zero-layers")
    same_weights(load_model(kind(path)), load_model(path))


@pytest.mark.parametrize(
    "name", ["variants/atomref-old-layout-old-head", "variants/zero-layers", "variants/zbl-float64"]
)
@pytest.mark.parametrize(
    "choice", [{}, {"length_unit": unit.bohr, "energy_unit": unit.hartree}], ids=["plain", "units"]
)
def test_what_the_file_holds_is_not_changed(name, choice, monkeypatch, model_path):
    seen = []

    def spy(*args, real=torch.load, **kwargs):
        seen.append(real(*args, **kwargs))
        seen.append(copy.deepcopy(seen[0]))
        assert kwargs["weights_only"] is True
        return seen[0]

    monkeypatch.setattr(torch, "load", spy)
    load_model(model_path(name), **choice)
    used, before = seen
    assert used.keys() == before.keys()
    assert used["hyper_parameters"] == before["hyper_parameters"]
    assert list(used["state_dict"]) == list(before["state_dict"])
    for key, value in before["state_dict"].items():
        torch.testing.assert_close(used["state_dict"][key], value, rtol=0, atol=0)


def test_loading_twice_gives_the_same(model_path):
    path = model_path("variants/atomref-old-layout-old-head")
    same_weights(load_model(path), load_model(path))


def test_old_layout_and_head_are_the_new_ones_in_another_order(edited, model_path):
    """Rewritten by hand as a newer version would write it, the file gives the same model."""

    def modernise(options, state):
        del options["check_errors"]
        for key in [
            k for k in state if re.search(r"(embedding\.linears_scalar\.1|layers\.\d+\.linears_scalar\.2)\.", k)
        ]:
            rows = state[key].numpy()
            # Row 3f+k of the old order is row kF+f of the new one.
            channels = len(rows) // 3
            new = np.empty_like(rows)
            for f in range(channels):
                for k in range(3):
                    new[k * channels + f] = rows[3 * f + k]
            state[key] = torch.from_numpy(new)
        for key in [k for k in state if k.startswith(f"{HEAD}.")]:
            state[key.replace("output_network.", "output_network.layers.")] = state.pop(key)
        state["model.representation_model.distance.box"] = torch.zeros(3, 3)

    name = "atomref-old-layout-old-head"
    same_weights(load_model(edited(modernise, name)), load_model(model_path(f"variants/{name}")))


@pytest.mark.parametrize("value", [True, False, None])
def test_the_layout_follows_from_a_key_of_the_file_whatever_its_value(value, edited, model_path):
    """Older versions always wrote `check_errors`; with it rows are ordered [F, 3]."""
    name = "atomref-old-layout-old-head"
    old = load_model(model_path(f"variants/{name}"))
    same_weights(load_model(edited(lambda options, state: options.update(check_errors=value), name)), old)
    new = load_model(edited(lambda options, state: options.pop("check_errors"), name))
    assert (energies(new) - energies(old)).abs().max() > 1e-4
    other = load_model(edited(lambda options, state: options.update(check_errors=value)))
    assert (energies(other) - energies(load_model(model_path("variants/zero-layers")))).abs().max() > 1e-4


@pytest.mark.parametrize("old", [True, False], ids=["old-head", "new-head"])
def test_the_depth_of_the_head_is_that_of_its_weights(old, edited):
    """The option output_mlp_num_layers is ignored, as the oracle does."""
    prefix = HEAD if old else f"{HEAD}.layers"
    weights = {0: torch.randn(16, 32), 2: torch.randn(16, 16), 4: torch.randn(1, 16)}

    def deepen(options, state):
        options["output_mlp_num_layers"] = 7
        for key in [k for k in state if k.startswith(HEAD)]:
            del state[key]
        for k, weight in weights.items():
            state[f"{prefix}.{k}.weight"], state[f"{prefix}.{k}.bias"] = weight, weight[:, 0].clone()

    model = load_model(edited(deepen))
    x = torch.randn(5, 96)
    y = torch.nn.functional.silu(model.out(model.out_norm(x)))
    for k, weight in weights.items():
        y = y @ weight.T + weight[:, 0]
        y = torch.nn.functional.silu(y) if k < 4 else y
    with torch.no_grad():
        torch.testing.assert_close(model.readout(x), y.squeeze(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", [64, "64"])
def test_precision(precision, edited, model_path):
    model = load_model(edited(lambda options, state: options.update(precision=precision)))
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    single = load_model(model_path("variants/zero-layers"))
    torch.testing.assert_close(
        energies(model), energies(single), rtol=0, atol=0
    )  # float32 numbers are exact in float64


@pytest.mark.parametrize("reduce_op", ["add", "sum"])
def test_add_is_sum(reduce_op, edited, model_path):
    model = load_model(edited(lambda options, state: options.update(reduce_op=reduce_op)))
    assert model.config.reduce_op == "sum"


@pytest.mark.parametrize("value", [None, False])
def test_an_unknown_option_that_is_off_is_accepted(value, edited, model_path):
    model = load_model(edited(lambda options, state: options.update(new_option_of_2027=value)))
    same_weights(model, load_model(model_path("variants/zero-layers")))


def test_options_of_training_are_accepted(edited, model_path):
    def edit(options, state):
        options.update(
            lr=0.1, num_epochs=7, dataset="ANI2X", dataset_arg={"a": 1}, ema_alpha_y=0.5, q_dim=3, spin=True, ngpus=-1,
            wandb_use=True, derivative=False, static_shapes=True, standardize=True, load_model="x.ckpt", seed=5,
        )  # fmt: skip

    same_weights(load_model(edited(edit)), load_model(model_path("variants/zero-layers")))


def test_without_the_buffer_of_a_box(edited, model_path):
    model = load_model(edited(lambda options, state: state.pop("model.representation_model.distance.box")))
    same_weights(model, load_model(model_path("variants/zero-layers")))


def test_extra_content_of_the_file_is_ignored(tmp_path, model_path):
    content = read("variants/zero-layers")
    bare = {key: content[key] for key in ("hyper_parameters", "state_dict")}
    same_weights(load_model(write(tmp_path / "a.ckpt", bare)), load_model(model_path("variants/zero-layers")))
    full = content | {"optimizer_states": [{"step": torch.ones(3)}], "anything": {"else": (1, "2")}}
    same_weights(load_model(write(tmp_path / "b.ckpt", full)), load_model(model_path("variants/zero-layers")))


def test_the_format_of_old_torch_versions(tmp_path, model_path):
    path = write(tmp_path / "old.ckpt", read("variants/zero-layers"), _use_new_zipfile_serialization=False)
    assert not zipfile.is_zipfile(path)
    same_weights(load_model(path), load_model(model_path("variants/zero-layers")))


# ------------------------------------------------------------------------------------------------ priors


ATOMREF = "atomref-old-layout-old-head"
ARGUMENTS = {"max_z": 20, "trainable": False, "enable": True}


@pytest.mark.parametrize(
    ("prior_model", "prior_args"),
    [
        ("Atomref", ARGUMENTS),
        ("Atomref", [ARGUMENTS]),
        (["Atomref"], [ARGUMENTS]),
        (["Atomref"], ARGUMENTS),
        ({"Atomref": ARGUMENTS}, None),
        ([{"Atomref": ARGUMENTS}], None),
        ([{"Atomref": None}], [ARGUMENTS]),
        ([{"Atomref": {"max_z": 20}}], None),
        ("Atomref", None),  # max_z is the model's
        ("Atomref", [None]),
    ],
    ids=repr,
)
def test_ways_to_write_a_prior_down(prior_model, prior_args, edited, model_path):
    path = edited(lambda options, state: options.update(prior_model=prior_model, prior_args=prior_args), ATOMREF)
    model = load_model(path)
    assert [type(prior) for prior in model.priors] == [Atomref]
    expected = energies(load_model(model_path(f"variants/{ATOMREF}")))
    torch.testing.assert_close(energies(model), expected, rtol=0, atol=0)


@pytest.mark.parametrize("nothing", [None, [], "", {}], ids=repr)
def test_ways_to_write_no_prior_down(nothing, edited):
    model = load_model(edited(lambda options, state: options.update(prior_model=nothing, prior_args=None)))
    assert len(model.priors) == 0


@pytest.mark.parametrize(("name", "trainable"), [("Atomref", False), ("LearnableAtomref", True)])
def test_learnable_atomref_is_an_atomref_that_trains(name, trainable, edited, model_path):
    def edit(options, state):
        options.update(prior_model=[name], prior_args=[{"max_z": 20}])

    model = load_model(edited(edit, ATOMREF))
    assert isinstance(model.priors[0], Atomref)
    assert model.priors[0].atomref.weight.requires_grad is trainable
    expected = energies(load_model(model_path(f"variants/{ATOMREF}")))
    torch.testing.assert_close(energies(model), expected, rtol=0, atol=0)


def references():
    """Sum of the references of each molecule, eV."""
    table = read(f"variants/{ATOMREF}")["state_dict"]["model.prior_model.0.atomref.weight"].double().squeeze()
    z, replicas, _ = VARIANTS[ATOMREF].atoms.tensors()
    return torch.zeros(3, dtype=torch.float64).index_add(0, replicas, table[z])


@pytest.mark.parametrize(
    ("remove", "enabled", "present"),
    [
        (None, True, True),
        (None, False, False),
        (True, True, False),
        (True, False, False),
        (False, True, True),
        (False, False, True),
    ],
)
def test_remove_ref_energy(remove, enabled, present, edited, model_path):
    """The file says whether references are added, and the caller may choose."""

    def edit(options, state):
        options.update(remove_ref_energy=not enabled)
        options["prior_args"][0]["enable"] = enabled

    path = edited(edit, ATOMREF)
    total = energies(load_model(model_path(f"variants/{ATOMREF}")))
    assert references().abs().min() > 0.1
    expected = total if present else total - references()
    model = load_model(path, remove_ref_energy=remove)
    torch.testing.assert_close(energies(model), expected, rtol=0, atol=1e-9)
    # The choice belongs to that call only.
    again = energies(load_model(path))
    torch.testing.assert_close(again, total if enabled else total - references(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("remove", [True, False])
def test_remove_ref_energy_without_references(remove, model_path):
    with pytest.raises(ValueError, match=rf"remove_ref_energy={remove}: expected a model with an Atomref prior"):
        load_model(model_path("variants/zero-layers"), remove_ref_energy=remove)


# Grimme, J. Comput. Chem. 27, 1787 (2006): C6 in J·nm⁶/mol, R0 in Å.
GRIMME = {1: (0.14, 1.001), 6: (1.75, 1.452), 7: (1.23, 1.397), 8: (0.70, 1.342)}
D2_ARGUMENTS = {
    "cutoff_distance": 3.0,
    "max_num_neighbors": 128,
    "atomic_number": list(range(20)),
    "distance_scale": 1e-10,
    "energy_scale": 1.602176634e-19,
}


def add_d2(options, state, k=0):
    """As TorchMD-Net writes the prior down."""
    options.update(prior_model=["D2"], prior_args=[D2_ARGUMENTS], precision=64)
    table = torch.full((55, 2), torch.nan, dtype=torch.float64)
    for z, (c6, radius) in GRIMME.items():
        table[z] = torch.tensor([c6, radius / 10], dtype=torch.float64)
    state[f"model.prior_model.{k}.Z_map"] = torch.arange(20)
    state[f"model.prior_model.{k}.C_6"], state[f"model.prior_model.{k}.R_r"] = table[:, 0].clone(), table[:, 1].clone()
    state[f"model.prior_model.{k}.distances.box"] = torch.zeros(3, 3)


def d2_energies():
    """Eq. 11 and 12 of the paper for the three molecules, eV; s6 = 1, d = 20."""
    case = VARIANTS["zero-layers"]
    total = np.zeros(3)
    for i in range(len(case.atoms.numbers)):
        for j in range(i):
            r = np.linalg.norm(case.positions[i] - case.positions[j])  # nm
            if case.atoms.replicas[i] != case.atoms.replicas[j] or r >= 0.3:
                continue
            (c_i, r_i), (c_j, r_j) = GRIMME[case.atoms.numbers[i]], GRIMME[case.atoms.numbers[j]]
            damping = 1 / (1 + np.exp(-20 * (10 * r / (r_i + r_j) - 1)))
            total[case.atoms.replicas[i]] -= np.sqrt(c_i * c_j) / r**6 * damping
    return total / (1.602176634e-19 * 6.02214076e23)  # J/mol in an eV


def test_d2(edited, model_path):
    model = load_model(edited(add_d2))
    assert [type(prior) for prior in model.priors] == [D2]
    difference = energies(model) - energies(load_model(model_path("variants/zero-layers")))
    assert (d2_energies() < -1e-4).all()
    np.testing.assert_allclose(difference.numpy(), d2_energies(), rtol=1e-10, atol=1e-12)


def test_several_priors(edited, model_path):
    """ZBL of the file and D2 add up; weights go by position in the list."""

    def edit(options, state):
        zbl = options["prior_args"][0]
        add_d2(options, state, k=1)
        options.update(prior_model=["ZBL", "D2"], prior_args=[zbl, D2_ARGUMENTS])

    model = load_model(edited(edit, "zbl-float64"))
    assert [type(prior) for prior in model.priors] == [ZBL, D2]
    difference = energies(model) - energies(load_model(model_path("variants/zbl-float64")))
    np.testing.assert_allclose(difference.numpy(), d2_energies(), rtol=1e-8, atol=1e-11)


# ------------------------------------------------------------------------------------------------- units


def test_units_are_recorded_and_change_no_weight(model_path):
    path = model_path("variants/zero-layers")
    model = load_model(path, length_unit=unit.bohr, energy_unit=unit.hartree)
    assert model.units.nm_per_length == pytest.approx(0.0529177210903, rel=1e-8)
    assert model.units.kj_per_mol_per_energy == pytest.approx(2625.4996394799, rel=1e-8)
    assert model.metadata["units"]["length"] == "bohr" and model.metadata["units"]["energy"] == "hartree"
    same_weights(model, load_model(path))
    molar = load_model(path, energy_unit=unit.kilocalorie_per_mole)
    assert molar.units.kj_per_mol_per_energy == pytest.approx(4.184, rel=1e-12)
    assert molar.units.nm_per_length == 0.1 and molar.metadata["units"]["length"] == "angstrom"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"length_unit": unit.hartree}, "length_unit: expected an OpenMM unit of length"),
        ({"length_unit": 1.0 * unit.bohr}, "length_unit: expected an OpenMM unit of length"),
        ({"length_unit": "bohr"}, "length_unit: expected an OpenMM unit of length"),
        ({"energy_unit": unit.bohr}, "energy_unit: expected an OpenMM unit of energy"),
        ({"energy_unit": 1.0 * unit.hartree}, "energy_unit: expected an OpenMM unit of energy"),
        ({"energy_unit": unit.hartree / unit.bohr}, "energy_unit: expected an OpenMM unit of energy"),
    ],
    ids=repr,
)
def test_wrong_units(choice, message, model_path):
    with pytest.raises(TypeError, match=message):
        load_model(model_path("variants/zero-layers"), **choice)


def test_options_are_keyword_only_and_not_swallowed(model_path):
    path = model_path("variants/zero-layers")
    with pytest.raises(TypeError):
        load_model(path, unit.bohr)
    with pytest.raises(TypeError, match="remove_reference"):
        load_model(path, remove_reference=True)


# -------------------------------------------------------------------------- refusals: options and weights


def option(**values):
    return lambda options, state: options.update(values)


def without_option(name):
    return lambda options, state: options.pop(name)


def weight(key, change):
    def edit(options, state):
        state[key] = change(state[key])

    return edit


def new_weight(key, value):
    return lambda options, state: state.update({key: value})


def without_weight(key):
    return lambda options, state: state.pop(key)


def poisoned(value):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[-1] = value
        return tensor

    return change


EMBEDDING = "model.representation_model.tensor_embedding.emb.weight"
BOX = "model.representation_model.distance.box"
ZBL_ARGUMENTS = {
    key: D2_ARGUMENTS[key] for key in ("cutoff_distance", "atomic_number", "distance_scale", "energy_scale")
}

REFUSED = [
    # architecture and output
    *(
        (
            f"architecture {name}",
            option(model=name),
            rf"model: expected the architecture 'tensornet' or 'tensornet2', received {name!r}",
        )
        for name in (
            "tensornet3",
            "equivariant-transformer",
            "transformer",
            "graph-network",
            "TensorNet",
            5,
            None,
        )
    ),
    (
        "no architecture",
        without_option("model"),
        r"expected the architecture 'tensornet' or 'tensornet2', received None",
    ),
    *(
        (f"output {name}", option(output_model=name), rf"output_model: expected 'Scalar' with .*, received {name!r}")
        for name in ("ScalarPlusWeightedCoulomb", "DipoleMoment", "ElectronicSpatialExtent", "VectorOutput", None)
    ),
    ("no output", without_option("output_model"), r"output_model: expected 'Scalar' with .*, received None"),
    # options that would change the energy
    ("unknown option", option(dispersion="D4"), r"option dispersion='D4' is not known and might change the energy"),
    ("unknown flag", option(use_magic=True), r"option use_magic=True is not known"),
    ("unknown number", option(scale=1.5), r"option scale=1\.5 is not known"),
    ("unknown list", option(extra=[]), r"option extra=\[\] is not known"),
    ("unknown tensor", option(extra=torch.ones(2)), r"option extra=tensor.* is not known"),
    ("misspelt option", option(Repulsion=True), r"option Repulsion=True is not known"),
    ("repulsion", option(repulsion=True), r"repulsion: expected False, received True, which cannot be honoured"),
    ("atom filter", option(atom_filter=5), r"atom_filter: expected -1, received 5, which cannot be honoured"),
    ("atom filter 0", option(atom_filter=0), r"atom_filter: expected -1, received 0"),
    ("box", option(box_vecs=[[9.0, 0, 0], [0, 9.0, 0], [0, 0, 9.0]]), r"box_vecs: expected None, received a box"),
    ("precision 16", option(precision=16), r"precision: expected 32 or 64, received 16"),
    ("precision list", option(precision=[32]), r"precision: expected 32 or 64, received \[32\]"),
    ("precision None", option(precision=None), r"precision: expected 32 or 64, received None"),
    # values of known options
    ("basis", option(rbf_type="bessel"), r"rbf_type: expected one of expnorm, gauss, received 'bessel'"),
    ("activation", option(activation="relu"), r"activation: expected one of silu, .*, received 'relu'"),
    (
        "group",
        option(equivariance_invariance_group="SU(2)"),
        r"group: expected one of O\(3\), SO\(3\), received 'SU\(2\)'",
    ),
    ("reduction", option(reduce_op="max"), r"reduce_op: expected one of sum, mean, received 'max'"),
    ("reduction None", option(reduce_op=None), r"reduce_op: expected one of sum, mean, received None"),
    (
        "no channels",
        option(embedding_dimension=0),
        r"embedding_dimension: expected an integer of at least 2, received 0",
    ),
    (
        "text for a number",
        option(embedding_dimension="32"),
        r"embedding_dimension: expected an integer .*, received '32'",
    ),
    ("float for an integer", option(num_rbf=16.0), r"num_rbf: expected an integer of at least 2, received 16\.0"),
    ("flag for a number", option(num_layers=True), r"num_layers: expected an integer of at least 0, received True"),
    ("negative layers", option(num_layers=-1), r"num_layers: expected an integer of at least 0, received -1"),
    ("no elements", option(max_z=0), r"max_z: expected an integer of at least 1, received 0"),
    ("cutoff 0", option(cutoff_upper=0.0), r"expected 0 <= cutoff_lower < cutoff_upper, received 0\.0 and 0\.0"),
    ("cutoffs swapped", option(cutoff_lower=5.0), r"expected 0 <= cutoff_lower < cutoff_upper, received 5\.0 and 4\.5"),
    (
        "cutoff negative",
        option(cutoff_lower=-1.0),
        r"expected 0 <= cutoff_lower < cutoff_upper, received -1\.0 and 4\.5",
    ),
    ("cutoff NaN", option(cutoff_upper=float("nan")), r"cutoff_upper, received 0\.0 and nan"),
    (
        "cutoff infinite",
        option(cutoff_upper=float("inf")),
        r"cutoff_upper: expected a length of at most 1e\+06, received inf",
    ),
    (
        "cutoff beyond all lengths",
        option(cutoff_upper=1e300),
        r"cutoff_upper: expected a length of at most 1e\+06, received 1e\+300",
    ),
    (
        "option that is a tensor",
        option(atom_filter=torch.ones(2)),
        r"atom_filter: expected numbers, texts, or lists of them, received a tensor",
    ),
    ("cutoff None", option(cutoff_upper=None), r"cutoff_upper.*None"),
    ("cutoff text", option(cutoff_upper="far"), r"cutoff_upper.*'far'"),
    *(
        (f"no {name}", without_option(name), rf"option {name} is missing")
        for name in (
            "embedding_dimension",
            "num_layers",
            "num_rbf",
            "rbf_type",
            "trainable_rbf",
            "activation",
            "cutoff_lower",
            "cutoff_upper",
            "max_z",
        )
    ),
    # options of a network that the file cannot hold
    ("huge width", option(embedding_dimension=10**9), r"network far larger than the weights in the file"),
    ("large width", option(embedding_dimension=15000), r"network far larger than the weights in the file"),
    ("huge depth", option(num_layers=10**9), r"network far larger than the weights in the file"),
    ("large depth", option(num_layers=10**4), r"network far larger than the weights in the file"),
    ("huge basis", option(num_rbf=10**12), r"network far larger than the weights in the file"),
    ("huge max_z", option(max_z=10**15), r"network far larger than the weights in the file"),
    (
        "huge head",
        new_weight(f"{HEAD}.layers.2000000000.weight", torch.ones(1)),
        r"network far larger than the weights",
    ),
    (
        "huge atomref",
        option(prior_model=[{"Atomref": {"max_z": 10**12}}]),
        r"prior_args of Atomref are not understood",
    ),
    # priors
    *(
        (
            f"prior {name}",
            option(prior_model=name, prior_args=None),
            r"prior_model: expected .*, received 'Coulomb', which cannot",
        )
        for name in (
            "Coulomb",
            ["Coulomb"],
            {"Coulomb": {}},
            [{"Coulomb": {"max_num_neighbors": 9}}],
            ["Atomref", "Coulomb"],
        )
    ),
    (
        "Coulomb with arguments",
        option(prior_model=["Coulomb"], prior_args=[{"lower_switch_distance": 4}]),
        r"received 'Coulomb'",
    ),
    (
        "unknown prior",
        option(prior_model="D4"),
        r"prior_model: expected Atomref, LearnableAtomref, ZBL or D2, received 'D4'",
    ),
    ("prior that is no name", option(prior_model=[5]), r"prior_model: expected .*, received 5"),
    ("prior in a list twice", option(prior_model=[["Atomref"]]), r"prior_model: expected .*, received \['Atomref'\]"),
    (
        "too few prior_args",
        option(prior_model=["Atomref", "ZBL"], prior_args=[{}]),
        r"prior_args: expected 2 entries, .* received 1",
    ),
    (
        "too many prior_args",
        option(prior_model=["Atomref"], prior_args=[{}, {}]),
        r"prior_args: expected 1 entries, .* received 2",
    ),
    ("prior_args text", option(prior_model=["Atomref"], prior_args=["max_z"]), r"prior_args of Atomref.*'max_z'"),
    ("prior argument number", option(prior_model={"Atomref": 20}), r"prior_args of Atomref.*20"),
    (
        "unknown argument",
        option(prior_model=[{"Atomref": {"max_z": 20, "scale": 2}}]),
        r"prior_args of Atomref .*'scale'",
    ),
    ("missing argument", option(prior_model=[{"ZBL": {"cutoff_distance": 4.0}}]), r"prior_args of ZBL .*atomic_number"),
    ("missing D2 argument", option(prior_model=[{"D2": {}}]), r"prior_args of D2 .*cutoff_distance"),
    ("ZBL of None", option(prior_model=[{"ZBL": ZBL_ARGUMENTS | {"atomic_number": None}}]), r"prior_args of ZBL"),
    (
        "ZBL of text",
        option(prior_model=[{"ZBL": ZBL_ARGUMENTS | {"cutoff_distance": "far"}}]),
        r"prior_args of ZBL.*'far'",
    ),
    ("Atomref of text", option(prior_model=[{"Atomref": {"max_z": "many"}}]), r"prior_args of Atomref"),
    ("Atomref below zero", option(prior_model=[{"Atomref": {"max_z": -1}}]), r"prior_args of Atomref"),
    (
        "Atomref without weights",
        option(prior_model="Atomref"),
        r"weight model\.prior_model\.0\.atomref\.weight is missing",
    ),
    # weights
    *(
        (f"missing {key}", without_weight(key), rf"weight {re.escape(key)} is missing")
        for key in (
            "model.mean",
            "model.std",
            EMBEDDING,
            f"{SCALAR}.weight",
            f"{SCALAR}.bias",
            "model.representation_model.distance_expansion.betas",
            "model.representation_model.out_norm.bias",
            f"{HEAD}.layers.0.bias",
        )
    ),
    (
        "surplus",
        new_weight("model.representation_model.extra.weight", torch.ones(3)),
        r"weight model\.representation_model\.extra\.weight is not known \(1 surplus weights in all\)",
    ),
    (
        "surplus layer",
        new_weight("model.representation_model.layers.0.linears_tensor.0.weight", torch.ones(32, 32)),
        r"layers\.0\.linears_tensor\.0\.weight is not known",
    ),
    (
        "surplus prior",
        new_weight("model.prior_model.0.atomref.weight", torch.ones(20, 1)),
        r"prior_model\.0\.atomref\.weight is not known",
    ),
    (
        "misshapen",
        weight(EMBEDDING, lambda w: w[:-1].clone()),
        r"emb\.weight: expected shape \(20, 32\), received \(19, 32\)",
    ),
    (
        "transposed",
        weight(f"{SCALAR}.weight", lambda w: w.T.clone()),
        r"expected shape \(96, 64\), received \(64, 96\)",
    ),
    (
        "mean of two",
        weight("model.mean", lambda w: torch.zeros(2)),
        r"model\.mean: expected shape \(\), received \(2,\)",
    ),
    (
        "NaN",
        weight(EMBEDDING, poisoned(float("nan"))),
        r"emb\.weight: expected finite numbers, received NaN or infinity",
    ),
    ("infinity", weight(f"{HEAD}.layers.2.bias", poisoned(float("inf"))), r"layers\.2\.bias: expected finite numbers"),
    ("NaN mean", weight("model.mean", poisoned(float("nan"))), r"weight model\.mean: expected finite numbers"),
    (
        "integer weights",
        weight(EMBEDDING, lambda w: w.long()),
        r"emb\.weight: expected a tensor like torch\.float32, received torch\.int64",
    ),
    (
        "complex weights",
        weight(EMBEDDING, lambda w: w.to(torch.complex64)),
        r"emb\.weight: expected .* received torch\.complex64",
    ),
    ("list for a tensor", weight(EMBEDDING, lambda w: w.tolist()), r"emb\.weight: expected a tensor, received list"),
    ("None for a tensor", weight(EMBEDDING, lambda w: None), r"emb\.weight: expected a tensor, received NoneType"),
    (
        "a box",
        weight(BOX, lambda w: 9 * torch.eye(3)),
        r"distance\.box: expected an empty box, received \[\[9\.0, .*cannot be honoured",
    ),
    ("a NaN box", weight(BOX, lambda w: w * float("nan")), r"distance\.box: expected an empty box"),
]


@pytest.mark.parametrize(("edit", "message"), [pytest.param(edit, message, id=name) for name, edit, message in REFUSED])
def test_refused(edit, message, edited):
    path = edited(edit)
    with pytest.raises(ValueError, match=message) as caught:
        load_model(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_box_in_a_prior_is_refused(edited):
    def edit(options, state):
        state["model.prior_model.0.distance.box"] = torch.eye(3)

    with pytest.raises(ValueError, match=r"prior_model\.0\.distance\.box: expected an empty box"):
        load_model(edited(edit, "zbl-float64"))


def test_zbl_with_other_atomic_numbers_than_its_options(edited):
    def edit(options, state):
        state["model.prior_model.0.atomic_number"] = torch.arange(19)

    with pytest.raises(ValueError, match=r"prior_model\.0\.atomic_number: expected shape \(20,\), received \(19,\)"):
        load_model(edited(edit, "zbl-float64"))


def test_both_heads_at_once(edited):
    """Nothing says which one is meant."""

    def edit(options, state):
        for key in [k for k in state if k.startswith(f"{HEAD}.layers.")]:
            state[key.replace(".layers.", ".")] = 2 * state[key]

    with pytest.raises(ValueError, match=r"output_network\.(layers\.)?0\.(weight|bias)"):
        load_model(edited(edit))


# ------------------------------------------------------------------------------------- refusals: the file


def refused(path, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_model(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("part", [0.0001, 0.01, 0.3, 0.7, 0.99, 0.9999])
@pytest.mark.parametrize("old", [False, True], ids=["zip", "old-format"])
def test_truncated(part, old, tmp_path):
    path = write(tmp_path / "cut.ckpt", read("variants/zero-layers"), _use_new_zipfile_serialization=not old)
    data = path.read_bytes()
    path.write_bytes(data[: max(1, int(part * len(data)))])
    refused(
        path,
        r"cannot be read as a checkpoint: it is no checkpoint, or truncated or damaged",
    )


@pytest.mark.parametrize("missing", [1, 22, 100])
def test_truncated_at_the_very_end(missing, tmp_path, model_path):
    """The end of a zip file holds its list of contents."""
    path = tmp_path / "cut.ckpt"
    path.write_bytes(model_path("variants/zero-layers").read_bytes()[:-missing])
    refused(path, r"cannot be read as a checkpoint")


def test_damaged_list_of_contents(tmp_path, model_path):
    data = bytearray(model_path("variants/zero-layers").read_bytes())
    where = data.index(b"PK\x01\x02")
    data[where : where + 4] = b"XXXX"
    path = tmp_path / "damaged.ckpt"
    path.write_bytes(data)
    refused(path, r"cannot be read as a checkpoint")


def test_every_bit_of_an_entry_in_the_list_of_contents(tmp_path, model_path):
    """PyTorch's reader believes fields that Python's does not look at: a weight became another one by a single bit."""
    data = model_path("variants/zero-layers").read_bytes()
    right = model_hash(load_model(model_path("variants/zero-layers")))
    start, end = (data.rindex(mark) for mark in (b"PK\x01\x02", b"PK\x05\x06"))
    start = data.rindex(b"PK\x01\x02", 0, data.rindex(b"/data/", 0, end))  # of the last tensor
    path = tmp_path / "damaged.ckpt"
    same = 0
    for bit in range(8 * 46):
        changed = bytearray(data)
        changed[start + bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            assert model_hash(load_model(path)) == right, bit
            same += 1
        except ValueError as error:
            assert str(error).startswith(f"{path}: ")
    assert 50 < same < 300


def test_wrong_bytes_never_give_another_kind_of_error(tmp_path, model_path):
    """A byte changed in the options, the names or the list of contents: refused with ValueError, or harmless."""
    data = model_path("variants/zero-layers").read_bytes()
    with zipfile.ZipFile(model_path("variants/zero-layers")) as archive:
        (member,) = [m for m in archive.infolist() if m.filename.endswith("/data.pkl")]
    places = [(member.header_offset, member.header_offset + member.file_size), (len(data) - 3000, len(data))]
    random = np.random.default_rng(5)
    path = tmp_path / "damaged.ckpt"
    outcomes = set()
    for trial in range(80):
        changed = bytearray(data)
        changed[random.integers(*places[trial % 2])] = random.integers(256)
        path.write_bytes(changed)
        try:
            load_model(path)
            outcomes.add("read")
        except ValueError as error:
            assert str(error).startswith(f"{path}: ")
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"These are not weights.\n" * 40,
        b"model: tensornet\nnum_layers: 2\n",
        b"\x80\x02",
        b"PK\x03\x04" + bytes(200),
        b"PK\x05\x06" + bytes(18),
        np.random.default_rng(0).bytes(4096),
        np.random.default_rng(1).bytes(100_000),
        bytes(5000),
        "Gewichte fehlen ünd Ümlaute".encode("utf-16"),
    ],
    ids=[
        "empty",
        "newline",
        "text",
        "yaml",
        "pickle-start",
        "zip-start",
        "empty-zip",
        "random",
        "random-long",
        "zeros",
        "utf-16",
    ],
)
def test_no_checkpoint(data, tmp_path):
    path = tmp_path / "file.ckpt"
    path.write_bytes(data)
    refused(path, r"cannot be read as a checkpoint: it is no checkpoint")


class Attack:
    """What runs code when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("where", ["option", "weight", "beside", "root"])
@pytest.mark.parametrize("how", ["zip", "old-format", "pickle"])
def test_code_is_not_run(where, how, tmp_path):
    marker = tmp_path / "it-ran"
    content = read("variants/zero-layers")
    attack = Attack(marker)
    if where == "option":
        content["hyper_parameters"]["lr"] = attack
    elif where == "weight":
        content["state_dict"]["model.extra"] = attack
    elif where == "beside":
        content["callbacks"] = {"x": attack}
    else:
        content = attack
    path = tmp_path / "attack.ckpt"
    if how == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        write(path, content, _use_new_zipfile_serialization=how == "zip")
    refused(path, "wants code to be run, which is refused" if how != "pickle" else "cannot be read as a checkpoint")
    assert not marker.exists()
    # The trap works: unpickled without care, it runs.
    with contextlib.suppress(Exception):
        torch.load(path, weights_only=False)
    assert marker.exists()


@pytest.mark.parametrize(
    "content",
    [argparse.Namespace(model="tensornet"), np.float64(1.0), re.compile("x")],
    ids=["Namespace", "numpy", "pattern"],
)
def test_what_is_not_plain_is_refused(content, tmp_path):
    """Nothing needs to be evil: other objects too would need their code."""
    whole = read("variants/zero-layers")
    whole["hyper_parameters"]["conf"] = content
    refused(write(tmp_path / "object.ckpt", whole), r"wants code to be run, which is refused; save it again with plain")


@pytest.mark.parametrize(
    ("content", "missing"),
    [
        ({}, "hyper_parameters"),
        ([1, 2], "hyper_parameters"),
        (torch.ones(3), "hyper_parameters"),
        (None, "hyper_parameters"),
        ({"state_dict": {}}, "hyper_parameters"),
        ({"hyper_parameters": {"model": "tensornet"}}, "state_dict"),
        ({"hyper_parameters": [], "state_dict": {}}, "hyper_parameters"),
        ({"hyper_parameters": {}, "state_dict": None}, "state_dict"),
        (OrderedDict(weight=torch.ones(2)), "hyper_parameters"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_other_files_of_torch(content, missing, tmp_path):
    path = write(tmp_path / "other.ckpt", content)
    refused(path, rf"expected a TorchMD-Net checkpoint with a dictionary '{missing}', which is missing")


def test_no_options_and_no_weights(tmp_path):
    path = write(tmp_path / "bare.ckpt", {"hyper_parameters": {}, "state_dict": {}})
    refused(path, r"model: expected the architecture 'tensornet' or 'tensornet2', received None")
    options = read("variants/zero-layers")["hyper_parameters"]
    path = write(tmp_path / "weightless.ckpt", {"hyper_parameters": options, "state_dict": {}})
    refused(path, r"larger than the weights in the file|is missing")


def test_ensembles(tmp_path, model_path):
    one = model_path("variants/zero-layers")
    path = tmp_path / "ensemble.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(one, "first.ckpt")
        archive.write(one, "second.ckpt")
    refused(path, r"expected one checkpoint, received a zip of several \(an ensemble\); unpack one of them")
    for several in ([one, one], (str(one),), []):
        with pytest.raises(ValueError, match=r"expected one checkpoint, received a list; ensembles are not supported"):
            load_model(several)


def test_torchscript(tmp_path):
    path = tmp_path / "scripted.pt"
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))
    refused(
        path, r"expected a TorchMD-Net checkpoint, received TorchScript, which is a program; give it to openmmtorch"
    )


def test_compressed(tmp_path, model_path):
    path = tmp_path / "compressed.ckpt"
    with zipfile.ZipFile(model_path("variants/zero-layers")) as source:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
            for member in source.namelist():
                target.writestr(member, source.read(member))
    refused(path, r"expected a checkpoint as torch writes it, received a compressed archive")


def test_other_zip(tmp_path):
    path = tmp_path / "notes.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    refused(path, r"cannot be read as a checkpoint")


def test_directory(tmp_path):
    refused(tmp_path, r"expected a checkpoint file, received a directory")


def test_no_such_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.ckpt"):
        load_model(tmp_path / "absent.ckpt")


@pytest.mark.parametrize("value", [None, 5.0, {"model": "tensornet"}])
def test_what_is_no_path(value):
    with pytest.raises(TypeError):
        load_model(value)


# -------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize(
    "name", ["charged-3layers-mean", "lower-cutoff-trainable", "so3-gauss-2layers-meanstd", "zero-layers"]
)
def test_what_is_written_is_read_again(model_path, tmp_path, name):
    model = load_model(model_path(f"variants/{name}"))
    model.about = {"name": "test", "elements": [1, 8]}
    save_model(model, tmp_path / "model.ckpt")
    again = load_model(tmp_path / "model.ckpt")
    assert again.config == model.config
    assert again.about == model.about
    assert again.elements == (1, 8)
    own, read = model.state_dict(), again.state_dict()
    assert own.keys() == read.keys()
    assert all(torch.equal(own[key], read[key]) for key in own)
    assert all(key in again.metadata for key in model.metadata)


def test_models_with_priors_are_not_written(model_path, tmp_path):
    with pytest.raises(ValueError, match="model: expected one without priors, received ZBL"):
        save_model(load_model(model_path("variants/zbl-float64")), tmp_path / "model.ckpt")
    assert not list(tmp_path.iterdir())


def test_options_that_are_known_to_do_nothing(model_path, tmp_path):
    source = model_path("variants/zero-layers")
    content = torch.load(source, weights_only=True)
    content["hyper_parameters"] |= {"dispersion": "D4", "run_name": "third"}
    path = tmp_path / "model.ckpt"
    torch.save(content, path)
    with pytest.raises(ValueError, match=r"pass load_model\(\.\.\., ignore_options=\['dispersion'\]\)"):
        load_model(path)
    with pytest.raises(ValueError, match="option run_name='third' is not known"):
        load_model(path, ignore_options="dispersion")
    own, other = (
        m.state_dict() for m in (load_model(path, ignore_options=["dispersion", "run_name"]), load_model(source))
    )
    assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)
    for name in ("cutoff_upper", "lr", "misspelt"):  # one that is read, one without effect, one that is not there
        with pytest.raises(
            ValueError, match=rf"ignore_options: expected .*\(dispersion, run_name\), received '{name}'"
        ):
            load_model(path, ignore_options=[name])


def test_description_that_is_none(model_path, tmp_path):
    content = torch.load(model_path("variants/zero-layers"), weights_only=True)
    torch.save(content | {"openmm_tensornet": "text"}, tmp_path / "model.ckpt")
    with pytest.raises(ValueError, match="openmm_tensornet: expected a dictionary, received str"):
        load_model(tmp_path / "model.ckpt")


ORACLE = """
import json, sys
import torch
from torchmdnet.models.model import load_model
path, z, x = json.loads(sys.argv[1])
model = load_model(path, derivative=True).double()
energy, forces = model(torch.tensor(z), torch.tensor(x, dtype=torch.float64), torch.zeros(len(z), dtype=torch.long))
print(json.dumps([energy.item(), forces.tolist()]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alanine-dipeptide-gfn2", "so3-gauss-2layers-meanstd", "charged-3layers-mean"])
def test_torchmdnet_reads_what_is_written(model_path, tmp_path, name):
    """The same energies (eV) and forces (eV/Å), from torchmd-net itself, in float64."""
    python = Path(__file__).resolve().parents[2] / ".venv-peers" / "bin" / "python"
    if not python.exists():
        pytest.skip("torchmd-net is not installed in .venv-peers; `make oracle` does that")
    model = load_model(name if "gfn2" in name else model_path(f"variants/{name}"))
    path = tmp_path / "model.ckpt"
    save_model(model, path)
    generator = torch.Generator().manual_seed(0)
    x = 1.5 * torch.cartesian_prod(*[torch.arange(2.0, dtype=torch.float64)] * 3)
    x = x + 0.2 * torch.rand(8, 3, generator=generator, dtype=torch.float64)
    z = [1, 6, 7, 8, 1, 6, 7, 8]
    question = json.dumps([str(path), z, x.tolist()])
    done = subprocess.run([python, "-c", ORACLE, question], capture_output=True, text=True, timeout=600, check=True)
    energy, forces = json.loads(done.stdout.splitlines()[-1])
    molecule = torch.zeros(8, dtype=torch.long)
    ours = model.double().energy_and_forces(torch.tensor(z), x, molecule, find_pairs(x, molecule, model.cutoff), 1)
    assert float(ours[0].detach()) == pytest.approx(energy, abs=1e-9)
    np.testing.assert_allclose(ours[1].detach(), forces, atol=1e-9)
