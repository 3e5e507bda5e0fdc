"""Turning a module that differentiates inside into one flat graph."""

import torch
from torch import Tensor, nn

from openmm_tensornet.graph.record import flatten


class Forces(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.rand(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_(True)
        energy = (torch.exp(x) * self.weights.exp()).sum() + torch.exp(x).prod()
        (force,) = torch.autograd.grad(-energy, x)
        with torch.no_grad():
            total = torch.zeros_like(x)
            total.add_(1)
            changed = torch.zeros_like(x)
            changed.add_(2)
        return energy.detach(), force * total * changed


def called(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_the_same_numbers_without_autograd():
    module, x = Forces(), torch.rand(4, dtype=torch.float64)
    flat = flatten(module, (torch.zeros(4, dtype=torch.float64),))
    for found, expected in zip(flat(x), module(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
        assert not found.requires_grad


def test_constants_are_folded_and_what_is_changed_in_place_is_not():
    names = called(flatten(Forces(), (torch.zeros(4, dtype=torch.float64),)))
    # Those of x stay where they are, since keeping a result from the forward pass takes memory; that of the constant is gone.
    assert names.count("aten.exp.default") == 2
    assert names.count("aten.add_.Tensor") == 2
