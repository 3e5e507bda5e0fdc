"""TorchScript: what TorchForce calls, and programs written for its compiler; the only module that knows it."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, fx, nn

from ..common import jit
from ..common.module import Module
from ..graph.capture import copied

_ATEN = torch.ops.aten


def inlined(module: nn.Module) -> torch.jit.ScriptModule:
    """Script a module and write what it calls into its own methods; tensors stay attributes, which move to another device.

    TorchForce freezes the module for each Context. Where that has something to inline, an exception in an operator (of a signal, say)
    ends the process: the interpreter looks up names of functions that freezing has removed.
    """
    scripted = jit.script(module.eval())
    kept = [name for name in ("evaluate", "metadata", "charges", "plain") if hasattr(scripted, name)]
    frozen = jit.freeze(scripted, [*kept, *(name for name, _ in scripted.named_buffers())])
    return copied(frozen)  # whose parts are modules for Python again


def keep_attributes(x: Tensor, tensors: list[Tensor]) -> None:
    """No-op that keeps freezing from making constants of tensors: they seem to be written.

    Constants stay in memory as long as the force exists, for every Context that was ever made of it.
    """
    if x.dim() == 0:
        for tensor in tensors:
            tensor.zero_()


def scriptable(program: fx.GraphModule) -> fx.GraphModule:
    """A copy of a flat graph that `torch.jit.script` takes.

    Overload names and device arguments go, and matrix products are written so that TorchScript's optimiser neither
    splits them (addmm) nor mistakes the shape of a constant left operand (mm, bmm).
    """
    graph = fx.Graph()
    output = graph.graph_copy(program.graph, {})
    graph.output(output)
    first = next(node for node in graph.nodes if node.op == "placeholder")
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        own = [graph.get_attr(name) for name, _ in program.named_buffers()]
        graph.call_function(keep_attributes, (first, own))
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        node.kwargs = {k: v for k, v in node.kwargs.items() if k not in ("layout", "device", "pin_memory")}
        if node.target in (_ATEN.mm.default, _ATEN.bmm.default) and node.args[0].op == "get_attr":
            node.target = torch.matmul
        elif node.target is _ATEN.addmm.default and not node.kwargs:
            bias, left, right = node.args
            with graph.inserting_before(node):
                turned = graph.call_function(torch.ops.aten.t, (right,))
            node.target, node.args = torch.ops.aten.linear, (left, turned, bias)
        elif node.target is _ATEN._to_copy.default:  # nothing to do where the dtype is right already
            node.op, node.target = "call_method", "to"
        else:
            node.target = node.target.overloadpacket
    return fx.GraphModule(program, graph)


def compiled(program: fx.GraphModule) -> torch.jit.ScriptModule:
    """A flat graph as TorchScript, which calls PyTorch's operators faster than Python does and fuses some of them on a GPU."""
    with warnings.catch_warnings():  # about annotations in the class that fx writes, and that TorchScript will go
        warnings.simplefilter("ignore")
        return jit.freeze(jit.script(scriptable(program).eval()))


class OfAtoms(Module):
    """A program for the potential's atoms that takes positions of the whole System, shape (S, 3)."""

    def __init__(self, program: nn.Module, atoms: Tensor | None, count: int):
        super().__init__()
        self.program, self.count = program, count
        self.subset = atoms is not None
        self.largest = int(atoms.max()) if atoms is not None else count - 1
        self.register_buffer("atoms", atoms if atoms is not None else torch.empty(0, dtype=torch.long))

    def check(self, positions: Tensor):
        """Refuse a System of another size (a shape is known without asking the device)."""
        if not self.subset and positions.size(0) != self.count:
            raise RuntimeError(
                "TensorNetForce: the System has another number of particles than the force has atoms; pass atoms="
            )
        if positions.size(0) <= self.largest:  # a gather would read other memory
            raise RuntimeError(
                f"atoms: expected indices below the number of the System's particles, {positions.size(0)}, received {self.largest}; "
                "make the force with the indices of this System"
            )

    def gather(self, positions: Tensor) -> Tensor:
        """Positions of the potential's atoms."""
        return positions.index_select(0, self.atoms) if self.subset else positions


class Charges(OfAtoms):
    """Partial charges, shape (N,), without a box."""

    def forward(self, positions: Tensor):
        self.check(positions)
        return self.program(self.gather(positions))


class PeriodicCharges(OfAtoms):
    """The same with box vectors."""

    def forward(self, positions: Tensor, boxvectors: Tensor):
        self.check(positions)
        return self.program(self.gather(positions), boxvectors.to(positions.dtype))


