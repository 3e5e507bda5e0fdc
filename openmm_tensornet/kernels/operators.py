"""Fused operators of the static potential, registered with PyTorch as `openmm_tensornet::…`.

Each is one kernel where the portable program has ten library operators. :mod:`.definitions` says in plain PyTorch what each
computes; kernels are in the folders ``cpu`` (Numba) and ``cuda`` (Triton); some operators are for GPUs alone. Exported programs that
contain them need this module to be imported before they are loaded.

Shapes: P pairs, A atoms, F channels, K intervals. Tensors of the network are (9, A, F), components in the orthonormal
basis of :mod:`openmm_tensornet.models.tensors`. Operators named `…_backward` take the gradient of the result first and give
the gradients of what depends on positions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..common.interrupts import deliver
from ..graph.capture import declare_launches
from . import definitions

NAMESPACE = "openmm_tensornet"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")

# Of what a sequence of kernels works on, by number.
DTYPES = (torch.float32, torch.float64, torch.int64)


def available() -> bool:
    """Whether numba, which compiles the kernels for CPUs, is installed: every force is checked there."""
    return find_spec("numba") is not None


_KINDS = {dtype: torch.empty(0, dtype=dtype).numpy() for dtype in DTYPES}


def _on_cpu(name: str, args: list, results: tuple[Tensor, ...]) -> None:
    """Run a kernel as a sequence of one, so that nothing is compiled but what runs sequences."""
    program = import_module(".cpu.program", __package__)
    if name not in program.Kernel.__members__:  # one for GPUs alone
        values = getattr(definitions, name)(*args)
        for result, value in zip(results, values if isinstance(values, tuple) else (values,), strict=True):
            result.copy_(value)
        return
    positions = 2 if name in ("near_pairs", "geometry") else 0  # these and the box are float64 in any case
    tensors = [a.double() if k < positions else a for k, a in enumerate(args) if isinstance(a, Tensor)] + [*results]
    real = [t.dtype for t in (results if name == "geometry" else tensors[positions:]) if t.is_floating_point()]
    code = [int(program.Kernel[name])]
    for k, tensor in enumerate(tensors):
        code += [k, 0, *tensor.shape, *[0] * (program.FIELDS - 2 - tensor.dim())]
    row, numbers = np.array(code), np.array([float(a) for a in args if not isinstance(a, Tensor)])
    addresses = [row.ctypes.data, numbers.ctypes.data, *(t.data_ptr() for t in tensors)]
    kind = _KINDS[real[0] if real else torch.float32]
    program.execute(np.array(addresses), 0, 1, len(row), len(numbers), kind)


def _on_cuda(name: str, args: list, results: tuple[Tensor, ...]) -> None:
    getattr(import_module(".cuda", __package__), name)(*args, *results)


# For each kind of device what runs a kernel: its name, arguments and results.
RUNNERS: dict[str, Callable] = {"CPU": _on_cpu, "CUDA": _on_cuda}


def _operator(schema: str, allocate: Callable[..., tuple[Tensor, ...]], launches: int = 1) -> None:
    """Register an operator.

    Parameters
    ----------
    schema : str
        Name and types.
    allocate : callable
        From the arguments to empty results; also what tracing with fake tensors sees.
    launches : int
        Kernels that it launches on a GPU.
    """
    name = schema.partition("(")[0]
    single = schema.endswith("-> Tensor")

    def fake(*args):
        results = allocate(*args)
        return results[0] if single else results

    def compute(device: str, args: tuple, results: tuple[Tensor, ...]) -> None:
        given = [tree_map_only(Tensor, Tensor.contiguous, a) if isinstance(a, (Tensor, list)) else a for a in args]
        RUNNERS[device](name, given, results)

    def run(device: str, *args):
        results = allocate(*args)
        compute(device, args, results)
        return results[0] if single else results

    def inside(*args) -> int:
        steps = import_module(".cuda.steps", __package__)
        return steps.count_launches(lambda: compute("CUDA", args, allocate(*args)))

    _LIBRARY.define(schema)
    for device in RUNNERS:
        _LIBRARY.impl(name, deliver(partial(run, device)), device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    declare_launches(f"{NAMESPACE}::{name}", launches, inside if find_spec("triton") is not None else None)


def _like(*places: int) -> Callable[..., tuple[Tensor, ...]]:
    """Results shaped like the arguments at these places."""
    return lambda *args: tuple(torch.empty_like(args[k], memory_format=torch.contiguous_format) for k in places)


def _pair_geometry(positions: Tensor, box: Tensor, pairs: Tensor, by_atom: Tensor, far: float, single: bool):
    distance = positions.new_empty(pairs.shape[1], dtype=torch.float32 if single else torch.float64)
    return distance, distance.new_empty((pairs.shape[1], 3))


_operator(
    "near_pairs(Tensor positions, Tensor box, Tensor molecules, float cutoff, int capacity) -> (Tensor, Tensor)",
    lambda positions, box, molecules, cutoff, capacity: (molecules.new_empty((2, capacity)), molecules.new_empty(1)),
    launches=6,
)
_operator(
    "by_atom(Tensor pairs, int atoms) -> Tensor",
    lambda pairs, atoms: (pairs.new_empty(atoms + 1 + pairs.numel()),),
    launches=9,
)
_PAIRS = "Tensor distance, Tensor unit, Tensor pairs, Tensor by_atom"
_SPECIES = "Tensor receiver, Tensor sender"
_TABLE = "Tensor table, float cutoff"
_operator(
    "geometry(Tensor positions, Tensor box, Tensor pairs, Tensor by_atom, float far, bool single) -> (Tensor, Tensor)",
    _pair_geometry,
)
_operator(
    f"geometry_backward(Tensor g_distance, Tensor g_unit, {_PAIRS}, int atoms) -> Tensor",
    lambda *args: (args[2].new_empty((args[-1], 3), dtype=torch.float64),),
)
_operator(
    f"embed({_PAIRS}, {_SPECIES}, Tensor own, {_TABLE}) -> Tensor",
    lambda *args: (args[6].new_empty(9, *args[6].shape),),
)
_operator(
    f"embed_backward(Tensor g_x, Tensor g_distance, Tensor distance, Tensor unit, Tensor pairs, {_SPECIES}, {_TABLE}) -> (Tensor, Tensor)",
    _like(2, 3),
)
_MESSAGE = f"Tensor distance, Tensor pairs, Tensor by_atom, Tensor own, {_TABLE}, Tensor y"
_operator(f"interact({_MESSAGE}, Tensor factor, bool both) -> (Tensor, Tensor)", _like(6, 6))
_operator(
    f"interact_backward(Tensor g_out, {_MESSAGE}, Tensor m, Tensor factor, bool both) -> (Tensor, Tensor)",
    _like(1, 7),
    launches=2,
)
_operator("block_message(Tensor weight, Tensor scale, Tensor y) -> Tensor", _like(2))
_operator(
    "block_message_backward(Tensor g_m, Tensor weight, Tensor scale, Tensor y) -> (Tensor, Tensor, Tensor)",
    _like(1, 2, 3),
)
_PERCEPTRON = "Tensor panels1, Tensor bias1, Tensor panels2, Tensor bias2"
_operator(
    f"charge_message(Tensor distance, Tensor pairs, {_TABLE}, Tensor own, Tensor terms, {_PERCEPTRON}, Tensor y) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    lambda *args: (
        torch.empty_like(args[10], memory_format=torch.contiguous_format),
        *(
            args[5].new_empty(len(args[5]) + 2 * len(args[0]), n)
            for n in (len(args[4]) - 1, len(args[7]), len(args[9]))
        ),
    ),
)
_operator(
    f"charge_message_backward(Tensor g_m, Tensor distance, Tensor pairs, {_TABLE}, Tensor own, Tensor y, Tensor h0, Tensor h1, "
    "Tensor h2, Tensor panels2, Tensor panels1) -> (Tensor, Tensor, Tensor)",
    lambda *args: (
        torch.empty_like(args[1]),
        args[6].new_empty(args[6].shape[1], 2 * args[6].shape[2]),
        torch.empty_like(args[6], memory_format=torch.contiguous_format),
    ),
)
_operator("norm_features(Tensor x, Tensor weight, Tensor bias) -> Tensor", lambda x, w, b: (x.new_empty(x.shape[1:]),))
_operator("norm_features_backward(Tensor g_x, Tensor g_out, Tensor x, Tensor weight) -> Tensor", _like(2))
_operator("normalize(Tensor x) -> Tensor", _like(0))
_operator("normalize_backward(Tensor g_out, Tensor x) -> Tensor", _like(1))
_operator("gate(Tensor x, Tensor gates, bool silu, bool normalize) -> Tensor", _like(0))
_operator(
    "gate_backward(Tensor g_out, Tensor x, Tensor gates, bool silu, bool normalize) -> (Tensor, Tensor)", _like(1, 2)
)
_operator("product(Tensor y, Tensor m, Tensor factor, bool both) -> Tensor", _like(0))
_operator(
    "product_backward(Tensor g_out, Tensor y, Tensor m, Tensor factor, bool both) -> (Tensor, Tensor)", _like(1, 2)
)
_operator("plus_square(Tensor x, Tensor d, Tensor factor, bool normalize) -> Tensor", _like(0))
_operator(
    "plus_square_backward(Tensor g_out, Tensor x, Tensor d, Tensor factor, bool normalize) -> (Tensor, Tensor)",
    _like(1, 2),
)
_operator("head(Tensor h, Tensor weight, Tensor bias, bool silu) -> Tensor", lambda h, *_: (h.new_empty(h.shape[0]),))
_operator("head_backward(Tensor g_out, Tensor h, Tensor weight, bool silu) -> Tensor", _like(1))
_operator(
    "part_features(Tensor x, float scalar, bool square, Tensor weight, Tensor bias) -> Tensor",
    lambda x, scalar, square, weight, bias: (x.new_empty(x.shape[1], weight.shape[0]),),
)
_operator(
    "part_features_backward(Tensor g_out, Tensor x, float scalar, bool square, Tensor weight) -> Tensor", _like(1)
)
_operator(
    "equilibrate(Tensor h, Tensor molecule, Tensor charge) -> Tensor",
    lambda h, molecule, charge: (h.new_empty(len(h), h.shape[1] // 2),),
)
_operator("equilibrate_backward(Tensor g_q, Tensor h, Tensor molecule, Tensor charge) -> Tensor", _like(1))
# Of programs for GPUs alone, which have no kernel for CPUs.
_LIST = "Tensor distance, Tensor pairs, Tensor by_atom"
_operator(
    f"pair_terms({_LIST}, {_TABLE}, Tensor own, Tensor terms) -> (Tensor, Tensor)",
    lambda *args: tuple(args[6].new_empty(len(args[6]) + 2 * len(args[0]), args[6].shape[1] // 2) for _ in range(2)),
)
_operator(
    f"pair_terms_backward(Tensor g_h, Tensor g_distance, {_LIST}, {_TABLE}, Tensor z, int atoms) -> (Tensor, Tensor)",
    lambda *args: (torch.empty_like(args[2]), args[7].new_empty(args[8], 2 * args[7].shape[1])),
)
_operator(f"directed_message({_LIST}, {_TABLE}, Tensor own, Tensor z, Tensor y) -> Tensor", _like(7))
_operator(
    f"directed_message_backward(Tensor g_m, {_LIST}, {_TABLE}, Tensor own, Tensor z, Tensor y) -> (Tensor, Tensor, Tensor)",
    _like(1, 7, 8),
)
_operator(
    "perceptron(Tensor h, Tensor[] affine) -> (Tensor, Tensor)",
    lambda h, affine: tuple(
        h.new_empty(len(h), n) for n in (len(affine[-1]), sum(len(bias) for bias in affine[1:-2:2]))
    ),
)
_operator(
    "perceptron_backward(Tensor g_out, Tensor hidden, Tensor[] affine) -> Tensor",
    lambda g, hidden, affine: (g.new_empty(len(g), len(affine[0])),),
)
_CHARGES = "Tensor q, Tensor weights, float per_nm, float cutoff"
_operator(f"coulomb({_LIST}, {_CHARGES}) -> Tensor", lambda *args: (args[3].new_empty(len(args[3])),))
_operator(f"coulomb_backward(Tensor g_out, {_LIST}, {_CHARGES}) -> (Tensor, Tensor)", _like(1, 4))
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
    """Run a sequence of kernels on the CPU, which :mod:`.lowering` wrote, or a part of it after all of it."""
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
