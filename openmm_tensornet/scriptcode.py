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
# What the wrappers and straight-line programs of the exporter consist of: control flow, and operators that compute and do nothing else.
_CONTROL = set(
    """
    Constant CreateObject GetAttr If ListConstruct Loop RaiseException SetAttr TupleConstruct TupleUnpack data dtype is_cuda
    """.split()
)
_COMPUTE = set(
    """
    __getitem__ __not__ _unsafe_view abs add addcmul addcmul_ addmm addmv amin any append baddbmm bitwise_and bitwise_not bitwise_or
    bmm cat clamp clone contiguous copy_ cos cumsum diagonal dim div dot eq erfc exp expand expm1 flatten floor format full_like
    gather ge gt index index_add index_add_ index_copy index_select isnan le len linalg_vector_norm linear log logical_and
    logical_and_ logical_not logical_or lt masked_fill matmul maximum mean minimum mm mul mul_ native_layer_norm
    native_layer_norm_backward ne neg new_zeros ones_like permute pow reciprocal relu remainder reshape round rsqrt rsub scatter
    scatter_add select set_ sigmoid sigmoid_backward silu silu_backward sin size slice softplus softplus_backward split
    split_with_sizes sqrt squeeze stack sub sum t tanh tanh_backward threshold_backward to transpose unbind unflatten unsqueeze view
    where zero_ zeros_like
    """.split()
)
_OPERATORS = (
    {f"prim::{name}" for name in _CONTROL} | {f"aten::{name}" for name in _COMPUTE} | {"neighbors::getNeighborPairs"}
)
_OWN = "openmm_tensornet::"


def runs_when_loaded(member: bytes) -> bool:
    """Whether a member of an archive holds anything that is run when the archive is loaded."""
    return _AT_LOADING.search(member) is not None


def check_operators(module: torch.jit.ScriptModule) -> None:
    """ValueError for a module with an operator that the exporter never writes. Nothing of the module is run."""
    parts: Any = module.modules()
    for part in parts:
        for name in part._c._method_names():
            for kind in _kinds(part._c._get_method(name).inlined_graph):
                if kind not in _OPERATORS and not kind.startswith(_OWN):
                    raise ValueError(f"its code has the operator {kind}, which no exported file has")


def _kinds(block: Any) -> Iterator[str]:
    for node in block.nodes():
        yield node.kind()
        for inner in node.blocks():
            yield from _kinds(inner)
