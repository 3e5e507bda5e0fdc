"""The pair list by NNPOps, imitated by a stand-in that keeps its contract; the real one where it is installed."""

import importlib.util
import sys
import types

import pytest
import torch

from openmm_tensornet import StaticPotential, check_graph_safety, load_model
from openmm_tensornet.common.atoms import Atoms
from openmm_tensornet.export.compiled import compile_potential
from openmm_tensornet.models.accuracy import TOLERANCES, deviation, packing, reference_energy_and_forces
from openmm_tensornet.neighbors.lists import NNPOpsPairs, SelectedPairs
from openmm_tensornet.neighbors.reference import find_pairs, minimum_image
from openmm_tensornet.static.potential import Options, choose_kernels, copy_double

INSTALLED = importlib.util.find_spec("NNPOps") is not None
CUTOFF = 0.5
BOXES = {
    "vacuum": None,
    "rectangular": torch.tensor([[1.3, 0, 0], [0, 1.2, 0], [0, 0, 1.1]], dtype=torch.float64),
    "triclinic": torch.tensor([[1.4, 0, 0], [0.5, 1.3, 0], [-0.6, 0.4, 1.2]], dtype=torch.float64),
}


def stand_in(positions, cutoff, max_num_pairs, box_vectors, check_errors):
    """As the real one on a CPU: −1 and NaN up to `max_num_pairs`, any order, int32; more pairs than that are more columns."""
    assert not check_errors and positions.is_contiguous()
    i, j = torch.combinations(torch.arange(len(positions))).T
    delta = positions[j] - positions[i]  # from neighbors[1] to neighbors[0]
    if box_vectors is not None:
        if bool(box_vectors.diagonal().min() < 2 * cutoff):
            raise RuntimeError("box_vectors is too small")
        delta = minimum_image(delta, box_vectors)
    used = torch.nonzero(delta.norm(dim=1) <= cutoff).flatten()
    used = used[torch.randperm(len(used))]
    room = max(0, int(max_num_pairs) - len(used))
    neighbors = torch.nn.functional.pad(torch.stack((j[used], i[used])), (0, room), value=-1).int()
    deltas = torch.nn.functional.pad(delta[used], (0, 0, 0, room), value=torch.nan)
    return neighbors, deltas, deltas.norm(dim=1), torch.tensor([len(used)], dtype=torch.int32)


@pytest.fixture(
    params=[
        "stand-in",
        pytest.param(
            "real",
            marks=pytest.mark.skipif(not INSTALLED, reason="NNPOps, which comes with conda only, is not installed"),
        ),
    ]
)
def nnpops(request, monkeypatch):
    """NNPOps.neighbors."""
    if request.param == "real":
        yield
        return

    def get(positions, cutoff, max_num_pairs=-1, box_vectors=None, check_errors=False):
        return stand_in(positions, cutoff, max_num_pairs, box_vectors, check_errors)

    package, module = types.ModuleType("NNPOps"), types.ModuleType("NNPOps.neighbors")
    module.getNeighborPairs = get
    monkeypatch.setitem(sys.modules, "NNPOps", package)
    monkeypatch.setitem(sys.modules, "NNPOps.neighbors", module)
    yield


