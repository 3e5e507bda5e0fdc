"""The interpreter of sequences of kernels on a CPU: many kernels in one call.

TorchScript takes some 10 µs for an operator written in Python, and there are 40 of them in an evaluation that could take one
millisecond. The bytecode of a sequence, which :mod:`..lowering` writes, has a row for each kernel: which one, and for
each array the index of its base address, its offset in bytes, and its shape.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from pathlib import Path
from zlib import crc32

import numpy as np
from numba import carray, njit, types

from ...common.files import others_can_write
from ...models.tensornet2 import SMALLEST_SHARE
from .. import definitions, intervals
from ..table import OPERATORS
from . import aten, atoms, charges, pairs, sums
from .simd import intrinsic
from .steps import OPTIONS, inlined

FIELDS = 6  # of an array: base, offset, and up to four dimensions
_KERNELS = {operator.name: operator for operator in (*OPERATORS.values(), *aten.ROWS) if operator.on_cpu}
Kernel = IntEnum("Kernel", list(_KERNELS), start=0)  # type: ignore[misc]


def encode(kernel: Kernel, arrays: Iterable[tuple[int, int, Sequence[int]]]) -> list[int]:
    """A row of bytecode.

    Parameters
    ----------
    kernel : Kernel
    arrays : iterable of (base, offset, shape)
        Arguments, then results: index of the base address, offset in bytes.

    Raises
    ------
    ValueError
        For other arrays than those of the kernel's row in the table: it would read other memory.
    """
    operator = _KERNELS[kernel.name]
    expected = [value for value in (*operator.arguments, *operator.results) if value.is_array]
    row = [int(kernel)]
    for value, (base, offset, shape) in zip(expected, arrays, strict=True):
        if len(shape) != value.rank:
            raise ValueError(
                f"{kernel.name}: {value.name}: expected {value.rank} dimensions, received shape {tuple(shape)}"
            )
        row += [base, offset, *shape, *[0] * (FIELDS - 2 - value.rank)]
    return row


@intrinsic
def _address(typingctx, address, array):
    """A pointer to numbers of the array's kind."""
    kind = types.CPointer(array.dtype)

    def generate(context, builder, sig, args):
        return builder.inttoptr(args[0], context.get_value_type(kind))

    return kind(address, array), generate


@inlined
def _one(row, k, bases, kind):
    k = 1 + FIELDS * k
    return carray(_address(bases[row[k]] + row[k + 1], kind), (row[k + 2],))


@inlined
def _two(row, k, bases, kind):
    k = 1 + FIELDS * k
    return carray(_address(bases[row[k]] + row[k + 1], kind), (row[k + 2], row[k + 3]))


@inlined
def _three(row, k, bases, kind):
    k = 1 + FIELDS * k
    return carray(_address(bases[row[k]] + row[k + 1], kind), (row[k + 2], row[k + 3], row[k + 4]))


@inlined
def _four(row, k, bases, kind):
    k = 1 + FIELDS * k
    return carray(_address(bases[row[k]] + row[k + 1], kind), (row[k + 2], row[k + 3], row[k + 4], row[k + 5]))


def _interpreter(sources: int) -> Callable:
    """What runs a part of a sequence: a loop over its rows, with a branch for each kernel, written from the table.

    Numba's cache looks at one file and at what a function encloses, which is a number for all files. Arguments:

    addresses : array of int64
        Of the code, integers of shape (kernels, width); of what else the kernels take, in their order, float64 of shape
        (kernels, values); then the base addresses that the code speaks of.
    first, last : int
        The kernels to run.
    width, values : int
        1 + FIELDS·arrays, and numbers beside arrays.
    r : array
        Of any size: its kind is what the network computes with.
    """
    lines = [
        "def enclose(sources):",
        "  def execute(addresses, first, last, width, values, r):",
        "    d, i = empty(0), empty(0 * sources, int64)",
        "    code = carray(_address(addresses[0], i), (last, width))",
        "    table = carray(_address(addresses[1], d), (last, values))",
        "    bases = addresses[2:]",
        "    for k in range(first, last):",
        "      row, numbers = code[k], table[k]",
    ]
    ranks = {1: "_one", 2: "_two", 3: "_three", 4: "_four"}
    casts = {"float": "{}", "int": "int({})", "bool": "{} != 0"}
    for number, operator in enumerate(_KERNELS.values()):
        arrays = plain = 0
        arguments = []
        for value in (*operator.arguments, *operator.results):
            if value.is_array:
                arguments.append(f"{ranks[value.rank]}(row, {arrays}, bases, {value.type[0]})")
                arrays += 1
            else:
                arguments.append(casts[value.type].format(f"numbers[{plain}]"))
                plain += 1
        lines += [f"      {'el' if number else ''}if row[0] == {number}:"]
        lines += [f"        {operator.name}({', '.join(arguments)})"]
    lines += ["  return execute"]
    names = globals() | {"empty": np.empty, "int64": np.int64}
    for module in (pairs, sums, charges, atoms, aten):
        names |= {name: kernel for name, kernel in vars(module).items() if name in _KERNELS}
    exec(compile("\n".join(lines), __file__, "exec"), names)  # our own text, of our own table
    return names["enclose"](sources)


def _compiled(execute: Callable) -> Callable:
    """The interpreter as Numba compiles it, with its cache, where that is safe."""
    try:
        cached = njit(cache=True, **OPTIONS)(execute)
        if not others_can_write(cached._cache.cache_path):  # what lies there is unpickled
            return cached
        reason = f"others can write to the folder for compiled kernels, {cached._cache.cache_path}"
    except RuntimeError:  # what Numba raises where it finds no place for its cache
        reason = "no folder for compiled kernels can be written"
    logging.getLogger("openmm_tensornet").warning(
        "openmm-tensornet: %s, so every process compiles them anew, for about a minute; set NUMBA_CACHE_DIR to a folder that you alone "
        "can write, or use kernels='portable' (--kernels portable)",
        reason,
    )
    return njit(**OPTIONS)(execute)


# What is compiled: the code of these files, and these constants of others.
_SOURCES = [*sorted(Path(__file__).parent.glob("*.py")), Path(__file__).parents[1] / "table.py"]
_CONSTANTS = repr((SMALLEST_SHARE, definitions.EPSILON, intervals.BEND)).encode()
execute = _compiled(_interpreter(crc32(b"".join((*(path.read_bytes() for path in _SOURCES), _CONSTANTS)))))
