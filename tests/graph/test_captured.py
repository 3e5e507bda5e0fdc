"""CUDA graphs as TorchForce uses them, imitated on a CPU, over every kind of module that is exported."""

import pytest
import torch
from conftest import CASES, CHARGE_VARIANTS, VARIANTS

from openmm_tensornet.common.atoms import Atoms
from openmm_tensornet.export.compiled import compile_potential
from openmm_tensornet.graph.captured import CapturedModule
from openmm_tensornet.models.accuracy import packing
from openmm_tensornet.models.checkpoint import load_model
from openmm_tensornet.static.potential import Options

BOX = 1.3 * torch.eye(3, dtype=torch.float64)


def make(kind: str):
    """A module and a geometry of the whole System."""
    model = load_model(VARIANTS["zero-layers"].checkpoint)
    atoms, options, box = CASES["toluene"].atoms, {}, None
    if kind == "box":
        atoms, box, options = Atoms.make([8, 1, 1] * 5), BOX, {"box": BOX}
    elif kind == "list in a box":
        atoms, box, options = Atoms.make([8, 1, 1] * 20), BOX, {"box": BOX}
    elif kind == "replicas":
        atoms = Atoms.make(atoms.numbers * 8, [k for k in range(8) for _ in atoms.numbers], [0] * 8)
    elif kind == "some atoms":
        options = {"particles": list(range(len(atoms.numbers)))[::-1]}
    elif kind == "charges":
        model = load_model(CHARGE_VARIANTS["so3"].checkpoint)
    x = packing(atoms, 5, box)
    return model, atoms, options, x if kind != "some atoms" else torch.cat((x.flip(0), x[:3] + 9)), box


@pytest.fixture(scope="module", params=["vacuum", "box", "list in a box", "replicas", "some atoms", "charges"])
def made(request):
    model, atoms, options, x, box = make(request.param)
    exported = [
        compile_potential(model, atoms, Options(box is not None, kernels=kernels), scripted=True, **options)
        for kernels in ("portable", "fused")
    ]
    return exported, x, box


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single or mixed", "double"])
@pytest.mark.parametrize(
    "order", [(True, True, False, True, False), (False, True, False, True)], ids=["forces", "energy"]
)
def test_energies_and_forces_in_turn(made, dtype, order):
    """Whichever is asked for first, always those of the positions at hand."""
    exported, x, box = made
    x = x.to(dtype)
    box = None if box is None else box.to(dtype)
    generator = torch.Generator().manual_seed(0)
    for module in (e.module for e in exported):
        context = CapturedModule(module, x, box, warmup_steps=1)
        for with_forces in order:
            y = x + 0.005 * torch.randn(x.shape, generator=generator).to(dtype)
            energy, forces = context.execute(y, box, forces=with_forces)
            energies, expected = module.evaluate(*(t for t in (y, box) if t is not None))
            assert abs(energy - float(energies.sum())) < 1e-3
            assert forces.dtype == dtype and forces.is_contiguous()
            if with_forces:
                assert float((forces - expected).norm() / expected.norm()) < 1e-5


def test_results_of_two_contexts_are_apart(made):
    exported, x, box = made
    one, other = (CapturedModule(exported[0].module, x, box) for _ in range(2))
    first = one.execute(x, box)
    other.execute(x + 0.01 * torch.rand(x.shape, dtype=x.dtype), box)
    assert torch.equal(one._results[1], first[1])
    assert one._results[1].data_ptr() != other._results[1].data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single or mixed", "double"])
def test_the_scale_parameter(made, dtype):
    """Without graphs, as forces with one are made, energy, forces and the derivative are those of the value at hand."""
    exported, x, box = made
    x, box = x.to(dtype), None if box is None else box.to(dtype)
    for plain in exported:
        energies, forces = plain.module.evaluate(*(t for t in (x, box) if t is not None))
        expected = float(energies.sum())
        context = CapturedModule(plain.scaled().module, x, box, warmup_steps=None)
        for scale in (1.0, 0.25, 0.0):
            energy, found = context.execute(x, box, parameters=(scale,))
            assert energy == pytest.approx(scale * expected, rel=1e-6)
            assert context.derivatives == [pytest.approx(expected, rel=1e-6)]
            assert found.dtype == dtype and float((found - scale * forces).norm() / forces.norm()) < 1e-5


def test_why_forces_with_a_scale_parameter_have_no_graphs(made):
    """A replay does not see a new value."""
    exported, x, box = made
    context = CapturedModule(exported[0].scaled().module, x, box, warmup_steps=1)
    first, _ = context.execute(x, box, parameters=(1.0,))
    assert context.execute(x, box, parameters=(0.25,))[0] == first
