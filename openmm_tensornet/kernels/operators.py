"""The package's own operators, registered with PyTorch as `openmm_tensornet::…`, and their derivatives.

Each is one kernel where the portable program has ten library operators. :mod:`.table` lists them. :mod:`.definitions` says in plain
PyTorch what each computes; kernels are in the folders ``cpu`` (Numba) and ``cuda`` (Triton). Exported programs that contain operators
need this module to be imported before they are loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..common.interrupts import deliver
from ..graph.capture import declare_launches
from . import definitions
from .table import OPERATORS, Operator

NAMESPACE = "openmm_tensornet"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")

# Of what a sequence of kernels works on, by number.
DTYPES = (torch.float32, torch.float64, torch.int64)


def available() -> bool:
    """Whether numba, which compiles the kernels for CPUs, is installed: every force is checked there."""
    return find_spec("numba") is not None


_KINDS = {dtype: torch.empty(0, dtype=dtype).numpy() for dtype in DTYPES}


def _on_cpu(operator: Operator, args: list, results: tuple[Tensor, ...]) -> None:
    """Run a single kernel through the interpreter of sequences, so that only the interpreter is compiled."""
    if not operator.on_cpu:
        values = getattr(definitions, operator.name)(*args)
        for result, value in zip(results, values if isinstance(values, tuple) else (values,), strict=True):
            result.copy_(value)
        return
    program = import_module(".cpu.program", __package__)
    given = zip((*operator.arguments, *operator.results), (*args, *results), strict=True)
    arrays = [(v, t.double() if v.type[0] == "d" else t) for v, t in given if v.is_array]
    row = np.array(program.encode(program.Kernel[operator.name], [(k, 0, t.shape) for k, (_, t) in enumerate(arrays)]))
    numbers = np.array([float(a) for a in args if not isinstance(a, Tensor)])
    addresses = [row.ctypes.data, numbers.ctypes.data, *(t.data_ptr() for _, t in arrays)]
    real = [t.dtype for value, t in arrays if value.type[0] == "r"]
    program.execute(np.array(addresses), 0, 1, len(row), len(numbers), _KINDS[real[0] if real else torch.float32])


def _on_cuda(operator: Operator, args: list, results: tuple[Tensor, ...]) -> None:
    getattr(import_module(".cuda", __package__), operator.name)(*args, *results)


# For each kind of device what runs a kernel: its operator, arguments and results.
RUNNERS: dict[str, Callable] = {"CPU": _on_cpu, "CUDA": _on_cuda}


def _register(operator: Operator) -> None:
    """Make PyTorch know an operator, with its shapes and its launches on a GPU."""
    name = f"{NAMESPACE}::{operator.name}"

    def given_back(results: tuple[Tensor, ...]):
        return results[0] if len(results) == 1 else results

    def compute(device: str, args: tuple, results: tuple[Tensor, ...]) -> None:
        given = [tree_map_only(Tensor, Tensor.contiguous, a) if isinstance(a, (Tensor, list)) else a for a in args]
        RUNNERS[device](operator, given, results)

    def run(device: str, *args):
        results = operator.allocate(*args)
        compute(device, args, results)
        return given_back(results)

    def count_launches(*args) -> int:
        steps = import_module(".cuda.steps", __package__)
        return steps.count_launches(lambda: compute("CUDA", args, operator.allocate(*args)))

    _LIBRARY.define(operator.schema)
    for device in RUNNERS:
        _LIBRARY.impl(operator.name, deliver(partial(run, device)), device)
    torch.library.register_fake(name, lambda *args: given_back(operator.allocate(*args)), lib=_LIBRARY)
    declare_launches(name, operator.launches, count_launches if find_spec("triton") is not None else None)


for _operator in OPERATORS.values():
    _register(_operator)


class _Differentiable(torch.autograd.Function):
    """An operator whose backward pass is the operator of its name with `_backward`."""

    @staticmethod
    def forward(ctx, name: str, only_backward: dict[str, Tensor], *args):
        operator, ctx.derivative = OPERATORS[name], OPERATORS[f"{name}_backward"]
        results = getattr(torch.ops.openmm_tensornet, name)(*args)
        results = results if isinstance(results, tuple) else (results,)
        given = {a.name: value for a, value in zip(operator.arguments, args, strict=True)}
        values = only_backward | given | {r.name: value for r, value in zip(operator.results, results, strict=True)}
        used = {a.name: values[a.name] for a in ctx.derivative.arguments if not a.is_gradient}
        ctx.tensors = [name for name, value in used.items() if isinstance(value, Tensor)]
        ctx.rest = {name: value for name, value in used.items() if not isinstance(value, Tensor)}
        ctx.save_for_backward(*(used[name] for name in ctx.tensors))
        ctx.arguments = list(given)
        wanted = [a.name.removeprefix("g_") for a in ctx.derivative.arguments if a.is_gradient]
        out = tuple(given[name].view_as(given[name]) if name in given else values[name] for name in wanted)
        return out[0] if len(out) == 1 else out

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        values = ctx.rest | dict(zip(ctx.tensors, ctx.saved_tensors, strict=True))
        incoming = iter(gradients)
        args = [next(incoming) if a.is_gradient else values[a.name] for a in ctx.derivative.arguments]
        found = getattr(torch.ops.openmm_tensornet, ctx.derivative.name)(*args)
        found = found if isinstance(found, tuple) else (found,)
        by_name = {r.name: value for r, value in zip(ctx.derivative.results, found, strict=True)}
        return None, None, *(by_name.get(f"g_{name}") for name in ctx.arguments)


def call(name: str, *args: Any, **only_backward: Tensor) -> Any:
    """Call an operator so that its results can be differentiated.

    Parameters
    ----------
    name : str
    args
        Its arguments.
    only_backward : Tensor
        What the backward pass needs beside them.

    Returns
    -------
    Tensor or tuple of Tensor
        What the derivative takes gradients of, in its order: results, and arguments that later steps use too.
    """
    return _Differentiable.apply(name, only_backward, *args)


_SCRATCH = threading.local()


@cache
def _layout(layout: tuple[int, ...]) -> tuple[tuple[torch.dtype, ...], list[tuple[torch.dtype, tuple[int, ...]]]]:
    """Dtypes of inputs; dtypes and shapes of results."""
    count, *rest = layout
    inputs, rest, results = tuple(DTYPES[k] for k in rest[:count]), rest[count:], []
    while rest:
        dtype, dimensions = rest[:2]
        results.append((DTYPES[dtype], tuple(rest[2 : 2 + dimensions])))
        rest = rest[2 + dimensions :]
    return inputs, results


@cache
def _execute() -> Callable:
    return import_module(".cpu.program", __package__).execute


def _scratch(size: int) -> Tensor:
    """Memory of this thread, the same at every call: it is in the cache, and Linux need not be asked for it."""
    memory = getattr(_SCRATCH, "memory", None)
    if memory is None or memory.numel() < size:
        memory = _SCRATCH.memory = torch.empty(size, dtype=torch.uint8)
    return memory


def run_kernels(
    inputs: list[Tensor],
    real: Tensor,
    integer: Tensor,
    code: Tensor,
    numbers: Tensor,
    arena: int,
    layout: list[int],
    part: slice = slice(None),
) -> list[Tensor]:
    """Run a sequence of kernels written by :mod:`.lowering`, or a range of it once the whole has run."""
    dtypes, shapes = _layout(tuple(layout))
    given = [
        t if t.dtype is dtype and t.is_contiguous() else t.to(dtype).contiguous()
        for t, dtype in zip(inputs, dtypes, strict=True)
    ]
    results = [torch.empty(shape, dtype=dtype) for dtype, shape in shapes]
    bases = (code, numbers, _scratch(arena), real, integer, *given, *results)
    first, last, _ = part.indices(len(code))
    execute = _execute()
    execute(np.array([t.data_ptr() for t in bases]), first, last, code.shape[1], numbers.shape[1], _KINDS[real.dtype])
    return results


_LIBRARY.define(
    "run(Tensor[] inputs, Tensor real, Tensor integer, Tensor code, Tensor numbers, int arena, int[] layout) -> Tensor[]"
)
_LIBRARY.impl("run", deliver(run_kernels), "CPU")
