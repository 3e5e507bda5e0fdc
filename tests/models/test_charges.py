"""Models with charges: the oracle's numbers, what charges must do, and the Coulomb interaction."""

import copy
import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
from conftest import ACEFF2, CHARGE_CASES, CHARGE_VARIANTS, KJ_PER_EV, PUBLISHED2, published

from openmm_tensornet import load_model
from openmm_tensornet.models.coulomb import coulomb_interaction
from openmm_tensornet.models.tensornet import pair_geometry
from openmm_tensornet.models.tensornet2 import TensorNet2, TensorNet2Config
from openmm_tensornet.neighbors.reference import find_pairs

# Of the published numbers; stand-ins have both boxes.
SMALL_SYSTEMS = ("acetate", "alanine", "chloroiodomethane", "methylammonium", "toluene", "triclinic")
# Against the oracle in float64: eV an atom, eV/Å.
ORACLE = (1e-9, 1e-8)
SAME = {"rtol": 1e-10, "atol": 1e-10}


@functools.cache
def model_of(checkpoint, coulomb_cutoff=None) -> TensorNet2:
    """A float64 model; cutoff in nm, by default as in the file."""
    model = load_model(checkpoint).double()
    if coulomb_cutoff is not None:
        model.config = dataclasses.replace(model.config, coulomb_cutoff=10 * coulomb_cutoff)
    return model


def arguments_of(case, model):
    """Arguments of TensorNet.forward."""
    z, replicas, charges = case.atoms.tensors()
    x = torch.tensor(case.positions) * 10
    box = None if case.box is None else torch.tensor(case.box) * 10
    return [z, x, replicas, find_pairs(x, replicas, model.cutoff, box), len(charges), charges]


@pytest.mark.parametrize("name", [*CHARGE_CASES, *published(PUBLISHED2, quick=SMALL_SYSTEMS)])
def test_oracle(name):
    case = (CHARGE_CASES | PUBLISHED2)[name]
    model = model_of(case.checkpoint, case.coulomb_cutoff)
    energy, forces = model.energy_and_forces(*arguments_of(case, model))
    sizes = np.bincount(case.atoms.replicas)
    assert np.abs(forces.numpy()).max() > 0.01
    assert (np.abs(energy.detach().numpy() - case.energies) / sizes).max() < ORACLE[0]
    assert np.abs(forces.detach().numpy() - case.forces).max() < ORACLE[1]


@pytest.mark.published("aceff-2.0")
@pytest.mark.parametrize(("cutoff", "expected"), [(None, -379.7603), (1.2, -362.4612)])
def test_toluene(cutoff, expected):
    """kJ/mol, of torchmd-net 3.1.0 without cutoff and with a reaction field in vacuum."""
    case = PUBLISHED2["published-toluene-2.0"]
    model = model_of(case.checkpoint, cutoff)
    energy = model(*arguments_of(case, model))
    assert float(energy.detach()) * KJ_PER_EV == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", CHARGE_CASES)
def test_charges_sum_to_the_total_charge(name):
    case = CHARGE_CASES[name]
    model = model_of(case.checkpoint, case.coulomb_cutoff)
    with torch.no_grad():
        charges = model.partial_charges(*arguments_of(case, model)).numpy()
    total = np.bincount(case.atoms.replicas, charges)
    assert np.abs(total - case.atoms.charges).max() < 1e-12
    # Equal charges would do so, too. Stand-ins have small ones: seeded.py makes their last layers small.
    assert np.ptp(charges) > (2e-3 if name in ACEFF2 else 0.3)


@pytest.mark.parametrize("name", CHARGE_VARIANTS)
def test_charges_of_every_channel_sum_to_the_total_charge(name):
    """As the equilibration makes them, before what it leaves out is shared among the atoms."""
    case = CHARGE_VARIANTS[name]
    model = model_of(case.checkpoint)
    z, x, replicas, pairs, count, total = arguments_of(case, model)
    with torch.no_grad():
        _, layers = model.tensors_and_charges(z, pairs.edge_index, *pair_geometry(x, pairs), replicas, total)
    for charges in layers:
        sums = charges.new_zeros(count, charges.shape[1]).index_add(0, replicas, charges)
        assert float((sums - total.unsqueeze(1)).abs().max()) < 1e-3 < 0.1 < float(charges.abs().max())


