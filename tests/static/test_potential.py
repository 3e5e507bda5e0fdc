"""The static potential against the reference model and the oracle: energies of each molecule, and forces."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import CASES, CHARGE_VARIANTS, KJ_PER_EV, SMALL, VARIANTS, Case

import openmm_tensornet.static.potential as potential_module
from openmm_tensornet.common.atoms import Atoms
from openmm_tensornet.graph.capture import check_graph_safety
from openmm_tensornet.models.accuracy import (
    TABULATION,
    deviation,
    geometries,
    packing,
    reference_energy_and_forces,
)
from openmm_tensornet.models.checkpoint import load_model
from openmm_tensornet.neighbors.lists import AllPairs, CellPairs, SelectedPairs
from openmm_tensornet.neighbors.plan import Grid
from openmm_tensornet.neighbors.reference import check_box, find_pairs, minimum_image
from openmm_tensornet.static import program
from openmm_tensornet.static.potential import Options, StaticPotential, choose_coulomb_cutoff, copy_double

ZBL_TOLERANCE = 1e-5  # the oracle rounds ZBL's screening length to float32


def make(case: Case, **options) -> StaticPotential:
    model = load_model(case.checkpoint)
    x, box = case.tensors()
    expected = reference_energy_and_forces(copy_double(model), case.atoms, x, box)
    return StaticPotential.make(
        model, case.atoms, Options(periodic=box is not None, **options), check=[(x, box, expected)]
    )


def evaluate(static: StaticPotential, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Energies in eV, forces in eV/Å."""
    x, box = case.tensors()
    energies, forces = static(x) if box is None else static(x, box)
    return energies.numpy() / KJ_PER_EV, forces.numpy() / KJ_PER_EV / 10


@pytest.fixture(params=["dense", "list"])
def way(request, monkeypatch):
    """Both ways of summing over pairs, with chunks that do not divide the number of pairs."""
    if request.param == "list":
        monkeypatch.setattr(program, "DENSE_ATOMS", 1)
        monkeypatch.setattr(program, "CHUNK", 100)
    return request.param


@pytest.mark.parametrize("name", [*VARIANTS, "alanine-dipeptide", "acetate"])
def test_untabulated_double_is_the_reference(name, way):
    case = SMALL[name]
    static = make(case, precision="double", tabulate=False)
    assert (static.capacity is None) == (way == "dense")
    energies, forces = evaluate(static, case)
    loose = ZBL_TOLERANCE if "zbl" in name else 0.0
    assert np.abs(energies - case.energies).max() / len(forces) < max(1e-9, loose)
    assert np.abs(forces - case.forces).max() < max(1e-8, loose)


@pytest.mark.parametrize("kernels", ["portable", "fused"])
@pytest.mark.parametrize("name", [*VARIANTS, "alanine-dipeptide", "acetate"])
def test_tables_stay_within_their_bound(name, way, kernels):
    case = SMALL[name]
    static = make(case, precision="double", kernels=kernels)
    energies, forces = evaluate(static, case)
    bound = TABULATION["double"]
    assert static.tabulation["relative_force"] <= bound.force
    assert static.tabulation["energy_eV_per_atom"] <= bound.energy
    loose = ZBL_TOLERANCE if "zbl" in name else 0.0
    assert np.abs(energies - case.energies).max() / len(forces) < max(1.1 * bound.energy, loose)
    assert np.linalg.norm(forces - case.forces) / np.linalg.norm(case.forces) < max(1.1 * bound.force, loose)


def test_float32_and_float64_positions():
    case = VARIANTS["atomref-old-layout-old-head"]
    for precision in ("single", "double"):
        static = make(case, precision=precision)
        x, _ = case.tensors()
        energies, forces = static(x)
        assert energies.dtype == forces.dtype == torch.float64
        assert forces.is_contiguous()
        energies32, forces32 = static(x.float())
        assert torch.allclose(energies, energies32, rtol=1e-5, atol=1e-3)
        assert (forces - forces32).norm() < 1e-4 * forces.norm()


