"""TorchScript for TorchForce: modules, and programs written for its compiler."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, fx, nn

from ..common import jit
from ..graph.capture import copied
from .modules import keep_attributes

_ATEN = torch.ops.aten


def inlined(module: nn.Module) -> torch.jit.ScriptModule:
    """Script a module and write what it calls into its own methods; tensors stay attributes, which move to another device.

    TorchForce freezes the module for each Context. Where that has something to inline, an exception in an operator (of a signal, say)
    ends the process: the interpreter looks up names of functions that freezing has removed.
    """
    scripted = jit.script(module.eval())
    kept = [name for name in ("evaluate", "metadata", "charges", "plain") if hasattr(scripted, name)]
    frozen = jit.freeze(scripted, [*kept, *(name for name, _ in scripted.named_buffers())])
    return copied(frozen)  # whose parts are modules for Python again


def scriptable(program: fx.GraphModule) -> fx.GraphModule:
    """A copy of a flat graph, of positions and perhaps box vectors, that `torch.jit.script` takes; box vectors may be None.

    Overload names and device arguments go, and matrix products are written so that TorchScript's optimiser neither
    splits them (addmm) nor mistakes the shape of a constant left operand (mm, bmm).
    """
    graph = fx.Graph()
    output = graph.graph_copy(program.graph, {})
    graph.output(output)
    positions, *periodic = (node for node in graph.nodes if node.op == "placeholder")
    with graph.inserting_before(positions.next):
        boxvectors = graph.placeholder("boxvectors", Tensor | None, None)
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        own = [graph.get_attr(name) for name, _ in program.named_buffers()]
        graph.call_function(keep_attributes, (positions, own))
        for box in periodic:
            box.replace_all_uses_with(graph.call_function(torch.jit._unwrap_optional, (boxvectors,)))
            graph.erase_node(box)
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        node.kwargs = {k: v for k, v in node.kwargs.items() if k not in ("layout", "device", "pin_memory")}
        if node.target in (_ATEN.mm.default, _ATEN.bmm.default) and node.args[0].op == "get_attr":
            node.target = torch.matmul
        elif node.target is _ATEN.addmm.default and not node.kwargs:
            bias, left, right = node.args
            with graph.inserting_before(node):
                turned = graph.call_function(torch.ops.aten.t, (right,))
            node.target, node.args = torch.ops.aten.linear, (left, turned, bias)
        elif node.target is _ATEN._to_copy.default:  # nothing to do where the dtype is right already
            node.op, node.target = "call_method", "to"
        else:
            node.target = node.target.overloadpacket
    return fx.GraphModule(program, graph)


def compiled(program: fx.GraphModule) -> torch.jit.ScriptModule:
    """A flat graph as TorchScript, which calls PyTorch's operators faster than Python does and fuses some of them on a GPU."""
    with warnings.catch_warnings():  # about annotations in the class that fx writes, and that TorchScript will go
        warnings.simplefilter("ignore")
        return jit.freeze(jit.script(scriptable(program).eval()))
