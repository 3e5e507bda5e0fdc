"""What concerns each atom by itself, on the CPU."""

from __future__ import annotations

import math

import numpy as np

from .. import definitions
from .simd import at, lanes, load, pointer, store, wide
from .steps import (
    LANES,
    activate,
    by_part,
    inlined,
    kernel,
    multiply,
    multiply_backward,
    nine,
    normalized,
    normalized_backward,
    over_channels,
    part_sums,
    plus,
    put,
    sum_up,
    three,
    value_and_slope,
)

EPSILON = definitions.EPSILON

# ------------------------------------------------------------------------------------------------------------ pairs


# ------------------------------------------------------------------------------------------------------------ atoms


@kernel
def _moments(t):
    """Mean, and one over the standard deviation."""
    count = t.dtype.type(len(t))
    total = t.dtype.type(0)
    for k in range(len(t)):
        total += t[k]
    mean = total / count
    total = t.dtype.type(0)
    for k in range(len(t)):
        total += (t[k] - mean) * (t[k] - mean)
    return mean, t.dtype.type(1 / math.sqrt(total / count + EPSILON))


@kernel
def _layer_norm(t, weight, bias, out, a):
    mean, scale = _moments(t)
    for k in range(len(t)):
        out[a, k] = (t[k] - mean) * scale * weight[k] + bias[k]


@kernel
def _layer_norm_backward(t, weight, g, a, g_t):
    count = t.dtype.type(len(t))
    mean, scale = _moments(t)
    first = second = t.dtype.type(0)
    for k in range(len(t)):
        first += g[a, k] * weight[k]
        second += g[a, k] * weight[k] * (t[k] - mean)
    first, second = first / count, second / count * scale * scale
    for k in range(len(t)):
        g_t[k] = scale * (g[a, k] * weight[k] - first - (t[k] - mean) * second)


@kernel
def _norms(x, a, t):
    for f in range(len(t)):
        t[f] = 0
    for c in range(9):
        for f in range(len(t)):
            t[f] += x[c, a, f] * x[c, a, f]


@kernel
def norm_features(x, weight, bias, out):
    atoms, channels = x.shape[1:]
    t = np.empty(channels, x.dtype)
    for a in range(atoms):
        _norms(x, a, t)
        _layer_norm(t, weight, bias, out, a)


@kernel
def norm_features_backward(g_x, g_out, x, weight, result):
    atoms, channels = x.shape[1:]
    t, g_t = np.empty(channels, x.dtype), np.empty(channels, x.dtype)
    for a in range(atoms):
        _norms(x, a, t)
        _layer_norm_backward(t, weight, g_out, a, g_t)
        for f in range(channels):
            g_t[f] += g_t[f]
        for c in range(9):
            for f in range(channels):
                result[c, a, f] = g_x[c, a, f] + x[c, a, f] * g_t[f]


@kernel
def _part_norms(x, a, scalar, square, t):
    channels = x.shape[2]
    for f in range(channels):
        t[channels + f] = t[2 * channels + f] = 0
    for f in range(channels):
        t[f] = scalar * x[0, a, f] * (x[0, a, f] if square else x.dtype.type(1))
    for c in range(1, 9):
        first = channels if c < 4 else 2 * channels
        for f in range(channels):
            t[first + f] += x[c, a, f] * x[c, a, f]


@kernel
def part_features(x, scalar, square, weight, bias, out):
    atoms, channels = x.shape[1:]
    t = np.empty(3 * channels, x.dtype)
    for a in range(atoms):
        _part_norms(x, a, x.dtype.type(scalar), square, t)
        _layer_norm(t, weight, bias, out, a)


