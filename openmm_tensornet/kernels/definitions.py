"""What each fused operator computes, in plain differentiable PyTorch; the tests compare values and gradients.

Arguments and shapes are those of :mod:`.table`. What programs for GPUs alone are made of has no kernel for CPUs: there these
functions are run, those of the backward pass too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..models import tensors
from ..models.coulomb import coulomb_interaction, coulomb_slope
from ..models.tensornet2 import SMALLEST_SHARE
from ..neighbors.reference import all_pairs, minimum_image
from .intervals import place

EPSILON = 1e-5  # of LayerNorm


def near_pairs(positions: Tensor, box: Tensor, replicas: Tensor, cutoff: float, capacity: int) -> tuple[Tensor, Tensor]:
    """Pairs i<j of one replica closer than the cutoff, in any order, (2, capacity), and how many there are, (1,).

    If they are too many, which are left out is undefined; a coordinate that is not finite counts as too many. Unused
    places name atom 0 twice. `box` has shape (3, 3), or (0, 3) where there is none.
    """
    pairs = all_pairs(replicas)
    vector = vectors(positions, box, pairs)
    near = ~((vector * vector).sum(1) >= cutoff**2)
    found = near.sum() if positions.isfinite().all() else torch.tensor(capacity + 1)
    pairs = pairs[:, near][:, :capacity]
    return torch.nn.functional.pad(pairs, (0, capacity - pairs.shape[1])), found.view(1)


def by_atom(pairs: Tensor, atoms: int) -> Tensor:
    """Which pairs an atom is in, shape (A+1+2P,): where each atom's entries begin, and where the last one's end; then the entries.

    The entry of pair p is 2p for its first atom and 2p+1 for its second one. Pairs of an atom with itself, which stand for none, are not
    among them; what is left at the end is undefined.
    """
    count = pairs.shape[1]
    atom = torch.where(pairs[0] == pairs[1], atoms, pairs).T.flatten()
    atom, entries = torch.sort(atom, stable=True)
    begin = torch.searchsorted(atom, torch.arange(atoms + 1, device=pairs.device))
    return torch.cat((begin, entries)) if count else begin


def vectors(positions: Tensor, box: Tensor, pairs: Tensor) -> Tensor:
    """x_i − x_j, (P, 3), to the nearest image where there is a box."""
    vector = positions[pairs[0]] - positions[pairs[1]]
    return minimum_image(vector, box) if len(box) else vector


def geometry(
    positions: Tensor, box: Tensor, pairs: Tensor, by_atom: Tensor, far: float, single: bool
) -> tuple[Tensor, Tensor]:
    """Distance, (P,), and unit vector, (P, 3); `far` and zero for a pair of an atom with itself."""
    dtype = torch.float32 if single else torch.float64
    same = pairs[0] == pairs[1]
    r = vectors(positions, box, pairs).to(dtype)
    r = torch.where(same.unsqueeze(1), torch.tensor([far, 0, 0], dtype=dtype), r)
    distance = torch.linalg.vector_norm(r, dim=-1)
    return distance, torch.where(same.unsqueeze(1), 0, r / distance.unsqueeze(-1))


def _interval(distance: Tensor, table: Tensor, cutoff: float) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of each distance's interval, (P, 4, G), the place in it, (P, 1), and its derivative by the distance, (P, 1)."""
    where, rate = place(distance.double(), cutoff, table.shape[0] - 2)
    row = where.detach().floor().nan_to_num(0).clamp(0, table.shape[0] - 1).long()
    row = torch.where(distance > 0, row, 0)
    return table[row], (where - row).to(table.dtype).unsqueeze(-1), rate.to(table.dtype).unsqueeze(-1)


def functions(distance: Tensor, table: Tensor, cutoff: float) -> Tensor:
    """Functions of the distance, shape (P, G), from coefficients, shape (K+2, 4, G), of K intervals.

    The first row is for a distance that is NaN or zero, the last one for what is beyond the cutoff.
    """
    c, t, _ = _interval(distance, table, cutoff)
    return c[:, 0] + t * (c[:, 1] + t * (c[:, 2] + t * c[:, 3]))


def slopes(distance: Tensor, table: Tensor, cutoff: float) -> Tensor:
    """Their derivatives by the distance."""
    c, t, rate = _interval(distance, table, cutoff)
    return (c[:, 1] + t * (2 * c[:, 2] + 3 * t * c[:, 3])) * rate


