"""What OpenMM's plugin does with a module on CUDA, imitated on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common import jit
from .capture import copied


class CapturedModule:
    """What TorchForce does on CUDA with a module that gives energy and forces, with or without CUDA graphs: here on any device.

    With graphs it runs the module some times and captures it, once for evaluations that ask for forces and once for those that ask for
    the energy alone. A capture keeps the memory of inputs and results, to which every replay writes; the results of the last capture
    are read after every replay, whichever graph it was. Parameters are new tensors in every evaluation, which a graph never sees.
    (CudaTorchKernels.cpp of openmm-torch, `execute` and `executeGraph`.)

    Parameters
    ----------
    module : ScriptModule
        Is copied and frozen, as for a Context.
    positions : Tensor, shape (S, 3)
        Gives the size of the System, and the dtype that a platform's precision has.
    box : Tensor, shape (3, 3), optional
    warmup_steps : int or None
        None for no graphs.
    """

    def __init__(
        self,
        module: torch.jit.ScriptModule,
        positions: Tensor,
        box: Tensor | None = None,
        warmup_steps: int | None = 10,
    ):
        own = copied(module)
        self._module = jit.freeze(own) if hasattr(own, "training") else own
        self._inputs = [torch.zeros_like(t) for t in (positions, box) if t is not None]
        self._warmup_steps = warmup_steps
        self._captured: dict[bool, tuple[tuple[Tensor, ...], list[Tensor]]] = {}
        self._results: tuple[Tensor, ...] = ()
        self.derivatives: list[float] = []

    def execute(
        self, positions: Tensor, box: Tensor | None = None, *, forces: bool = True, parameters: tuple[float, ...] = ()
    ) -> tuple[float, Tensor]:
        """The energy, and the forces that would be added where `forces` are asked for.

        Without graphs, `derivatives` then has those of the energy by the parameters.
        """
        given = [t for t in (positions, box) if t is not None]
        for own, value in zip(self._inputs, given, strict=True):
            own.copy_(value)
        values = [torch.tensor([value], requires_grad=True) for value in parameters]
        if self._warmup_steps is None:
            self._results = self._module(*self._inputs, *values)
            if values:
                self._results[0].backward()
                self.derivatives = [float(value.grad) for value in values]  # type: ignore[arg-type]
            return float(self._results[0].detach()), self._results[1].detach().clone()
        if forces not in self._captured:
            for _ in range(self._warmup_steps):
                self._module(*self._inputs, *values)
            self._results = self._module(*self._inputs, *values)
            self._captured[forces] = self._results, values
        memories, captured = self._captured[forces]
        replayed = [value.clone() for value in self._module(*self._inputs, *captured)]
        for memory, value in zip(memories, replayed, strict=True):
            memory.data.copy_(value)
        return float(self._results[0].detach()), self._results[1].detach().clone()