@kernel
def part_features_backward(g_out, x, scalar, square, weight, g_x):
    atoms, channels = x.shape[1:]
    t, g_t = np.empty(3 * channels, x.dtype), np.empty(3 * channels, x.dtype)
    for a in range(atoms):
        _part_norms(x, a, x.dtype.type(scalar), square, t)
        _layer_norm_backward(t, weight, g_out, a, g_t)
        for c in range(9):
            first = 0 if c == 0 else channels if c < 4 else 2 * channels
            factor = x.dtype.type(2 * scalar if c == 0 else 2)
            for f in range(channels):
                g_x[c, a, f] = factor * g_t[first + f] * x[c, a, f]
        if not square:
            for f in range(channels):
                g_x[0, a, f] = x.dtype.type(scalar) * g_t[f]


@over_channels
def _gate(f, like, x, row, gates, channels, silu, normalize, out):
    n = three(gates, f, channels, like)
    n = activate(n[0], silu), activate(n[1], silu), activate(n[2], silu)
    put(out, f, row, normalized(by_part(n, nine(x, f, row, like)), normalize))


@kernel
def gate(x, gates, silu, normalize, out):
    atoms, channels = x.shape[1:]
    for a in range(atoms):
        x_a, out_a = at(pointer(x), a * channels), at(pointer(out), a * channels)
        _gate(
            channels, x_a, x_a, atoms * channels, at(pointer(gates), 3 * a * channels), channels, silu, normalize, out_a
        )


@over_channels
def _gate_gradients(f, like, g_out, x, row, gates, channels, silu, normalize, g_x, g_gates):
    n = three(gates, f, channels, like)
    (i, by_i), (v, by_v), (s, by_s) = (
        value_and_slope(n[0], silu),
        value_and_slope(n[1], silu),
        value_and_slope(n[2], silu),
    )
    n = i, v, s
    x_a = nine(x, f, row, like)
    g = normalized_backward(nine(g_out, f, row, like), by_part(n, x_a), normalize)
    put(g_x, f, row, by_part(n, g))
    by_gate = part_sums(g, x_a)
    store(g_gates, f, by_i * by_gate[0])
    store(g_gates, f + channels, by_v * by_gate[1])
    store(g_gates, f + 2 * channels, by_s * by_gate[2])


@kernel
def gate_backward(g_out, x, gates, silu, normalize, g_x, g_gates):
    atoms, channels = x.shape[1:]
    for a in range(atoms):
        g_a, x_a, to_a = at(pointer(g_out), a * channels), at(pointer(x), a * channels), at(pointer(g_x), a * channels)
        _gate_gradients(
            channels,
            x_a,
            g_a,
            x_a,
            atoms * channels,
            at(pointer(gates), 3 * a * channels),
            channels,
            silu,
            normalize,
            to_a,
            at(pointer(g_gates), 3 * a * channels),
        )


@over_channels
def _head(f, like, h, weight, silu, sums):
    store(sums, 0, load(sums, 0, like) + activate(load(h, f, like), silu) * load(weight, f, like))


@kernel
def head(h, weight, bias, silu, out):
    sums = np.empty(LANES, h.dtype)
    weight_at, sums_at = pointer(weight), pointer(sums)
    for a in range(h.shape[0]):
        store(sums_at, 0, wide(weight_at))
        _head(h.shape[1], weight_at, at(pointer(h), a * h.shape[1]), weight_at, silu, sums_at)
        out[a] = bias[0] + sum_up(sums, 0, lanes(weight_at))


@over_channels
def _head_gradient(f, like, h, g, weight, silu, g_h):
    store(g_h, f, g * (load(weight, f, like) * value_and_slope(load(h, f, like), silu)[1]))


@kernel
def head_backward(g_out, h, weight, silu, g_h):
    for a in range(h.shape[0]):
        h_a = at(pointer(h), a * h.shape[1])
        _head_gradient(h.shape[1], h_a, h_a, g_out[a], pointer(weight), silu, at(pointer(g_h), a * h.shape[1]))


# ------------------------------------------------------------------------------------------- products of 3×3 tensors
# Of one atom at a time; from component to component there are `row` numbers.


@over_channels
def _normalize(f, like, x, row, out):
    put(out, f, row, normalized(nine(x, f, row, like), True))