def angular(unit: Tensor) -> Tensor:
    """Components of 𝟙, skew(u) and uuᵀ−𝟙/3, each part's constant factor left to the functions; shape (9, P)."""
    outer = (unit.unsqueeze(2) * unit.unsqueeze(1)).flatten(1)
    symmetric = outer @ tensors.basis(unit.dtype)[4:].flatten(1).T
    return torch.cat((torch.ones_like(unit[:, :1]), unit, symmetric), dim=1).T


def embed(
    distance: Tensor, unit: Tensor, pairs: Tensor, by_atom: Tensor, receiver: Tensor, sender: Tensor, own: Tensor,
    table: Tensor, cutoff: float,
) -> Tensor:  # fmt: skip
    """Σ_j (receiver_i + sender_j) f(d_ij) ⊙ angular(u_ij), (9, A, F), over pairs i<j in both directions; `own` adds to I."""
    f = by_component(functions(distance, table, cutoff).unflatten(1, (3, -1)))
    i, j = pairs
    x = torch.cat((own.unsqueeze(0), own.new_zeros(8, *own.shape)))
    x = x.index_add(1, i, f * angular(unit).unsqueeze(-1) * (receiver[i] + sender[j]))
    return x.index_add(1, j, f * angular(-unit).unsqueeze(-1) * (receiver[j] + sender[i]))