def test_empty_last_molecule():
    case = VARIANTS["so3-gauss-2layers-meanstd"]  # its mean belongs to every molecule, empty ones too
    atoms = Atoms.make(case.atoms.numbers, case.atoms.replicas, [0, 0, 0, 0])
    model = load_model(case.checkpoint)
    x, _ = case.tensors()
    static = StaticPotential.make(model, atoms, Options(precision="double", tabulate=False))
    energies, forces = static(x)
    expected = reference_energy_and_forces(copy_double(model), atoms, x)
    assert energies.shape == (4,)
    assert float(energies[3]) == pytest.approx(float(model.mean) * KJ_PER_EV)
    assert torch.allclose(energies, expected[0], rtol=0, atol=1e-8)
    assert torch.allclose(forces, expected[1], rtol=0, atol=1e-7)


@pytest.mark.parametrize("sizes", [(1,), (2,), (1, 3, 1), (7, 2, 1)])
def test_small_and_uneven_molecules(sizes, way, model_path):
    model = load_model(model_path("variants/lower-cutoff-trainable"))
    generator = torch.Generator().manual_seed(sum(sizes))
    numbers = torch.randint(1, 10, (sum(sizes),), generator=generator).tolist()
    replicas = [k for k, n in enumerate(sizes) for _ in range(n)]
    order = torch.randperm(len(replicas), generator=generator)  # molecules need not be contiguous
    atoms = Atoms.make(numbers, [replicas[k] for k in order], [float(k % 3 - 1) for k in range(len(sizes))])
    x = packing(atoms, seed=1)
    expected = reference_energy_and_forces(copy_double(model), atoms, x)
    static = StaticPotential.make(model, atoms, Options(precision="double", tabulate=False))
    assert deviation(static(x), expected).energy < 1e-10
    assert (static(x)[1] - expected[1]).abs().max() < 1e-6


def test_several_molecules_do_not_see_each_other(model_path):
    """Copies on top of each other have N times one energy, and the same forces."""
    case = CASES["toluene"]
    n = len(case.atoms.numbers)
    model = load_model(case.checkpoint)
    x, _ = case.tensors()
    one = StaticPotential.make(model, case.atoms, Options(precision="double"))
    atoms = Atoms.make(case.atoms.numbers * 3, [k for k in range(3) for _ in range(n)], [0, 0, 0])
    three = StaticPotential.make(model, atoms, Options(precision="double"))
    energies, forces = three(x.repeat(3, 1))
    energy, force = one(x)
    assert torch.allclose(energies, energy.expand(3), rtol=0, atol=1e-7)
    assert torch.allclose(forces, force.repeat(3, 1), rtol=0, atol=1e-6)


def test_more_pairs_than_the_list_holds_is_nan(monkeypatch):
    monkeypatch.setattr(program, "DENSE_ATOMS", 1)
    case = VARIANTS["zero-layers"]
    x, _ = case.tensors()
    model = load_model(case.checkpoint)
    x_model = x / 0.1
    count = find_pairs(x_model, torch.tensor(case.atoms.replicas), model.cutoff).edge_index.shape[1] // 2
    exact = StaticPotential.make(model, case.atoms, Options(precision="double", tabulate=False, max_pairs=count))
    energies, forces = exact(x)
    assert exact.capacity == count
    assert np.allclose(energies.numpy() / KJ_PER_EV, case.energies, rtol=0, atol=1e-9)
    short = StaticPotential.make(model, case.atoms, Options(precision="double", tabulate=False, max_pairs=count - 1))
    energies, forces = short(x)
    assert energies.isnan().all()
    assert forces.isnan().all()