def cloud(count: int, seed: int = 1) -> torch.Tensor:
    return 1.1 * torch.rand(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("several", [False, True], ids=["one molecule", "three molecules"])
def test_same_pairs_as_the_reference(nnpops, box, several):
    x, lattice = cloud(60), BOXES[box]
    replicas = torch.arange(60) % 3 if several else torch.zeros(60, dtype=torch.long)
    pairs, vector, overflow = NNPOpsPairs(replicas, lattice is not None, CUTOFF, 1700)(x, lattice)
    assert not bool(overflow)
    assert pairs.shape == (2, 1700) and pairs.dtype == torch.long and bool(torch.isfinite(vector).all())
    found = {}
    for i, j, v in zip(*pairs.tolist(), vector, strict=True):
        if i != j:
            found[i, j], found[j, i] = v, -v
    expected = find_pairs(x, replicas, CUTOFF, lattice)
    edges = [tuple(e) for e in expected.edge_index.T.tolist()]
    assert set(found) == set(edges) and len(edges) == 2 * int((pairs[0] != pairs[1]).sum())
    i, j = expected.edge_index
    torch.testing.assert_close(torch.stack([found[e] for e in edges]), x[i] - x[j] + expected.shift)
    assert bool((vector[pairs[0] == pairs[1]].norm(dim=1) > CUTOFF).all())


def test_overflow_is_told(nnpops):
    x, replicas = cloud(60), torch.zeros(60, dtype=torch.long)
    needed = find_pairs(x, replicas, CUTOFF).edge_index.shape[1] // 2
    for capacity in (needed - 1, needed, needed + 1):
        for kind in (NNPOpsPairs, SelectedPairs):
            assert bool(kind(replicas, False, CUTOFF, capacity)(x, None)[2]) == (capacity < needed)


@pytest.mark.parametrize("periodic", [False, True], ids=["vacuum", "periodic"])
def test_potential(nnpops, model_path, periodic):
    """The program for GPUs equals the reference with NNPOps' pairs; and can be captured."""
    model = load_model(model_path("variants/so3-gauss-2layers-meanstd"))
    atoms = Atoms.make([6, 1, 8, 1, 7, 1] * 12)
    box = torch.eye(3, dtype=torch.float64) * 2.4 * model.cutoff * model.units.nm_per_length if periodic else None
    x = packing(atoms, 3, box) if periodic else packing(atoms, 3)
    inputs = (x,) if box is None else (x, box)
    expected = reference_energy_and_forces(copy_double(model), atoms, x, box)
    exported = compile_potential(model, atoms, Options(periodic=periodic, kernels="nnpops"), positions=x, box=box)
    assert exported.metadata["pair_lists"] == {"cpu": "torch", "cuda": "nnpops"}
    options = {"periodic": periodic, "kernels": "nnpops", "tabulate": False}
    static = StaticPotential.make(model, atoms, Options(**options), check=[(x, box, expected)])
    assert deviation(static.gpu_program(*inputs), expected).within(TOLERANCES["single"])
    small = StaticPotential.make(model, atoms, Options(max_pairs=20, **options))
    assert all(bool(result.isnan().all()) for result in small.gpu_program(*inputs))


def test_a_box_below_twice_the_cutoff(nnpops, model_path):
    """NaN, though NNPOps would raise on a CPU."""
    model = load_model(model_path("variants/zero-layers"))
    atoms = Atoms.make([8, 1] * 30)
    potential = StaticPotential.make(model, atoms, Options(periodic=True, kernels="nnpops", tabulate=False))
    box = torch.eye(3, dtype=torch.float64) * 1.9 * model.cutoff * model.units.nm_per_length
    assert all(bool(result.isnan().all()) for result in potential.gpu_program(packing(atoms, 3), box))


def test_going_on_without_it(monkeypatch):
    """It may be installed and yet not importable."""
    monkeypatch.setitem(sys.modules, "NNPOps", None)
    with pytest.warns(UserWarning, match=r"'nnpops' needs NNPOps, which cannot be imported \(.*going on with"):
        assert choose_kernels("nnpops") == "portable"


def test_check_of_the_graph_needs_no_nnpops_kernel_for_fake_tensors(nnpops):
    replicas = torch.zeros(60, dtype=torch.long)

    class List(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pairs = NNPOpsPairs(replicas, False, CUTOFF, 900)

        def forward(self, x):
            return self.pairs(x, None)[1]

    from openmm_tensornet.graph.record import flatten

    assert check_graph_safety(flatten(List(), (cloud(60),)), cloud(60)).kernels >= 5


def test_small_molecules_need_no_list(nnpops, model_path):
    model = load_model(model_path("variants/so3-gauss-2layers-meanstd"))
    assert StaticPotential.make(model, Atoms.make([8, 1, 1])).capacity is None
