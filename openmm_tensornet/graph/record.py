"""Turn a module that differentiates inside into one flat graph of library operators.

The backward pass is derived, not written: the module is run once, with its call of `torch.autograd.grad`, and every ATen
operator on the way, forward and backward, becomes a node of one straight-line graph. (`make_fx` does the same, but imports PyTorch's
compiler for it: seconds and 100 MB.) That run is on the meta device, where tensors have shapes and no values, so that it takes neither
time nor memory. Then everything that depends on constants alone is computed once.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from .capture import VIEWS

_ATEN = torch.ops.aten
# Operators that change nothing here: there is no autograd around the flat graph.
_IDENTITIES = {
    _ATEN.detach.default,
    _ATEN.alias.default,
    _ATEN.lift_fresh_copy.default,
    _ATEN.lift_fresh.default,
}


def flatten(module: nn.Module, example: tuple[Tensor, ...], keep: bool = False) -> fx.GraphModule:
    """Flat, autograd-free equivalent of `module`.

    Parameters
    ----------
    module : nn.Module
        Its buffers become buffers of the result; it has no trainable parameters.
    example : tuple of Tensor
        Inputs; their shapes become fixed, their values do not matter.
    keep : bool
        Whether what the backward pass computes again is kept from the forward pass: fewer operators, and more memory. Custom
        operators are called once for the same arguments in any case.

    Returns
    -------
    GraphModule
    """
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    recorder = _Recorder()
    inputs, known = _without_values(*example), dict(zip(state, _without_values(*state.values()), strict=True))
    for k, tensor in enumerate(inputs):
        node = recorder.nodes[tensor] = recorder.graph.placeholder(f"input{k}")
        node.meta["tensors"] = (tensor,)
    for name, tensor in known.items():
        recorder.constant(tensor, name.replace(".", "_"), state[name])
    with recorder:
        outputs = torch.func.functional_call(module, known, inputs)
    graph, constants = recorder.graph, recorder.constants
    graph.output(tree_map(recorder.node, outputs))
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _IDENTITIES:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    _fold(graph, constants)
    _merge(graph, keep)
    return _rebuild(graph, constants)


class _Recorder(TorchDispatchMode):
    """Writes what is run into a graph. Constants, which the operators find rather than make, are nodes with a name and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.constants: dict[fx.Node, tuple[str, Tensor]] = {}
        self.nodes = WeakTensorKeyDictionary()  # an intermediate result lives no longer than in the run itself

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch's compiler does not see this, and need not be imported to be told so

    def constant(self, tensor: Tensor, name: str, value: Tensor) -> fx.Node:
        node = self.nodes[tensor] = self.graph.get_attr(name)
        self.constants[node] = name, value.detach()
        return node

    def node(self, value):
        if not isinstance(value, Tensor):
            return value
        known = value in self.nodes
        return self.nodes[value] if known else self.constant(value, f"constant{len(self.constants)}", value)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        recorded = {name: value for name, value in kwargs.items() if name != "device"}  # which here is meta
        node = self.graph.call_function(func, *tree_map(self.node, (args, recorded)))
        result = func(*args, **kwargs)
        results = [result] if isinstance(result, Tensor) else [r for r in result if isinstance(r, Tensor)]
        node.meta["tensors"] = _without_values(*results)
        if isinstance(result, Tensor):
            self.nodes[result] = node
        elif isinstance(result, (tuple, list)):
            for k, part in enumerate(result):
                if isinstance(part, Tensor):
                    chosen = self.nodes[part] = self.graph.call_function(operator.getitem, (node, k))
                    chosen.meta["tensors"] = _without_values(part)
        return result


def _without_values(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Shapes, strides and dtypes."""
    return tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors)


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


def _merge(graph: fx.Graph, every: bool) -> None:
    """Compute once what every operator, or every custom one, computes from the same arguments."""
    first: dict[str, fx.Node] = {}
    written = _written(graph)
    for node in list(graph.nodes):
        own = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace != "aten"
        if node.op != "call_function" or not (every or own) or written.intersection((node, *node.all_input_nodes)):
            continue
        same = first.setdefault(repr((node.target, node.args, node.kwargs)), node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _rebuild(graph: fx.Graph, constants: dict) -> fx.GraphModule:
    """Graph in which constants are buffers."""
    root = nn.Module()
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
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
        if node in constants:
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


def share_buffers(program: fx.GraphModule, other: fx.GraphModule) -> None:
    """Let buffers of `other` that equal one of `program` be that one, so that memory and files hold it once."""
    known: dict = {}
    for value in program.buffers():
        known.setdefault((value.dtype, value.shape), []).append(value)
    for name, value in list(other.named_buffers()):
        candidates = known.get((value.dtype, value.shape), [])
        same = [k for k, candidate in enumerate(candidates) if torch.equal(candidate, value)]
        if same:  # each once: a module's buffers are told apart by their tensors
            setattr(other, name, candidates.pop(same[0]))
