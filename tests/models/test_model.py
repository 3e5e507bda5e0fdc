"""The reference model: the oracle's numbers, its symmetries, its derivatives, and that it trains."""

import copy
import functools
import itertools
import json
import math

import numpy as np
import pytest
import torch
from conftest import ACEFF, CASES, KJ_PER_EV, PUBLISHED, SMALL, VARIANTS, published
from torch import nn

from openmm_tensornet import TensorNet, TensorNetConfig, load_model
from openmm_tensornet.models.priors import D2, ZBL, Atomref
from openmm_tensornet.models.tensornet import ACTIVATIONS
from openmm_tensornet.neighbors.reference import Pairs, find_pairs

# Against the oracle in float64: eV an atom, eV/Å. ZBL's screening length is float32 in the oracle.
ORACLE = (1e-9, 1e-8)
ORACLE_ZBL = (1e-5, 1e-5)
# float32 against float64: eV an atom, and of the norm of the forces.
SINGLE = (2e-6, 1e-5)
# Two ways to the same number in float64.
SAME = {"rtol": 1e-10, "atol": 1e-10}


@functools.cache
def model_of(checkpoint) -> TensorNet:
    return load_model(checkpoint).double()


def evaluate(model, case, positions=None, box=None, charges=None):
    """Energies (M,), eV, and forces (N, 3), eV/Å, of a case at its own or at other positions (Å)."""
    z, replicas, own_charges = case.atoms.tensors()
    x = torch.tensor(case.positions) * 10 if positions is None else positions
    if box is None and case.box is not None:
        box = torch.tensor(case.box) * 10
    x = x.to(model.mean.dtype)
    pairs = find_pairs(x, replicas, model.cutoff, None if box is None else box.to(x))
    charges = own_charges if charges is None else charges
    energy, forces = model.energy_and_forces(z, x, replicas, pairs, len(own_charges), charges)
    return energy.detach(), forces.detach()


def sizes(case):
    return np.bincount(case.atoms.replicas)


def rotation(seed=0):
    q, r = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
    q = q * r.diagonal().sign()
    return q * torch.linalg.det(q)


def small(seed=0, priors=(), **options):
    """A random model that costs nothing; random biases and norms too, so that no term is zero."""
    torch.manual_seed(seed)
    settings = {"embedding_dimension": 8, "num_layers": 2, "num_rbf": 6, "max_z": 10, "cutoff_upper": 3.5} | options
    model = TensorNet(TensorNetConfig(**settings), list(priors)).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif ".tensor." in name:
                parameter.mul_(3)
    return model


# Every option of the format that changes how energies are computed.
OPTIONS = {
    "plain": {},
    "SO(3)": {"group": "SO(3)"},
    "gauss": {"rbf_type": "gauss"},
    "trainable": {"trainable_rbf": True},
    "trainable-gauss": {"trainable_rbf": True, "rbf_type": "gauss"},
    "lower-cutoff": {"cutoff_lower": 0.5},
    "lower-cutoff-gauss": {"cutoff_lower": 0.5, "rbf_type": "gauss"},
    "mean": {"reduce_op": "mean"},
    "no-layers": {"num_layers": 0},
    "deep-head": {"head_hidden_layers": 2},
    **{name: {"activation": name} for name in ACTIVATIONS if name != "silu"},
}