@pytest.mark.published("aceff-2.0")
def test_the_oxygens_of_acetate_carry_its_charge():
    case = PUBLISHED2["published-acetate-2.0"]
    model = model_of(case.checkpoint)
    charges = model.partial_charges(*arguments_of(case, model)).detach().numpy()
    oxygen = np.array(case.atoms.numbers) == 8
    assert charges[oxygen].max() < -0.2 < charges[~oxygen].min()


@pytest.mark.parametrize("name", CHARGE_VARIANTS)
def test_molecules_of_a_batch_do_not_mix(name):
    """Each alone, with its charge, has the same energy, forces and charges."""
    case = CHARGE_VARIANTS[name]
    model = model_of(case.checkpoint)
    z, x, replicas, pairs, count, total = arguments_of(case, model)
    energy, forces = model.energy_and_forces(z, x, replicas, pairs, count, total)
    charges = model.partial_charges(z, x, replicas, pairs, count, total)
    for k in range(count):
        own = replicas == k
        one = torch.zeros(int(own.sum()), dtype=torch.long)
        alone = (z[own], x[own], one, find_pairs(x[own], one, model.cutoff), 1, total[k : k + 1])
        alone_energy, alone_forces = model.energy_and_forces(*alone)
        torch.testing.assert_close(alone_energy[0], energy[k], **SAME)
        torch.testing.assert_close(alone_forces, forces[own], **SAME)
        torch.testing.assert_close(model.partial_charges(*alone), charges[own], **SAME)


@pytest.mark.parametrize("name", CHARGE_VARIANTS)
def test_forces_are_the_gradient(name):
    case = CHARGE_VARIANTS[name]
    model = model_of(case.checkpoint)
    z, x, replicas, _, count, total = arguments_of(case, model)
    everything = find_pairs(x, replicas, math.inf)
    _, forces = model.energy_and_forces(z, x, replicas, everything, count, total)
    direction = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def energy(step):
        with torch.no_grad():
            return float(model(z, x + step * direction, replicas, everything, count, total).sum())

    h = 5e-4
    slope = (8 * (energy(h) - energy(-h)) - energy(2 * h) + energy(-2 * h)) / (12 * h)
    exact = -float((forces * direction).sum())
    assert slope == pytest.approx(exact, abs=1e-7 * float(forces.norm() * direction.norm()))


MIRROR = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)


@pytest.mark.parametrize("name", CHARGE_VARIANTS)
def test_symmetries(name):
    case = CHARGE_VARIANTS[name]
    model = model_of(case.checkpoint)
    z, x, replicas, pairs, count, total = arguments_of(case, model)
    energy, forces = model.energy_and_forces(z, x, replicas, pairs, count, total)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    turn = turn * torch.linalg.det(turn)
    turned_energy, turned_forces = model.energy_and_forces(z, x @ turn.T + 3.0, replicas, pairs, count, total)
    torch.testing.assert_close(turned_energy, energy, **SAME)
    torch.testing.assert_close(turned_forces, forces @ turn.T, rtol=1e-9, atol=1e-9)
    mirrored = model(z, x * MIRROR, replicas, pairs, count, total)
    if model.config.group == "O(3)":
        torch.testing.assert_close(mirrored, energy, **SAME)
    else:
        assert (mirrored - energy).abs().max() > 1e-6


def test_the_total_charge_matters_and_the_model_itself_trains():
    case = CHARGE_VARIANTS["so3"]
    model = copy.deepcopy(model_of(case.checkpoint)).train()
    z, x, replicas, pairs, count, total = arguments_of(case, model)
    neutral = model(z, x, replicas, pairs, count)
    charged = model(z, x, replicas, pairs, count, total)
    assert charged[2] == neutral[2] and (charged[:2] - neutral[:2]).abs().min() > 1e-4
    _, forces = model.energy_and_forces(z, x, replicas, pairs, count, total)
    (forces**2).sum().backward()
    without = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0}
    assert without == {"head.1.bias", "rbf.means", "rbf.betas"}


