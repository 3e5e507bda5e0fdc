"""The operators' kernels for NVIDIA GPUs, in Triton; :mod:`.definitions` says what each computes.

One launch each, except that the backward pass of a layer takes two. Sums over neighbors are gathered by the atom that receives them,
from the entries of `by_atom`, with all neighbors of a small molecule at once: nothing is added atomically, and the same input gives the
same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..charges import SMALLEST_SHARE
from . import definitions
from .cuda_steps import (
    EPSILON,
    HALF,
    SIXTH,
    activate,
    activation_slope,
    angular,
    anticommutator,
    by_part,
    components,
    dot,
    each,
    entries,
    function_slopes,
    function_values,
    load,
    locate,
    matmul,
    matrix,
    multiply,
    multiply_backward,
    nearest_image,
    normalized,
    normalized_backward,
    part_sums,
    plus,
    store,
    sum_rows,
    times,
    turn,
    vector,
)

NEIGHBORS = 32  # at a time, in single precision
CHANNELS = 32  # of a program that sums over neighbors
ELEMENTS = 128  # atoms times channels of a program that treats each by itself
CHARGES = 16  # channels of a program that sums over a molecule


def _at_once(like: Tensor) -> int:
    """Neighbors at a time: registers hold half as many numbers in double precision."""
    return NEIGHBORS * 4 // like.element_size()


# ------------------------------------------------------------------------------------------------------------- pairs


@triton.jit
def _near(positions, box, molecules, cutoff, atoms, i, j, PERIODIC: tl.constexpr):
    """Which atoms j > i are near to atom i; a coordinate of j that is not a number makes it near to all."""
    exists = (j > i) & (j < atoms)
    x, y, z = vector(positions, i, tl.where(exists, j, i))
    if PERIODIC:
        x, y, z = nearest_image(box, x, y, z)
    same = tl.load(molecules + i) == tl.load(molecules + j, exists, 0)
    return exists & same & ~(x * x + y * y + z * z >= cutoff * cutoff)


@triton.jit
def _count_near(
    positions, box, molecules, counts, cutoff, atoms, capacity, PERIODIC: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0)
    count = tl.zeros((BLOCK,), tl.int64)
    limit = tl.load(cutoff)
    for first in range(i + 1, atoms, BLOCK):
        count += _near(positions, box, molecules, limit, atoms, i, first + tl.arange(0, BLOCK), PERIODIC).to(tl.int64)
    x, y, z = tl.load(positions + 3 * i), tl.load(positions + 3 * i + 1), tl.load(positions + 3 * i + 2)
    finite = (x - x == 0) & (y - y == 0) & (z - z == 0)
    tl.store(counts + i, tl.where(finite, tl.sum(count, 0), capacity + 1))


@triton.jit
def _list_near(
    positions, box, molecules, ends, pairs, cutoff, atoms, capacity, PERIODIC: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0)
    place, limit = tl.load(ends + i - 1, i > 0, 0), tl.load(cutoff)
    for first in range(i + 1, atoms, BLOCK):
        j = first + tl.arange(0, BLOCK)
        near = _near(positions, box, molecules, limit, atoms, i, j, PERIODIC).to(tl.int64)
        at = place + tl.cumsum(near, 0) - 1
        fits = (near > 0) & (at < capacity)
        tl.store(pairs + at, tl.zeros((BLOCK,), tl.int64) + i, fits)
        tl.store(pairs + capacity + at, j.to(tl.int64), fits)
        place += tl.sum(near, 0)


def near_pairs(positions, box, molecules, cutoff, capacity, pairs, found) -> None:
    """All atoms are compared with all: for a few thousand, a GPU does it in less time than cells take to fill."""
    atoms, options = len(molecules), {"PERIODIC": len(box) == 3, "BLOCK": ELEMENTS}
    limit = positions.new_full((), cutoff)  # an argument of Triton's would be float32
    counts = torch.empty_like(molecules)
    _count_near[(atoms,)](positions, box, molecules, counts, limit, atoms, capacity, **options)
    ends = counts.cumsum(0)
    found.copy_(ends[-1:])
    pairs.zero_()
    _list_near[(atoms,)](positions, box, molecules, ends, pairs, limit, atoms, capacity, **options)


@triton.jit
def _geometry(
    positions, box, pairs, far, distance, unit, count, PERIODIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = p < count
    i, j = tl.load(pairs + p, mask, 0), tl.load(pairs + count + p, mask, 0)
    x, y, z = vector(positions, i, j)
    if PERIODIC:
        x, y, z = nearest_image(box, x, y, z)
    dtype = distance.dtype.element_ty
    x, y, z = x.to(dtype), y.to(dtype), z.to(dtype)
    d = tl.sqrt(x * x + y * y + z * z)
    none = i == j
    tl.store(distance + p, tl.where(none, far, d), mask)
    tl.store(unit + 3 * p, tl.where(none, 0, x / d), mask)
    tl.store(unit + 3 * p + 1, tl.where(none, 0, y / d), mask)
    tl.store(unit + 3 * p + 2, tl.where(none, 0, z / d), mask)


def geometry(positions, box, pairs, by_atom, far, single, distance, unit) -> None:
    count = pairs.shape[1]
    if count:
        _geometry[(triton.cdiv(count, ELEMENTS),)](
            positions, box, pairs, far, distance, unit, count, PERIODIC=len(box) == 3, BLOCK=ELEMENTS
        )


@triton.jit
def _geometry_backward(g_distance, g_unit, distance, unit, pairs, by_atom, forces, count, atoms, BLOCK: tl.constexpr):
    atom = tl.program_id(0)
    start, end = tl.load(by_atom + atom), tl.load(by_atom + atom + 1)
    fx = tl.zeros((BLOCK,), tl.float64)
    fy = tl.zeros((BLOCK,), tl.float64)
    fz = tl.zeros((BLOCK,), tl.float64)
    for first in range(start, end, BLOCK):
        exists, p, _, sign = entries(by_atom, pairs, count, atoms, first + tl.arange(0, BLOCK), end)
        d = tl.load(distance + p, exists, 1)
        x, y, z = (
            tl.load(unit + 3 * p, exists, 0),
            tl.load(unit + 3 * p + 1, exists, 0),
            tl.load(unit + 3 * p + 2, exists, 0),
        )
        a = tl.load(g_unit + 3 * p, exists, 0) / d
        b = tl.load(g_unit + 3 * p + 1, exists, 0) / d
        c = tl.load(g_unit + 3 * p + 2, exists, 0) / d
        along = tl.load(g_distance + p, exists, 0) - (x * a + y * b + z * c)
        fx += (sign * (a + x * along)).to(tl.float64)
        fy += (sign * (b + y * along)).to(tl.float64)
        fz += (sign * (c + z * along)).to(tl.float64)
    tl.store(forces + 3 * atom, tl.sum(fx, 0))
    tl.store(forces + 3 * atom + 1, tl.sum(fy, 0))
    tl.store(forces + 3 * atom + 2, tl.sum(fz, 0))


def geometry_backward(g_distance, g_unit, distance, unit, pairs, by_atom, atoms, forces) -> None:
    _geometry_backward[(atoms,)](
        g_distance, g_unit, distance, unit, pairs, by_atom, forces, pairs.shape[1], atoms, BLOCK=NEIGHBORS
    )


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
        exists, p, other, sign = entries(by_atom, pairs, count, atoms, first + tl.arange(0, BLOCK), end)
        d = tl.load(distance + p, exists, 0)
        near = exists & ~(d >= cutoff)
        row, t, _ = locate(d, intervals, cutoff, dtype)
        mask = near[:, None] & inside[None, :]
        values = function_values(table, row[:, None], tl.where(near, t, 0)[:, None], f[None, :], mask, channels)
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
        table.shape[0] - 2, cutoff=cutoff, BLOCK=_at_once(own), WIDTH=width,
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
        exists, p, other, _ = entries(by_atom, pairs, count, atoms, first + tl.arange(0, BLOCK), end)
        d = tl.load(distance + p, exists, 0)
        near = exists & ~(d >= cutoff)
        row, t, _ = locate(d, intervals, cutoff, dtype)
        mask = near[:, None] & inside[None, :]
        values = function_values(table, row[:, None], tl.where(near, t, 0)[:, None], f[None, :], mask, channels)
        y_j = load(y, atoms * channels, other[:, None] * channels + f[None, :], mask)
        m = plus(m, sum_rows(by_part(values, y_j)))
    return m


@triton.jit
def _interact(
    distance, pairs, by_atom, own, table, y, factor, result, message, count, atoms, channels, intervals,
    cutoff: tl.constexpr, BOTH: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
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
        table.shape[0] - 2, cutoff=cutoff, BOTH=both, BLOCK=_at_once(y), WIDTH=width,
    )  # fmt: skip


@triton.jit
def _message_backward(
    distance, pairs, by_atom, own, table, y, g_m, g_distance, g_y, count, atoms, channels, intervals, parts,
    cutoff: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """The first programs add to the gradient by Y of an atom's channels, the others give that by a pair's distance."""
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
        cutoff=cutoff, BLOCK=_at_once(y), WIDTH=width, ALL=triton.next_power_of_2(channels),
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
        weight, scale, y, m, atoms, slots, channels, BLOCK=_at_once(y), WIDTH=width
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
        BLOCK=_at_once(y), WIDTH=width, ALL=triton.next_power_of_2(channels),
    )  # fmt: skip


@triton.jit
def _of_molecule(h, molecule, first, atoms, channels, k, BLOCK: tl.constexpr):
    """Which of some atoms are of this program's molecule, the places of their charges, the charges and the shares."""
    a = first + tl.arange(0, BLOCK)
    own = (tl.load(molecule + a, a < atoms, -1) == tl.program_id(0))[:, None] & (k < channels)[None, :]
    at = a[:, None] * 2 * channels + k[None, :]
    return own, a[:, None] * channels + k[None, :], at, tl.load(h + at, own, 0), tl.load(h + at + channels, own, 0)


