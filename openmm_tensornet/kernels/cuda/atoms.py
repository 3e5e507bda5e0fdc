"""What concerns each atom by itself, on NVIDIA GPUs; see :mod:`openmm_tensornet.kernels.cuda`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .steps import (
    ELEMENTS,
    EPSILON,
    activate,
    activation_slope,
    anticommutator,
    by_part,
    components,
    dot,
    load,
    matmul,
    matrix,
    multiply,
    multiply_backward,
    normalized,
    normalized_backward,
    part_sums,
    plus,
    store,
    times,
    turn,
)


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