def test_every_tensor_is_in_the_state():
    model = model_of(CHARGE_VARIANTS["lower-cutoff-mean"].checkpoint)
    other = TensorNet2(model.config).double().eval()
    other.load_state_dict(model.state_dict())
    arguments = arguments_of(CHARGE_VARIANTS["lower-cutoff-mean"], model)
    torch.testing.assert_close(other(*arguments), model(*arguments), rtol=0, atol=0)
    assert {t.dtype for t in copy.deepcopy(model).float().state_dict().values()} == {torch.float32}


# ------------------------------------------------------------------------------------------------- Coulomb


def two(distance, charge=(1.0, 1.0)):
    """Two unit charges: the energy by the formula of a classical force field, eV."""
    return 14.3996454 * charge[0] * charge[1] / distance


def test_coulomb_is_coulomb_beyond_its_damping():
    d = torch.tensor([4.7, 6.0, 20.0, 500.0], dtype=torch.float64)
    np.testing.assert_allclose(coulomb_interaction(d, None).numpy(), two(d.numpy()), rtol=1e-5)


def test_reaction_field_ends_at_the_cutoff():
    inside, outside = coulomb_interaction(torch.tensor([9.0 - 1e-7, 9.0 + 1e-7], dtype=torch.float64), 9.0)
    assert abs(float(inside)) < 1e-6 and outside == 0
    d = torch.tensor(9.0 - 1e-9, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(coulomb_interaction(d, 9.0), d)
    # what a conductor would make zero, water makes small
    assert abs(float(slope)) < 0.03 * two(9.0) / 9.0


@pytest.mark.parametrize("cutoff", [None, 6.0])
def test_reaction_field_is_openmms(cutoff):
    """The same two charges in a NonbondedForce."""
    import openmm
    from openmm import unit

    system = openmm.System()
    force = openmm.NonbondedForce()
    for charge in (0.5, -0.8):
        system.addParticle(1.0)
        force.addParticle(charge, 0.3, 0.0)
    force.setNonbondedMethod(force.NoCutoff if cutoff is None else force.CutoffNonPeriodic)
    force.setCutoffDistance((cutoff or 1.0) / 10)
    force.setReactionFieldDielectric(78.3)
    system.addForce(force)
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), openmm.Platform.getPlatformByName("Reference"))
    for distance in (4.7, 5.5, 6.5):
        context.setPositions([[0, 0, 0], [distance / 10, 0, 0]])
        state = context.getState(getEnergy=True)
        expected = state.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole)
        own = float(coulomb_interaction(torch.tensor(distance, dtype=torch.float64), cutoff)) * 0.5 * -0.8
        assert own * KJ_PER_EV == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_damping_is_smooth_and_removes_the_pole():
    d = torch.linspace(0.3, 5.0, 2000, dtype=torch.float64)
    value = coulomb_interaction(d, None)
    assert float(value[0]) < 1.0  # undamped, 48
    assert float((value[1:] - value[:-1]).abs().max()) < 0.02
    single = coulomb_interaction(torch.linspace(0.3, 9.0, 2000, requires_grad=True), 8.0)
    assert torch.isfinite(single).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q_dim": 0}, "q_dim: expected an integer of at least 1, received 0"),
        ({"q_dim": True}, "q_dim: expected an integer of at least 1, received True"),
        ({"coulomb_cutoff": 0.0}, r"coulomb_cutoff: expected a positive length or None, received 0\.0"),
        ({"coulomb_cutoff": math.nan}, "coulomb_cutoff: expected a positive length or None, received nan"),
        ({"group": "U(1)"}, "group: expected one of"),
    ],
    ids=repr,
)
def test_wrong_configurations(options, message):
    with pytest.raises(ValueError, match=message):
        TensorNet2Config(**options)


