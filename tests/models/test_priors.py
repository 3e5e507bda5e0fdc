"""Priors, against the published formulas written once more in numpy."""

import numpy as np
import pytest
import torch

from openmm_tensornet.models.priors import D2, ZBL, Atomref, Prior
from openmm_tensornet.models.tensornet import TensorNet, TensorNetConfig
from openmm_tensornet.neighbors.reference import Pairs, find_pairs

# CODATA 2018
ELEMENTARY_CHARGE = 1.602176634e-19  # C
VACUUM_PERMITTIVITY = 8.8541878128e-12  # F/m
AVOGADRO = 6.02214076e23  # 1/mol
BOHR = 5.29177210903e-11  # m
HARTREE = 4.3597447222071e-18  # J
EV = ELEMENTARY_CHARGE  # J
ANGSTROM = 1e-10  # m
# Grimme, J. Comput. Chem. 27, 1787 (2006), table 1: C6 in J·nm⁶/mol, R0 in Å.
GRIMME = {1: (0.14, 1.001), 6: (1.75, 1.452), 7: (1.23, 1.397), 8: (0.70, 1.342), 53: (31.50, 1.892)}
# The ZBL prior carries e²/(4πε₀) with the oracle's nine digits.
ZBL_DIGITS = 3e-9
FLOAT64 = 1e-12

DISTANCES = np.array([0.3, 0.7, 1.1, 1.9, 2.6, 3.3, 3.99])  # model lengths
UNITS = [pytest.param(ANGSTROM, EV, id="angstrom, eV"), pytest.param(BOHR, HARTREE, id="bohr, hartree")]


def zbl(z_i, z_j, metres):
    """Ziegler, Biersack, Littmark: The Stopping and Range of Ions in Solids (1985), eq. 9 and 10; joule."""
    x = metres * (z_i**0.23 + z_j**0.23) / (0.8854 * BOHR)
    screening = (
        0.1818 * np.exp(-3.2 * x)
        + 0.5099 * np.exp(-0.9423 * x)
        + 0.2802 * np.exp(-0.4029 * x)
        + 0.02817 * np.exp(-0.2016 * x)
    )
    return ELEMENTARY_CHARGE**2 / (4 * np.pi * VACUUM_PERMITTIVITY) * z_i * z_j / metres * screening


def cutoff_function(d, upper):
    return np.where(d < upper, (np.cos(np.pi * d / upper) + 1) / 2, 0.0)


def d2(z_i, z_j, metres):
    """Grimme 2006, eq. 11 and 12 with s6 = 1, d = 20; joule per pair."""
    (c_i, r_i), (c_j, r_j) = GRIMME[z_i], GRIMME[z_j]
    nm = metres * 1e9
    damping = 1 / (1 + np.exp(-20 * (nm / (0.1 * (r_i + r_j)) - 1)))
    return -np.sqrt(c_i * c_j) / nm**6 * damping / AVOGADRO


def make_zbl(cutoff=4.0, numbers=tuple(range(60)), length=ANGSTROM, energy=EV):
    return ZBL(cutoff, list(numbers), length, energy).double()


def make_d2(cutoff=4.0, numbers=tuple(range(60)), length=ANGSTROM, energy=EV):
    prior = D2(cutoff, list(numbers), length, energy).double()
    for z, (c6, radius) in GRIMME.items():
        prior.C_6[z], prior.R_r[z] = c6, radius / 10
    return prior


def evaluate(prior, z_i, z_j, distance):
    """Pair energies of two types at these distances."""
    d = torch.as_tensor(distance, dtype=torch.float64)
    return prior.pair_energy(torch.full(d.shape, z_i), torch.full(d.shape, z_j), d)


@pytest.mark.parametrize(("length", "energy"), UNITS)
@pytest.mark.parametrize(("z_i", "z_j"), [(1, 1), (1, 8), (8, 1), (6, 7), (53, 53)])
def test_zbl(z_i, z_j, length, energy):
    expected = zbl(z_i, z_j, DISTANCES * length) * cutoff_function(DISTANCES, 4.0) / energy
    found = evaluate(make_zbl(length=length, energy=energy), z_i, z_j, DISTANCES).numpy()
    np.testing.assert_allclose(found, expected, rtol=ZBL_DIGITS)


def test_zbl_of_bare_nuclei():
    """At a tiny distance next to nothing is screened: two protons 0.001 Å apart have nearly 14399.645 eV."""
    found = float(evaluate(make_zbl(), 1, 1, [0.001]))
    assert 0.99 * 14399.645 < found < 14399.645


