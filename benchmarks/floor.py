"""What an evaluation cannot do without: operations and bytes of each operator, and what a core takes for them at its best."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from openmm_tensornet import tensors
from openmm_tensornet.graphsafety import VIEWS

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
SQUARE, BLOCK, REPEATS = 1024, 1 << 20, 9


def count(module: Callable, *inputs: Tensor) -> dict[str, dict[str, float]]:
    """Operations and bytes, read and written, of each operator in one evaluation, by its name."""
    counter = _Counter()
    with torch.no_grad(), counter:
        module(*inputs)
    return dict(counter.found)


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, dict[str, float]] = defaultdict(lambda: {"operations": 0.0, "bytes": 0.0})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in VIEWS:
            name = func._schema.name.partition("::")[2]
            found = self.found[name]
            found["operations"] += _operations(name, args, result)
            found["bytes"] += sum(_bytes(t, args) for t in tree_leaves((args, result)) if isinstance(t, Tensor))
        return result


def _operations(name: str, args: Any, result: Any) -> float:
    if name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv"):
        factors = [t for t in args if isinstance(t, Tensor)][-2:]
        return 2 * result.numel() * factors[0].shape[-1]
    if name in PER_ATOM or name in PER_PAIR:
        x = next(t for t in tree_leaves((args, result)) if isinstance(t, Tensor) and t.dim() == 3 and t.shape[0] == 9)
        return PER_PAIR.get(name, 0) * _pairs(args) * x.shape[2] + PER_ATOM.get(name, 0) * x[0].numel()
    return sum(t.numel() for t in tree_leaves(result) if isinstance(t, Tensor))


def _pairs(args: Any) -> int:
    return next(
        (t.shape[1] for t in args if isinstance(t, Tensor) and t.shape[:1] == (2,) and not t.is_floating_point()), 0
    )


def _bytes(tensor: Tensor, args: Any) -> float:
    """Of a table only a row for each pair is read."""
    if tensor.dim() == 3 and tensor.shape[1] == COEFFICIENTS:
        return tensor[0].nbytes * min(_pairs(args), len(tensor))
    return tensor.nbytes


def machine() -> dict[str, float]:
    """Operations a second of a large matrix product, and bytes a second of a copy that stays in the cache."""
    a = torch.randn(SQUARE, SQUARE)
    b, c = torch.randn(2, BLOCK).unbind()

    def best(call: Callable) -> float:
        times = []
        for _ in range(REPEATS):
            begin = perf_counter()
            call()
            times.append(perf_counter() - begin)
        return min(times)

    return {
        "operations_per_s": 2 * SQUARE**3 / best(lambda: torch.mm(a, a)),
        "bytes_per_s": 2 * b.nbytes / best(lambda: b.copy_(c)),
    }
