"""Algebra of 3×3 tensors.

Two representations are used. The reference model keeps whole matrices, shape (..., 3, 3, F), and takes
them apart into trace, antisymmetric and symmetric traceless parts. The static potential keeps the nine
components in an orthonormal basis of the 3×3 matrices, in which the squared Frobenius norm is a plain sum of squares
and every bilinear product is a fixed 9×9×9 table.

Components are ordered I (1), A (3), S (5), as :data:`PART_SIZES` has them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PART_SIZES = (1, 3, 5)

# A third, rounded to float32: the oracle's kernel squares the trace with this literal even in float64, and so
# trained models and reference energies carry it (1e-8 relative).
ONE_THIRD = 0.3333333432674408


def skew(v: Tensor) -> Tensor:
    """Matrix of the cross product, [[0, −z, y], [z, 0, −x], [−y, x, 0]].

    Parameters
    ----------
    v : Tensor, shape (..., 3)

    Returns
    -------
    Tensor, shape (..., 3, 3)
    """
    x, y, z = v.unbind(-1)
    o = torch.zeros_like(x)
    return torch.stack((o, -z, y, z, o, -x, -y, x, o), dim=-1).unflatten(-1, (3, 3))


def symmetric_traceless(v: Tensor) -> Tensor:
    """v vᵀ − (v·v)𝟙/3 of vectors of shape (..., 3); shape (..., 3, 3)."""
    eye = torch.eye(3, dtype=v.dtype, device=v.device)
    return v.unsqueeze(-1) * v.unsqueeze(-2) - (v * v).sum(-1)[..., None, None] * eye / 3


def decompose(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split matrices into X = I·𝟙 + A + S.

    Parameters
    ----------
    x : Tensor, shape (N, 3, 3, F)

    Returns
    -------
    I : Tensor, shape (N, F)
        A third of the trace.
    A, S : Tensor, shape (N, 3, 3, F)
        Antisymmetric part and symmetric traceless part.
    """
    trace_third = x.diagonal(dim1=1, dim2=2).mean(-1)
    xt = x.transpose(1, 2)
    eye = torch.eye(3, dtype=x.dtype, device=x.device)[None, :, :, None]
    return trace_third, 0.5 * (x - xt), 0.5 * (x + xt) - trace_third[:, None, None, :] * eye


def compose(i: Tensor, a: Tensor, s: Tensor) -> Tensor:
    """Inverse of :func:`decompose`."""
    eye = torch.eye(3, dtype=i.dtype, device=i.device)[None, :, :, None]
    return i[:, None, None, :] * eye + a + s


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """Matrix product for each atom and channel of tensors of shape (N, 3, 3, F)."""
    return torch.einsum("nikf,nkjf->nijf", x, y)


def squared_norm(x: Tensor) -> Tensor:
    """Squared Frobenius norm of tensors of shape (N, 3, 3, F), shape (N, F)."""
    return (x * x).sum((1, 2))


def basis(dtype: torch.dtype = torch.float64) -> Tensor:
    """Orthonormal basis of the 3×3 matrices, shape (9, 3, 3), ordered I, A₁₋₃, S₁₋₅."""
    b = torch.zeros(9, 3, 3, dtype=torch.float64)
    b[0] = torch.eye(3, dtype=torch.float64) / math.sqrt(3)
    b[1:4] = skew(torch.eye(3, dtype=torch.float64)) / math.sqrt(2)
    for k, (i, j) in enumerate(((0, 1), (0, 2), (1, 2))):
        b[4 + k, i, j] = b[4 + k, j, i] = 1 / math.sqrt(2)
    b[7] = torch.diag(torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)) / math.sqrt(2)
    b[8] = torch.diag(torch.tensor([-1.0, -1.0, 2.0], dtype=torch.float64)) / math.sqrt(6)
    return b.to(dtype)


def product_table() -> Tensor:
    """Table T with (XY)_c = Σ_ab T[a, b, c] X_a Y_b in the basis of :func:`basis`; float64."""
    b = basis()
    return torch.einsum("aik,bkj,cij->abc", b, b, b)


def layer_table(both: bool) -> Tensor:
    """As :func:`product_table`, of YM+MY (in O(3)) or 2MY (in SO(3))."""
    table = product_table()
    turned = table.transpose(0, 1)
    return table + turned if both else 2 * turned


def square_table() -> Tensor:
    """As :func:`product_table`, of XX: symmetric in its factors."""
    table = product_table()
    return (table + table.transpose(0, 1)) / 2
