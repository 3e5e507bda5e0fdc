"""Energies and forces of many geometries of one molecule at once, fast enough to train on a CPU.

The numbers are those of the reference model (a test compares energies, forces and gradients of the weights); only the
order of the arithmetic differs. Tensors are components first, (9, F, B, n) for B geometries of n atoms and F channels, in the
orthonormal basis of :mod:`openmm_tensornet.models.tensors`; functions of the distance are evaluated once for each pair within
the cutoff, and sums over neighbours are products of n×n matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openmm_tensornet.models import tensors
from openmm_tensornet.models.tensornet import TensorNet
from openmm_tensornet.neighbors.reference import all_pairs
from openmm_tensornet.static.aggregation import part_scales, symmetric_components


class _Contiguous(torch.autograd.Function):
    """A tensor, and its gradient, made contiguous: small batched products of other strides run one by one."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.contiguous()

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return _Contiguous.apply(gradients[0])


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return _Contiguous.apply(torch.bmm(_Contiguous.apply(a), _Contiguous.apply(b)))


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Matrix products of matrices of shape (3, 3, K)."""
    return (x.unsqueeze(2) * y.unsqueeze(0)).sum(1)


class MoleculeBatch(nn.Module):
    """A TensorNet evaluated for geometries of one neutral molecule; the weights stay those of `model`.

    Parameters
    ----------
    model : TensorNet
        Of group O(3), reduced by sum, without priors.
    z : Tensor of int64, shape (n,)
        Atomic numbers.
    """

    def __init__(self, model: TensorNet, z: Tensor):
        super().__init__()
        self.model = model
        n = len(z)
        pairs = all_pairs(torch.zeros(n, dtype=torch.long))
        row = torch.zeros(n, n, dtype=torch.long)
        sign = torch.zeros(n, n)
        count = pairs.shape[1]
        row[pairs[0], pairs[1]] = row[pairs[1], pairs[0]] = torch.arange(count)
        sign[pairs[0], pairs[1]], sign[pairs[1], pairs[0]] = 1.0, -1.0
        for name, value in (
            ("z", z),
            ("pairs", pairs),
            ("row", row.flatten()),
            ("sign", sign),
            ("other", 1 - torch.eye(n)),
            ("part", torch.arange(3).repeat_interleave(torch.tensor(tensors.PART_SIZES))),
            ("scales", part_scales().float()),
            ("components", symmetric_components().float()),
            ("basis", tensors.basis().flatten(1).T.contiguous().float()),
        ):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        """Energies, shape (B,), of positions in model lengths, shape (B, n, 3), without `mean`."""
        model, (b, n, _) = self.model, x.shape
        embedding = model.embedding
        vector = x[:, self.pairs[0]] - x[:, self.pairs[1]]  # (B, P, 3)
        distance = torch.linalg.vector_norm(vector, dim=-1)
        unit = vector / distance.unsqueeze(-1)
        functions = self._functions(distance)  # (1 + L, 3, F, B, n, n)
        own = model.radial_functions(distance.new_zeros(1)).squeeze(0)  # (1 + L, 3, F)

        outer = (unit.unsqueeze(-1) * unit.unsqueeze(-2)).flatten(2) @ self.components
        geometry = torch.cat((unit, outer), dim=-1).index_select(1, self.row).view(b, n, n, 8)
        sign = torch.cat((self.sign[..., None].expand(n, n, 3), self.other[..., None].expand(n, n, 5)), dim=-1)
        geometry = geometry * sign
        i, j = (index.flatten() for index in torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij"))
        species = embedding.pair_species(self.z[i], self.z[j]).T.view(-1, n, n)  # (F, n, n)
        w_i, w_a, w_s = (functions[0] * (self.scales.view(3, 1, 1, 1) * species).unsqueeze(2)).unbind(0)
        own_i = own[0, 0] * self.scales[0] * species.diagonal(dim1=1, dim2=2).T  # (n, F)
        scalar = w_i.sum(-1) + own_i.T.unsqueeze(1)
        direction = geometry.flatten(0, 1)  # (B n, n, 8)
        parts = [
            _bmm(w.permute(1, 2, 0, 3).flatten(0, 1), g)
            for w, g in ((w_a, direction[..., :3]), (w_s, direction[..., 3:]))
        ]
        tensor = torch.cat(parts, dim=-1).view(b, n, -1, 8).permute(3, 2, 0, 1)  # (8, F, B, n)
        t = torch.cat((scalar.unsqueeze(0), tensor))
        gates = embedding.gates((t * t).sum(0).permute(1, 2, 0)).permute(2, 3, 0, 1)  # (3, F, B, n)
        t = self._linear(embedding.tensor, t) * gates.index_select(0, self.part)

        for k, layer in enumerate(model.layers, start=1):
            t = t / ((t * t).sum(0) + 1)
            y = self._linear(layer.tensor[:3], t)
            m = self._message(functions[k], y) + own[k].index_select(0, self.part)[..., None, None] * y
            y, m = self._matrices(y), self._matrices(m)
            p = self._components(_product(y, m) + _product(m, y)).view(t.shape)
            d = self._linear(layer.tensor[3:], p / ((p * p).sum(0) + 1))
            square = self._matrices(d)
            t = t + d + self._components(_product(square, square)).view(t.shape)

        square = t * t
        norms = [part.sum(0) for part in square.split(tensors.PART_SIZES)]
        features = torch.cat(norms).permute(1, 2, 0)
        return model.std * model.readout(features).sum(1)

    def _functions(self, distance: Tensor) -> Tensor:
        """Radial functions of each pair of atoms, zero on the diagonal and beyond the cutoff; (1 + L, 3, F, B, n, n)."""
        b, n = distance.shape[0], len(self.z)
        near = (distance < self.model.config.cutoff_upper).flatten()
        place = near.cumsum(0) * near  # 0 is the place of zeros
        place = place.view(b, -1).index_select(1, self.row) * self.other.flatten().long()
        values = self.model.radial_functions(distance.flatten()[near])  # (Q, 1 + L, 3, F)
        values = torch.cat((values.new_zeros(1, *values.shape[1:]), values)).flatten(1).T
        return values.index_select(1, place.flatten()).view(len(self.model.layers) + 1, 3, -1, b, n, n)

    def _linear(self, linears, t: Tensor) -> Tensor:
        """The three parts' linears over channels."""
        weight = torch.stack([linear.weight for linear in linears]).index_select(0, self.part)
        return torch.bmm(weight, t.flatten(2)).view(t.shape)

    def _message(self, weight: Tensor, y: Tensor) -> Tensor:
        """Σ_j w_ij y_j of each part; weights (3, F, B, n, n)."""
        found = []
        for w, part in zip(weight, y.split(tensors.PART_SIZES), strict=True):
            m = _bmm(w.flatten(0, 1), part.permute(1, 2, 3, 0).flatten(0, 1))
            found.append(m.unflatten(0, w.shape[:2]).permute(3, 0, 1, 2))
        return torch.cat(found)

    def _matrices(self, t: Tensor) -> Tensor:
        """3×3 matrices, shape (3, 3, F B n), of components."""
        return (self.basis @ t.flatten(1)).unflatten(0, (3, 3))

    def _components(self, matrices: Tensor) -> Tensor:
        """The reverse of :meth:`_matrices`, shape (9, F B n)."""
        return self.basis.T @ matrices.flatten(0, 1)

    def energy_and_forces(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Energies, shape (B,), and forces, shape (B, n, 3); both can be differentiated by the weights in training mode."""
        x = x.detach().requires_grad_(True)
        with torch.enable_grad():
            energy = self(x)
            (gradient,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
        return energy if self.training else energy.detach(), -gradient
