"""The pair list by NNPOps, imitated by a stand-in that keeps its contract; the real one where it is installed."""

import importlib.util
import sys
import types

import pytest
import torch

from openmm_tensornet import StaticPotential, check_graph_safety, load_model
from openmm_tensornet.atoms import Atoms
from openmm_tensornet.export import NNPOPS, compile_potential
from openmm_tensornet.neighbors import NNPOpsPairs, SelectedPairs, find_pairs, minimum_image
from openmm_tensornet.potential import copy_double
from openmm_tensornet.testing import TOLERANCES, deviation, packing, reference_energy_and_forces

INSTALLED = importlib.util.find_spec("NNPOps") is not None
CUTOFF = 0.5
BOXES = {
    "vacuum": None,
    "rectangular": torch.tensor([[1.3, 0, 0], [0, 1.2, 0], [0, 0, 1.1]], dtype=torch.float64),
    "triclinic": torch.tensor([[1.4, 0, 0], [0.5, 1.3, 0], [-0.6, 0.4, 1.2]], dtype=torch.float64),
}


def stand_in(positions, cutoff, max_num_pairs, box_vectors, check_errors):
    """All that design and documentation say of it: total capacity, −1 and NaN padding, any order, int32, the count found."""
    assert not check_errors and positions.is_contiguous()
    i, j = torch.combinations(torch.arange(len(positions))).T
    delta = positions[j] - positions[i]  # from neighbors[1] to neighbors[0]
    if box_vectors is not None:
        delta = minimum_image(delta, box_vectors)
    near = delta.norm(dim=1) < cutoff
    order = torch.nonzero(near).flatten()
    order = order[torch.randperm(len(order))]
    used = order[: int(max_num_pairs)]
    room = int(max_num_pairs) - len(used)
    neighbors = torch.nn.functional.pad(torch.stack((j[used], i[used])), (0, room), value=-1).int()
    deltas = torch.nn.functional.pad(delta[used], (0, 0, 0, room), value=torch.nan)
    return neighbors, deltas, deltas.norm(dim=1), torch.tensor([len(order)], dtype=torch.int32)


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
    """NNPOps.neighbors, and a machine that looks as if its use paid."""
    monkeypatch.setattr("openmm_tensornet.potential.nnpops_fits", lambda: True)
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
    molecules = torch.arange(60) % 3 if several else torch.zeros(60, dtype=torch.long)
    pairs, vector, overflow = NNPOpsPairs(molecules, lattice is not None, CUTOFF, 1700)(x, lattice)
    assert not bool(overflow)
    assert pairs.shape == (2, 1700) and pairs.dtype == torch.long and bool(torch.isfinite(vector).all())
    found = {}
    for i, j, v in zip(*pairs.tolist(), vector, strict=True):
        if i != j:
            found[i, j], found[j, i] = v, -v
    expected = find_pairs(x, molecules, CUTOFF, lattice)
    edges = [tuple(e) for e in expected.edge_index.T.tolist()]
    assert set(found) == set(edges) and len(edges) == 2 * int((pairs[0] != pairs[1]).sum())
    i, j = expected.edge_index
    torch.testing.assert_close(torch.stack([found[e] for e in edges]), x[i] - x[j] + expected.shift)
    assert bool((vector[pairs[0] == pairs[1]].norm(dim=1) > CUTOFF).all())


def test_overflow_is_told(nnpops):
    x, molecules = cloud(60), torch.zeros(60, dtype=torch.long)
    needed = find_pairs(x, molecules, CUTOFF).edge_index.shape[1] // 2
    for capacity in (needed - 1, needed, needed + 1):
        for kind in (NNPOpsPairs, SelectedPairs):
            assert bool(kind(molecules, False, CUTOFF, capacity)(x, None)[2]) == (capacity < needed)


@pytest.mark.parametrize("periodic", [False, True], ids=["vacuum", "periodic"])
@pytest.mark.parametrize("kernels", ["portable", "fused"])
def test_potential(nnpops, model_path, periodic, kernels):
    """Energy and forces through NNPOps equal the reference's; the file says that it needs it, and can be captured."""
    model = load_model(model_path("variants/so3-gauss-2layers-meanstd"))
    atoms = Atoms.make([6, 1, 8, 1, 7, 1] * 12)
    box = torch.eye(3, dtype=torch.float64) * 2.4 * model.cutoff * model.units.nm_per_length if periodic else None
    x = packing(atoms, 3, box) if periodic else packing(atoms, 3)
    expected = reference_energy_and_forces(copy_double(model), atoms, x, box)
    exported = compile_potential(model, atoms, periodic=periodic, kernels=kernels, positions=x, box=box)
    assert NNPOPS in exported.metadata["needs_imports"] and exported.metadata["pair_list"] == "nnpops"
    frozen = torch.jit.freeze(exported.module.eval())
    for _ in range(3):
        energy, forces = frozen(x) if box is None else frozen(x, box)
        assert deviation((energy.reshape(1), forces), expected).within(TOLERANCES["single"])
    small = StaticPotential(
        model, atoms, periodic=periodic, kernels=kernels, max_pairs=20, tabulate=False
    ) if kernels == "portable" else None  # fmt: skip
    if small is not None:
        energy, forces = small(x, box)
        assert bool(energy.isnan().all()) and bool(forces.isnan().all())


def test_check_of_the_graph_needs_no_nnpops_kernel_for_fake_tensors(nnpops):
    molecules = torch.zeros(60, dtype=torch.long)

    class List(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pairs = NNPOpsPairs(molecules, False, CUTOFF, 900)

        def forward(self, x):
            return self.pairs(x, None)[1]

    from openmm_tensornet.flatten import flatten

    assert check_graph_safety(flatten(List(), (cloud(60),)), cloud(60)).kernels >= 5


def test_small_molecules_need_no_list(nnpops, model_path):
    model = load_model(model_path("variants/so3-gauss-2layers-meanstd"))
    assert StaticPotential(model, Atoms.make([8, 1, 1])).capacity is None
