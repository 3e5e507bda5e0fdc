"""The static program of models with charges, against the reference model and the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import ACEFF2, CHARGE_CASES, CHARGE_VARIANTS, KJ_PER_EV, VARIANTS, Case

from openmm_tensornet.common.atoms import Atoms
from openmm_tensornet.graph.capture import check_graph_safety
from openmm_tensornet.models.accuracy import TABULATION, packing, reference_energy_and_forces
from openmm_tensornet.models.checkpoint import load_model
from openmm_tensornet.neighbors.reference import find_pairs
from openmm_tensornet.static import program
from openmm_tensornet.static.potential import Options, StaticPotential, choose_coulomb_cutoff, copy_double
from openmm_tensornet.static.program import coulomb_cutoff_of


@pytest.fixture(params=["dense", "list"])
def way(request, monkeypatch):
    """Both ways of summing over pairs, with chunks that do not divide the number of pairs."""
    if request.param == "list":
        monkeypatch.setattr(program, "DENSE_ATOMS", 1)
        monkeypatch.setattr(program, "CHUNK", 60)
    return request.param


def reference_charges(model, atoms: Atoms, x: torch.Tensor, box: torch.Tensor | None = None) -> torch.Tensor:
    z, replicas, charges = atoms.tensors()
    pairs = find_pairs(10 * x, replicas, model.cutoff, None if box is None else 10 * box)
    with torch.no_grad():
        return copy_double(model).partial_charges(z, 10 * x, replicas, pairs, len(charges), charges)


def compare(static: StaticPotential, model, atoms: Atoms, x, box=None, energy=1e-8, force=1e-6) -> None:
    """kJ/mol and kJ/mol/nm."""
    arguments = (x,) if box is None else (x, box)
    expected = reference_energy_and_forces(copy_double(model), atoms, x, box)
    energies, forces = static(*arguments)
    torch.testing.assert_close(energies, expected[0], rtol=0, atol=energy)
    torch.testing.assert_close(forces, expected[1], rtol=0, atol=force)
    charges = static.partial_charges(*arguments)
    torch.testing.assert_close(charges, reference_charges(model, atoms, x, box), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", [*CHARGE_VARIANTS, "toluene-2.0", "acetate-2.0"])
def test_untabulated_double_is_the_oracle(name, way):
    case = CHARGE_CASES[name]
    static = StaticPotential.make(load_model(case.checkpoint), case.atoms, Options(precision="double", tabulate=False))
    assert (static.capacity is None) == (way == "dense")
    x, _ = case.tensors()
    energies, forces = static(x)
    assert np.abs(energies.numpy() / KJ_PER_EV - case.energies).max() / len(x) < 1e-9
    assert np.abs(forces.numpy() / KJ_PER_EV / 10 - case.forces).max() < 1e-8
    expected = reference_charges(load_model(case.checkpoint).double(), case.atoms, x)
    torch.testing.assert_close(static.partial_charges(x), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kernels", ["portable", "fused"])
@pytest.mark.parametrize("name", ["so3", "lower-cutoff-mean", "scalar-gauss", "methylammonium-2.0"])
def test_tables_stay_within_their_bound(name, kernels, way):
    if kernels == "fused":
        pytest.importorskip("numba", reason="numba, which compiles the kernels for the CPU, is not installed")
    case = CHARGE_CASES[name]
    model = load_model(case.checkpoint)
    x, _ = case.tensors()
    expected = reference_energy_and_forces(copy_double(model), case.atoms, x)
    static = StaticPotential.make(
        model, case.atoms, Options(precision="double", kernels=kernels), check=[(x, None, expected)]
    )
    bound = TABULATION["double"]
    assert static.tabulation["relative_force"] <= bound.force
    assert static.tabulation["energy_eV_per_atom"] <= bound.energy
    _, forces = static(x)
    assert (forces - expected[1]).norm() / expected[1].norm() < 1.1 * bound.force


@pytest.mark.parametrize(
    ("sizes", "cutoff"), [((1,), None), ((2,), 0.3), ((1, 3, 1), None), ((7, 2, 1), None), ((7, 2, 1), 0.45)]
)
def test_small_and_uneven_molecules(sizes, cutoff, way):
    """Charged ones, with an empty last one; the network's cutoff is 0.4 nm."""
    model = choose_coulomb_cutoff(load_model(CHARGE_VARIANTS["so3"].checkpoint), False, cutoff)
    generator = torch.Generator().manual_seed(sum(sizes))
    numbers = torch.randint(1, 10, (sum(sizes),), generator=generator).tolist()
    replicas = [k for k, n in enumerate(sizes) for _ in range(n)]
    order = torch.randperm(len(replicas), generator=generator)
    charges = [float(k % 3 - 1) for k in range(len(sizes) + 1)]
    atoms = Atoms.make(numbers, [replicas[k] for k in order], charges)
    static = StaticPotential.make(model, atoms, Options(precision="double", tabulate=False))
    compare(static, model, atoms, packing(atoms, seed=1))


