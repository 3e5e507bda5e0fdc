"""What a TensorNet2 has beyond a TensorNet, on NVIDIA GPUs; see :mod:`openmm_tensornet.kernels.cuda`."""

from __future__ import annotations

import triton
import triton.language as tl

from ...models.tensornet2 import SMALLEST_SHARE
from .steps import (
    CHANNELS,
    ELEMENTS,
    activate,
    activation_slope,
    at_once,
    by_part,
    directed,
    entries,
    load,
    locate,
    part_sums,
    plus,
    polynomial,
    polynomial_slope,
    store,
    sum_rows,
)

CHARGES = 16  # channels of a program that sums over a replica


@triton.jit
def _of_replica(h, replica, first, atoms, channels, k, BLOCK: tl.constexpr):
    """Which of some atoms are of this program's replica, the places of their charges, the charges and the shares."""
    a = first + tl.arange(0, BLOCK)
    own = (tl.load(replica + a, a < atoms, -1) == tl.program_id(0))[:, None] & (k < channels)[None, :]
    at = a[:, None] * 2 * channels + k[None, :]
    return own, a[:, None] * channels + k[None, :], at, tl.load(h + at, own, 0), tl.load(h + at + channels, own, 0)


@triton.jit
def _equilibrate(
    h, replica, charge, result, atoms, channels, smallest: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    charges = tl.zeros((BLOCK, WIDTH), result.dtype.element_ty)
    shares = tl.zeros((BLOCK, WIDTH), result.dtype.element_ty)
    for first in range(0, atoms, BLOCK):
        _, _, _, q, f = _of_replica(h, replica, first, atoms, channels, k, BLOCK)
        charges += q
        shares += f * f
    ratio = (tl.load(charge + tl.program_id(0)) - tl.sum(charges, 0)) / (tl.sum(shares, 0) + smallest)
    for first in range(0, atoms, BLOCK):
        own, place, _, q, f = _of_replica(h, replica, first, atoms, channels, k, BLOCK)
        tl.store(result + place, q + f * f * ratio[None, :], own)


def _each_replica(kernel, q, charge, *tensors) -> None:
    atoms, channels = q.shape
    width = min(CHARGES, triton.next_power_of_2(channels))
    kernel[(len(charge), triton.cdiv(channels, width))](
        *tensors, atoms, channels, smallest=SMALLEST_SHARE, BLOCK=at_once(q), WIDTH=width
    )


def equilibrate(h, replica, charge, q) -> None:
    _each_replica(_equilibrate, q, charge, h, replica, charge, q)


@triton.jit
def _equilibrate_backward(
    g_q, h, replica, charge, g_h, atoms, channels, smallest: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    charges = tl.zeros((BLOCK, WIDTH), g_h.dtype.element_ty)
    shares = tl.zeros((BLOCK, WIDTH), g_h.dtype.element_ty)
    taken = tl.zeros((BLOCK, WIDTH), g_h.dtype.element_ty)
    for first in range(0, atoms, BLOCK):
        own, place, _, q, f = _of_replica(h, replica, first, atoms, channels, k, BLOCK)
        charges += q
        shares += f * f
        taken += f * f * tl.load(g_q + place, own, 0)
    total = tl.sum(shares, 0) + smallest
    ratio = (tl.load(charge + tl.program_id(0)) - tl.sum(charges, 0)) / total
    mean = tl.sum(taken, 0) / total
    for first in range(0, atoms, BLOCK):
        own, place, at, _, f = _of_replica(h, replica, first, atoms, channels, k, BLOCK)
        g = tl.load(g_q + place, own, 0) - mean[None, :]
        tl.store(g_h + at, g, own)
        tl.store(g_h + at + channels, 2 * f * g * ratio[None, :], own)


def equilibrate_backward(g_q, h, replica, charge, g_h) -> None:
    _each_replica(_equilibrate_backward, g_q, charge, g_q, h, replica, charge, g_h)


@triton.jit
def _value(table, row, t, f, mask, width):
    """Values of functions f of a table of so many functions."""
    return polynomial(table + row * 4 * width + f, t, mask, width)


@triton.jit
def _slope(table, row, t, f, mask, width, rate):
    """Their derivatives by the distance."""
    return polynomial_slope(table + row * 4 * width + f, t, mask, width, rate)


@triton.jit
def _pair_terms(
    distance, pairs, table, own, terms, z, h, count, atoms, channels, intervals,
    cutoff: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """First layer's values for the atoms themselves and for both directions of each pair."""
    item, f = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    itself, exists = item < atoms, item < atoms + count
    p = tl.where(itself, 0, item - atoms)
    is_pair = exists & ~itself
    i = tl.load(pairs + p, is_pair, item)
    j = tl.load(pairs + count + p, is_pair, item)
    d = tl.load(distance + p, is_pair, 0)
    near = is_pair & ~(d >= cutoff)
    dtype = table.dtype.element_ty
    row, t, _ = locate(d, intervals, cutoff, dtype)
    inside = (f < channels)[None, :]
    here = exists[:, None] & inside
    value = _value(table, row[:, None], tl.where(near, t, 0)[:, None], f[None, :], near[:, None] & inside, channels + 1)
    value = tl.where(itself[:, None], tl.load(own + f, f < channels, 0)[None, :], value)
    at_i, at_j = i[:, None] * 2 * channels + f[None, :], j[:, None] * 2 * channels + f[None, :]
    forth = value + tl.load(terms + at_i, here, 0) + tl.load(terms + at_j + channels, here, 0)
    back = value + tl.load(terms + at_j, here, 0) + tl.load(terms + at_i + channels, here, 0)
    at = item[:, None] * channels + f[None, :]
    tl.store(z + at, forth, here)
    tl.store(h + at, activate(forth, True), here)
    turned = is_pair[:, None] & inside
    tl.store(z + count * channels + at, back, turned)
    tl.store(h + count * channels + at, activate(back, True), turned)


def pair_terms(distance, pairs, by_atom, table, cutoff, own, terms, z, h) -> None:
    atoms, channels, count = len(terms), terms.shape[1] // 2, pairs.shape[1]
    width = triton.next_power_of_2(channels)
    block = max(1, 4 * ELEMENTS // width)
    _pair_terms[(triton.cdiv(atoms + count, block),)](
        distance, pairs, table, own, terms, z, h, count, atoms, channels, table.shape[0] - 2,
        cutoff=cutoff, BLOCK=block, WIDTH=width,
    )  # fmt: skip


@triton.jit
def _by_value(g_h, z, at, mask):
    """Gradient by what is activated."""
    return tl.load(g_h + at, mask, 0) * activation_slope(tl.load(z + at, mask, 0), True)


@triton.jit
def _pair_terms_backward(
    g_h, g_through, distance, pairs, by_atom, table, z, g_distance, g_terms, count, atoms, channels, intervals, parts,
    cutoff: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """The first programs give the gradients by the terms of an atom, the others those by a pair's distance."""
    program = tl.program_id(0)
    if program < atoms * parts:
        atom, f = program // parts, program % parts * WIDTH + tl.arange(0, WIDTH)
        inside = f < channels
        receiver = _by_value(g_h, z, atom * channels + f, inside)
        sender = receiver
        start, end = tl.load(by_atom + atom), tl.load(by_atom + atom + 1)
        for first in range(start, end, BLOCK):
            exists, p, _, sign = entries(by_atom, pairs, count, atoms, first + tl.arange(0, BLOCK), end)
            mask = exists[:, None] & inside[None, :]
            to, of = directed(p, sign, count, atoms)
            receiver += tl.sum(_by_value(g_h, z, to[:, None] * channels + f[None, :], mask), 0)
            sender += tl.sum(_by_value(g_h, z, of[:, None] * channels + f[None, :], mask), 0)
        tl.store(g_terms + atom * 2 * channels + f, receiver, inside)
        tl.store(g_terms + atom * 2 * channels + channels + f, sender, inside)
    else:
        p, k = program - atoms * parts, tl.arange(0, ALL)
        d = tl.load(distance + p)
        near = ~(d >= cutoff)
        mask = k < tl.where(near, channels, 0)
        row, t, rate = locate(d, intervals, cutoff, table.dtype.element_ty)
        slope = _slope(table, row, tl.where(near, t, 0), k, mask, channels + 1, rate)
        at = (atoms + p) * channels + k
        g = _by_value(g_h, z, at, mask) + _by_value(g_h, z, at + count * channels, mask)
        tl.store(g_distance + p, tl.load(g_through + p) + tl.sum(slope * g, 0))


def pair_terms_backward(g_h, g_through, distance, pairs, by_atom, table, cutoff, z, g_distance, g_terms) -> None:
    atoms, channels, count = len(g_terms), z.shape[1], pairs.shape[1]
    width = min(CHANNELS, triton.next_power_of_2(channels))
    parts = triton.cdiv(channels, width)
    _pair_terms_backward[(atoms * parts + count,)](
        g_h, g_through, distance, pairs, by_atom, table, z, g_distance, g_terms, count, atoms, channels,
        table.shape[0] - 2, parts, cutoff=cutoff, BLOCK=at_once(z), WIDTH=width, ALL=triton.next_power_of_2(channels),
    )  # fmt: skip


@triton.jit
def _weights(c, z, at, mask, channels):
    """c times the activated values of the three parts."""
    return (
        c * activate(tl.load(z + at, mask, 0), True),
        c * activate(tl.load(z + at + channels, mask, 0), True),
        c * activate(tl.load(z + at + 2 * channels, mask, 0), True),
    )


@triton.jit
def _directed_sum(
    atom, f, inside, distance, pairs, by_atom, table, own, z, y, count, atoms, channels, intervals,
    cutoff: tl.constexpr, RECEIVES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Σ_j w_ij ⊙ Y_j of one atom i, or Σ_j w_ji ⊙ Y_j, itself included."""
    start, end = tl.load(by_atom + atom), tl.load(by_atom + atom + 1)
    own_c = tl.load(own + channels)
    own_w = _weights(own_c, z, atom * 3 * channels + f, inside, channels)
    m = by_part(own_w, load(y, atoms * channels, atom * channels + f, inside))
    for first in range(start, end, BLOCK):
        exists, p, other, sign = entries(by_atom, pairs, count, atoms, first + tl.arange(0, BLOCK), end)
        d = tl.load(distance + p, exists, 0)
        near = exists & ~(d >= cutoff)
        row, t, _ = locate(d, intervals, cutoff, table.dtype.element_ty)
        c = _value(table, row, tl.where(near, t, 0), channels, near, channels + 1)[:, None]
        to, of = directed(p, sign, count, atoms)
        if not RECEIVES:
            to = of
        mask = near[:, None] & inside[None, :]
        w = _weights(c, z, to[:, None] * 3 * channels + f[None, :], mask, channels)
        y_j = load(y, atoms * channels, other[:, None] * channels + f[None, :], mask)
        m = plus(m, sum_rows(by_part(w, y_j)))
    return m


@triton.jit
def _directed_message(
    distance, pairs, by_atom, table, own, z, y, m, count, atoms, channels, intervals,
    cutoff: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    atom, f = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = _directed_sum(
        atom, f, f < channels, distance, pairs, by_atom, table, own, z, y, count, atoms, channels, intervals, cutoff, True,
        BLOCK,
    )  # fmt: skip
    store(m, atoms * channels, atom * channels + f, f < channels, total)


def directed_message(distance, pairs, by_atom, table, cutoff, own, z, y, m) -> None:
    atoms, channels = y.shape[1:]
    width = min(CHANNELS, triton.next_power_of_2(channels))
    _directed_message[(atoms, triton.cdiv(channels, width))](
        distance, pairs, by_atom, table, own, z, y, m, pairs.shape[1], atoms, channels, table.shape[0] - 2,
        cutoff=cutoff, BLOCK=at_once(y), WIDTH=width,
    )  # fmt: skip


@triton.jit
def _by_weights(g_m, z, y, g_z, row, i, j, c, atoms, channels, k, mask, exists):
    """Stores the gradient by the values of one direction, and gives that by its C(d)."""
    stride = atoms * channels
    by = part_sums(load(g_m, stride, i * channels + k, mask), load(y, stride, j * channels + k, mask))
    along = tl.zeros_like(by[0])
    for part in tl.static_range(3):
        at = (3 * row + part) * channels + k
        value = tl.load(z + at, mask, 0)
        along += by[part] * activate(value, True)
        tl.store(g_z + at, c * by[part] * activation_slope(value, True), exists)
    return along


@triton.jit
def _directed_message_backward(
    g_m, distance, pairs, by_atom, table, own, z, y, g_distance, g_z, g_y, count, atoms, channels, intervals, parts,
    cutoff: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """The first programs give the gradient by Y of an atom's channels, others those by the values of atoms and then of pairs."""
    program = tl.program_id(0)
    if program < atoms * parts:
        atom, f = program // parts, program % parts * WIDTH + tl.arange(0, WIDTH)
        total = _directed_sum(
            atom, f, f < channels, distance, pairs, by_atom, table, own, z, g_m, count, atoms, channels, intervals, cutoff,
            False, BLOCK,
        )  # fmt: skip
        store(g_y, atoms * channels, atom * channels + f, f < channels, total)
    else:
        item, k = program - atoms * parts, tl.arange(0, ALL)
        inside = k < channels
        if item < atoms:
            c = tl.load(own + channels)
            _by_weights(g_m, z, y, g_z, item, item, item, c, atoms, channels, k, inside, inside)
        else:
            p = item - atoms
            i, j = tl.load(pairs + p), tl.load(pairs + count + p)
            d = tl.load(distance + p)
            near = ~(d >= cutoff)
            mask = k < tl.where(near, channels, 0)
            row, t, rate = locate(d, intervals, cutoff, table.dtype.element_ty)
            t = tl.where(near, t, 0)
            c = _value(table, row, t, channels, near, channels + 1)
            along = _by_weights(g_m, z, y, g_z, item, i, j, c, atoms, channels, k, mask, inside)
            along += _by_weights(g_m, z, y, g_z, item + count, j, i, c, atoms, channels, k, mask, inside)
            slope = _slope(table, row, t, channels, near, channels + 1, rate)
            tl.store(g_distance + p, slope * tl.sum(along, 0))


def directed_message_backward(g_m, distance, pairs, by_atom, table, cutoff, own, z, y, g_distance, g_z, g_y) -> None:
    (atoms, channels), count = y.shape[1:], pairs.shape[1]
    width = min(CHANNELS, triton.next_power_of_2(channels))
    parts = triton.cdiv(channels, width)
    _directed_message_backward[(atoms * parts + atoms + count,)](
        g_m, distance, pairs, by_atom, table, own, z, y, g_distance, g_z, g_y, count, atoms, channels, table.shape[0] - 2,
        parts, cutoff=cutoff, BLOCK=at_once(y), WIDTH=width, ALL=triton.next_power_of_2(channels),
    )  # fmt: skip