def test_two_atoms_in_one_place_are_nan():
    case = CHARGE_VARIANTS["no-layers"]
    model = model_of(case.checkpoint)
    z, x, replicas, _, count, total = arguments_of(case, model)
    x[1] = x[0]
    energy = model(z, x, replicas, find_pairs(x, replicas, model.cutoff), count, total)
    assert torch.isnan(energy[0]) and torch.isfinite(energy[1:]).all()


# --------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture
def edited(tmp_path):
    """A copy of a variant's checkpoint, changed by a function of its options and weights: edited(edit, name)."""

    def make(edit, name="so3"):
        content = torch.load(CHARGE_VARIANTS[name].checkpoint, weights_only=True)
        edit(content["hyper_parameters"], content["state_dict"])
        torch.save(content, tmp_path / "edited.ckpt")
        return tmp_path / "edited.ckpt"

    return make


@pytest.mark.parametrize("name", CHARGE_VARIANTS)
def test_every_weight_of_the_file_is_in_the_model(name):
    content = torch.load(CHARGE_VARIANTS[name].checkpoint, weights_only=True)
    given = torch.cat([v.flatten() for v in content["state_dict"].values()])
    held = torch.cat([v.flatten() for v in load_model(CHARGE_VARIANTS[name].checkpoint).state_dict().values()])
    torch.testing.assert_close(held.sort().values, given.sort().values, rtol=0, atol=0)


def test_the_old_layout_concerns_the_embedding_only(edited):
    """Row 3f+k of the old order is row kF+f of the new one."""

    def old(options, state):
        options["check_errors"] = True
        for part in ("weight", "bias"):
            key = f"model.representation_model.tensor_embedding.linears_scalar.1.{part}"
            state[key] = state[key].unflatten(0, (3, -1)).transpose(0, 1).flatten(0, 1)

    plain = load_model(CHARGE_VARIANTS["so3"].checkpoint).state_dict()
    for name, value in load_model(edited(old)).state_dict().items():
        torch.testing.assert_close(value, plain[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda o, s: o.pop("q_dim"), "option q_dim is missing"),
        (lambda o, s: o.update(q_dim=10**9), "network far larger than the weights in the file"),
        (lambda o, s: o.update(q_dim=5), r"expected shape .*, received"),
        (lambda o, s: o.update(coulomb_cutoff="12"), "coulomb_cutoff: expected a number, received '12'"),
        (
            lambda o, s: o.update(coulomb_cutoff=-1),
            r"coulomb_cutoff: expected a positive length or None, received -1\.0",
        ),
        (lambda o, s: o.update(coulomb_epsilon_solvent=4.0), "option coulomb_epsilon_solvent=4.0 is not known"),
        (lambda o, s: o.update(repulsion=True), "repulsion: expected False, received True"),
        (
            lambda o, s: o.update(output_model="DipoleMoment"),
            "output_model: expected 'Scalar' or 'ScalarPlusWeightedCoulomb' with the architecture 'tensornet2', received 'Dip",
        ),
        (lambda o, s: s.pop("model.output_model.qweights"), r"weight model\.output_model\.qweights is missing"),
        (lambda o, s: o.update(output_model="Scalar"), r"output_model\.qweights is not known"),
        (
            lambda o, s: s["model.output_model.qweights"].zero_(),
            "qweights: expected a sum other than zero, received 0.0",
        ),
    ],
)
def test_refused_checkpoints(edit, message, edited):
    with pytest.raises(ValueError, match=message):
        load_model(edited(edit))


def test_a_scalar_model_ignores_what_it_has_for_coulomb(edited):
    """The oracle reads neither the cutoff nor the weights there."""
    model = load_model(edited(lambda o, s: o.update(coulomb_cutoff=-3, q_weights=None), "scalar-gauss"))
    assert not model.config.coulomb and model.config.coulomb_cutoff is None
    assert model.cutoff == model.config.cutoff_upper and model.config.head_hidden_layers == 0


@pytest.mark.published("aceff-2.0")
def test_known_model():
    model = load_model(PUBLISHED2["published-toluene-2.0"].checkpoint)
    assert isinstance(model, TensorNet2) and model.elements is not None
    assert model.metadata["config"]["q_dim"] == 16 and model.metadata["config"]["coulomb_cutoff"] is None