@triton.jit
def _equilibrate(
    h, molecule, charge, result, atoms, channels, smallest: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    charges = tl.zeros((BLOCK, WIDTH), result.dtype.element_ty)
    shares = tl.zeros((BLOCK, WIDTH), result.dtype.element_ty)
    for first in range(0, atoms, BLOCK):
        _, _, _, q, f = _of_molecule(h, molecule, first, atoms, channels, k, BLOCK)
        charges += q
        shares += f * f
    ratio = (tl.load(charge + tl.program_id(0)) - tl.sum(charges, 0)) / (tl.sum(shares, 0) + smallest)
    for first in range(0, atoms, BLOCK):
        own, place, _, q, f = _of_molecule(h, molecule, first, atoms, channels, k, BLOCK)
        tl.store(result + place, q + f * f * ratio[None, :], own)


def equilibrate(h, molecule, charge, q) -> None:
    atoms, channels = q.shape
    width = min(CHARGES, triton.next_power_of_2(channels))
    _equilibrate[(len(charge), triton.cdiv(channels, width))](
        h, molecule, charge, q, atoms, channels, smallest=SMALLEST_SHARE, BLOCK=_at_once(q), WIDTH=width
    )


@triton.jit
def _equilibrate_backward(
    g_q, h, molecule, charge, g_h, atoms, channels, smallest: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    charges = tl.zeros((BLOCK, WIDTH), g_h.dtype.element_ty)
    shares = tl.zeros((BLOCK, WIDTH), g_h.dtype.element_ty)
    taken = tl.zeros((BLOCK, WIDTH), g_h.dtype.element_ty)
    for first in range(0, atoms, BLOCK):
        own, place, _, q, f = _of_molecule(h, molecule, first, atoms, channels, k, BLOCK)
        charges += q
        shares += f * f
        taken += f * f * tl.load(g_q + place, own, 0)
    total = tl.sum(shares, 0) + smallest
    ratio = (tl.load(charge + tl.program_id(0)) - tl.sum(charges, 0)) / total
    mean = tl.sum(taken, 0) / total
    for first in range(0, atoms, BLOCK):
        own, place, at, _, f = _of_molecule(h, molecule, first, atoms, channels, k, BLOCK)
        g = tl.load(g_q + place, own, 0) - mean[None, :]
        tl.store(g_h + at, g, own)
        tl.store(g_h + at + channels, 2 * f * g * ratio[None, :], own)


def equilibrate_backward(g_q, h, molecule, charge, g_h) -> None:
    atoms, channels = g_q.shape
    width = min(CHARGES, triton.next_power_of_2(channels))
    _equilibrate_backward[(len(charge), triton.cdiv(channels, width))](
        g_q, h, molecule, charge, g_h, atoms, channels, smallest=SMALLEST_SHARE, BLOCK=_at_once(h), WIDTH=width
    )


def by_atom(pairs: Tensor, atoms: int, result: Tensor) -> None:
    result.copy_(definitions.by_atom(pairs, atoms))


# ------------------------------------------------------------------------------------------------------------- atoms


@triton.jit
def _norm_features(x, weight, bias, out, atoms, channels, WIDTH: tl.constexpr):
    atom, f = tl.program_id(0), tl.arange(0, WIDTH)
    inside = f < channels
    x = load(x, atoms * channels, atom * channels + f, inside)
    t = dot(x, x)
    t -= tl.sum(t, 0) / channels
    t = tl.where(inside, t, 0)
    t *= 1 / tl.sqrt(tl.sum(t * t, 0) / channels + EPSILON)
    tl.store(out + atom * channels + f, t * tl.load(weight + f, inside, 0) + tl.load(bias + f, inside, 0), inside)


def norm_features(x, weight, bias, out) -> None:
    atoms, channels = out.shape
    _norm_features[(atoms,)](x, weight, bias, out, atoms, channels, WIDTH=triton.next_power_of_2(channels))


@triton.jit
def _norm_features_backward(g_x, g_out, x, weight, result, atoms, channels, WIDTH: tl.constexpr):
    atom, f = tl.program_id(0), tl.arange(0, WIDTH)
    inside = f < channels
    at = atom * channels + f
    x = load(x, atoms * channels, at, inside)
    t = dot(x, x)
    t = tl.where(inside, t - tl.sum(t, 0) / channels, 0)
    scale = 1 / tl.sqrt(tl.sum(t * t, 0) / channels + EPSILON)
    g = tl.load(g_out + at, inside, 0) * tl.load(weight + f, inside, 0)
    g = 2 * scale * (g - tl.sum(g, 0) / channels - t * (scale * scale * tl.sum(g * t, 0) / channels))
    store(result, atoms * channels, at, inside, plus(load(g_x, atoms * channels, at, inside), times(g, x)))


def norm_features_backward(g_x, g_out, x, weight, result) -> None:
    atoms, channels = g_out.shape
    _norm_features_backward[(atoms,)](
        g_x, g_out, x, weight, result, atoms, channels, WIDTH=triton.next_power_of_2(channels)
    )


@triton.jit
def _part_norms(x, inside, count, scalar: tl.constexpr, SQUARE: tl.constexpr):
    """Centred norms of the three parts, or I itself, and one over their standard deviation."""
    i, a, s = part_sums(x, x)
    if not SQUARE:
        i = x[0]
    i *= scalar
    mean = tl.sum(i + a + s, 0) / count
    i, a, s = tl.where(inside, i - mean, 0), tl.where(inside, a - mean, 0), tl.where(inside, s - mean, 0)
    return (i, a, s), 1 / tl.sqrt(tl.sum(i * i + a * a + s * s, 0) / count + EPSILON)


@triton.jit
def _part_features(
    x, weight, bias, out, atoms, channels, scalar: tl.constexpr, SQUARE: tl.constexpr, WIDTH: tl.constexpr
):
    atom, f = tl.program_id(0), tl.arange(0, WIDTH)
    inside = f < channels
    x = load(x, atoms * channels, atom * channels + f, inside)
    t, scale = _part_norms(x, inside, 3 * channels, scalar, SQUARE)
    for k in tl.static_range(3):
        at = k * channels + f
        value = t[k] * scale * tl.load(weight + at, inside, 0) + tl.load(bias + at, inside, 0)
        tl.store(out + atom * 3 * channels + at, value, inside)


def part_features(x, scalar, square, weight, bias, out) -> None:
    atoms, channels = x.shape[1:]
    _part_features[(atoms,)](
        x, weight, bias, out, atoms, channels, scalar=scalar, SQUARE=square, WIDTH=triton.next_power_of_2(channels)
    )


@triton.jit
def _part_features_backward(
    g_out, x, weight, g_x, atoms, channels, scalar: tl.constexpr, SQUARE: tl.constexpr, WIDTH: tl.constexpr
):
    atom, f = tl.program_id(0), tl.arange(0, WIDTH)
    inside = f < channels
    x = load(x, atoms * channels, atom * channels + f, inside)
    t, scale = _part_norms(x, inside, 3 * channels, scalar, SQUARE)
    g_out += atom * 3 * channels
    i = tl.load(g_out + f, inside, 0) * tl.load(weight + f, inside, 0)
    a = tl.load(g_out + channels + f, inside, 0) * tl.load(weight + channels + f, inside, 0)
    s = tl.load(g_out + 2 * channels + f, inside, 0) * tl.load(weight + 2 * channels + f, inside, 0)
    mean = tl.sum(i + a + s, 0) / (3 * channels)
    along = scale * scale * tl.sum(i * t[0] + a * t[1] + s * t[2], 0) / (3 * channels)
    i = 2 * scale * (i - mean - t[0] * along) * scalar
    a = 2 * scale * (a - mean - t[1] * along)
    s = 2 * scale * (s - mean - t[2] * along)
    by = by_part((i, a, s), x)
    if not SQUARE:
        by = (i / 2, by[1], by[2], by[3], by[4], by[5], by[6], by[7], by[8])
    store(g_x, atoms * channels, atom * channels + f, inside, by)


def part_features_backward(g_out, x, scalar, square, weight, g_x) -> None:
    atoms, channels = x.shape[1:]
    _part_features_backward[(atoms,)](
        g_out, x, weight, g_x, atoms, channels, scalar=scalar, SQUARE=square, WIDTH=triton.next_power_of_2(channels)
    )


@triton.jit
def _head(h, weight, bias, out, width, SILU: tl.constexpr, WIDTH: tl.constexpr):
    atom, k = tl.program_id(0), tl.arange(0, WIDTH)
    value = activate(tl.load(h + atom * width + k, k < width, 0), SILU) * tl.load(weight + k, k < width, 0)
    tl.store(out + atom, tl.sum(value, 0) + tl.load(bias))


def head(h, weight, bias, silu, out) -> None:
    atoms, width = h.shape
    _head[(atoms,)](h, weight, bias, out, width, SILU=silu, WIDTH=triton.next_power_of_2(width))


@triton.jit
def _head_backward(g_out, h, weight, g_h, width, SILU: tl.constexpr, WIDTH: tl.constexpr):
    atom, k = tl.program_id(0), tl.arange(0, WIDTH)
    slope = activation_slope(tl.load(h + atom * width + k, k < width, 0), SILU)
    tl.store(g_h + atom * width + k, tl.load(g_out + atom) * tl.load(weight + k, k < width, 0) * slope, k < width)


def head_backward(g_out, h, weight, silu, g_h) -> None:
    atoms, width = h.shape
    _head_backward[(atoms,)](g_out, h, weight, g_h, width, SILU=silu, WIDTH=triton.next_power_of_2(width))


# -------------------------------------------------------------------------------------------- each atom and channel


def _elements(x: Tensor) -> tuple[int, tuple[int]]:
    """Atoms times channels, and the grid of programs over them."""
    size = x[0].numel()
    return size, (triton.cdiv(size, ELEMENTS),)


@triton.jit
def _first_gate(at, channels):
    """Place in (A, 3F) of the first part's gate of an atom and channel."""
    return at // channels * 3 * channels + at % channels


@triton.jit
def _gates(gates, at, channels, mask):
    """Values of the three parts' gates."""
    place = gates + _first_gate(at, channels)
    return tl.load(place, mask, 0), tl.load(place + channels, mask, 0), tl.load(place + 2 * channels, mask, 0)


@triton.jit
def _gate(x, gates, out, size, channels, SILU: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    g = _gates(gates, at, channels, mask)
    factors = (activate(g[0], SILU), activate(g[1], SILU), activate(g[2], SILU))
    store(out, size, at, mask, normalized(by_part(factors, load(x, size, at, mask)), NORMALIZE))


def gate(x, gates, silu, normalize, out) -> None:
    size, grid = _elements(x)
    _gate[grid](x, gates, out, size, x.shape[2], SILU=silu, NORMALIZE=normalize, BLOCK=ELEMENTS)


@triton.jit
def _gate_backward(
    g_out, x, gates, g_x, g_gates, size, channels, SILU: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    x = load(x, size, at, mask)
    n = _gates(gates, at, channels, mask)
    factors = (activate(n[0], SILU), activate(n[1], SILU), activate(n[2], SILU))
    g = normalized_backward(load(g_out, size, at, mask), by_part(factors, x), NORMALIZE)
    store(g_x, size, at, mask, by_part(factors, g))
    by = part_sums(g, x)
    place = g_gates + _first_gate(at, channels)
    for k in tl.static_range(3):
        tl.store(place + k * channels, by[k] * activation_slope(n[k], SILU), mask)


def gate_backward(g_out, x, gates, silu, normalize, g_x, g_gates) -> None:
    size, grid = _elements(x)
    _gate_backward[grid](
        g_out, x, gates, g_x, g_gates, size, x.shape[2], SILU=silu, NORMALIZE=normalize, BLOCK=ELEMENTS
    )


@triton.jit
def _normalized(x, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    store(out, size, at, at < size, normalized(load(x, size, at, at < size), True))


def normalize(x, out) -> None:
    size, grid = _elements(x)
    _normalized[grid](x, out, size, BLOCK=ELEMENTS)


@triton.jit
def _normalized_backward(g_out, x, g_x, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    store(g_x, size, at, mask, normalized_backward(load(g_out, size, at, mask), load(x, size, at, mask), True))


def normalize_backward(g_out, x, g_x) -> None:
    size, grid = _elements(x)
    _normalized_backward[grid](g_out, x, g_x, size, BLOCK=ELEMENTS)


@triton.jit
def _product(y, m, factor, out, size, channels, BOTH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    scale = tl.load(factor + at // channels, mask, 0)
    p = multiply(load(y, size, at, mask), load(m, size, at, mask), scale, BOTH)
    store(out, size, at, mask, normalized(p, True))


def product(y, m, factor, both, out) -> None:
    size, grid = _elements(y)
    _product[grid](y, m, factor, out, size, y.shape[2], BOTH=both, BLOCK=ELEMENTS)


@triton.jit
def _product_backward(g_out, y, m, factor, g_y, g_m, size, channels, BOTH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    y, m = load(y, size, at, mask), load(m, size, at, mask)
    scale = tl.load(factor + at // channels, mask, 0)
    g = normalized_backward(load(g_out, size, at, mask), multiply(y, m, scale, BOTH), True)
    by_y, by_m = multiply_backward(g, y, m, scale, BOTH)
    store(g_y, size, at, mask, by_y)
    store(g_m, size, at, mask, by_m)


def product_backward(g_out, y, m, factor, both, g_y, g_m) -> None:
    size, grid = _elements(y)
    _product_backward[grid](g_out, y, m, factor, g_y, g_m, size, y.shape[2], BOTH=both, BLOCK=ELEMENTS)


@triton.jit
def _plus_square(x, d, factor, out, size, channels, NORMALIZE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    d = load(d, size, at, mask)
    total = plus(plus(load(x, size, at, mask), d), _square(d, tl.load(factor + at // channels, mask, 0)))
    store(out, size, at, mask, normalized(total, NORMALIZE))


@triton.jit
def _square(d, factor):
    d = matrix(d)
    return components(times(factor, matmul(d, d)))


def plus_square(x, d, factor, normalize, out) -> None:
    size, grid = _elements(x)
    _plus_square[grid](x, d, factor, out, size, x.shape[2], NORMALIZE=normalize, BLOCK=ELEMENTS)


@triton.jit
def _plus_square_backward(g_out, x, d, factor, g_x, g_d, size, channels, NORMALIZE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    d = load(d, size, at, mask)
    scale = tl.load(factor + at // channels, mask, 0)
    total = plus(plus(load(x, size, at, mask), d), _square(d, scale))
    g = normalized_backward(load(g_out, size, at, mask), total, NORMALIZE)
    store(g_x, size, at, mask, g)
    by_square = components(anticommutator(matrix(times(scale, g)), turn(matrix(d))))
    store(g_d, size, at, mask, plus(g, by_square))


def plus_square_backward(g_out, x, d, factor, normalize, g_x, g_d) -> None:
    size, grid = _elements(x)
    _plus_square_backward[grid](g_out, x, d, factor, g_x, g_d, size, x.shape[2], NORMALIZE=normalize, BLOCK=ELEMENTS)
