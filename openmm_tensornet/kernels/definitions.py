"""What each fused operator computes, in plain differentiable PyTorch; the tests compare values and gradients.

Arguments and shapes are those of :mod:`.operators`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import tensors
from ..neighbors import all_pairs, minimum_image

EPSILON = 1e-5  # of LayerNorm


def near_pairs(
    positions: Tensor, box: Tensor, molecules: Tensor, cutoff: float, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs i<j of one molecule closer than the cutoff, in any order, (2, capacity); their vectors; how many there are, (1,).

    If they are too many, which are left out is undefined; a coordinate that is not finite counts as too many. Unused
    places name atom 0 twice, at twice the cutoff. `box` has shape (3, 3), or (0, 3) where there is none.
    """
    pairs = all_pairs(molecules)
    vector = positions[pairs[0]] - positions[pairs[1]]
    if len(box):
        vector = minimum_image(vector, box)
    near = ~((vector * vector).sum(1) >= cutoff**2)
    found = near.sum() if positions.isfinite().all() else torch.tensor(capacity + 1)
    pairs, vector = pairs[:, near][:, :capacity], vector[near][:capacity]
    room = capacity - pairs.shape[1]
    far = torch.tensor([[2 * cutoff, 0.0, 0.0]], dtype=vector.dtype).expand(room, 3)
    return torch.nn.functional.pad(pairs, (0, room)), torch.cat((vector, far)), found.view(1)


def direction(r: Tensor) -> tuple[Tensor, Tensor]:
    """Distance and unit vector of vectors, shape (P, 3)."""
    distance = torch.linalg.vector_norm(r, dim=-1)
    return distance, r / distance.unsqueeze(-1)


def functions(distance: Tensor, table: Tensor, lower: float, step: float) -> Tensor:
    """Functions of the distance, shape (P, 3, F), from coefficients, shape (K+2, 4, 3F), of K intervals from `lower` on.

    The first row is for what is closer, the last one for what is farther away.
    """
    place = (distance.double() - lower) / step + 1
    row = place.detach().floor().nan_to_num(0).clamp(0, table.shape[0] - 1).long()
    t = (place - row).to(table.dtype).unsqueeze(-1)
    c = table[row]
    values = c[:, 0] + t * (c[:, 1] + t * (c[:, 2] + t * c[:, 3]))
    return values.unflatten(1, (3, -1))


def geometry(unit: Tensor) -> Tensor:
    """Components of 𝟙, skew(u) and uuᵀ−𝟙/3, each part's constant factor left to the functions; shape (9, P)."""
    outer = (unit.unsqueeze(2) * unit.unsqueeze(1)).flatten(1)
    symmetric = outer @ tensors.basis(unit.dtype)[4:].flatten(1).T
    return torch.cat((torch.ones_like(unit[:, :1]), unit, symmetric), dim=1).T


def embed(
    distance: Tensor, unit: Tensor, pairs: Tensor, receiver: Tensor, sender: Tensor, own: Tensor,
    table: Tensor, lower: float, step: float,
) -> Tensor:  # fmt: skip
    """Σ_j (receiver_i + sender_j) f(d_ij) ⊙ geometry(u_ij), (9, A, F), over pairs i<j in both directions; `own` adds to I."""
    f = by_component(functions(distance, table, lower, step))
    i, j = pairs
    x = torch.cat((own.unsqueeze(0), own.new_zeros(8, *own.shape)))
    x = x.index_add(1, i, f * geometry(unit).unsqueeze(-1) * (receiver[i] + sender[j]))
    return x.index_add(1, j, f * geometry(-unit).unsqueeze(-1) * (receiver[j] + sender[i]))


def message(
    distance: Tensor, pairs: Tensor, own: Tensor, table: Tensor, lower: float, step: float, y: Tensor
) -> Tensor:
    """own ⊙ Y_i + Σ_j f(d_ij) ⊙ Y_j over pairs i<j in both directions; (9, A, F), `own` of shape (9, F)."""
    f = by_component(functions(distance, table, lower, step))
    i, j = pairs
    return (own.unsqueeze(1) * y).index_add(1, i, f * y[:, j]).index_add(1, j, f * y[:, i])


def pair_forces(pairs: Tensor, forces: Tensor, start: Tensor) -> Tensor:
    """Forces of pairs, (P, 3), on their first atoms, and the opposite on their second ones, added to `start`, (A, 3), float64."""
    return start.index_add(0, pairs[0], forces.double()).index_add(0, pairs[1], forces.double(), alpha=-1)


def block_message(weight: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    """Σ_j scale_ij weight_ij ⊙ Y_j over the n slots j of i's block; (9, A, F), weights (A, n, 3, F), scale (A, n)."""
    atoms, n = scale.shape
    f = by_component((weight * scale[:, :, None, None]).flatten(0, 1)).unflatten(1, (atoms // n, n, n))
    return (f * y.unflatten(1, (atoms // n, 1, n))).sum(3).flatten(1, 2)


def by_component(parts: Tensor) -> Tensor:
    """Repeat each part's values for its components, (P, 3, F) to (9, P, F)."""
    return torch.repeat_interleave(parts, torch.tensor(tensors.PART_SIZES), dim=1).transpose(0, 1)


def norm_features(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """LayerNorm of ‖x‖², shape (A, F)."""
    return torch.nn.functional.layer_norm((x * x).sum(0), weight.shape, weight, bias, EPSILON)


def part_features(x: Tensor, scalar: float, weight: Tensor, bias: Tensor) -> Tensor:
    """LayerNorm of (scalar·I², ‖A‖², ‖S‖²), shape (A, 3F)."""
    i, a, s = ((part * part).sum(0) for part in x.split(tensors.PART_SIZES))
    return torch.nn.functional.layer_norm(torch.cat((scalar * i, a, s), dim=1), weight.shape, weight, bias, EPSILON)


def normalize(x: Tensor) -> Tensor:
    """x/(‖x‖²+1)."""
    return normalized(x, True)


def gate(x: Tensor, gates: Tensor, normalize: bool) -> Tensor:
    """x times its part's gate, gates of shape (A, 3F), divided by ‖·‖²+1 on demand."""
    return normalized(x * by_component(gates.unflatten(1, (3, -1))), normalize)


def product(y: Tensor, m: Tensor, factor: Tensor, terms: Tensor, weights: Tensor) -> Tensor:
    """P/(‖P‖²+1) of P = factor·(bilinear product of y and m), `factor` of shape (A,)."""
    return normalized(factor.unsqueeze(-1) * bilinear(y, m, terms, weights), True)


def plus_square(x: Tensor, d: Tensor, factor: Tensor, terms: Tensor, weights: Tensor, normalize: bool) -> Tensor:
    """x + d + factor·(bilinear product of d with itself), divided by ‖·‖²+1 on demand."""
    return normalized(x + d + factor.unsqueeze(-1) * bilinear(d, d, terms, weights), normalize)


def bilinear(y: Tensor, m: Tensor, terms: Tensor, weights: Tensor) -> Tensor:
    """Component c is the sum of weight·y_p·m_q over terms (c, p, q); terms of shape (T, 3)."""
    c, p, q = terms.T
    return torch.zeros_like(y).index_add(0, c, weights[:, None, None] * y[p] * m[q])


def normalized(x: Tensor, normalize: bool) -> Tensor:
    """x/(‖x‖²+1), or x."""
    return x / ((x * x).sum(0) + 1) if normalize else x
