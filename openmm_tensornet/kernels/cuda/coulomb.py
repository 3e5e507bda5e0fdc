"""The Coulomb interaction of partial charges on NVIDIA GPUs; see :mod:`openmm_tensornet.kernels.cuda`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...models import coulomb as model
from .steps import at_once, entries

COULOMB_CONSTANT: tl.constexpr = tl.constexpr(model.COULOMB_CONSTANT)
DAMPING_RANGE: tl.constexpr = tl.constexpr(model.DAMPING_RANGE)
LARGEST: tl.constexpr = tl.constexpr(model.LARGEST)


@triton.jit
def _interaction(distance, per_nm: tl.constexpr, k_rf: tl.constexpr, c_rf: tl.constexpr, cutoff: tl.constexpr):
    """Energy of two unit charges and its derivative, as :func:`openmm_tensornet.models.coulomb.coulomb_interaction` has them."""
    d = distance * per_nm
    t = d * (1 / DAMPING_RANGE)
    free = t > LARGEST  # of damping
    t = tl.where(free, LARGEST, t)
    rest = 1 / (1 - t * t)
    x = t * t * rest
    decay = tl.exp(-x)
    series = tl.zeros_like(x) + 1  # of (1 − exp(−x))/x, where the difference would lose digits
    for k in tl.static_range(14):
        series = 1 - series * x * (1 / (15 - k))
    damping = tl.where(x < 0.5, x * series, 1 - decay)
    rise = tl.where(free, 0, decay * t * rest * rest * (2 / DAMPING_RANGE))
    inverse = 1 / d
    bare = inverse + k_rf * d * d - c_rf
    value = COULOMB_CONSTANT * damping * bare
    slope = COULOMB_CONSTANT * per_nm * (rise * bare + damping * (2 * k_rf * d - inverse * inverse))
    if cutoff > 0:
        value, slope = tl.where(d < cutoff, value, 0), tl.where(d < cutoff, slope, 0)
    return value, slope


@triton.jit
def _potential(
    atom, k, inside, distance, pairs, by_atom, q, factors, count, atoms, channels, per_nm: tl.constexpr,
    k_rf: tl.constexpr, c_rf: tl.constexpr, cutoff: tl.constexpr, FACTORS: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Σ_j c(d_ij) q_j of one atom i, with charges times the sum of both atoms' factors on demand."""
    total = tl.zeros((WIDTH,), q.dtype.element_ty)
    start, end = tl.load(by_atom + atom), tl.load(by_atom + atom + 1)
    for first in range(start, end, BLOCK):
        exists, p, other, _ = entries(by_atom, pairs, count, atoms, first + tl.arange(0, BLOCK), end)
        value, _ = _interaction(tl.load(distance + p, exists, 1), per_nm, k_rf, c_rf, cutoff)
        if FACTORS:
            value *= tl.load(factors + atom) + tl.load(factors + other, exists, 0)
        q_j = tl.load(q + other[:, None] * channels + k[None, :], exists[:, None] & inside[None, :], 0)
        total += tl.sum(value[:, None] * q_j, 0)
    return total


@triton.jit
def _coulomb(
    distance, pairs, by_atom, q, weights, energy, count, atoms, channels, per_nm: tl.constexpr, k_rf: tl.constexpr,
    c_rf: tl.constexpr, cutoff: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    atom, k = tl.program_id(0), tl.arange(0, WIDTH)
    inside = k < channels
    total = _potential(
        atom, k, inside, distance, pairs, by_atom, q, q, count, atoms, channels, per_nm, k_rf, c_rf, cutoff, False, BLOCK,
        WIDTH,
    )  # fmt: skip
    q_i = tl.load(q + atom * channels + k, inside, 0) * tl.load(weights + k, inside, 0)
    tl.store(energy + atom, tl.sum(q_i * total, 0))


def _options(per_nm: float, cutoff: float, q: Tensor) -> dict:
    """Constants of a kernel; no cutoff is zero. Neighbors or pairs at a time are as many as registers hold with their charges."""
    k_rf, c_rf = model.reaction_field(cutoff) if cutoff else (0.0, 0.0)
    width = triton.next_power_of_2(q.shape[1])
    block = max(1, at_once(q) * 16 // width)
    return {"per_nm": per_nm, "k_rf": k_rf, "c_rf": c_rf, "cutoff": cutoff, "BLOCK": block, "WIDTH": width}


def coulomb(distance, pairs, by_atom, q, weights, per_nm, cutoff, energy) -> None:
    atoms, channels = q.shape
    _coulomb[(atoms,)](
        distance, pairs, by_atom, q, weights, energy, pairs.shape[1], atoms, channels, **_options(per_nm, cutoff, q)
    )


@triton.jit
def _coulomb_backward(
    g, distance, pairs, by_atom, q, weights, g_distance, g_q, count, atoms, channels, per_nm: tl.constexpr,
    k_rf: tl.constexpr, c_rf: tl.constexpr, cutoff: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The first programs give the gradients by an atom's charges, the others those by the distances of some pairs."""
    program, k = tl.program_id(0), tl.arange(0, WIDTH)
    inside = k < channels
    w = tl.load(weights + k, inside, 0)
    if program < atoms:
        total = _potential(
            program, k, inside, distance, pairs, by_atom, q, g, count, atoms, channels, per_nm, k_rf, c_rf, cutoff, True,
            BLOCK, WIDTH,
        )  # fmt: skip
        tl.store(g_q + program * channels + k, w * total, inside)
    else:
        p = (program - atoms) * BLOCK + tl.arange(0, BLOCK)
        exists = p < count
        i, j = tl.load(pairs + p, exists, 0), tl.load(pairs + count + p, exists, 0)
        _, slope = _interaction(tl.load(distance + p, exists, 1), per_nm, k_rf, c_rf, cutoff)
        mask = (exists & (i != j))[:, None] & inside[None, :]
        q_i = tl.load(q + i[:, None] * channels + k[None, :], mask, 0)
        q_j = tl.load(q + j[:, None] * channels + k[None, :], mask, 0)
        both = tl.load(g + i, exists, 0) + tl.load(g + j, exists, 0)
        tl.store(g_distance + p, slope * both * tl.sum(q_i * q_j * w[None, :], 1), exists)


def coulomb_backward(g, distance, pairs, by_atom, q, weights, per_nm, cutoff, g_distance, g_q) -> None:
    (atoms, channels), count, options = q.shape, pairs.shape[1], _options(per_nm, cutoff, q)
    _coulomb_backward[(atoms + triton.cdiv(count, options["BLOCK"]),)](
        g, distance, pairs, by_atom, q, weights, g_distance, g_q, count, atoms, channels, **options
    )