@pytest.mark.parametrize("prior", [make_zbl, make_d2], ids=["ZBL", "D2"])
def test_types_are_mapped_to_atomic_numbers(prior):
    """Type 0 is carbon here, type 1 oxygen, type 2 hydrogen."""
    mapped = evaluate(prior(numbers=(6, 8, 1)), 0, 2, DISTANCES)
    torch.testing.assert_close(mapped, evaluate(prior(), 6, 1, DISTANCES), rtol=0, atol=0)


def test_zbl_and_its_slope_end_at_the_cutoff():
    edge = 4.0
    d = torch.tensor([2.0, edge - 1e-6, edge, edge + 1e-6, 5.0], dtype=torch.float64, requires_grad=True)
    energy = make_zbl(edge).pair_energy(torch.full((5,), 6), torch.full((5,), 8), d)
    (slope,) = torch.autograd.grad(energy.sum(), d)
    energy = energy.detach()
    assert float(energy[0]) > 0 and float(slope[0]) < 0
    assert energy[2:].tolist() == [0, 0, 0] and slope[2:].tolist() == [0, 0, 0]
    # ½(1+cos(πd/r)) is π²/4·(1−d/r)² at the edge: 1e-6 inside, energy falls by 1e-13 and the slope by 1e-6.
    assert 0 < float(energy[1]) < 1e-12 * float(energy[0])
    assert -1e-6 < float(slope[1]) / abs(float(slope[0])) < 0