@kernel
def normalize(x, out):
    atoms, channels = x.shape[1:]
    for a in range(atoms):
        x_a = at(pointer(x), a * channels)
        _normalize(channels, x_a, x_a, atoms * channels, at(pointer(out), a * channels))


@over_channels
def _normalize_gradient(f, like, g_out, x, row, g_x):
    put(g_x, f, row, normalized_backward(nine(g_out, f, row, like), nine(x, f, row, like), True))


@kernel
def normalize_backward(g_out, x, g_x):
    atoms, channels = x.shape[1:]
    for a in range(atoms):
        x_a = at(pointer(x), a * channels)
        _normalize_gradient(
            channels, x_a, at(pointer(g_out), a * channels), x_a, atoms * channels, at(pointer(g_x), a * channels)
        )


@over_channels
def _product(f, like, y, m, row, factor, both, out):
    put(out, f, row, normalized(multiply(nine(y, f, row, like), nine(m, f, row, like), factor, both), True))


@kernel
def product(y, m, factor, both, out):
    atoms, channels = y.shape[1:]
    row = atoms * channels
    for a in range(atoms):
        y_a, m_a = at(pointer(y), a * channels), at(pointer(m), a * channels)
        _product(channels, y_a, y_a, m_a, row, factor[a], both, at(pointer(out), a * channels))


@over_channels
def _multiplied_gradients(f, like, g_out, y, m, row, factor, both, g_y, g_m):
    y_a, m_a = nine(y, f, row, like), nine(m, f, row, like)
    g = normalized_backward(nine(g_out, f, row, like), multiply(y_a, m_a, factor, both), True)
    by_y, by_m = multiply_backward(g, y_a, m_a, factor, both)
    put(g_y, f, row, by_y)
    put(g_m, f, row, by_m)


@kernel
def product_backward(g_out, y, m, factor, both, g_y, g_m):
    atoms, channels = y.shape[1:]
    for a in range(atoms):
        g_a, y_a, m_a = at(pointer(g_out), a * channels), at(pointer(y), a * channels), at(pointer(m), a * channels)
        to_y, to_m = at(pointer(g_y), a * channels), at(pointer(g_m), a * channels)
        _multiplied_gradients(channels, y_a, g_a, y_a, m_a, atoms * channels, factor[a], both, to_y, to_m)


@inlined
def _squared(x, d, factor):
    """x + d + factor·DD."""
    return plus(plus(x, d), multiply(d, d, 0.5 * factor, True))


@over_channels
def _plus_square(f, like, x, d, row, factor, normalize, out):
    p = _squared(nine(x, f, row, like), nine(d, f, row, like), factor)
    put(out, f, row, normalized(p, normalize))


@kernel
def plus_square(x, d, factor, normalize, out):
    atoms, channels = x.shape[1:]
    for a in range(atoms):
        x_a, d_a = at(pointer(x), a * channels), at(pointer(d), a * channels)
        _plus_square(channels, x_a, x_a, d_a, atoms * channels, factor[a], normalize, at(pointer(out), a * channels))


@over_channels
def _plus_square_gradients(f, like, g_out, x, d, row, factor, normalize, g_x, g_d):
    d_a = nine(d, f, row, like)
    g = normalized_backward(nine(g_out, f, row, like), _squared(nine(x, f, row, like), d_a, factor), normalize)
    put(g_x, f, row, g)
    put(g_d, f, row, plus(g, multiply_backward(g, d_a, d_a, factor, True)[0]))


@kernel
def plus_square_backward(g_out, x, d, factor, normalize, g_x, g_d):
    atoms, channels = x.shape[1:]
    for a in range(atoms):
        g_a, x_a, d_a = at(pointer(g_out), a * channels), at(pointer(x), a * channels), at(pointer(d), a * channels)
        to_x, to_d = at(pointer(g_x), a * channels), at(pointer(g_d), a * channels)
        _plus_square_gradients(channels, x_a, g_a, x_a, d_a, atoms * channels, factor[a], normalize, to_x, to_d)
