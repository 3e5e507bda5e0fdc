"""Sums over neighbors on NVIDIA GPUs; see :mod:`openmm_tensornet.kernels.cuda`.

`embed` makes the first tensors, `interact` sums TensorNet's messages and multiplies by them, and `block_message` sums messages over dense
blocks of atoms, for a TensorNet2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .atoms import product_backward
from .steps import (
    CHANNELS,
    HALF,
    SIXTH,
    angular,
    at_once,
    by_part,
    dot,
    each,
    entries,
    function_slopes,
    function_values,
    load,
    locate,
    multiply,
    normalized,
    part_sums,
    plus,
    store,
    sum_rows,
    times,
)


@triton.jit
def _neighbors(
    by_atom, pairs, distance, table, count, atoms, channels, intervals, k, end, f, inside, cutoff: tl.constexpr
):
    """For entries k of `by_atom`: pair, other atom, direction, whether it is within the cutoff, mask by channel, and radial functions."""
    exists, p, other, sign = entries(by_atom, pairs, count, atoms, k, end)
    d = tl.load(distance + p, exists, 0)
    near = exists & ~(d >= cutoff)
    row, t, _ = locate(d, intervals, cutoff, table.dtype.element_ty)
    mask = near[:, None] & inside[None, :]
    values = function_values(table, row[:, None], tl.where(near, t, 0)[:, None], f[None, :], mask, channels)
    return p, other, sign, near, mask, values


@triton.jit
def _embed(
    distance, unit, pairs, by_atom, receiver, sender, own, table, result, count, atoms, channels, intervals,
    cutoff: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    atom, f = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = f < channels
    dtype = own.dtype.element_ty
    z_i = tl.load(receiver + atom * channels + f, inside, 0)
    x0 = tl.load(own + atom * channels + f, inside, 0)
    zero = tl.zeros((WIDTH,), dtype)
    x = (x0, zero, zero, zero, zero, zero, zero, zero, zero)
    start, end = tl.load(by_atom + atom), tl.load(by_atom + atom + 1)
    for first in range(start, end, BLOCK):
        p, other, sign, near, mask, values = _neighbors(
            by_atom, pairs, distance, table, count, atoms, channels, intervals, first + tl.arange(0, BLOCK), end, f, inside, cutoff
        )  # fmt: skip
        z = z_i[None, :] + tl.load(sender + other[:, None] * channels + f[None, :], mask, 0)
        u = sign * tl.load(unit + 3 * p, near, 0)
        v = sign * tl.load(unit + 3 * p + 1, near, 0)
        w = sign * tl.load(unit + 3 * p + 2, near, 0)
        g = angular(u[:, None], v[:, None], w[:, None])
        x = plus(x, sum_rows(by_part((values[0] * z, values[1] * z, values[2] * z), g)))
    store(result, atoms * channels, atom * channels + f, inside, x)


def embed(distance, unit, pairs, by_atom, receiver, sender, own, table, cutoff, result) -> None:
    atoms, channels = own.shape
    width = min(CHANNELS, triton.next_power_of_2(channels))
    _embed[(atoms, triton.cdiv(channels, width))](
        distance, unit, pairs, by_atom, receiver, sender, own, table, result, pairs.shape[1], atoms, channels,
        table.shape[0] - 2, cutoff=cutoff, BLOCK=at_once(own), WIDTH=width,
    )  # fmt: skip


@triton.jit
def _embed_backward(
    g_result, g_through, distance, unit, pairs, receiver, sender, table, g_distance, g_unit, count, atoms, channels, intervals,
    cutoff: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    p, f = tl.program_id(0), tl.arange(0, WIDTH)
    i, j = tl.load(pairs + p), tl.load(pairs + count + p)
    d = tl.load(distance + p)
    near = ~(d >= cutoff)
    mask = f < tl.where(near, channels, 0)
    dtype = table.dtype.element_ty
    row, t, rate = locate(d, intervals, cutoff, dtype)
    t = tl.where(near, t, 0)
    values = function_values(table, row, t, f, mask, channels)
    slopes = function_slopes(table, row, t, f, mask, channels, rate)
    z_i = tl.load(receiver + i * channels + f, mask, 0) + tl.load(sender + j * channels + f, mask, 0)
    z_j = tl.load(receiver + j * channels + f, mask, 0) + tl.load(sender + i * channels + f, mask, 0)
    g_i = times(z_i, load(g_result, atoms * channels, i * channels + f, mask))
    g_j = times(z_j, load(g_result, atoms * channels, j * channels + f, mask))
    # Of the second atom the vector points the other way.
    both = (
        g_i[0] + g_j[0], g_i[1] - g_j[1], g_i[2] - g_j[2], g_i[3] - g_j[3], g_i[4] + g_j[4], g_i[5] + g_j[5], g_i[6] + g_j[6],
        g_i[7] + g_j[7], g_i[8] + g_j[8],
    )  # fmt: skip
    x, y, z = tl.load(unit + 3 * p, near, 0), tl.load(unit + 3 * p + 1, near, 0), tl.load(unit + 3 * p + 2, near, 0)
    along = tl.sum(dot(by_part(slopes, both), angular(x, y, z)), 0)
    tl.store(g_distance + p, tl.load(g_through + p) + along)
    g = sum_rows(by_part(values, both))
    by_x = g[1] + 2 * ((g[4] * y + g[5] * z + g[7] * x) * HALF - g[8] * x * SIXTH)
    by_y = g[2] + 2 * ((g[4] * x + g[6] * z - g[7] * y) * HALF - g[8] * y * SIXTH)
    by_z = g[3] + 2 * ((g[5] * x + g[6] * y) * HALF + 2 * g[8] * z * SIXTH)
    tl.store(g_unit + 3 * p, by_x)
    tl.store(g_unit + 3 * p + 1, by_y)
    tl.store(g_unit + 3 * p + 2, by_z)


def embed_backward(
    g_result, g_through, distance, unit, pairs, receiver, sender, table, cutoff, g_distance, g_unit
) -> None:
    (atoms, channels), count = receiver.shape, pairs.shape[1]
    if count:
        _embed_backward[(count,)](
            g_result, g_through, distance, unit, pairs, receiver, sender, table, g_distance, g_unit, count, atoms, channels,
            table.shape[0] - 2, cutoff=cutoff, WIDTH=triton.next_power_of_2(channels),
        )  # fmt: skip


@triton.jit
def _gather(
    start, end, distance, pairs, by_atom, table, y, count, atoms, channels, intervals, f, inside,
    cutoff: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Σ_j f(d_ij) ⊙ Y_j of one atom."""
    dtype = table.dtype.element_ty
    zero = tl.zeros((WIDTH,), dtype)
    m = (zero, zero, zero, zero, zero, zero, zero, zero, zero)
    for first in range(start, end, BLOCK):
        _, other, _, _, mask, values = _neighbors(
            by_atom, pairs, distance, table, count, atoms, channels, intervals, first + tl.arange(0, BLOCK), end, f, inside, cutoff
        )  # fmt: skip
        y_j = load(y, atoms * channels, other[:, None] * channels + f[None, :], mask)
        m = plus(m, sum_rows(by_part(values, y_j)))
    return m


