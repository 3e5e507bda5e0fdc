"""What an evaluation cannot do without: operations and bytes of each operator, and what a core takes for them at its best."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from openmm_tensornet.export.programs import potential
from openmm_tensornet.graph.capture import VIEWS
from openmm_tensornet.models import tensors

_BOTH, _SQUARE = (int((t.abs() > 1e-12).sum()) for t in (tensors.layer_table(True), tensors.square_table()))
# Additions and multiplications of the fused kernels for each pair and channel, and for each atom and channel. The functions of a pair
# are three cubic polynomials (18, and 15 for their slopes); each term of a product of tensors is 3, and 6 for its gradients.
PER_PAIR = {"embed": 72, "embed_backward": 96, "interact": 54, "interact_backward": 114}
PER_ATOM = {
    "interact": 9 + 3 * _BOTH + 36, "interact_backward": 9 * _BOTH + 63 + 18, "product": 3 * _BOTH + 36,
    "product_backward": 9 * _BOTH + 63, "plus_square": 3 * _SQUARE + 54, "plus_square_backward": 9 * _SQUARE + 90,
    "gate": 66, "gate_backward": 120, "normalize": 36, "normalize_backward": 63, "norm_features": 25,
    "norm_features_backward": 57, "part_features": 38, "part_features_backward": 66,
}  # fmt: skip
COEFFICIENTS = 4  # of a function in an interval
SEQUENCE = "run"  # the operator that runs a sequence of kernels
SQUARE, BLOCK, REPEATS = 1024, 1 << 20, 9


def count(module: Callable, *inputs: Tensor) -> dict[str, dict[str, float]]:
    """Operations and bytes, read and written, of each operator in one evaluation, by its name; of sequences, of their kernels."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"operations": 0.0, "bytes": 0.0})
    for func, args, result in _Listener.hear(module, *inputs):
        name = func._schema.name.partition("::")[2]
        if name == SEQUENCE:
            itemsize = args[1].itemsize
            for kernel, shapes in _kernels(args[3]):
                found[kernel]["operations"] += _operations(kernel, shapes)
                found[kernel]["bytes"] += sum(_bytes(shape, itemsize, shapes) for shape in shapes)
        else:
            tensors = [t for t in tree_leaves((args, result)) if isinstance(t, Tensor)]
            shapes = [tuple(t.shape) for t in tensors]
            found[name]["operations"] += _operations(name, shapes)
            found[name]["bytes"] += sum(_bytes(tuple(t.shape), t.itemsize, shapes) for t in tensors)
    return dict(found)


def kernel_times(module: Callable, *inputs: Tensor) -> dict[str, tuple[float, float]]:
    """Calls and seconds of each kernel in an evaluation's sequences, by its name: each called alone, medians."""
    from openmm_tensornet.kernels.operators import run_kernels

    def median(args: tuple, part: slice) -> float:
        return statistics.median(_seconds(lambda: run_kernels(*args, part)) for _ in range(50))

    times: dict[str, tuple[float, float]] = {}
    for func, args, _ in _Listener.hear(module, *inputs):
        if func._schema.name.partition("::")[2] != SEQUENCE:
            continue
        run_kernels(*args)
        call = median(args, slice(0, 0))
        for k, (name, _) in enumerate(_kernels(args[3])):
            calls, before = times.get(name, (0, 0.0))
            times[name] = calls + 1, before + max(0.0, median(args, slice(k, k + 1)) - call)
    return times


class _Listener(TorchDispatchMode):
    """Hears of every operator that computes something."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple] = []

    @classmethod
    def hear(cls, module: Callable, *inputs: Tensor) -> list[tuple]:
        """Operators with their arguments and results in one evaluation."""
        listener = cls()
        with torch.no_grad(), listener:
            module(*inputs)
        return listener.heard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.openmm_tensornet.potential.default:
            with self:  # those that it calls are heard instead
                return potential(*args)
        result = func(*args, **(kwargs or {}))
        if func not in VIEWS:
            self.heard.append((func, args, result))
        return result


def _kernels(code: Tensor) -> list[tuple[str, list[tuple[int, ...]]]]:
    """Names of a sequence's kernels, and shapes of their arrays."""
    program = import_module("openmm_tensornet.kernels.cpu.program")
    found = []
    for which, *rest in code.tolist():
        arrays = [rest[k + 2 : k + program.FIELDS] for k in range(0, len(rest), program.FIELDS)]
        found.append((program.Kernel(which).name, [tuple(n for n in shape if n) for shape in arrays if any(shape)]))
    return found


def _operations(name: str, shapes: list[tuple[int, ...]]) -> float:
    """Of an operator, whose results are the last ones."""
    result = shapes[-1] if shapes else ()
    if name == "linear":
        return 2 * math.prod(shapes[0]) * result[-1]
    if name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv"):
        return 2 * math.prod(result) * shapes[-2][-1 if name.endswith("mv") else -2]
    if name in PER_ATOM or name in PER_PAIR:
        _, atoms, channels = next(s for s in shapes if len(s) == 3 and s[0] == 9)
        return PER_PAIR.get(name, 0) * _pairs(shapes) * channels + PER_ATOM.get(name, 0) * atoms * channels
    return math.prod(result)


def _pairs(shapes: list[tuple[int, ...]]) -> int:
    return next((s[1] for s in shapes if len(s) == 2 and s[0] == 2), 0)


def _bytes(shape: tuple[int, ...], itemsize: int, shapes: list[tuple[int, ...]]) -> float:
    """Of a table only a row for each pair is read."""
    if len(shape) == 3 and shape[1] == COEFFICIENTS:
        return itemsize * math.prod(shape[1:]) * min(_pairs(shapes), shape[0])
    return itemsize * math.prod(shape)


def _seconds(call: Callable) -> float:
    begin = perf_counter()
    call()
    return perf_counter() - begin


def machine() -> dict[str, float]:
    """Operations a second of a large matrix product, and bytes a second of a copy that stays in the cache."""
    a = torch.randn(SQUARE, SQUARE)
    b, c = torch.randn(2, BLOCK).unbind()

    def best(call: Callable) -> float:
        return min(_seconds(call) for _ in range(REPEATS))

    return {
        "operations_per_s": 2 * SQUARE**3 / best(lambda: torch.mm(a, a)),
        "bytes_per_s": 2 * b.nbytes / best(lambda: b.copy_(c)),
    }
