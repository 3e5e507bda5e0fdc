"""What the TorchScript of an exported file may do: only what the exporter writes.

The check looks at the graph that will run, not at the text that it was compiled from, with all calls inlined.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

DESCRIPTION = "archive/extra/metadata.json"
# Every member that torch.jit.save writes for a module of the exporter.
MEMBERS = re.compile(
    r"archive/(data\.pkl|constants\.pkl|version|byteorder|\.data/serialization_id|extra/metadata\.json|(data|constants)/\d+"
    r"|code/__torch__/(openmm_tensornet/[a-z_]+|torch/fx/graph_module|torch/autograd/grad_mode)(/___torch_mangle_\d+)?\.py(\.debug_pkl)?)"
)
# What torch.jit.load calls by itself, or makes of the file's data: nothing written by the exporter has it.
_AT_LOADING = re.compile(rb"__setstate__|__forward_(pre_)?hooks__|torch\.classes")
# What the wrappers and straight-line programs of the exporter consist of besides PyTorch's operators.
_CONTROL = {
    f"prim::{name}"
    for name in """Constant CreateObject GetAttr If ListConstruct Loop RaiseException SetAttr TupleConstruct TupleUnpack data dtype
    is_cuda""".split()
}
# Operators of PyTorch compute and do nothing else, except for some that are given a text: the name of a file, say. These are fine.
_WITH_TEXT = {"aten::format", "aten::div", "aten::einsum", "aten::gelu", "aten::gelu_backward"}
_OWN = "openmm_tensornet::"


def runs_when_loaded(member: bytes) -> bool:
    """Whether a member of an archive holds anything that is run when the archive is loaded."""
    return _AT_LOADING.search(member) is not None


def check_operators(module: torch.jit.ScriptModule) -> None:
    """ValueError for a module with an operator that the exporter never writes. Nothing of the module is run."""
    parts: Any = module.modules()
    for part in parts:
        for name in part._c._method_names():
            for node in _nodes(part._c._get_method(name).inlined_graph):
                if not _is_harmless(node):
                    raise ValueError(f"its code has the operator {node.kind()}, which no exported file has")


def _is_harmless(node: Any) -> bool:
    kind = node.kind()
    if kind in _CONTROL or kind in _WITH_TEXT or kind.startswith(_OWN) or kind == "neighbors::getNeighborPairs":
        return True
    return kind.startswith("aten::") and not any("str" in str(value.type()) for value in node.inputs())


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)
