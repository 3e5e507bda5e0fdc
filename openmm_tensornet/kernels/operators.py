"""Fused operators of the static potential, registered with PyTorch as `openmm_tensornet::…`.

Each is one kernel where the portable program has ten library operators. :mod:`.definitions` says in plain PyTorch what each
computes; kernels for the CPU are in :mod:`.cpu` (Numba). Exported programs that contain them need this module to be
imported before they are loaded.

Shapes: P pairs, A atoms, F channels, K intervals. Tensors of the network are (9, A, F), components in the orthonormal
basis of :mod:`openmm_tensornet.tensors`. Operators named `…_backward` take the gradient of the result first and give
the gradients of what depends on positions.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from ..graphsafety import declare_launches

NAMESPACE = "openmm_tensornet"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def available() -> bool:
    """Whether the package that compiles the kernels for the CPU is installed."""
    return find_spec("numba") is not None


def _operator(schema: str, allocate: Callable[..., tuple[Tensor, ...]]) -> None:
    """Register an operator.

    Parameters
    ----------
    schema : str
        Name and types.
    allocate : callable
        From the arguments to empty results; also what tracing with fake tensors sees.
    """
    name = schema.partition("(")[0]
    single = schema.endswith("-> Tensor")
    kernels: list = []

    def fake(*args):
        results = allocate(*args)
        return results[0] if single else results

    def run(*args):
        if not kernels:
            kernels.append(getattr(import_module(".cpu", __package__), name))
        results = allocate(*args)
        arrays = [a.contiguous().numpy() if isinstance(a, Tensor) else a for a in args]
        kernels[0](*arrays, *(r.numpy() for r in results))
        return results[0] if single else results

    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    declare_launches(f"{NAMESPACE}::{name}", 1)


def _like(*places: int) -> Callable[..., tuple[Tensor, ...]]:
    """Results shaped like the arguments at these places."""
    return lambda *args: tuple(torch.empty_like(args[k], memory_format=torch.contiguous_format) for k in places)


_operator(
    "near_pairs(Tensor positions, Tensor box, Tensor molecules, float cutoff, int capacity) -> (Tensor, Tensor, Tensor)",
    lambda positions, box, molecules, cutoff, capacity: (
        molecules.new_empty((2, capacity)),
        positions.new_empty((capacity, 3)),
        molecules.new_empty(1),
    ),
)
_PAIR = "Tensor distance, Tensor unit, Tensor pairs, Tensor receiver, Tensor sender"
_TABLE = "Tensor table, float lower, float step"
_TERMS = "Tensor factor, Tensor terms, Tensor weights"
_operator("direction(Tensor r) -> (Tensor, Tensor)", lambda r: (r.new_empty(r.shape[0]), r.new_empty(r.shape)))
_operator("direction_backward(Tensor g_distance, Tensor g_unit, Tensor distance, Tensor unit) -> Tensor", _like(3))
_operator(f"embed({_PAIR}, Tensor own, {_TABLE}) -> Tensor", lambda *args: (args[5].new_empty(9, *args[5].shape),))
_operator(f"embed_backward(Tensor g_x, {_PAIR}, {_TABLE}) -> (Tensor, Tensor)", _like(1, 2))
_operator(f"message(Tensor distance, Tensor pairs, Tensor own, {_TABLE}, Tensor y) -> Tensor", _like(6))
_operator(
    f"message_backward(Tensor g_m, Tensor distance, Tensor pairs, Tensor own, {_TABLE}, Tensor y) -> (Tensor, Tensor)",
    _like(1, 7),
)
_operator("pair_forces(Tensor pairs, Tensor forces, Tensor start) -> Tensor", _like(2))
_operator("block_message(Tensor weight, Tensor scale, Tensor y) -> Tensor", _like(2))
_operator(
    "block_message_backward(Tensor g_m, Tensor weight, Tensor scale, Tensor y) -> (Tensor, Tensor, Tensor)",
    _like(1, 2, 3),
)
_operator("norm_features(Tensor x, Tensor weight, Tensor bias) -> Tensor", lambda x, w, b: (x.new_empty(x.shape[1:]),))
_operator("norm_features_backward(Tensor g_x, Tensor g_out, Tensor x, Tensor weight) -> Tensor", _like(2))
_operator("normalize(Tensor x) -> Tensor", _like(0))
_operator("normalize_backward(Tensor g_out, Tensor x) -> Tensor", _like(1))
_operator("gate(Tensor x, Tensor gates, bool normalize) -> Tensor", _like(0))
_operator("gate_backward(Tensor g_out, Tensor x, Tensor gates, bool normalize) -> (Tensor, Tensor)", _like(1, 2))
_operator(f"product(Tensor y, Tensor m, {_TERMS}) -> Tensor", _like(0))
_operator(
    f"product_backward(Tensor g_out, Tensor y, Tensor m, {_TERMS}) -> (Tensor, Tensor)",
    _like(1, 2),
)
_operator(f"plus_square(Tensor x, Tensor d, {_TERMS}, bool normalize) -> Tensor", _like(0))
_operator(
    f"plus_square_backward(Tensor g_out, Tensor x, Tensor d, {_TERMS}, bool normalize) -> (Tensor, Tensor)",
    _like(1, 2),
)
_operator(
    "part_features(Tensor x, float scalar, Tensor weight, Tensor bias) -> Tensor",
    lambda x, scalar, weight, bias: (x.new_empty(x.shape[1], weight.shape[0]),),
)
_operator("part_features_backward(Tensor g_out, Tensor x, float scalar, Tensor weight) -> Tensor", _like(1))