@triton.jit
def _interact(
    distance, pairs, by_atom, own, table, y, factor, result, message, count, atoms, channels, intervals,
    cutoff: tl.constexpr, BOTH: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Message of an atom's channels, its self pair included, and the normalised product with it."""
    atom, f = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = f < channels
    start, end = tl.load(by_atom + atom), tl.load(by_atom + atom + 1)
    m = _gather(
        start, end, distance, pairs, by_atom, table, y, count, atoms, channels, intervals, f, inside, cutoff, BLOCK, WIDTH
    )  # fmt: skip
    y_i = load(y, atoms * channels, atom * channels + f, inside)
    m = plus(m, each(load(own, channels, f, inside), y_i))
    store(message, atoms * channels, atom * channels + f, inside, m)
    product = normalized(multiply(y_i, m, tl.load(factor + atom), BOTH), True)
    store(result, atoms * channels, atom * channels + f, inside, product)


def interact(distance, pairs, by_atom, own, table, cutoff, y, factor, both, result, message) -> None:
    atoms, channels = y.shape[1:]
    width = min(CHANNELS, triton.next_power_of_2(channels))
    _interact[(atoms, triton.cdiv(channels, width))](
        distance, pairs, by_atom, own, table, y, factor, result, message, pairs.shape[1], atoms, channels,
        table.shape[0] - 2, cutoff=cutoff, BOTH=both, BLOCK=at_once(y), WIDTH=width,
    )  # fmt: skip


@triton.jit
def _message_backward(
    distance, pairs, by_atom, own, table, y, g_m, g_distance, g_y, count, atoms, channels, intervals, parts,
    cutoff: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """The first atoms·parts programs add up dE/dY for channels of an atom; each of the others computes dE/d(distance) of a pair."""
    program = tl.program_id(0)
    if program < atoms * parts:
        atom, f = program // parts, program % parts * WIDTH + tl.arange(0, WIDTH)
        inside = f < channels
        start, end = tl.load(by_atom + atom), tl.load(by_atom + atom + 1)
        # f_ij = f_ji, so the derivative by Y is the same sum over the incoming gradient.
        g = _gather(
            start, end, distance, pairs, by_atom, table, g_m, count, atoms, channels, intervals, f, inside, cutoff, BLOCK,
            WIDTH,
        )  # fmt: skip
        g_i = load(g_m, atoms * channels, atom * channels + f, inside)
        g = plus(g, each(load(own, channels, f, inside), g_i))
        before = load(g_y, atoms * channels, atom * channels + f, inside)
        store(g_y, atoms * channels, atom * channels + f, inside, plus(before, g))
    else:
        p, k = program - atoms * parts, tl.arange(0, ALL)
        i, j = tl.load(pairs + p), tl.load(pairs + count + p)
        d = tl.load(distance + p)
        near = ~(d >= cutoff)
        mask = k < tl.where(near, channels, 0)
        row, t, rate = locate(d, intervals, cutoff, table.dtype.element_ty)
        slopes = function_slopes(table, row, tl.where(near, t, 0), k, mask, channels, rate)
        stride = atoms * channels
        forth = part_sums(load(g_m, stride, i * channels + k, mask), load(y, stride, j * channels + k, mask))
        back = part_sums(load(g_m, stride, j * channels + k, mask), load(y, stride, i * channels + k, mask))
        along = slopes[0] * (forth[0] + back[0]) + slopes[1] * (forth[1] + back[1]) + slopes[2] * (forth[2] + back[2])
        tl.store(g_distance + p, tl.sum(along, 0))


def interact_backward(
    g_out, distance, pairs, by_atom, own, table, cutoff, y, message, factor, both, g_distance, g_y
) -> None:
    (atoms, channels), count = y.shape[1:], pairs.shape[1]
    g_m = torch.empty_like(y)
    product_backward(g_out, y, message, factor, both, g_y, g_m)
    width = min(CHANNELS, triton.next_power_of_2(channels))
    parts = triton.cdiv(channels, width)
    _message_backward[(atoms * parts + count,)](
        distance, pairs, by_atom, own, table, y, g_m, g_distance, g_y, count, atoms, channels, table.shape[0] - 2, parts,
        cutoff=cutoff, BLOCK=at_once(y), WIDTH=width, ALL=triton.next_power_of_2(channels),
    )  # fmt: skip


@triton.jit
def _block_sum(
    weight, scale, y, own, others, atoms, slots, channels, f, inside, own_step, other_step,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Σ_s scale_s weight_s ⊙ Y_(others+s) over the slots of a block; `scale` has slot s at own·own_step + s·other_step."""
    zero = tl.zeros((WIDTH,), weight.dtype.element_ty)
    total = (zero, zero, zero, zero, zero, zero, zero, zero, zero)
    for first in range(0, slots, BLOCK):
        s = first + tl.arange(0, BLOCK)
        place = own * own_step + s * other_step
        c = tl.load(scale + place, s < slots, 0)
        mask = ((s < slots) & (c != 0))[:, None] & inside[None, :]
        w = weight + place[:, None] * 3 * channels + f[None, :]
        c = c[:, None]
        parts = (
            c * tl.load(w, mask, 0),
            c * tl.load(w + channels, mask, 0),
            c * tl.load(w + 2 * channels, mask, 0),
        )
        y_s = load(y, atoms * channels, (others + s)[:, None] * channels + f[None, :], mask)
        total = plus(total, sum_rows(by_part(parts, y_s)))
    return total


@triton.jit
def _block_message(weight, scale, y, m, atoms, slots, channels, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    atom, f = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = f < channels
    block = atom // slots * slots
    total = _block_sum(weight, scale, y, atom, block, atoms, slots, channels, f, inside, slots, 1, BLOCK, WIDTH)
    store(m, atoms * channels, atom * channels + f, inside, total)


def block_message(weight, scale, y, m) -> None:
    (atoms, slots), channels = scale.shape, y.shape[2]
    width = min(CHANNELS, triton.next_power_of_2(channels))
    _block_message[(atoms, triton.cdiv(channels, width))](
        weight, scale, y, m, atoms, slots, channels, BLOCK=at_once(y), WIDTH=width
    )


@triton.jit
def _block_message_backward(
    g_m, weight, scale, y, g_weight, g_scale, g_y, atoms, slots, channels, parts,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """The first programs give the gradient by Y of an atom's channels, the others those by the weights of two atoms."""
    program = tl.program_id(0)
    stride = atoms * channels
    if program < atoms * parts:
        atom, f = program // parts, program % parts * WIDTH + tl.arange(0, WIDTH)
        inside = f < channels
        block = atom // slots * slots
        column = block * slots + atom % slots  # who receives from this atom
        total = _block_sum(weight, scale, g_m, column, block, atoms, slots, channels, f, inside, 1, slots, BLOCK, WIDTH)
        store(g_y, stride, atom * channels + f, inside, total)
    else:
        place, k = program - atoms * parts, tl.arange(0, ALL)
        i = place // slots
        j = i // slots * slots + place % slots
        c = tl.load(scale + place)
        mask = k < tl.where(c != 0, channels, 0)
        by = part_sums(load(g_m, stride, i * channels + k, mask), load(y, stride, j * channels + k, mask))
        at = place * 3 * channels + k
        along = by[0] * tl.load(weight + at, mask, 0) + by[1] * tl.load(weight + channels + at, mask, 0)
        along += by[2] * tl.load(weight + 2 * channels + at, mask, 0)
        for part in tl.static_range(3):
            tl.store(g_weight + part * channels + at, c * by[part], k < channels)
        tl.store(g_scale + place, tl.sum(along, 0))


def block_message_backward(g_m, weight, scale, y, g_weight, g_scale, g_y) -> None:
    (atoms, slots), channels = scale.shape, y.shape[2]
    width = min(CHANNELS, triton.next_power_of_2(channels))
    parts = triton.cdiv(channels, width)
    _block_message_backward[(atoms * parts + atoms * slots,)](
        g_m, weight, scale, y, g_weight, g_scale, g_y, atoms, slots, channels, parts,
        BLOCK=at_once(y), WIDTH=width, ALL=triton.next_power_of_2(channels),
    )  # fmt: skip