@pytest.mark.parametrize("tabulate", [True, False])
def test_close_atoms_have_the_networks_own_value(tabulate, way):
    """At any distance, also where no model was trained; in one place there is no direction, and everything is NaN."""
    case = VARIANTS["zero-layers"]
    static = StaticPotential.make(
        load_model(case.checkpoint), case.atoms, Options(precision="double", tabulate=tabulate)
    )
    x, _ = case.tensors()
    y = x.clone()
    direction = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    assert case.atoms.replicas[0] == case.atoms.replicas[1]
    for distance in (0.06, 0.02, 0.005, 2e-4):
        y[1] = y[0] + distance * direction
        found = deviation(static(y), reference_energy_and_forces(load_model(case.checkpoint).double(), case.atoms, y))
        assert found.within(TABULATION["single"]), (distance, found)
    y[1] = y[0]
    energies, forces = static(y)
    assert energies[case.atoms.replicas[0]].isnan()
    assert forces.isnan().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_positions_are_nan_not_a_crash(value, way):
    case = VARIANTS["zero-layers"]
    static = StaticPotential.make(load_model(case.checkpoint), case.atoms)
    x, _ = case.tensors()
    x[3, 1] = value
    energies, forces = static(x)
    assert energies.isnan().any()
    assert forces.isnan().all()


def test_box_below_twice_the_cutoff_is_nan():
    model = load_model(VARIANTS["zero-layers"].checkpoint)
    case = CASES["water-64-rectangular"]
    static = StaticPotential.make(model, case.atoms, Options(periodic=True))
    x, box = case.tensors()
    assert box is not None
    assert torch.isfinite(static(x, box)[0]).all()
    for k in range(3):
        small = box.clone()
        small[k, k] = 2 * static.cutoff - 1e-6
        energies, forces = static(x, small)
        assert energies.isnan().all()
        assert forces.isnan().all()


def test_d2_with_a_box_is_refused():
    from openmm_tensornet.models.priors import D2
    from openmm_tensornet.models.tensornet import TensorNet, TensorNetConfig

    config = TensorNetConfig(embedding_dimension=4, num_layers=0, num_rbf=4, max_z=10)
    model = TensorNet(config, [D2(6.0, list(range(10)), 1e-10, 1.602176634e-19)])
    with pytest.raises(ValueError, match=r"D2.*ignores the box"):
        StaticPotential.make(model, Atoms.make([8, 1, 1]), Options(periodic=True, tabulate=False))


@pytest.mark.parametrize(("kernels", "most"), [("portable", 152), ("fused", 28)])
def test_kernels_of_alanine_dipeptide(kernels, most):
    """The figure that decides the speed on a GPU; it may fall, not grow."""
    case = CASES["alanine-dipeptide"]
    static = make(case, kernels=kernels)
    x, _ = case.tensors()
    assert check_graph_safety(static.gpu_program, x.float()).kernels <= most


def described(program) -> tuple:
    """Code and constants of a flat graph."""
    return program.code, {name: (t.dtype, t.numpy().tobytes()) for name, t in program.named_buffers()}