class Cluster(OfAtoms):
    """What TorchForce calls, without a box: positions (S, 3) of the whole System to (energy, forces).

    The results lie in the same memory at every call. On CUDA TorchForce captures one graph that gives the energy alone and one that
    gives both, but reads the results of the last capture whichever it replays.

    The CPU platforms hand over positions that require gradients; their `data` do not, and nothing is recorded. A `detach` would
    not do, since freezing removes it, nor a `no_grad` block, in which an exception (of a signal, say) ends the process.
    """

    def __init__(self, program: nn.Module, charges: nn.Module | None, atoms: Tensor | None, count: int):
        super().__init__(program, atoms, count)
        self.metadata = ""
        self.charges = charges  # not run by forward, so that freezing drops it
        self.register_buffer("energy", torch.zeros((), dtype=torch.float64))
        # One for each dtype of positions, since on a GPU nothing may convert it later.
        self.register_buffer("forces_single", torch.zeros(0, 3))
        self.register_buffer("forces_double", torch.zeros(0, 3, dtype=torch.float64))

    def forward(self, positions: Tensor):
        energies, forces = self.evaluate(positions)
        return self.fixed(energies, forces)

    def fixed(self, energies: Tensor, forces: Tensor):
        """Energy, shape (), and forces, (S, 3), where they are at every call."""
        own = self.forces_double if forces.dtype == torch.float64 else self.forces_single
        if own.size(0) != forces.size(0):  # at the first call; from then on they stay in one place
            own.set_(torch.zeros_like(forces))
        return self.energy.copy_(energies.sum()), own.copy_(forces)

    @torch.jit.export
    def evaluate(self, positions: Tensor):
        """Energies of the molecules, shape (M,), and forces (S, 3)."""
        self.check(positions)
        positions = positions.data
        energies, forces = self.program(self.gather(positions))
        return energies, self.scatter(positions, forces)

    def scatter(self, positions: Tensor, forces: Tensor) -> Tensor:
        """Forces of all particles of the System."""
        forces = forces.to(positions.dtype)
        if self.subset:
            return torch.zeros_like(positions).index_copy(0, self.atoms, forces)
        return forces


class Periodic(Cluster):
    """The same with box vectors."""

    def forward(self, positions: Tensor, boxvectors: Tensor):  # type: ignore[override]
        energies, forces = self.evaluate(positions, boxvectors)
        return self.fixed(energies, forces)

    @torch.jit.export
    def evaluate(self, positions: Tensor, boxvectors: Tensor):  # type: ignore[override]
        self.check(positions)
        positions = positions.data
        energies, forces = self.program(self.gather(positions), boxvectors.to(positions.dtype))
        return energies, self.scatter(positions, forces)


class Scaled(Module):
    """A module that TorchForce calls, times a global parameter by which it differentiates the energy."""

    def __init__(self, plain: nn.Module, metadata: str):
        super().__init__()
        self.plain, self.metadata = plain, metadata

    def forward(self, positions: Tensor, scale: Tensor):
        energy, forces = self.plain(positions)
        return self.scaled(energy, forces, scale)

    def scaled(self, energy: Tensor, forces: Tensor, scale: Tensor):
        """The scale has shape (), or (1,) on CUDA, where its dtype would win over that of the 0-d energy."""
        return energy * scale.to(energy.dtype), forces * scale.data.to(forces.dtype)


class ScaledPeriodic(Scaled):
    """The same with box vectors."""

    def forward(self, positions: Tensor, boxvectors: Tensor, scale: Tensor):  # type: ignore[override]
        energy, forces = self.plain(positions, boxvectors)
        return self.scaled(energy, forces, scale)


class ByDevice(Module):
    """Two programs that compute the same, for GPUs and for CPUs."""

    def __init__(self, on_gpu: nn.Module, on_cpu: nn.Module):
        super().__init__()
        self.on_gpu, self.on_cpu = on_gpu, on_cpu

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if positions.is_cuda:
            energies, forces = self.on_gpu(positions)
        else:
            energies, forces = self.on_cpu(positions)
        return energies, forces


class PeriodicByDevice(ByDevice):
    """The same with box vectors."""

    def forward(self, positions: Tensor, boxvectors: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if positions.is_cuda:
            energies, forces = self.on_gpu(positions, boxvectors)
        else:
            energies, forces = self.on_cpu(positions, boxvectors)
        return energies, forces
