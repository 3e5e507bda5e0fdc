"""Matrix products with constant weights for the CPU.

The library's products repack their right factor at every call, which for the few rows of a small molecule takes a while. Here
the weights are packed once (:func:`pack`): in panels of as many columns as two vectors have, a panel's rows one after the other.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .simd import BYTES, at, keep, lanes, load, pointer, store, wide
from .steps import inlined, kernel

BLOCK = 96  # rows whose numbers stay in the second-level cache while all panels pass by
ROWS = 6  # whose sums fit into registers, two vectors each


def pack(weight: Tensor) -> Tensor:
    """Panels, flat, of a weight of shape (K, N); the last panel is filled up with zeros."""
    depth, columns = weight.shape
    width = panel_width(weight.dtype)
    padded = torch.nn.functional.pad(weight, (0, -columns % width))
    return padded.view(depth, -1, width).transpose(0, 1).flatten()


def panel_width(dtype: torch.dtype) -> int:
    return 2 * BYTES // dtype.itemsize


@inlined
def _six(x, depth, panel, start, start_row, out, out_row):
    """Six rows of a panel's columns, added to what stands at `start`."""
    like = wide(x)
    w = lanes(x)
    s1, s2, s3, s4, s5 = start_row, 2 * start_row, 3 * start_row, 4 * start_row, 5 * start_row
    a0, b0 = load(start, 0, like), load(start, w, like)
    a1, b1 = load(start, s1, like), load(start, s1 + w, like)
    a2, b2 = load(start, s2, like), load(start, s2 + w, like)
    a3, b3 = load(start, s3, like), load(start, s3 + w, like)
    a4, b4 = load(start, s4, like), load(start, s4 + w, like)
    a5, b5 = load(start, s5, like), load(start, s5 + w, like)
    x1, x2, x3, x4, x5 = at(x, depth), at(x, 2 * depth), at(x, 3 * depth), at(x, 4 * depth), at(x, 5 * depth)
    for k in range(depth):
        p, q = load(panel, 2 * w * k, like), load(panel, 2 * w * k + w, like)
        a0, b0 = a0 + x[k] * p, b0 + x[k] * q
        a1, b1 = a1 + x1[k] * p, b1 + x1[k] * q
        a2, b2 = a2 + x2[k] * p, b2 + x2[k] * q
        a3, b3 = a3 + x3[k] * p, b3 + x3[k] * q
        a4, b4 = a4 + x4[k] * p, b4 + x4[k] * q
        a5, b5 = a5 + x5[k] * p, b5 + x5[k] * q
    r1, r2, r3, r4, r5 = out_row, 2 * out_row, 3 * out_row, 4 * out_row, 5 * out_row
    store(out, 0, a0)
    store(out, w, b0)
    store(out, r1, a1)
    store(out, r1 + w, b1)
    store(out, r2, a2)
    store(out, r2 + w, b2)
    store(out, r3, a3)
    store(out, r3 + w, b3)
    store(out, r4, a4)
    store(out, r4 + w, b4)
    store(out, r5, a5)
    store(out, r5 + w, b5)


@inlined
def _one(x, depth, panel, start, out):
    like = wide(x)
    w = lanes(x)
    a, b = load(start, 0, like), load(start, w, like)
    for k in range(depth):
        a, b = a + x[k] * load(panel, 2 * w * k, like), b + x[k] * load(panel, 2 * w * k + w, like)
    store(out, 0, a)
    store(out, w, b)


@kernel
def linear(x, panels, start, out):
    """out = x·weight + start: x (M, K), the packed weight, out (M, N); what is added is empty, (N,) or, flat, (M, N)."""
    rows, depth = x.shape
    columns = out.shape[1]
    x_at, panels_at, out_at = pointer(x), pointer(panels), pointer(out)
    w = 2 * lanes(x_at)
    row = columns if len(start) > columns else 0
    scratch = np.zeros(2 * w, x.dtype)
    for first in range(0, rows, BLOCK):
        last = min(first + BLOCK, rows)
        for c in range(0, columns - columns % w, w):
            panel = at(panels_at, c * depth)
            start_c = at(pointer(start), c) if len(start) else pointer(scratch)
            for r in range(first, last, ROWS):
                # The last rows once more rather than fewer at a time: what is written does not change what is read.
                r = max(min(r, last - ROWS), 0)
                if r + ROWS <= rows:
                    _six(
                        at(x_at, r * depth),
                        depth,
                        panel,
                        at(start_c, r * row),
                        row,
                        at(out_at, r * columns + c),
                        columns,
                    )
                else:
                    for k in range(r, last):
                        _one(at(x_at, k * depth), depth, panel, at(start_c, k * row), at(out_at, k * columns + c))
    c = columns - columns % w
    for r in range(rows if c < columns else 0):
        for k in range(c, columns):
            scratch[k - c] = start[r * row + k] if len(start) else 0
        _one(at(x_at, r * depth), depth, at(panels_at, c * depth), pointer(scratch), at(pointer(scratch), w))
        for k in range(c, columns):
            out[r, k] = scratch[w + k - c]
    keep(scratch)