def batch(molecule_sizes, seed=0, spread=1.0):
    """Random molecules of H to O on a jittered lattice, interleaved: arguments of TensorNet.forward."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(molecule_sizes)
    replicas = torch.repeat_interleave(torch.arange(len(molecule_sizes)), torch.tensor(molecule_sizes))
    replicas = replicas[torch.randperm(count, generator=generator)]
    z = torch.randint(1, 9, (count,), generator=generator)
    lattice = torch.tensor(list(itertools.product(range(3), repeat=3)), dtype=torch.float64)
    x = torch.empty(count, 3, dtype=torch.float64)
    for k, size in enumerate(molecule_sizes):
        x[replicas == k] = 1.1 * lattice[torch.randperm(27, generator=generator)[:size]]
    x = spread * (x + 0.25 * torch.rand(count, 3, generator=generator, dtype=torch.float64))
    charges = torch.arange(len(molecule_sizes), dtype=torch.float64) % 3 - 1
    return z, x, replicas, find_pairs(x, replicas, 3.5), len(molecule_sizes), charges


# --------------------------------------------------------------------------------------------- the oracle


@pytest.mark.parametrize("name", [*CASES, *published(PUBLISHED)])
def test_oracle(name):
    case = (CASES | PUBLISHED)[name]
    model = model_of(case.checkpoint)
    energy, forces = evaluate(model, case)
    tolerance = ORACLE_ZBL if any(isinstance(prior, ZBL) for prior in model.priors) else ORACLE
    assert energy.shape == case.energies.shape and energy.dtype == torch.float64
    assert (np.abs(energy.numpy() - case.energies) / sizes(case)).max() < tolerance[0]
    assert np.abs(forces.numpy() - case.forces).max() < tolerance[1]


@pytest.mark.published("aceff-1.1")
def test_toluene():
    """The published energy of AceFF-1.1, −6976.57038 kJ/mol."""
    case = PUBLISHED["published-toluene"]
    energy, _ = evaluate(model_of(case.checkpoint), case)
    assert float(energy) * KJ_PER_EV == pytest.approx(-6976.57038, abs=1e-4)


@pytest.mark.parametrize("name", SMALL)
def test_single_precision(name):
    case = SMALL[name]
    model = copy.deepcopy(model_of(case.checkpoint)).float()
    energy, forces = evaluate(model, case)
    assert energy.dtype == forces.dtype == torch.float32
    exact_energy, exact_forces = evaluate(model_of(case.checkpoint), case)
    assert ((energy.double() - exact_energy).abs() / torch.tensor(sizes(case))).max() < SINGLE[0]
    assert (forces.double() - exact_forces).norm() / exact_forces.norm() < SINGLE[1]


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("silu", lambda x: x / (1 + np.exp(-x))),
        ("swish", lambda x: x / (1 + np.exp(-x))),
        ("ssp", lambda x: np.log1p(np.exp(x)) - float(np.float32(np.log(2)))),
        ("tanh", np.tanh),
        ("sigmoid", lambda x: 1 / (1 + np.exp(-x))),
        ("mish", lambda x: x * np.tanh(np.log1p(np.exp(x)))),
    ],
)
def test_activations(name, formula):
    x = np.linspace(-6, 6, 41)
    np.testing.assert_allclose(ACTIVATIONS[name]()(torch.tensor(x)).numpy(), formula(x), rtol=0, atol=1e-14)


def test_every_activation_is_checked():
    assert set(ACTIVATIONS) == {"silu", "swish", "ssp", "tanh", "sigmoid", "mish"}


# --------------------------------------------------------------------------------------------- derivatives


def differences(function, x, direction, h=5e-4):
    """Derivative along a direction, by central differences of the fourth order."""
    near = function(x + h * direction) - function(x - h * direction)
    far = function(x + 2 * h * direction) - function(x - 2 * h * direction)
    return (8 * near - far) / (12 * h)


@pytest.mark.parametrize("name", [*VARIANTS, "acetate", "chloroiodomethane"])
def test_forces_are_the_gradient(name):
    case = CASES[name]
    model = model_of(case.checkpoint)
    x = torch.tensor(case.positions) * 10
    _, forces = evaluate(model, case)
    for seed in range(2):
        direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        slope = differences(lambda y: float(evaluate(model, case, y)[0].sum()), x, direction)
        exact = float(-(forces * direction).sum())
        assert slope == pytest.approx(exact, abs=1e-7 * float(forces.norm() * direction.norm()))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_a_loss_of_forces_differentiates(options):
    """Double backward against finite differences, along a random direction in the space of all weights."""
    model = small(**options).train()
    arguments = batch((5, 3), seed=1)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    start = torch.cat([w.detach().flatten() for w in weights])
    generator = torch.Generator().manual_seed(2)
    target = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    direction = torch.randn(len(start), generator=generator, dtype=torch.float64) / math.sqrt(len(start))

    def loss():
        _, forces = model.energy_and_forces(*arguments)
        return ((forces - target) ** 2).sum()

    def at(flat):
        with torch.no_grad():
            for w, value in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
                w.copy_(value.view_as(w))
        return float(loss().detach())

    gradients = torch.autograd.grad(loss(), weights, allow_unused=True)
    zeros = [torch.zeros_like(w) if g is None else g for w, g in zip(weights, gradients, strict=True)]
    exact = float(torch.cat([g.flatten() for g in zeros]) @ direction)
    assert abs(exact) > 1e-6
    assert differences(at, start, direction, h=1e-3) == pytest.approx(exact, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("options", [{}, {"group": "SO(3)", "rbf_type": "gauss"}], ids=["O(3)", "SO(3)"])
def test_second_derivatives_by_positions(options):
    model = small(num_layers=1, **options).requires_grad_(False)
    z, x, replicas, pairs, count, charges = batch((3,), seed=4)
    x.requires_grad_(True)
    assert torch.autograd.gradgradcheck(lambda y: model(z, y, replicas, pairs, count, charges), x, fast_mode=True)


def test_which_weights_a_loss_of_forces_trains():
    """All but what only shifts the energy; the radial basis where it was made trainable."""
    model = small(trainable_rbf=True, priors=[Atomref(10, trainable=True)]).train()
    _, forces = model.energy_and_forces(*batch((5, 3), seed=1))
    (forces**2).sum().backward()
    without = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0}
    assert without == {"head.1.bias", "priors.0.atomref.weight"}
    for parameter in model.parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all()
    fixed = small(trainable_rbf=False)
    assert not fixed.rbf.means.requires_grad and not fixed.rbf.betas.requires_grad


def test_gradients_are_kept_in_training_mode_only():
    arguments = batch((5, 3))
    model = small()
    for training, graph in ((True, True), (False, False)):
        energy, forces = model.train(training).energy_and_forces(*arguments)
        assert energy.requires_grad is forces.requires_grad is graph
    with torch.no_grad():
        energy, forces = model.train().energy_and_forces(*arguments)
    assert not energy.requires_grad and not forces.requires_grad and forces.abs().max() > 0


# ---------------------------------------------------------------------------------------------- symmetries


SYMMETRIC = [*VARIANTS, "acetate"]


@pytest.mark.parametrize("name", SYMMETRIC)
def test_rotation_and_translation(name):
    case = CASES[name]
    model = model_of(case.checkpoint)
    turn = rotation(seed=3)
    assert torch.linalg.det(turn) == pytest.approx(1)
    energy, forces = evaluate(model, case)
    x = torch.tensor(case.positions) * 10
    turned_energy, turned_forces = evaluate(model, case, x @ turn.T + torch.tensor([3.0, -20.0, 7.0]))
    torch.testing.assert_close(turned_energy, energy, **SAME)
    torch.testing.assert_close(turned_forces, forces @ turn.T, rtol=1e-9, atol=1e-9)
    assert (turned_forces - forces).abs().max() > 1e-3
    for k in range(len(energy)):  # no net force on a molecule
        members = torch.tensor(case.atoms.replicas) == k
        assert forces[members].sum(0).abs().max() < 1e-10


MIRROR = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)


@pytest.mark.parametrize("name", [name for name in SYMMETRIC if not name.startswith("so3")])
def test_reflection(name):
    """O(3) models do not tell left from right."""
    case = CASES[name]
    model = model_of(case.checkpoint)
    assert model.config.group == "O(3)"
    energy, forces = evaluate(model, case)
    other_energy, other_forces = evaluate(model, case, torch.tensor(case.positions) * 10 * MIRROR)
    torch.testing.assert_close(other_energy, energy, **SAME)
    torch.testing.assert_close(other_forces, forces * MIRROR, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("group", ["O(3)", "SO(3)"])
def test_only_so3_models_know_handedness(group):
    z, x, replicas, pairs, count, charges = batch((7, 5))
    model = small(group=group).eval()
    energy, forces = model.energy_and_forces(z, x, replicas, pairs, count, charges)
    other_energy, other_forces = model.energy_and_forces(z, x * MIRROR, replicas, pairs, count, charges)
    turn = rotation(seed=5)
    turned_energy, turned_forces = model.energy_and_forces(z, x @ turn.T, replicas, pairs, count, charges)
    torch.testing.assert_close(turned_energy, energy, **SAME)
    torch.testing.assert_close(turned_forces, forces @ turn.T, rtol=1e-9, atol=1e-9)
    if group == "O(3)":
        torch.testing.assert_close(other_energy, energy, **SAME)
        torch.testing.assert_close(other_forces, forces * MIRROR, rtol=1e-9, atol=1e-9)
    else:
        assert (other_energy - energy).abs().min() > 1e-5
        assert (other_forces - forces * MIRROR).abs().max() > 1e-4


@pytest.mark.parametrize("name", VARIANTS)
def test_order_of_atoms(name):
    case = VARIANTS[name]
    model = model_of(case.checkpoint)
    energy, forces = evaluate(model, case)
    z, replicas, charges = case.atoms.tensors()
    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(1))
    x = (torch.tensor(case.positions) * 10)[order]
    pairs = find_pairs(x, replicas[order], model.cutoff)
    other_energy, other_forces = model.energy_and_forces(z[order], x, replicas[order], pairs, 3, charges)
    torch.testing.assert_close(other_energy, energy, **SAME)
    torch.testing.assert_close(other_forces, forces[order], **SAME)


@pytest.mark.parametrize("name", VARIANTS)
def test_like_atoms_are_alike_and_others_are_not(name):
    """Atoms 3 and 5 are hydrogens of the first molecule, 0 a carbon and 2 an oxygen."""
    case = VARIANTS[name]
    model = model_of(case.checkpoint)
    energy, forces = evaluate(model, case)
    for i, j in ((3, 5), (0, 2)):
        order = torch.arange(len(case.positions))
        order[i], order[j] = j, i
        other_energy, other_forces = evaluate(model, case, (torch.tensor(case.positions) * 10)[order])
        if case.atoms.numbers[i] == case.atoms.numbers[j]:
            torch.testing.assert_close(other_energy, energy, **SAME)
            torch.testing.assert_close(other_forces, forces[order], **SAME)
        else:
            assert (other_energy - energy)[0].abs() > 1e-4
            torch.testing.assert_close(other_energy[1:], energy[1:], **SAME)


# ---------------------------------------------------------------------------------------------- periodicity


def periodic(count=36):
    """Twelve waters in the triclinic box of the reference data, and a small model."""
    case = ACEFF["water-64-triclinic"]
    box = torch.tensor(case.box) * 10
    assert box[1, 0] != 0 and box[2, 0] != 0 and box[2, 1] != 0
    z = torch.tensor(case.atoms.numbers[:count])
    x = torch.tensor(case.positions[:count]) * 10
    return small(cutoff_upper=4.5), z, x, box


def periodic_energy(model, z, x, box):
    replicas = torch.zeros(len(z), dtype=torch.long)
    pairs = find_pairs(x, replicas, model.cutoff, box)
    energy, forces = model.eval().energy_and_forces(z, x, replicas, pairs, 1)
    return energy, forces, pairs


def test_whole_lattice_vectors_change_nothing():
    model, z, x, box = periodic()
    energy, forces, pairs = periodic_energy(model, z, x, box)
    assert (pairs.shift.abs().sum(1) > 0).any() and (pairs.shift.abs().sum(1) == 0).any()
    turns = torch.randint(-3, 4, (len(z), 3), generator=torch.Generator().manual_seed(0)).double()
    assert turns.abs().max() == 3
    unwrapped = periodic_energy(model, z, x + turns @ box, box)
    torch.testing.assert_close(unwrapped[0], energy, **SAME)
    torch.testing.assert_close(unwrapped[1], forces, rtol=1e-9, atol=1e-9)


def test_translation_in_a_box():
    model, z, x, box = periodic()
    energy, forces, _ = periodic_energy(model, z, x, box)
    for shift in ([0.1, 0.2, 0.3], [4.0, -7.0, 11.0]):
        moved = periodic_energy(model, z, x + torch.tensor(shift), box)
        torch.testing.assert_close(moved[0], energy, **SAME)
        torch.testing.assert_close(moved[1], forces, rtol=1e-9, atol=1e-9)


def test_a_box_is_a_piece_of_the_crystal():
    """The pairs of the central cell in 27 explicit copies are those found with the box; so are forces on its atoms."""
    model, z, x, box = periodic(count=12)
    _, forces, pairs = periodic_energy(model, z, x, box)
    images = torch.cartesian_prod(*[torch.arange(-2, 3)] * 3).double()
    images = images[images.abs().sum(1).argsort(stable=True)]  # the central cell comes first
    crystal = (x[None] + (images @ box)[:, None]).reshape(-1, 3)
    n = len(z)
    distance = (crystal[:n, None] - crystal[None]).norm(dim=2)
    near = ((distance < model.cutoff) & (distance > 0)).sum()
    assert pairs.edge_index.shape[1] == int(near) > 0
    found = (x[pairs.edge_index[0]] - x[pairs.edge_index[1]] + pairs.shift).norm(dim=1)
    expected = distance[(distance < model.cutoff) & (distance > 0)]
    torch.testing.assert_close(found.sort().values, expected.sort().values, **SAME)
    slope = differences(
        lambda y: float(periodic_energy(model, z, y, box)[0]), x, torch.ones_like(x) * torch.arange(n)[:, None]
    )
    assert slope == pytest.approx(float(-(forces * torch.arange(n)[:, None]).sum()), rel=1e-6, abs=1e-6)


# -------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_a_batch_is_its_molecules(options):
    """Molecules of different sizes, interleaved and overlapping in space, one of a single atom, the last one empty."""
    model = small(**options).eval()
    model.mean.fill_(0.37)
    model.std.fill_(1.9)
    z, x, replicas, pairs, _, _ = batch((5, 1, 9, 4))
    charges = torch.tensor([-1.0, 0.0, 2.0, 1.0, 3.0])
    energy, forces = model.energy_and_forces(z, x, replicas, pairs, 5, charges)
    for k in range(4):
        members = replicas == k
        one = torch.zeros(int(members.sum()), dtype=torch.long)
        alone_energy, alone_forces = model.energy_and_forces(
            z[members], x[members], one, find_pairs(x[members], one, model.cutoff), 1, charges[k : k + 1]
        )
        torch.testing.assert_close(energy[k : k + 1], alone_energy, **SAME)
        torch.testing.assert_close(forces[members], alone_forces, **SAME)
    assert float(energy[4]) == 0.37  # the sum over no atoms
    assert forces[replicas == 1].abs().max() == 0


@pytest.mark.parametrize("name", [*VARIANTS, "acetate"])
def test_pairs_beyond_the_cutoff_change_nothing(name):
    case = CASES[name]
    model = model_of(case.checkpoint)
    z, replicas, charges = case.atoms.tensors()
    x = torch.tensor(case.positions) * 10
    x = x * 1.6  # a few pairs are now farther apart than the cutoff
    near, everything = find_pairs(x, replicas, model.cutoff), find_pairs(x, replicas, 1e3)
    assert near.edge_index.shape[1] < everything.edge_index.shape[1] or name == "acetate"
    few = model.energy_and_forces(z, x, replicas, near, len(charges), charges)
    many = model.energy_and_forces(z, x, replicas, everything, len(charges), charges)
    torch.testing.assert_close(many[0], few[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(many[1], few[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_energy_and_forces_end_smoothly_at_the_cutoff(options):
    model = small(**options, priors=[ZBL(3.5, list(range(10)), 1e-10, 1.602e-19).double()]).eval()
    z, one = torch.tensor([6, 8]), torch.zeros(2, dtype=torch.long)

    def pair(distance):
        x = torch.tensor([[0.0, 0, 0], [distance, 0, 0]], dtype=torch.float64)
        return model.energy_and_forces(z, x, one, Pairs(torch.tensor([[0, 1], [1, 0]]), torch.zeros(2, 3).double()), 1)

    apart, edge, inside = pair(9.0), pair(3.5 - 1e-5), pair(2.0)
    assert (inside[0] - apart[0]).abs() > 1e-3 and apart[1].abs().max() == 0
    assert (edge[0] - apart[0]).abs() < 1e-8
    assert edge[1].abs().max() < 1e-3 * inside[1].abs().max()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_atoms_in_one_place_are_nan(options):
    """In their molecule, and nowhere else."""
    model = small(**options).eval()
    z, x, replicas, _, count, charges = batch((5, 4))
    i, j = torch.nonzero(replicas == 0).squeeze()[:2]
    x[i] = x[j]
    pairs = find_pairs(x, replicas, model.cutoff)
    energy, forces = model.energy_and_forces(z, x, replicas, pairs, count, charges)
    assert torch.isnan(energy[0]) and torch.isfinite(energy[1])
    assert torch.isnan(forces[i]).all() and torch.isnan(forces[j]).all()
    assert torch.isfinite(forces[replicas == 1]).all()


def test_atoms_of_two_molecules_may_be_in_one_place():
    model = small().eval()
    z, x, replicas, _, count, charges = batch((5, 4))
    x[torch.nonzero(replicas == 0)[0]] = x[torch.nonzero(replicas == 1)[0]]
    energy, forces = model.energy_and_forces(z, x, replicas, find_pairs(x, replicas, 3.5), count, charges)
    assert torch.isfinite(energy).all() and torch.isfinite(forces).all()


@pytest.mark.parametrize("group", ["O(3)", "SO(3)"])
def test_total_charge(group):
    model = small(group=group).eval()
    z, x, replicas, pairs, count, _ = batch((5, 4))
    neutral = model(z, x, replicas, pairs, count)
    torch.testing.assert_close(model(z, x, replicas, pairs, count, torch.zeros(2)), neutral, rtol=0, atol=0)
    charged = model(z, x, replicas, pairs, count, torch.tensor([0.0, 1.0]))
    assert charged[0] == neutral[0]  # a molecule does not see another one's charge
    assert (charged[1] - neutral[1]).abs() > 1e-6


# ---------------------------------------------------------------------------------------- the module itself


def test_every_tensor_is_in_the_state():
    """A copy that gets the state and another dtype gives the same numbers."""
    priors = [Atomref(10), ZBL(3.5, list(range(10)), 1e-10, 1.602e-19), D2(3.0, list(range(10)), 1e-10, 1.602e-19)]
    model = small(seed=1, trainable_rbf=True, priors=priors).eval()
    with torch.no_grad():
        model.priors[0].atomref.weight.normal_()
        model.priors[2].C_6.fill_(1.3)
        model.priors[2].R_r.fill_(0.14)
        model.mean.fill_(2.0)
        model.std.fill_(3.0)
        model.rbf.means.add_(0.1)
    priors = [Atomref(10), ZBL(3.5, [0] * 10, 1e-10, 1.602e-19), D2(3.0, [0] * 10, 1e-10, 1.602e-19)]
    other = small(seed=2, trainable_rbf=True, priors=priors).eval()
    other.load_state_dict(model.state_dict())
    arguments = batch((5, 4))
    for a, b in zip(model.energy_and_forces(*arguments), other.energy_and_forces(*arguments), strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    single = copy.deepcopy(model).float()
    assert {t.dtype for t in single.state_dict().values()} == {torch.float32, torch.int64}


def test_metadata_is_plain(model_path):
    metadata = load_model(model_path("aceff-1.1")).metadata
    assert json.loads(json.dumps(metadata))["config"]["embedding_dimension"] == 128
    assert metadata["units"]["nm_per_length"] == 0.1 and metadata["priors"] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rbf_type": "bessel"}, "rbf_type: expected one of expnorm, gauss, received 'bessel'"),
        ({"activation": "relu"}, "activation: expected one of .*, received 'relu'"),
        ({"group": "E(3)"}, r"group: expected one of O\(3\), SO\(3\), received 'E\(3\)'"),
        ({"reduce_op": "max"}, "reduce_op: expected one of sum, mean, received 'max'"),
        ({"embedding_dimension": 1}, "embedding_dimension: expected an integer of at least 2, received 1"),
        ({"num_layers": -1}, "num_layers: expected an integer of at least 0, received -1"),
        ({"num_layers": 1.0}, r"num_layers: expected an integer of at least 0, received 1\.0"),
        ({"num_rbf": 1}, "num_rbf: expected an integer of at least 2, received 1"),
        ({"max_z": True}, "max_z: expected an integer of at least 1, received True"),
        ({"cutoff_upper": 0.0}, r"expected 0 <= cutoff_lower < cutoff_upper, received 0\.0 and 0\.0"),
        ({"cutoff_lower": 4.5}, r"expected 0 <= cutoff_lower < cutoff_upper, received 4\.5 and 4\.5"),
        ({"cutoff_upper": math.inf}, "cutoff_lower < cutoff_upper, received 0.0 and inf"),
        ({"cutoff_upper": math.nan}, "cutoff_lower < cutoff_upper, received 0.0 and nan"),
    ],
    ids=repr,
)
def test_wrong_configurations(options, message):
    with pytest.raises(ValueError, match=message):
        TensorNetConfig(**options)


def test_misspelt_options_are_not_swallowed():
    with pytest.raises(TypeError, match="cutoff_uper"):
        TensorNetConfig(cutoff_uper=5.0)


# ------------------------------------------------------------------------------------------------- training


def training_data():
    """Two batches of different shape: perturbed small molecules, energies and forces of a teacher.

    Their shapes suit torch.compile, see below: no two sizes are equal, none is 3, and all have more than 28 atoms.
    """
    case = VARIANTS["atomref-old-layout-old-head"]
    teacher = model_of(case.checkpoint)
    z, replicas, _ = case.atoms.tensors()
    x = torch.tensor(case.positions) * 10
    generator = torch.Generator().manual_seed(7)
    found = []
    for members in ((0, 1, 0, 1), (2, 1, 2, 0, 1)):  # of 9, 6 and 5 atoms
        numbers = torch.cat([z[replicas == k] for k in members])
        index = torch.cat([torch.full((int((replicas == k).sum()),), m) for m, k in enumerate(members)])
        positions = torch.cat([x[replicas == k] for k in members])
        positions = positions + 0.1 * torch.randn(positions.shape, generator=generator, dtype=torch.float64)
        pairs = find_pairs(positions, index, teacher.cutoff)
        arguments = (numbers, positions, index, pairs, len(members), torch.zeros(len(members), dtype=torch.float64))
        energy, forces = teacher.energy_and_forces(*arguments)
        found.append((arguments, 50 * energy.detach(), 50 * forces.detach()))
    return found


def student():
    torch.manual_seed(11)
    config = TensorNetConfig(embedding_dimension=8, num_layers=1, num_rbf=8, max_z=20, cutoff_upper=4.5)
    return TensorNet(config, [Atomref(20, trainable=True)]).double().train()


def losses(evaluate, arguments, energy, forces):
    """Mean square errors of energies and forces."""
    found_energy, found_forces = evaluate(*arguments)
    return ((found_energy - energy) ** 2).mean(), ((found_forces - forces) ** 2).mean()


def fit(model, evaluate, data, steps):
    """Adam on energies and forces; the loss of the forces over all data before and after."""

    def of_forces():
        return sum(float(losses(evaluate, *one)[1].detach()) for one in data)

    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    before = of_forces()
    for step in range(steps):
        optimizer.zero_grad()
        energy_loss, force_loss = losses(evaluate, *data[step % len(data)])
        (0.01 * energy_loss + force_loss).backward()
        optimizer.step()
    return before, of_forces()


def test_training():
    """A few molecules in two shapes of batch: the loss of the forces falls to a fifth (to a tenth, when written)."""
    model, data = student(), training_data()
    assert len({arguments[0].shape for arguments, _, _ in data}) == 2
    before, after = fit(model, model.energy_and_forces, data, steps=60)
    assert after < 0.2 * before


# Found with torch 2.12.1, for losses of forces under torch.compile(dynamic=True):
# - torch.autograd.grad(..., create_graph=True) inside the compiled function breaks the graph, and outside of it asks
#   for the second derivative of a compiled function, which AOTAutograd refuses. torch.func.grad, which
#   energy_and_forces uses, is traced whole (fullgraph=True), and what is left to autograd is one backward pass.
# - Sizes that are equal in the first batch are taken to be equal for ever (a batch of 3 molecules: as many as there are
#   dimensions), sizes of 0 and 1 are constants, and Inductor has a special product for matrices of up to 32 numbers
#   (28 atoms, with 4 channels in the head). A batch on another side of these is compiled anew; others are not.
# - The whole of forward, force and backward takes Inductor minutes to compile, so that its test is marked slow, and
#   the quick one takes the backend "eager": the same capture, run without code generation.


def compare_compiled(model, compiled, data):
    """Numbers of one step, compiled and not, of each batch; how many graphs were compiled for them."""
    from torch._dynamo.utils import counters

    counters.clear()
    for one in data:
        results = []
        for evaluate_model in (model.energy_and_forces, compiled):
            model.zero_grad()
            energy_loss, force_loss = losses(evaluate_model, *one)
            (energy_loss + force_loss).backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            results.append([energy_loss.detach(), force_loss.detach(), *gradients])
        for exact, found in zip(*results, strict=True):
            torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9 * float(exact.abs().max()))
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_capture_for_training(fresh_compiler):
    """One graph for both shapes, whose numbers and gradients are those of the model."""
    model, data = student(), training_data()
    compiled = torch.compile(model.energy_and_forces, dynamic=True, fullgraph=True, backend="eager")
    assert compare_compiled(model, compiled, data) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated:FutureWarning")
def test_compiled_training(fresh_compiler):
    """The same in Inductor's code, and the loss of the forces falls as in test_training."""
    model, data = student(), training_data()
    compiled = torch.compile(model.energy_and_forces, dynamic=True)
    assert compare_compiled(model, compiled, data) == 1
    before, after = fit(model, compiled, data, steps=60)
    assert after < 0.2 * before
    again = student()
    expected = fit(again, again.energy_and_forces, data, steps=60)
    assert (before, after) == pytest.approx(expected, rel=1e-3)


def test_there_is_no_hidden_randomness():
    """Dropout or the like would make molecular dynamics drift."""
    model = small().train()
    arguments = batch((5, 4))
    torch.testing.assert_close(model(*arguments), model(*arguments), rtol=0, atol=0)
    assert not [part for part in model.modules() if isinstance(part, nn.Dropout)]
