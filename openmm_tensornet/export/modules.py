"""What forces call, as modules that run in Python and that TorchScript can compile."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..common.module import Module


def keep_attributes(x: Tensor, tensors: list[Tensor]) -> None:
    """No-op that keeps freezing from making constants of tensors: they seem to be written.

    Constants stay in memory as long as the force exists, for every Context that was ever made of it.
    """
    if x.dim() == 0:
        for tensor in tensors:
            tensor.zero_()


class OfAtoms(Module):
    """A program for the potential's atoms that takes positions of the whole System, shape (S, 3), and box vectors, or None."""

    def __init__(self, program: nn.Module, atoms: Tensor | None, count: int, periodic: bool):
        super().__init__()
        self.program, self.count, self.periodic = program, count, periodic
        self.subset = atoms is not None
        self.largest = int(atoms.max()) if atoms is not None else count - 1
        self.register_buffer("atoms", atoms if atoms is not None else torch.empty(0, dtype=torch.long))

    def check(self, positions: Tensor, boxvectors: Tensor | None):
        """Refuse a System of another size (a shape is known without asking the device), and another kind of boundaries."""
        if not self.subset and positions.size(0) != self.count:
            raise RuntimeError(
                "TensorNetForce: the System has another number of particles than the force has atoms; pass atoms="
            )
        if positions.size(0) <= self.largest:  # a gather would read other memory
            raise RuntimeError(
                f"atoms: expected indices below the number of the System's particles, {positions.size(0)}, received {self.largest}; "
                "make the force with the indices of this System"
            )
        if self.periodic != (boxvectors is not None):
            raise RuntimeError(
                f"boxvectors: a program made with periodic={self.periodic} received the other boundaries; call "
                f"setUsesPeriodicBoundaryConditions({self.periodic}) on the TorchForce"
            )

    def run(self, positions: Tensor, boxvectors: Tensor | None):
        """What the program gives for the potential's atoms."""
        if self.subset:
            positions = positions.index_select(0, self.atoms)
        return self.program(positions, None if boxvectors is None else boxvectors.to(positions.dtype))


class Charges(OfAtoms):
    """Partial charges, shape (N,)."""

    def forward(self, positions: Tensor, boxvectors: Tensor | None = None):
        self.check(positions, boxvectors)
        return self.run(positions, boxvectors)


class EnergyAndForces(OfAtoms):
    """What TorchForce calls: positions (S, 3) of the whole System, and box vectors, to (energy, forces).

    The results lie in the same memory at every call. On CUDA TorchForce captures one graph that gives the energy alone and one that
    gives both, but reads the results of the last capture whichever it replays.

    The CPU platforms hand over positions that require gradients; their `data` do not, and nothing is recorded. A `detach` would
    not do, since freezing removes it, nor a `no_grad` block, in which an exception (of a signal, say) ends the process.
    """

    def __init__(self, program: nn.Module, charges: nn.Module | None, atoms: Tensor | None, count: int, periodic: bool):
        super().__init__(program, atoms, count, periodic)
        self.metadata = ""
        self.charges = charges  # not run by forward, so that freezing drops it
        self.register_buffer("energy", torch.zeros((), dtype=torch.float64))
        # One for each dtype of positions, since on a GPU nothing may convert it later.
        self.register_buffer("forces_single", torch.zeros(0, 3))
        self.register_buffer("forces_double", torch.zeros(0, 3, dtype=torch.float64))

    def forward(self, positions: Tensor, boxvectors: Tensor | None = None):
        energies, forces = self.evaluate(positions, boxvectors)
        own = self.forces_double if forces.dtype == torch.float64 else self.forces_single
        if own.size(0) != forces.size(0):  # at the first call; from then on they stay in one place
            own.set_(torch.zeros_like(forces))
        return self.energy.copy_(energies.sum()), own.copy_(forces)

    def evaluate(self, positions: Tensor, boxvectors: Tensor | None = None):
        """Energies of the replicas, shape (M,), and forces (S, 3)."""
        self.check(positions, boxvectors)
        positions = positions.data
        energies, forces = self.run(positions, boxvectors)
        forces = forces.to(positions.dtype)
        if self.subset:
            forces = torch.zeros_like(positions).index_copy(0, self.atoms, forces)
        return energies, forces


class Scaled(Module):
    """A module that TorchForce calls, times a global parameter by which it differentiates the energy.

    TorchForce passes box vectors, where it does, before the parameter, which therefore has the second or the third place.
    """

    def __init__(self, plain: nn.Module, metadata: str):
        super().__init__()
        self.plain, self.metadata = plain, metadata

    def forward(self, positions: Tensor, second: Tensor, third: Tensor | None = None):
        if third is None:
            energy, forces = self.plain(positions)
            scale = second
        else:
            energy, forces = self.plain(positions, second)
            scale = third
        # The scale has shape (), or (1,) on CUDA, where its dtype would win over that of the 0-d energy.
        return energy * scale.to(energy.dtype), forces * scale.data.to(forces.dtype)


class ByDevice(Module):
    """Two programs that compute the same, for GPUs and for CPUs."""

    def __init__(self, on_gpu: nn.Module, on_cpu: nn.Module):
        super().__init__()
        self.on_gpu, self.on_cpu = on_gpu, on_cpu

    def forward(self, positions: Tensor, boxvectors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if positions.is_cuda:
            energies, forces = self.on_gpu(positions, boxvectors)
        else:
            energies, forces = self.on_cpu(positions, boxvectors)
        return energies, forces
