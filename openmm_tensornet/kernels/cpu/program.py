"""A sequence of the CPU's kernels as one call.

TorchScript takes some 10 µs for an operator written in Python, and there are 40 of them in an evaluation that could take one
millisecond. The code of such a sequence, which :mod:`.lowering` writes, is a table with a row for each kernel: which one, and for
each array the index of its base address, its offset in bytes, and its shape.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import IntEnum, auto
from pathlib import Path
from zlib import crc32

import numpy as np
from numba import carray, njit, types

from ...common.files import others_can_write
from ...models.tensornet2 import SMALLEST_SHARE
from .. import definitions, intervals
from . import atoms, charges, pairs, sums
from .charges import silu, silu_gradient
from .matmul import linear
from .simd import intrinsic, pointer
from .steps import OPTIONS, inlined, kernel

FIELDS = 6  # of an array: base, offset, and up to four dimensions


class Kernel(IntEnum):
    """Those of the operators, by their names, and some that stand for PyTorch's own."""

    near_pairs = 0
    by_atom = auto()
    geometry = auto()
    geometry_backward = auto()
    embed = auto()
    embed_backward = auto()
    interact = auto()
    interact_backward = auto()
    block_message = auto()
    block_message_backward = auto()
    charge_message = auto()
    charge_message_backward = auto()
    equilibrate = auto()
    equilibrate_backward = auto()
    norm_features = auto()
    norm_features_backward = auto()
    part_features = auto()
    part_features_backward = auto()
    normalize = auto()
    normalize_backward = auto()
    gate = auto()
    gate_backward = auto()
    product = auto()
    product_backward = auto()
    plus_square = auto()
    plus_square_backward = auto()
    head = auto()
    head_backward = auto()
    linear = auto()
    silu = auto()
    silu_backward = auto()
    plus = auto()
    widen = auto()
    addmv = auto()
    add = auto()


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


@kernel
def _addmv(start, matrix, x, out):
    for i in range(len(out)):
        total = start[i]
        for k in range(len(x)):
            total += matrix[i, k] * x[k]
        out[i] = total


@kernel
def _add(x, y, factor, out):
    """x + factor·y of a single number y."""
    for i in range(len(out)):
        out[i] = x[i] + factor * y[0]


@kernel
def _widen(x, out):
    for i in range(len(out)):
        out[i] = x[i]