def test_zbl_slope_is_the_derivative():
    d = torch.tensor(DISTANCES, requires_grad=True)
    (slope,) = torch.autograd.grad(evaluate(make_zbl(), 6, 8, d).sum(), d)
    h = 1e-5
    difference = evaluate(make_zbl(), 6, 8, DISTANCES + h) - evaluate(make_zbl(), 6, 8, DISTANCES - h)
    torch.testing.assert_close(slope, difference / (2 * h), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(("length", "energy"), UNITS)
@pytest.mark.parametrize(("z_i", "z_j"), [(1, 1), (1, 8), (8, 1), (6, 7), (53, 1)])
def test_d2(z_i, z_j, length, energy):
    expected = d2(z_i, z_j, DISTANCES * length) / energy
    found = evaluate(make_d2(length=length, energy=energy), z_i, z_j, DISTANCES).numpy()
    assert (found < 0).all()
    np.testing.assert_allclose(found, expected, rtol=FLOAT64)


def test_d2_of_benzene_carbons():
    """Two carbons in contact at 3.4 Å: −1.75/0.34⁶ J/mol = −0.27 kcal/mol, damped by 1/(1+exp(−20(3.4/2.904−1)))."""
    kcal_per_mol = 4184 / AVOGADRO
    found = float(evaluate(make_d2(energy=kcal_per_mol), 6, 6, [3.4]))
    undamped = -1.75 / 0.34**6 / 4184
    assert found / undamped == pytest.approx(1 / (1 + np.exp(-20 * (3.4 / 2.904 - 1))), rel=1e-9)
    assert -0.28 < undamped < -0.27


def test_d2_cuts_off_hard():
    found = evaluate(make_d2(4.0), 6, 6, [4.0 - 1e-9, 4.0, 4.5]).tolist()
    assert found[0] == pytest.approx(float(d2(6, 6, 4e-10) / EV), rel=1e-7)
    assert found[1:] == [0, 0]


def test_d2_of_an_element_without_parameters_is_nan():
    assert torch.isnan(evaluate(make_d2(), 6, 2, [1.0])).all()  # helium was not filled in


def test_atomref():
    table = Atomref(10).double()
    table.atomref.weight.copy_(torch.arange(10.0)[:, None] ** 2)
    z = torch.tensor([1, 8, 8, 6])
    assert table.atom_energy(z).tolist() == [1, 64, 64, 36]
    assert table.pair_energy(z, z, torch.ones(4)) is None
    assert table.cutoff == 0
    off = Atomref(10, enable=False)
    assert off.atom_energy(z) is None


@pytest.mark.parametrize("trainable", [False, True])
def test_atomref_trains_only_if_told_to(trainable):
    assert Atomref(10, trainable=trainable).atomref.weight.requires_grad is trainable


def test_base_prior_adds_nothing():
    z = torch.tensor([1, 8])
    assert Prior().atom_energy(z) is None and Prior().pair_energy(z, z, torch.ones(2)) is None


# ---------------------------------------------------------------------------------- priors inside the model


def small_model(priors, reduce_op):
    torch.manual_seed(3)
    config = TensorNetConfig(
        embedding_dimension=8, num_layers=1, num_rbf=8, max_z=10, cutoff_upper=3.0, reduce_op=reduce_op
    )
    model = TensorNet(config, priors).double().eval()
    model.std.fill_(2.5)
    model.mean.fill_(-0.7)
    return model


def replicas():
    """Water and CO, overlapping in space, and an empty third molecule."""
    z = torch.tensor([8, 6, 1, 8, 1])
    index = torch.tensor([0, 1, 0, 1, 0])
    x = torch.tensor(
        [[0, 0, 0], [0.3, 0.1, -0.2], [0.96, 0, 0], [0.2, 1.2, -0.2], [-0.24, 0.93, 0]], dtype=torch.float64
    )
    return z, x, index


def energies(model, box=None):
    z, x, index = replicas()
    with torch.no_grad():
        return model(z, x, index, find_pairs(x, index, model.cutoff, box), 3).numpy()


def pair_sums(formula, cutoff):
    """The formula summed over the pairs i<j of each molecule, eV."""
    z, x, index = (t.numpy() for t in replicas())
    total = np.zeros(3)
    for i in range(len(z)):
        for j in range(i):
            d = np.linalg.norm(x[i] - x[j])
            if index[i] == index[j] and d < cutoff:
                total[index[i]] += formula(int(z[i]), int(z[j]), d)
    return total


@pytest.mark.parametrize("reduce_op", ["sum", "mean"])
def test_pair_priors_are_added_once_a_molecule(reduce_op):
    """Neither std nor the mean over atoms touches them."""
    plain = energies(small_model([], reduce_op))
    both = energies(small_model([make_zbl(4.0), make_d2(5.0)], reduce_op))
    expected = pair_sums(lambda a, b, d: zbl(a, b, d * ANGSTROM) * cutoff_function(d, 4.0) / EV, 4.0)
    expected += pair_sums(lambda a, b, d: d2(a, b, d * ANGSTROM) / EV, 5.0)
    assert expected[0] > 5 and expected[1] > 5 and expected[2] == 0
    np.testing.assert_allclose(both - plain, expected, rtol=ZBL_DIGITS, atol=1e-10)


@pytest.mark.parametrize("reduce_op", ["sum", "mean"])
def test_atomref_is_inside_the_reduction_and_outside_std(reduce_op):
    table = Atomref(10)
    table.atomref.weight.copy_(torch.linspace(-900.0, 0.0, 10)[:, None])
    references = table.atomref.weight.double().squeeze().numpy()
    z, _, index = (t.numpy() for t in replicas())
    expected = np.bincount(index, references[z], minlength=3)
    if reduce_op == "mean":
        expected /= np.bincount(index, minlength=3) + 1  # the oracle counts its zero start value
    difference = energies(small_model([table], reduce_op)) - energies(small_model([], reduce_op))
    np.testing.assert_allclose(difference, expected, rtol=FLOAT64, atol=1e-10)


@pytest.mark.parametrize("prior", [make_zbl, make_d2], ids=["ZBL", "D2"])
def test_a_prior_may_reach_farther_than_the_network(prior):
    model = small_model([prior(4.0)], "sum")
    assert model.cutoff == 4.0 and small_model([], "sum").cutoff == 3.0
    z, index = torch.tensor([6, 8]), torch.zeros(2, dtype=torch.long)
    x = torch.tensor([[0.0, 0, 0], [3.5, 0, 0]], dtype=torch.float64)
    pairs = find_pairs(x, index, model.cutoff)
    with torch.no_grad():
        near = model(z, x, index, pairs, 1) - model(z, x, index, Pairs(pairs.edge_index[:, :0], pairs.shift[:0]), 1)
    torch.testing.assert_close(near, evaluate(prior(4.0), 6, 8, [3.5]), rtol=1e-6, atol=1e-14)


def test_d2_ignores_the_box_and_zbl_does_not():
    """Two atoms 9 Å apart in a box of 10 Å are neighbours through its wall."""
    z, index = torch.tensor([6, 8]), torch.zeros(2, dtype=torch.long)
    x = torch.tensor([[0.0, 0, 0], [9.0, 0, 0]], dtype=torch.float64)
    box = torch.eye(3, dtype=torch.float64) * 10
    for prior, expected in ((make_zbl, zbl(6, 8, 1e-10) * float(cutoff_function(1.0, 4.0)) / EV), (make_d2, 0.0)):
        with torch.no_grad():
            pairs = find_pairs(x, index, 4.0, box)
            assert pairs.edge_index.shape[1] == 2
            difference = small_model([prior(4.0)], "sum")(z, x, index, pairs, 1) - small_model([], "sum")(
                z, x, index, pairs, 1
            )
        assert float(difference) == pytest.approx(expected, rel=1e-8, abs=1e-12)