def waters(count: int, kind: str) -> tuple[Atoms, torch.Tensor, torch.Tensor]:
    """Water molecules that see each other in a box, unwrapped."""
    case = ACEFF2[f"water-64-{kind}-2.0"]
    x, box = case.tensors()
    assert box is not None
    x = x[: 3 * count] + torch.randint(-1, 2, (count, 3)).double().repeat_interleave(3, 0) @ box
    return Atoms.make(case.atoms.numbers[: 3 * count]), x, box


@pytest.mark.parametrize(("kind", "cutoff"), [("rectangular", 0.35), ("triclinic", 0.61)])
def test_periodic(kind, cutoff, way):
    """A Coulomb cutoff below and above that of the network."""
    atoms, x, box = waters(8, kind)
    model = choose_coulomb_cutoff(load_model(CHARGE_VARIANTS["so3"].checkpoint), True, cutoff)
    expected = reference_energy_and_forces(copy_double(model), atoms, x, box)
    static = StaticPotential.make(model, atoms, Options(True, "double", tabulate=False), check=[(x, box, expected)])
    assert static.cutoff == pytest.approx(max(0.4, cutoff))
    compare(static, model, atoms, x, box)
    small = box.clone()
    small[2, 2] = 2 * static.cutoff - 1e-6
    energies, forces = static(x, small)
    assert energies.isnan().all() and forces.isnan().all()


def test_more_coulomb_pairs_than_the_list_holds_is_nan(monkeypatch):
    monkeypatch.setattr(program, "DENSE_ATOMS", 1)
    atoms, x, box = waters(8, "rectangular")
    model = choose_coulomb_cutoff(load_model(CHARGE_VARIANTS["so3"].checkpoint), True, 0.6)
    count = find_pairs(x, torch.tensor(atoms.replicas), 0.6, box).edge_index.shape[1] // 2
    assert count < 276
    for capacity in (count, count - 1):
        monkeypatch.setattr(program, "pair_capacity", lambda *_, capacity=capacity: capacity)
        static = StaticPotential.make(
            model, atoms, Options(periodic=True, precision="double", tabulate=False, max_pairs=276)
        )
        assert static.plan.list_plans[1].capacity == capacity
        energies, forces = static(x, box)
        charges = static.partial_charges(x, box)
        for values in (energies, forces, charges):
            assert bool(values.isnan().all()) == (capacity < count)
            assert bool(values.isfinite().all()) == (capacity == count)


def test_atoms_in_one_place_and_broken_positions_are_nan_everywhere(way):
    case = CHARGE_VARIANTS["so3"]
    static = StaticPotential.make(load_model(case.checkpoint), case.atoms)
    x, _ = case.tensors()
    close, broken = x.clone(), x.clone()
    close[1] = close[0]
    broken[3, 1] = torch.nan
    assert case.atoms.replicas[0] == case.atoms.replicas[1]
    for y in (close, broken):
        energies, forces = static(y)
        assert energies.isnan().any() and forces.isnan().all() and static.partial_charges(y).isnan().all()


