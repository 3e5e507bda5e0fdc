"""Short vectors of floats for Numba's kernels: 32 bytes that one instruction adds or multiplies.

LLVM makes such instructions of plain loops too, but not where a loop reads and writes many rows that might overlap, as
kernels over pairs and products of tensors do. What is written with :func:`load` and :func:`store` is compiled for each kind of
vector that it is handed: :func:`wide` ones for most of a row, :func:`narrow` ones, of a single number, for the rest.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils, extending
from numba.core.datamodel import models, register_default
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature

intrinsic: Any = extending.intrinsic  # its type says that what it makes takes the typing context too
BYTES = 32
# NaN must stay NaN, so not all of fastmath.
FASTMATH = {"contract", "reassoc", "nsz", "arcp"}
_FLAGS = tuple(sorted(FASTMATH))


class Vector(types.Type):
    """Some floats."""

    def __init__(self, dtype: types.Float, count: int):
        self.dtype, self.count = dtype, count
        super().__init__(name=f"Vector({dtype}, {count})")


@register_default(Vector)
class _Model(models.PrimitiveModel):
    def __init__(self, manager, vector):
        element = ir.FloatType() if vector.dtype.bitwidth == 32 else ir.DoubleType()
        super().__init__(manager, vector, ir.VectorType(element, vector.count))


def _spread(builder, x, vector):
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, x, ir.IntType(32)(0))
    places = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, undefined, places)


def _arithmetic(operators: tuple[Callable, ...], instruction: str) -> None:
    """Of two vectors, or of a vector and a number, which is taken for a vector's worth of it."""

    class Typing(AbstractTemplate):
        def generic(self, args, kws):
            vectors = [a for a in args if isinstance(a, Vector)]
            if len(args) == 2 and vectors and all(a == vectors[0] or isinstance(a, types.Number) for a in args):
                return signature(vectors[0], *args)
            return None

    def lower(context, builder, sig, args):
        vector = context.get_value_type(sig.return_type)
        both = [
            a if isinstance(t, Vector) else _spread(builder, context.cast(builder, a, t, sig.return_type.dtype), vector)
            for a, t in zip(args, sig.args, strict=True)
        ]
        return getattr(builder, instruction)(*both, flags=_FLAGS)

    for op in operators:
        infer_global(op)(Typing)
        for kinds in ((Vector, Vector), (Vector, types.Number), (types.Number, Vector)):
            lower_builtin(op, *kinds)(lower)


_arithmetic((operator.add, operator.iadd), "fadd")
_arithmetic((operator.sub, operator.isub), "fsub")
_arithmetic((operator.mul, operator.imul), "fmul")
_arithmetic((operator.truediv, operator.itruediv), "fdiv")


@intrinsic
def pointer(typingctx, array):
    """Where a contiguous array begins: cheaper to hand on than the array, whose references Numba counts. See :func:`keep`."""

    def generate(context, builder, sig, args):
        return cgutils.create_struct_proxy(array)(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), generate


@intrinsic
def at(typingctx, start, place):
    """The pointer that many numbers further on."""

    def generate(context, builder, sig, args):
        return builder.gep(args[0], [context.cast(builder, args[1], place, types.intp)])

    return start(start, place), generate


@intrinsic
def keep(typingctx, array):
    """Do nothing, so that Numba does not take an earlier line for the last one that needs the array."""
    return types.void(array), lambda context, builder, sig, args: context.get_dummy_value()


def _place(context, builder, sig, args, kind):
    place = context.cast(builder, args[1], sig.args[1], types.intp)
    return builder.bitcast(builder.gep(args[0], [place]), context.get_value_type(kind).as_pointer())


@intrinsic
def load(typingctx, start, place, like):
    """What stands at a place after a pointer."""

    def generate(context, builder, sig, args):
        return builder.load(_place(context, builder, sig, args, like), align=start.dtype.bitwidth // 8)

    return like(start, place, like), generate


@intrinsic
def store(typingctx, start, place, value):
    """The way back."""

    def generate(context, builder, sig, args):
        builder.store(args[2], _place(context, builder, sig, args, value), align=start.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(start, place, value), generate


def _count(start):
    return BYTES * 8 // start.dtype.bitwidth


@intrinsic
def lanes(typingctx, start):
    """How many numbers of a pointer's kind a wide vector has."""
    return types.intp(start), lambda context, builder, sig, args: context.get_constant(types.intp, _count(start))


def _zeros(start, count):
    vector = Vector(start.dtype, count)

    def generate(context, builder, sig, args):
        return ir.Constant(context.get_value_type(vector), [0.0] * count)

    return vector(start), generate


@intrinsic
def wide(typingctx, start):
    """Zeros, as many of a pointer's kind as fit into 32 bytes."""
    return _zeros(start, _count(start))


@intrinsic
def narrow(typingctx, start):
    """A single zero of a pointer's kind."""
    return _zeros(start, 1)


@intrinsic
def exp(typingctx, vector):
    """e^x = 2ⁿ e^r by the series of e^r, |r| ≤ ln 2 / 2. Beyond the normal numbers it gives the last of them; NaN stays NaN."""
    bits, count = vector.dtype.bitwidth, vector.count
    # Bits of the fraction, bias of the exponent, terms of the series; ln 2 in two parts, the first one with few digits.
    fraction, bias, terms, high = (23, 127, 7, 0.693359375) if bits == 32 else (52, 1023, 13, 0.6931471803691238)
    low = math.log(2) - high if bits == 32 else 1.9082149292705877e-10

    def generate(context, builder, sig, args):
        kind = context.get_value_type(vector)
        whole = ir.VectorType(ir.IntType(bits), count)

        def constant(value, of=kind):
            return ir.Constant(of, [value] * count)

        x = args[0]
        for limit, comparison in (((bias - 1) * math.log(2), ">"), ((1 - bias) * math.log(2), "<")):
            beyond = builder.fcmp_ordered(comparison, x, constant(limit))
            x = builder.select(beyond, constant(limit), x)
        rint = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(kind, [kind]), f"llvm.rint.v{count}f{bits}"
        )
        n = builder.call(rint, [builder.fmul(x, constant(1 / math.log(2)))])
        r = builder.fsub(x, builder.fmul(n, constant(high)), flags=("contract",))
        r = builder.fsub(r, builder.fmul(n, constant(low)), flags=("contract",))
        series = constant(1 / math.factorial(terms))
        for k in reversed(range(terms)):
            product = builder.fmul(series, r, flags=("contract",))
            series = builder.fadd(product, constant(1 / math.factorial(k)), flags=("contract",))
        # The last bits of so large a sum are the integer, also where no instruction makes one of a vector of doubles.
        power = builder.bitcast(builder.fadd(n, constant(1.5 * 2.0**fraction)), whole)
        power = builder.shl(power, constant(fraction, whole))
        power = builder.add(power, constant(bias << fraction, whole))
        return builder.fmul(series, builder.bitcast(power, kind))

    return vector(vector), generate