@pytest.mark.parametrize("kernels", ["auto", "fused"])
@pytest.mark.parametrize("precision", ["single", "double"])
@pytest.mark.parametrize("periodic", [False, True], ids=["vacuum", "periodic"])
@pytest.mark.parametrize("count", [12, 50])
@pytest.mark.parametrize("case", [VARIANTS["so3-gauss-2layers-meanstd"], CHARGE_VARIANTS["so3"]], ids=["1", "2"])
def test_the_same_programs_with_and_without_a_gpu(case, count, periodic, precision, kernels, monkeypatch):
    """And every operator of the one for GPUs has a kernel there."""
    model = choose_coulomb_cutoff(load_model(case.checkpoint), periodic, None)
    monkeypatch.setattr(potential_module, "TABLE_SIZES", (1024,))
    made = []
    for seen in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda seen=seen: seen)
        atoms = Atoms.make([8, 1] * (count // 2))
        made.append(
            StaticPotential.make(model, atoms, Options(periodic=periodic, precision=precision, kernels=kernels))
        )
    for name in ("program", "gpu_program"):
        assert described(getattr(made[0], name)) == described(getattr(made[1], name))
    cuda = pytest.importorskip("openmm_tensornet.kernels.cuda", reason="triton is not installed")
    inputs = (torch.zeros(count, 3), *([torch.eye(3)] if periodic else []))
    names = [o.split(".") for o in check_graph_safety(made[0].gpu_program, *inputs).operators]
    own = {name for space, name, *_ in names if space == "openmm_tensornet"}
    assert all(hasattr(cuda, name) for name in own) and bool(own) == (kernels == "fused")


@pytest.mark.parametrize("periodic", [False, True], ids=["vacuum", "periodic"])
@pytest.mark.parametrize("case", [VARIANTS["so3-gauss-2layers-meanstd"], CHARGE_VARIANTS["so3"]], ids=["1", "2"])
def test_launches_do_not_grow_with_the_pairs(case, periodic, monkeypatch):
    """A list is one chunk on a GPU; on a CPU it is many, which give the same numbers."""
    model = choose_coulomb_cutoff(load_model(case.checkpoint), periodic, None)
    monkeypatch.setattr(program, "CHUNK", 300)
    atoms = Atoms.make([8, 1] * 30)
    edge = 2.5 * model.cutoff * model.units.nm_per_length if periodic else None
    inputs = (packing(atoms, 3, None if edge is None else torch.eye(3, dtype=torch.float64) * edge),)
    inputs += () if edge is None else (torch.eye(3, dtype=torch.float64) * edge,)
    launches = []
    for capacity in (900, 1700):
        static = StaticPotential.make(
            model, atoms, Options(periodic=periodic, precision="double", tabulate=False, max_pairs=capacity)
        )
        launches.append(check_graph_safety(static.gpu_program, *inputs).kernels)
        assert check_graph_safety(static.program, *inputs).kernels > 1.5 * launches[-1]
    assert launches[0] == launches[1]
    for found, expected in zip(static.gpu_program(*inputs), static.program(*inputs), strict=True):
        assert bool(torch.isfinite(expected).all())
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-8)


def test_choice_of_kernels(monkeypatch):
    assert potential_module.choose_kernels("auto") == "auto"
    monkeypatch.setattr(potential_module, "available", lambda: False)
    assert potential_module.choose_kernels("auto") == "portable"
    with pytest.raises(ImportError, match=r"kernels: 'fused' needs numba.*pip install numba"):
        potential_module.choose_kernels("fused")
    with pytest.raises(ValueError, match=r"kernels: expected one of auto, portable, fused, nnpops, received 'fast'"):
        potential_module.choose_kernels("fast")
    model = load_model(VARIANTS["zero-layers"].checkpoint)
    with pytest.raises(ValueError, match=r"kernels: expected 'portable' with tabulate=False"):
        StaticPotential.make(model, Atoms.make([8, 1, 1]), Options(kernels="fused", tabulate=False))


@pytest.mark.parametrize("kernels", ["portable", "fused"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_torch_compile_takes_it_whole(backend, kernels):
    case = VARIANTS["zero-layers" if backend == "aot_eager" else "atomref-old-layout-old-head"]
    static = make(case, precision="double", kernels=kernels)
    x, _ = case.tensors()
    torch._dynamo.reset()
    compiled = torch.compile(static, fullgraph=True, dynamic=False, backend=backend)
    for got, expected in zip(compiled(x), static(x), strict=True):
        assert torch.allclose(got, expected, rtol=0, atol=1e-7)


class TestAtoms:
    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            (([],), ValueError, "at least one atom"),
            (([0, 1],), ValueError, "at least 1, received 0 for atom 0"),
            (([1.5],), TypeError, "expected integers, received 1.5"),
            (("HCN",), TypeError, "sequence of integers"),
            (([1, 1], [0]), ValueError, "each of 2 atoms, received 1"),
            (([1, 1], [0, -1]), ValueError, "at least 0, received -1"),
            (([1, 1], [0, 1], 1), ValueError, "one charge for each of 2 replicas, received the single number 1"),
            (([1, 1], [0, 1], [1]), ValueError, "each of 2 replicas, received 1"),
            (([1, 1], None, 0.5), ValueError, "whole numbers of elementary charges, received 0.5"),
            (([1, 1], [0, 3], [0, 0]), ValueError, "below the number of atoms, 2, received 3"),
        ],
    )  # fmt: skip
    def test_refusals(self, arguments, error, text):
        if arguments[1:] == ([0, 3], [0, 0]):
            with pytest.raises(error, match=text):
                Atoms.make(*arguments, num_replicas=2)
            return
        with pytest.raises(error, match=text):
            Atoms.make(*arguments)

    def test_complete(self):
        atoms = Atoms.make(np.array([8, 1, 1]), None, -1)
        assert atoms == Atoms((8, 1, 1), (0, 0, 0), (-1.0,))


class TestNeighbors:
    @pytest.mark.parametrize("triclinic", [False, True])
    def test_selected_pairs_are_the_reference_pairs(self, triclinic):
        box = torch.diag(torch.tensor([1.1, 1.3, 1.2], dtype=torch.float64))
        if triclinic:
            box[1, 0], box[2, 0], box[2, 1] = 0.4, -0.5, 0.6
        x = torch.rand(60, 3, dtype=torch.float64) @ box
        turns = torch.randint(-3, 4, (60, 3)).double()
        replicas = torch.randint(0, 2, (60,))
        pairs = find_pairs(x, replicas, 0.5, box)
        expected = {tuple(p) for p in pairs.edge_index.T.tolist() if p[0] < p[1]}
        chosen = SelectedPairs(replicas, True, 0.5, len(expected) + 5)
        index, vector, overflow = chosen(x + turns @ box, box)
        assert not overflow
        distance = vector.norm(dim=1)
        found = {tuple(p) for p, d in zip(index.T.tolist(), distance.tolist(), strict=True) if d < 0.5}
        assert found == expected
        assert (distance[len(expected) :] == 1.0).all()
        assert SelectedPairs(replicas, True, 0.5, len(expected) - 1)(x, box)[2]

    @pytest.mark.parametrize("kind", ["none", "rectangular", "triclinic"])
    @pytest.mark.parametrize("several", [False, True])
    def test_cells_find_the_reference_pairs(self, kind, several):
        box = torch.diag(torch.tensor([1.6, 1.9, 2.2], dtype=torch.float64))
        if kind == "triclinic":
            box[1, 0], box[2, 0], box[2, 1] = 0.3, -0.5, 0.6
        x = torch.rand(300, 3, dtype=torch.float64) @ box - 0.7
        replicas = torch.arange(300) % 2 if several else torch.zeros(300, dtype=torch.long)
        lattice = None if kind == "none" else box
        pairs = find_pairs(x, replicas, 0.5, lattice)
        expected = {tuple(p) for p in pairs.edge_index.T.tolist() if p[0] < p[1]}
        if lattice is not None:
            x = x + torch.randint(-3, 4, (300, 3)).double() @ box
        cells = (3, 3, 3) if lattice is not None else (3, 4, 5)
        for room, capacity, left_out in (
            (60, len(expected) + 40, False),
            (60, len(expected) - 1, True),
            (3, 9000, True),
        ):
            finder = CellPairs(replicas, lattice is not None, 0.5, capacity, Grid(cells, room))
            index, vector, overflow = finder(x, lattice)
            assert index.shape == (2, capacity)
            assert bool(overflow) is left_out
            if left_out:
                continue
            distance = vector.norm(dim=1)
            found = [tuple(sorted(p)) for p, d in zip(index.T.tolist(), distance.tolist(), strict=True) if d < 0.5]
            assert len(found) == len(set(found))
            assert set(found) == expected
            direct = x[index[0]] - x[index[1]]
            if lattice is not None:
                direct = minimum_image(direct, lattice)
            assert torch.allclose(vector[distance < 0.5], direct[distance < 0.5])

    def test_cells_narrower_than_the_cutoff_are_noticed(self):
        box = torch.eye(3, dtype=torch.float64) * 1.55
        finder = CellPairs(torch.zeros(30, dtype=torch.long), True, 0.5, 400, Grid((3, 3, 3), 30))
        x = torch.rand(30, 3, dtype=torch.float64)
        assert not finder(x, box)[2]
        assert finder(x, box * 0.96)[2]

    def test_all_pairs(self):
        index, _, overflow = AllPairs(torch.tensor([0, 1, 0, 1, 0]), False, 1.0)(torch.rand(5, 3), None)
        assert index.T.tolist() == [[0, 2], [0, 4], [2, 4], [1, 3]]
        assert overflow is None

    def test_minimum_image_is_the_shortest(self):
        box = torch.tensor([[1.0, 0, 0], [0.5, 1.1, 0], [-0.5, 0.55, 1.2]], dtype=torch.float64)
        vector = torch.randn(500, 3, dtype=torch.float64) * 3
        images = torch.cartesian_prod(*[torch.arange(-4, 5.0, dtype=torch.float64)] * 3) @ box
        wrapped = minimum_image(vector, box)
        shortest = (wrapped[:, None] + images).norm(dim=-1).amin(1)
        near = shortest < 0.5
        assert near.sum() > 50
        assert torch.allclose(wrapped.norm(dim=1)[near], shortest[near])

    @pytest.mark.parametrize(
        ("box", "text"),
        [
            ([[0.9, 0, 0], [0, 2, 0], [0, 0, 2]], "at least twice the cutoff, 1, received 0.9"),
            ([[2, 0, 0], [1.2, 2, 0], [0, 0, 2]], "reduced form"),
            ([[2, 0.1, 0], [0, 2, 0], [0, 0, 2]], "reduced form"),
            ([[2, 0, 0], [0, 2, 0], [0, 0, float("nan")]], "finite"),
            ([[2, 0, 0], [0, 2, 0]], r"shape \(3, 3\), received shape \(2, 3\)"),
        ],
    )
    def test_boxes_that_are_refused(self, box, text):
        with pytest.raises(ValueError, match=text):
            check_box(torch.tensor(box, dtype=torch.float64), 0.5)


def test_named_geometries_keep_their_distance():
    case = CASES["alanine-dipeptide"]
    found = geometries(case.atoms, 0.5)
    assert len(found) == 2
    for x, box in found.values():
        assert box is None
        assert torch.pdist(x).min() >= 0.095


@pytest.mark.parametrize("edge", [1.1, 2.5, 6.0])
def test_geometries_of_a_box_are_dense_and_cross_its_faces(edge):
    """Whatever its size: a check on atoms that do not see each other would say nothing."""
    atoms = CASES["alanine-dipeptide"].atoms
    found = geometries(atoms, 0.5, box=edge * torch.eye(3, dtype=torch.float64))
    assert list(found) == ["packing 1", "packing 2"]
    for x, box in found.values():
        vectors = minimum_image((x[:, None] - x).flatten(0, 1), box).view(22, 22, 3)
        distances = vectors.norm(dim=2)[tuple(torch.triu_indices(22, 22, 1))]
        assert distances.min() >= 0.095 and (distances < 0.5).float().mean() > 0.3
        around = x - (x / edge).round() * edge
        assert all((around[:, k] < 0).any() and (around[:, k] > 0).any() for k in range(3))
    inside = found["packing 2"][0]
    assert 0 <= inside.min() and inside.max() < edge and torch.pdist(inside).max() > 0.75 * edge


def test_small_molecules_reach_the_cutoff():
    found = geometries(Atoms.make([8, 1, 1]), 0.5)
    x, _ = found["packing 2, stretched to the cutoff"]
    assert (x.amax(0) - x.amin(0)).max() == pytest.approx(0.5)
    assert len(found) == 3 and list(geometries(Atoms.make([2]), 0.5)) == ["packing 1", "packing 2"]