def test_molecules_on_top_of_each_other_do_not_mix(way):
    """Acetate three times with three total charges: each as if alone."""
    case: Case = ACEFF2["acetate-2.0"]
    model = load_model(case.checkpoint)
    x, _ = case.tensors()
    charges = (-1.0, 0.0, 1.0)
    atoms = Atoms.make(case.atoms.numbers * 3, [k for k in range(3) for _ in x], charges)
    three = StaticPotential.make(model, atoms, Options(precision="double", tabulate=False))
    energies, forces = three(x.repeat(3, 1))
    partial = three.partial_charges(x.repeat(3, 1)).view(3, -1)
    for k, charge in enumerate(charges):
        one = StaticPotential.make(
            model, Atoms.make(case.atoms.numbers, None, charge), Options(precision="double", tabulate=False)
        )
        energy, force = one(x)
        assert float(energies[k]) == pytest.approx(float(energy), abs=1e-7)
        torch.testing.assert_close(forces.view(3, -1, 3)[k], force, rtol=0, atol=1e-6)
        torch.testing.assert_close(partial[k], one.partial_charges(x), rtol=0, atol=1e-10)
    assert (partial.sum(1) - torch.tensor(charges)).abs().max() < 1e-6


@pytest.mark.parametrize(("kernels", "most", "most_of_charges"), [("portable", 446, 258), ("fused", 226, 128)])
def test_kernels(kernels, most, most_of_charges):
    """The figure that decides the speed on a GPU; it may fall, not grow."""
    pytest.importorskip("numba", reason="numba, which compiles the kernels for the CPU, is not installed")
    case = ACEFF2["alanine-dipeptide-2.0"]
    static = StaticPotential.make(load_model(case.checkpoint), case.atoms, Options(kernels=kernels))
    x, _ = case.tensors()
    assert check_graph_safety(static.gpu_program, x.float()).kernels <= most
    assert check_graph_safety(static.gpu_charge_program, x.float()).kernels <= most_of_charges


class TestCoulombCutoff:
    def test_choices(self):
        model = load_model(CHARGE_VARIANTS["so3"].checkpoint)
        own = load_model(CHARGE_VARIANTS["reaction-field-deep-old-layout"].checkpoint)
        for given, periodic, cutoff, expected in (
            (model, False, None, None),
            (model, False, 0.9, 0.9),
            (model, True, None, 1.2),
            (model, True, 0.9, 0.9),
            (own, False, None, 0.3),
            (own, True, None, 0.3),
            (own, True, 0.9, 0.9),
        ):
            before = given.config
            chosen = choose_coulomb_cutoff(given, periodic, cutoff)
            assert coulomb_cutoff_of(chosen) == (None if expected is None else pytest.approx(expected))
            assert given.config is before

    @pytest.mark.parametrize("case", [CHARGE_VARIANTS["scalar-gauss"], VARIANTS["zero-layers"]])
    def test_a_model_without_coulomb_has_none(self, case):
        model = load_model(case.checkpoint)
        assert choose_coulomb_cutoff(model, True, None) is model and coulomb_cutoff_of(model) is None
        with pytest.raises(
            ValueError, match=r"expected None for a model without a Coulomb interaction, received 1\.2 nm"
        ):
            choose_coulomb_cutoff(model, True, 1.2)

    def test_periodic_boundaries_need_one(self):
        model = load_model(CHARGE_VARIANTS["so3"].checkpoint)
        with pytest.raises(
            ValueError, match=r"coulomb_cutoff: expected a cutoff .* periodic boundaries, received None"
        ):
            StaticPotential.make(model, Atoms.make([8, 1, 1]), Options(periodic=True, tabulate=False))
