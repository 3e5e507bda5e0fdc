"""Turn a module that differentiates inside into one flat graph of library operators.

The backward pass is derived, not written: the module is traced with its call of `torch.autograd.grad`, which leaves
one straight-line ATen graph of forward and backward. Then everything that depends on constants alone is computed once.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from .graphsafety import VIEWS

_ATEN = torch.ops.aten
# Operators that change nothing here: there is no autograd around the flat graph.
_IDENTITIES = {
    _ATEN.detach.default,
    _ATEN.alias.default,
    _ATEN.lift_fresh_copy.default,
    _ATEN.lift_fresh.default,
}


def flatten(module: nn.Module, example: tuple[Tensor, ...]) -> fx.GraphModule:
    """Flat, autograd-free equivalent of `module`.

    Parameters
    ----------
    module : nn.Module
        Its buffers become buffers of the result; it has no trainable parameters.
    example : tuple of Tensor
        Inputs; their shapes and the devices become fixed, their values do not matter.

    Returns
    -------
    GraphModule
    """
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def run(state, inputs):
        return torch.func.functional_call(module, state, inputs)

    traced = make_fx(run, tracing_mode="real")(state, example)
    graph = traced.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    constants = {}
    for node, (name, value) in zip(placeholders, state.items(), strict=False):
        constants[node] = (name.replace(".", "_"), value.detach())
    for node in graph.nodes:
        if node.op == "get_attr":
            value = getattr(traced, node.target)
            constants[node] = (f"constant{len(constants)}", value.detach())
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _IDENTITIES:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    _fold(graph, constants)
    return _rebuild(graph, constants, [f"input{k}" for k in range(len(example))])


def _written(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose tensor is changed in place later, also through a view."""
    written: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            target = node.args[0]
            while isinstance(target, fx.Node) and target not in written:
                written.add(target)
                is_view = target.target in VIEWS or target.target is operator.getitem
                target = target.args[0] if is_view else None
    return written


def _fold(graph: fx.Graph, constants: dict) -> None:
    """Compute what depends on constants alone."""
    written = _written(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or not all(n in constants for n in node.all_input_nodes) or node in written:
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: constants[n][1])
        value = node.target(*args, **kwargs)
        # Keep what would grow (expanded views) or is no tensor (tuples) as an operation.
        size = sum(constants[n][1].numel() for n in node.all_input_nodes)
        if isinstance(value, Tensor) and (value.numel() <= max(size, 1) or node.target not in VIEWS):
            constants[node] = (
                f"folded_{node.name}",
                value.detach().clone(memory_format=torch.contiguous_format),
            )


def _rebuild(graph: fx.Graph, constants: dict, inputs: list[str]) -> fx.GraphModule:
    """Graph in which constants are buffers and only the true inputs are arguments."""
    root = nn.Module()
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    names = iter(inputs)
    for node in graph.nodes:
        if node in constants:
            continue
        if node.op == "placeholder":
            mapping[node] = new.placeholder(next(names))
    used: dict[str, fx.Node] = {}

    def lookup(n: fx.Node) -> fx.Node:
        if n in constants:
            name, value = constants[n]
            if name not in used:
                root.register_buffer(name, value)
                used[name] = new.get_attr(name)
            return used[name]
        return mapping[n]

    for node in graph.nodes:
        if node in constants or node.op in ("placeholder", "get_attr"):
            continue
        mapping[node] = new.node_copy(node, lookup)
    new.lint()
    return fx.GraphModule(root, new)


def select_outputs(program: fx.GraphModule, outputs: int | slice) -> fx.GraphModule:
    """A copy that computes only some of the outputs of a flat graph; buffers are shared."""
    graph = fx.Graph()
    results = graph.graph_copy(program.graph, {})
    graph.output(results[outputs])  # type: ignore[index]
    graph.eliminate_dead_code()
    return fx.GraphModule(program, graph)