def _compiled(sources: int) -> Callable:
    """What runs sequences. Numba's cache looks at one file and at what a function encloses, which is a number for all files."""

    def execute(addresses, first, last, width, values, r):
        """Run a part of a sequence.

        Parameters
        ----------
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
        d, i = np.empty(0), np.empty(0 * sources, np.int64)
        code = carray(_address(addresses[0], i), (last, width))
        numbers = carray(_address(addresses[1], d), (last, values))
        b = addresses[2:]
        for k in range(first, last):
            c, n = code[k], numbers[k]
            which = c[0]
            if which == Kernel.near_pairs:
                pairs.near_pairs(
                    _two(c, 0, b, d), _two(c, 1, b, d), _one(c, 2, b, i), n[0], int(n[1]), _two(c, 3, b, i), _one(c, 4, b, i)
                )  # fmt: skip
            elif which == Kernel.by_atom:
                pairs.by_atom(_two(c, 0, b, i), int(n[0]), _one(c, 1, b, i))
            elif which == Kernel.geometry:
                pairs.geometry(
                    _two(c, 0, b, d), _two(c, 1, b, d), _two(c, 2, b, i), _one(c, 3, b, i), n[0], n[1] != 0, _one(c, 4, b, r),
                    _two(c, 5, b, r),
                )  # fmt: skip
            elif which == Kernel.geometry_backward:
                pairs.geometry_backward(
                    _one(c, 0, b, r), _two(c, 1, b, r), _one(c, 2, b, r), _two(c, 3, b, r), _two(c, 4, b, i), _one(c, 5, b, i), int(n[0]),
                    _two(c, 6, b, d),
                )  # fmt: skip
            elif which == Kernel.embed:
                sums.embed(
                    _one(c, 0, b, r), _two(c, 1, b, r), _two(c, 2, b, i), _one(c, 3, b, i), _two(c, 4, b, r), _two(c, 5, b, r),
                    _two(c, 6, b, r), _three(c, 7, b, r), n[0], _three(c, 8, b, r),
                )  # fmt: skip
            elif which == Kernel.embed_backward:
                sums.embed_backward(
                    _three(c, 0, b, r), _one(c, 1, b, r), _one(c, 2, b, r), _two(c, 3, b, r), _two(c, 4, b, i), _two(c, 5, b, r),
                    _two(c, 6, b, r), _three(c, 7, b, r), n[0], _one(c, 8, b, r), _two(c, 9, b, r),
                )  # fmt: skip
            elif which == Kernel.interact:
                sums.interact(
                    _one(c, 0, b, r), _two(c, 1, b, i), _one(c, 2, b, i), _two(c, 3, b, r), _three(c, 4, b, r), n[0],
                    _three(c, 5, b, r), _one(c, 6, b, r), n[1] != 0, _three(c, 7, b, r), _three(c, 8, b, r),
                )  # fmt: skip
            elif which == Kernel.interact_backward:
                sums.interact_backward(
                    _three(c, 0, b, r), _one(c, 1, b, r), _two(c, 2, b, i), _one(c, 3, b, i), _two(c, 4, b, r), _three(c, 5, b, r),
                    n[0], _three(c, 6, b, r), _three(c, 7, b, r), _one(c, 8, b, r), n[1] != 0, _one(c, 9, b, r),
                    _three(c, 10, b, r),
                )  # fmt: skip
            elif which == Kernel.norm_features:
                atoms.norm_features(_three(c, 0, b, r), _one(c, 1, b, r), _one(c, 2, b, r), _two(c, 3, b, r))
            elif which == Kernel.norm_features_backward:
                atoms.norm_features_backward(
                    _three(c, 0, b, r), _two(c, 1, b, r), _three(c, 2, b, r), _one(c, 3, b, r), _three(c, 4, b, r)
                )
            elif which == Kernel.part_features:
                atoms.part_features(
                    _three(c, 0, b, r), n[0], n[1] != 0, _one(c, 1, b, r), _one(c, 2, b, r), _two(c, 3, b, r)
                )
            elif which == Kernel.part_features_backward:
                atoms.part_features_backward(
                    _two(c, 0, b, r), _three(c, 1, b, r), n[0], n[1] != 0, _one(c, 2, b, r), _three(c, 3, b, r)
                )
            elif which == Kernel.normalize:
                atoms.normalize(_three(c, 0, b, r), _three(c, 1, b, r))
            elif which == Kernel.normalize_backward:
                atoms.normalize_backward(_three(c, 0, b, r), _three(c, 1, b, r), _three(c, 2, b, r))
            elif which == Kernel.gate:
                atoms.gate(_three(c, 0, b, r), _two(c, 1, b, r), n[0] != 0, n[1] != 0, _three(c, 2, b, r))
            elif which == Kernel.gate_backward:
                atoms.gate_backward(
                    _three(c, 0, b, r), _three(c, 1, b, r), _two(c, 2, b, r), n[0] != 0, n[1] != 0, _three(c, 3, b, r), _two(c, 4, b, r)
                )  # fmt: skip
            elif which == Kernel.product:
                atoms.product(_three(c, 0, b, r), _three(c, 1, b, r), _one(c, 2, b, r), n[0] != 0, _three(c, 3, b, r))
            elif which == Kernel.product_backward:
                atoms.product_backward(
                    _three(c, 0, b, r), _three(c, 1, b, r), _three(c, 2, b, r), _one(c, 3, b, r), n[0] != 0, _three(c, 4, b, r),
                    _three(c, 5, b, r),
                )  # fmt: skip
            elif which == Kernel.plus_square:
                atoms.plus_square(
                    _three(c, 0, b, r), _three(c, 1, b, r), _one(c, 2, b, r), n[0] != 0, _three(c, 3, b, r)
                )
            elif which == Kernel.plus_square_backward:
                atoms.plus_square_backward(
                    _three(c, 0, b, r), _three(c, 1, b, r), _three(c, 2, b, r), _one(c, 3, b, r), n[0] != 0, _three(c, 4, b, r),
                    _three(c, 5, b, r),
                )  # fmt: skip
            elif which == Kernel.head:
                atoms.head(_two(c, 0, b, r), _two(c, 1, b, r), _one(c, 2, b, r), n[0] != 0, _one(c, 3, b, r))
            elif which == Kernel.head_backward:
                atoms.head_backward(_one(c, 0, b, r), _two(c, 1, b, r), _two(c, 2, b, r), n[0] != 0, _two(c, 3, b, r))
            elif which == Kernel.block_message:
                sums.block_message(_four(c, 0, b, r), _two(c, 1, b, r), _three(c, 2, b, r), _three(c, 3, b, r))
            elif which == Kernel.block_message_backward:
                sums.block_message_backward(
                    _three(c, 0, b, r), _four(c, 1, b, r), _two(c, 2, b, r), _three(c, 3, b, r), _four(c, 4, b, r), _two(c, 5, b, r),
                    _three(c, 6, b, r),
                )  # fmt: skip
            elif which == Kernel.charge_message:
                charges.charge_message(
                    _one(c, 0, b, r), _two(c, 1, b, i), _three(c, 2, b, r), n[0], _one(c, 3, b, r), _two(c, 4, b, r),
                    _one(c, 5, b, r), _one(c, 6, b, r), _one(c, 7, b, r), _one(c, 8, b, r), _three(c, 9, b, r), _three(c, 10, b, r),
                    _two(c, 11, b, r), _two(c, 12, b, r), _two(c, 13, b, r),
                )  # fmt: skip
            elif which == Kernel.charge_message_backward:
                charges.charge_message_backward(
                    _three(c, 0, b, r), _one(c, 1, b, r), _two(c, 2, b, i), _three(c, 3, b, r), n[0], _one(c, 4, b, r),
                    _three(c, 5, b, r), _two(c, 6, b, r), _two(c, 7, b, r), _two(c, 8, b, r), _one(c, 9, b, r), _one(c, 10, b, r),
                    _one(c, 11, b, r), _two(c, 12, b, r), _three(c, 13, b, r),
                )  # fmt: skip
            elif which == Kernel.equilibrate:
                charges.equilibrate(_two(c, 0, b, r), _one(c, 1, b, i), _one(c, 2, b, r), _two(c, 3, b, r))
            elif which == Kernel.equilibrate_backward:
                charges.equilibrate_backward(
                    _two(c, 0, b, r), _two(c, 1, b, r), _one(c, 2, b, i), _one(c, 3, b, r), _two(c, 4, b, r)
                )
            elif which == Kernel.linear:
                linear(_two(c, 0, b, r), _one(c, 1, b, r), _one(c, 2, b, r), _two(c, 3, b, r))
            elif which == Kernel.silu:
                x, out = _one(c, 0, b, r), _one(c, 1, b, r)
                silu(len(x), pointer(x), pointer(x), pointer(out))
            elif which == Kernel.silu_backward:
                g, x, out = _one(c, 0, b, r), _one(c, 1, b, r), _one(c, 2, b, r)
                silu_gradient(len(x), pointer(x), pointer(g), pointer(x), pointer(out))
            elif which == Kernel.widen:
                _widen(_one(c, 0, b, r), _one(c, 1, b, d))
            elif which == Kernel.plus:
                x, y, out = _one(c, 0, b, r), _one(c, 1, b, r), _one(c, 2, b, r)
                for e in range(len(out)):
                    out[e] = x[e] + y[e]
            elif which == Kernel.addmv:
                _addmv(_one(c, 0, b, d), _two(c, 1, b, d), _one(c, 2, b, d), _one(c, 3, b, d))
            elif which == Kernel.add:
                _add(_one(c, 0, b, d), _one(c, 1, b, d), n[0], _one(c, 2, b, d))

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
_SOURCES = sorted(Path(__file__).parent.glob("*.py"))
_CONSTANTS = repr((SMALLEST_SHARE, definitions.EPSILON, intervals.BEND)).encode()
execute = _compiled(crc32(b"".join((*(path.read_bytes() for path in _SOURCES), _CONSTANTS))))