def interact(
    distance: Tensor, pairs: Tensor, by_atom: Tensor, own: Tensor, table: Tensor, cutoff: float, y: Tensor,
    factor: Tensor, both: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The product of Y with its message, and the message: M_i = own ⊙ Y_i + Σ_j f(d_ij) ⊙ Y_j over pairs i<j in both directions.

    Both (9, A, F); `own` has shape (9, F).
    """
    f = by_component(functions(distance, table, cutoff).unflatten(1, (3, -1)))
    i, j = pairs
    m = (own.unsqueeze(1) * y).index_add(1, i, f * y[:, j]).index_add(1, j, f * y[:, i])
    return product(y, m, factor, both), m


def block_message(weight: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    """Σ_j scale_ij weight_ij ⊙ Y_j over the n slots j of i's block; (9, A, F), weights (A, n, 3, F), scale (A, n)."""
    atoms, n = scale.shape
    f = by_component((weight * scale[:, :, None, None]).flatten(0, 1)).unflatten(1, (atoms // n, n, n))
    return (f * y.unflatten(1, (atoms // n, 1, n))).sum(3).flatten(1, 2)


def _directed(pairs: Tensor, atoms: int) -> Tensor:
    """Receivers and senders, (2, E): the atoms themselves, then pairs, then these turned around."""
    itself = torch.arange(atoms, device=pairs.device).expand(2, -1)
    return torch.cat((itself, pairs, pairs.flip(0)), dim=1)


def charge_message(
    distance: Tensor, pairs: Tensor, table: Tensor, cutoff: float, own: Tensor, terms: Tensor,
    panels1: Tensor, bias1: Tensor, panels2: Tensor, bias2: Tensor, y: Tensor,
) -> Tensor:  # fmt: skip
    """M_i = Σ_j c(d_ij) σ(L₂σ(L₁σ(f(d_ij) + receiver_i + sender_j))) ⊙ Y_j over pairs i<j in both directions, and i itself; (9, A, F).

    Functions f and then c from the table, shape (K+2, 4, F+1), and for an atom itself `own`, (F+1,); `terms` of receivers and then
    of senders, (A, 2F). Weights are packed as :func:`openmm_tensornet.kernels.cpu.matmul.pack` does it. The operator gives three more
    results, for the backward pass alone.
    """
    atoms, (receiver, sender) = len(terms), terms.chunk(2, dim=1)
    i, j = _directed(pairs, atoms)
    f = functions(distance, table, cutoff)
    *share, c = torch.cat((own.expand(atoms, -1), f, f)).tensor_split((receiver.shape[1],), dim=1)
    h = torch.nn.functional.silu(share[0] + receiver[i] + sender[j])
    for panels, bias in ((panels1, bias1), (panels2, bias2)):
        h = torch.nn.functional.silu(torch.addmm(bias, h, unpack(panels, h.shape[1], len(bias))))
    w = by_component((c * h).unflatten(1, (3, -1)))
    return torch.zeros_like(y).index_add(1, i, w * y[:, j])


def pair_terms(
    distance: Tensor, pairs: Tensor, by_atom: Tensor, table: Tensor, cutoff: float, own: Tensor, terms: Tensor
) -> tuple[Tensor, Tensor]:
    """z_ij = f(d_ij) + receiver_i + sender_j of A atoms themselves, then pairs, then these turned around, and σ(z); both (A+2P, F).

    Arguments as of :func:`charge_message`.
    """
    atoms, (receiver, sender) = len(terms), terms.chunk(2, dim=1)
    i, j = _directed(pairs, atoms)
    f = functions(distance, table, cutoff)[:, :-1]
    z = torch.cat((own[:-1].expand(atoms, -1), f, f)) + receiver[i] + sender[j]
    return z, torch.nn.functional.silu(z)


def pair_terms_backward(
    g_h: Tensor, g_through: Tensor, distance: Tensor, pairs: Tensor, by_atom: Tensor, table: Tensor, cutoff: float,
    z: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    g, atoms = _silu_backward(g_h, z), len(z) - 2 * len(distance)
    i, j = _directed(pairs, atoms)
    zeros = g.new_zeros(atoms, g.shape[1])
    forth, back = g[atoms:].chunk(2)
    along = (slopes(distance, table, cutoff)[:, :-1] * (forth + back)).sum(1)
    return g_through + along, torch.cat((zeros.index_add(0, i, g), zeros.index_add(0, j, g)), dim=1)


def directed_message(
    distance: Tensor, pairs: Tensor, by_atom: Tensor, table: Tensor, cutoff: float, own: Tensor, z: Tensor, y: Tensor
) -> Tensor:
    """M_i = Σ_j c(d_ij) σ(z_ij) ⊙ Y_j, (9, A, F), of z, (A+2P, 3F), in the order of :func:`pair_terms`; c is the table's last function."""
    i, j = _directed(pairs, y.shape[1])
    w = by_component((_cutoffs(distance, table, cutoff, own, y) * torch.nn.functional.silu(z)).unflatten(1, (3, -1)))
    return torch.zeros_like(y).index_add(1, i, w * y[:, j])


def _cutoffs(distance: Tensor, table: Tensor, cutoff: float, own: Tensor, y: Tensor) -> Tensor:
    c = functions(distance, table, cutoff)[:, -1:]
    return torch.cat((own[-1].expand(y.shape[1], 1), c, c))


def directed_message_backward(
    g_m: Tensor, distance: Tensor, pairs: Tensor, by_atom: Tensor, table: Tensor, cutoff: float, own: Tensor, z: Tensor,
    y: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    i, j = _directed(pairs, y.shape[1])
    c, h = _cutoffs(distance, table, cutoff, own, y), torch.nn.functional.silu(z)
    products = (g_m[:, i] * y[:, j]).split(tensors.PART_SIZES)
    g = torch.cat([part.sum(0) for part in products], dim=1)
    forth, back = (g * h).sum(1)[y.shape[1] :].chunk(2)
    along = slopes(distance, table, cutoff)[:, -1] * (forth + back)
    w = by_component((c * h).unflatten(1, (3, -1)))
    return along, _silu_backward(c * g, z), torch.zeros_like(y).index_add(1, j, w * g_m[:, i])


def _silu_backward(g: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.silu_backward(g, x)


def perceptron(h: Tensor, affine: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Two or three linear layers with SiLU between them, and what it is taken of, (A, widths together).

    Weights, to multiply from the right, and biases in turn.
    """
    hidden: list[Tensor] = []
    for weight, bias in zip(affine[::2], affine[1::2], strict=True):
        h = torch.addmm(bias, torch.nn.functional.silu(h) if hidden else h, weight)
        hidden.append(h)
    return h, torch.cat(hidden[:-1], dim=1)


def perceptron_backward(g: Tensor, hidden: Tensor, affine: list[Tensor]) -> Tensor:
    first, *rest = affine[::2]
    for weight, x in reversed(list(zip(rest, hidden.split([len(w) for w in rest], dim=1), strict=True))):
        g = _silu_backward(torch.mm(g, weight.T), x)
    return torch.mm(g, first.T)


def coulomb(
    distance: Tensor, pairs: Tensor, by_atom: Tensor, q: Tensor, weights: Tensor, per_nm: float, cutoff: float
) -> Tensor:
    """Σ_j c(d_ij) Σ_k weights_k q_ik q_jk, (A,), of charges (A, K), over pairs i<j in both directions.

    c is :func:`openmm_tensornet.models.coulomb.coulomb_interaction` of the distance times `per_nm`, with no cutoff if it is zero.
    """
    i, j = pairs
    c = coulomb_interaction(distance * per_nm, cutoff or None) * (i != j)
    both = c * (weights * q[i] * q[j]).sum(1)
    return torch.zeros_like(q[:, 0]).index_add(0, i, both).index_add(0, j, both)


def coulomb_backward(
    g: Tensor,
    distance: Tensor,
    pairs: Tensor,
    by_atom: Tensor,
    q: Tensor,
    weights: Tensor,
    per_nm: float,
    cutoff: float,
) -> tuple[Tensor, Tensor]:
    i, j = pairs
    both = (g[i] + g[j]) * (i != j)
    c = (coulomb_interaction(distance * per_nm, cutoff or None) * both).unsqueeze(1)
    g_q = torch.zeros_like(q).index_add(0, i, c * weights * q[j]).index_add(0, j, c * weights * q[i])
    slope = coulomb_slope(distance * per_nm, cutoff or None) * per_nm
    return slope * both * (weights * q[i] * q[j]).sum(1), g_q


def unpack(panels: Tensor, depth: int, columns: int) -> Tensor:
    """A weight, shape (depth, columns), from its panels."""
    width = 64 // panels.element_size()
    return panels.view(-1, depth, width).transpose(0, 1).reshape(depth, -1)[:, :columns]


def by_component(parts: Tensor) -> Tensor:
    """Repeat each part's values for its components, (P, 3, F) to (9, P, F)."""
    return torch.repeat_interleave(parts, torch.tensor(tensors.PART_SIZES), dim=1).transpose(0, 1)


def norm_features(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """LayerNorm of ‖x‖², shape (A, F)."""
    return torch.nn.functional.layer_norm((x * x).sum(0), weight.shape, weight, bias, EPSILON)


def part_features(x: Tensor, scalar: float, square: bool, weight: Tensor, bias: Tensor) -> Tensor:
    """LayerNorm of (scalar·I² or scalar·I, ‖A‖², ‖S‖²), shape (A, 3F)."""
    i, a, s = ((part * part).sum(0) for part in x.split(tensors.PART_SIZES))
    features = torch.cat((scalar * (i if square else x[0]), a, s), dim=1)
    return torch.nn.functional.layer_norm(features, weight.shape, weight, bias, EPSILON)


def equilibrate(h: Tensor, replica: Tensor, charge: Tensor) -> Tensor:
    """q + f²/(Σf² + ε)·(Q − Σq) of h = (q, f), (A, 2K), with sums over each replica's atoms, whose charge Q has shape (M,); (A, K)."""
    q, f = h.chunk(2, dim=1)
    zeros = h.new_zeros(len(charge), q.shape[1])
    total = zeros.index_add(0, replica, f * f) + SMALLEST_SHARE
    missing = charge.unsqueeze(1) - zeros.index_add(0, replica, q)
    return q + f * f * (missing / total)[replica]


def normalize(x: Tensor) -> Tensor:
    """x/(‖x‖²+1)."""
    return normalized(x, True)


def gate(x: Tensor, gates: Tensor, silu: bool, normalize: bool) -> Tensor:
    """x times its part's gate, `gates` or their SiLU, (A, 3F), divided by ‖·‖²+1 on demand."""
    return normalized(x * by_component(activated(gates, silu).unflatten(1, (3, -1))), normalize)


def head(h: Tensor, weight: Tensor, bias: Tensor, silu: bool) -> Tensor:
    """Last linear layer, of `h` or its SiLU, (A, H): weight (H, 1), bias (1,); (A,)."""
    return torch.addmm(bias, activated(h, silu), weight).squeeze(1)


def activated(h: Tensor, silu: bool) -> Tensor:
    """SiLU on demand."""
    return torch.nn.functional.silu(h) if silu else h


def product(y: Tensor, m: Tensor, factor: Tensor, both: bool) -> Tensor:
    """P/(‖P‖²+1) of P = factor·(YM+MY), or factor·2MY; `factor` of shape (A,)."""
    return normalized(factor.unsqueeze(-1) * bilinear(y, m, tensors.layer_table(both)), True)


def plus_square(x: Tensor, d: Tensor, factor: Tensor, normalize: bool) -> Tensor:
    """x + d + factor·DD, divided by ‖·‖²+1 on demand."""
    return normalized(x + d + factor.unsqueeze(-1) * bilinear(d, d, tensors.square_table()), normalize)


def bilinear(y: Tensor, m: Tensor, table: Tensor) -> Tensor:
    """Product of components by a table."""
    return torch.einsum("pqc,paf,qaf->caf", table.to(y.dtype), y, m)


def normalized(x: Tensor, normalize: bool) -> Tensor:
    """x/(‖x‖²+1), or x."""
    return x / ((x * x).sum(0) + 1) if normalize else x
