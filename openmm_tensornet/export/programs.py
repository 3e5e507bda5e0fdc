"""The operators that forces call. They find, or make, the programs of a specification in this process.

A module that OpenMM holds, copies or writes to XML consists of the bytes of its specification and of their hash. So copies and files are
no larger than the weights, all copies in a process share one program for each device, and nothing that was stored is run.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..common.atoms import Atoms
from ..common.float32 import ieee_float32
from ..common.interrupts import apart, deliver
from ..common.module import Module
from ..graph.capture import declare_module
from ..kernels.operators import available
from ..static.potential import StaticPotential
from .modules import keep_attributes
from .specification import Specification, key_of

# Replicas are evaluated in blocks of about so many atoms, whose intermediate values stay in a CPU's cache: 64 alanine
# dipeptides at once take three times as long.
BLOCK_ATOMS = 96


class Replicas(Module):
    """Equal replicas without a box, block by block.

    Parameters
    ----------
    block : nn.Module
        Program for a block of them: positions to energies and forces.
    members : Tensor of int64, shape (blocks, atoms of a block)
        The atoms of each block.
    """

    def __init__(self, block: nn.Module, members: Tensor):
        super().__init__()
        self.block = block
        self.register_buffer("members", members)
        self.register_buffer("place", torch.argsort(members.flatten()))

    def forward(self, positions: Tensor, boxvectors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        energies, forces = [], []
        for atoms in self.members.unbind(0):
            energy, force = self.block(positions.index_select(0, atoms))
            energies.append(energy)
            forces.append(force)
        energy, force = torch.cat(energies), torch.cat(forces).index_select(0, self.place)
        return energy, torch.add(force, energy.sum(), alpha=0)  # NaN of one makes all forces NaN


def replica_blocks(atoms: Atoms) -> Tensor | None:
    """The atoms of each block of equal replicas, shape (blocks, atoms of a block); None where there is but one block."""
    numbers, replicas, charges = atoms.tensors()
    sizes = torch.bincount(replicas, minlength=len(charges))
    if len(sizes) == 1 or int(sizes.min()) != int(sizes.max()) or len(set(atoms.charges)) > 1:
        return None
    members = torch.argsort(replicas, stable=True).view(len(sizes), -1)
    if bool((numbers[members] != numbers[members[0]]).any()):
        return None
    fitting = max(1, BLOCK_ATOMS // members.shape[1])
    count = max(k for k in range(1, min(fitting, len(sizes)) + 1) if len(sizes) % k == 0)
    return None if count == len(sizes) else members.view(len(sizes) // count, -1)


def cpu_program(
    specification: Specification, potential: StaticPotential, finish: Callable[[fx.GraphModule], nn.Module]
) -> nn.Module:
    """What runs on a CPU; `finish` is given each flat graph."""

    def own(potential: StaticPotential) -> nn.Module:
        if not potential.options.fused:
            return finish(potential.program)
        if not available() and specification.options.kernels == "auto":  # a file from where numba is
            return finish(potential.gpu_program)
        from ..kernels.lowering import lower  # which needs numba

        return finish(lower(potential.program))

    atoms = specification.atoms
    blocks = None if specification.options.periodic or potential.capacity is not None else replica_blocks(atoms)
    if blocks is None:
        return own(potential)
    members = blocks[0].tolist()
    replicas = [atoms.replicas[k] for k in members]
    first = sorted(set(replicas))
    numbers, charges = [atoms.numbers[k] for k in members], [atoms.charges[m] for m in first]
    block = Atoms.make(numbers, [first.index(m) for m in replicas], charges)
    return Replicas(own(dataclasses.replace(specification, atoms=block).potential()), blocks)


class _Prepared(NamedTuple):
    """Programs on one device, and the memories of the data with which they were asked for: a CUDA graph needs a program to stay."""

    evaluate: Callable[..., tuple[Tensor, Tensor]]
    charges: Callable[..., Tensor] | None
    users: dict[int, StorageWeakRef]


_LOCK = threading.RLock()
_PREPARED: dict[tuple[str, torch.device, bool], _Prepared] = {}
_MADE: dict[str, tuple[Specification, StaticPotential]] = {}


@contextmanager
def made(key: str, specification: Specification, potential: StaticPotential) -> Iterator[None]:
    """Meanwhile, let the operators take a potential that has been made already."""
    _MADE[key] = specification, potential
    try:
        yield
    finally:
        del _MADE[key]


def _make(data: Tensor, key: str) -> tuple[Specification, StaticPotential]:
    if key in _MADE:
        return _MADE[key]
    content = data.cpu().numpy().tobytes()
    if key_of(content) != key:
        raise ValueError("TensorNet force: its data are damaged; make the force again")
    specification = Specification.unpack(content)
    return specification, specification.potential()


def _prepare(data: Tensor, key: str, scripted: bool) -> _Prepared:
    specification, potential = _make(data, key)
    program: Any
    if data.device.type == "cpu":
        fused = potential.options.fused and available()  # which are few calls in any case
        program = cpu_program(specification, potential, _finish(scripted and not fused))
    else:
        program = _finish(scripted)(potential.gpu_program.to(data.device))
    charges = potential.charge_program if data.device.type == "cpu" else potential.gpu_charge_program
    charges = None if charges is None else charges.to(data.device)
    if data.device.type == "cuda":
        torch.cuda.synchronize(data.device)  # the caller's stream does not wait for what this thread has copied there
    return _Prepared(program, charges, {})


def _finish(scripted: bool) -> Callable[[fx.GraphModule], nn.Module]:
    """What makes of a flat graph what is run: TorchScript, or itself."""
    if not scripted:
        return lambda program: program
    from .torchscript import compiled  # deprecated in PyTorch, and loaded for TorchForce alone

    return compiled


def _prepared(data: Tensor, key: str, scripted: bool) -> _Prepared:
    storage, wanted = data.untyped_storage(), (key, data.device, scripted)
    found = _PREPARED.get(wanted)
    if found is None or storage._cdata not in found.users:
        with _LOCK:
            found = _PREPARED.get(wanted)
            if found is None:
                for other, prepared in list(_PREPARED.items()):
                    if all(user.expired() for user in prepared.users.values()):
                        del _PREPARED[other]
                # In a thread of its own, since an operator's backward pass is out of reach inside of another operator.
                found = _PREPARED[wanted] = apart(_prepare, data, key, scripted)
            found.users[storage._cdata] = StorageWeakRef(storage)
    return found


_NAMESPACE = "openmm_tensornet"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
_GIVEN = "Tensor positions, Tensor? box, Tensor data, str key"
# What XML of an earlier TorchForce calls has no `scripted`.
_LIBRARY.define(f"potential({_GIVEN}, int replicas, bool scripted=True) -> (Tensor, Tensor)")
_LIBRARY.define(f"partial_charges({_GIVEN}, bool scripted=True) -> Tensor")


@ieee_float32
def potential(
    positions: Tensor, box: Tensor | None, data: Tensor, key: str, replicas: int, scripted: bool = True
) -> tuple[Tensor, Tensor]:
    """Energies and forces: what the operator of this name does on each device."""
    evaluate = _prepared(data, key, scripted).evaluate
    return evaluate(positions) if box is None else evaluate(positions, box)


@ieee_float32
def _partial_charges(positions: Tensor, box: Tensor | None, data: Tensor, key: str, scripted: bool = True) -> Tensor:
    charges = _prepared(data, key, scripted).charges
    assert charges is not None
    return charges(positions) if box is None else charges(positions, box)


def _fake_potential(positions: Tensor, box: Tensor | None, data: Tensor, key: str, replicas: int, *_):
    return positions.new_empty(replicas, dtype=torch.float64), torch.empty_like(positions, dtype=torch.float64)


def _fake_charges(positions: Tensor, *_):
    return positions.new_empty(positions.shape[0], dtype=torch.float64)


for _name, _run, _fake in (
    ("potential", potential, _fake_potential),
    ("partial_charges", _partial_charges, _fake_charges),
):
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, deliver(_run), _device)
    torch.library.register_fake(f"{_NAMESPACE}::{_name}", _fake, lib=_LIBRARY)


def _checked(positions: Tensor, box: Tensor | None, data: Tensor, key: str, replicas: int, scripted: bool = True):
    return _finish(scripted)(_make(data, key)[1].gpu_program)


declare_module(f"{_NAMESPACE}::potential", _checked)


class Potential(Module):
    """What a force's module calls: energies and forces.

    Parameters
    ----------
    data : Tensor of uint8
        Bytes of a specification.
    key : str
        Their hash, by which programs are known: on a GPU the bytes themselves would be out of reach during a capture.
    replicas : int
    scripted : bool
        Whether programs of PyTorch's own operators run as TorchScript, in about three quarters of the time on a CPU, or in Python.
    """

    def __init__(self, data: Tensor, key: str, replicas: int, scripted: bool):
        super().__init__()
        self.register_buffer("data", data)
        self.key, self.replicas, self.scripted = key, replicas, scripted

    def forward(self, positions: Tensor, boxvectors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        keep_attributes(positions, [self.data])
        return torch.ops.openmm_tensornet.potential(
            positions, boxvectors, self.data, self.key, self.replicas, self.scripted
        )


class PartialCharges(Potential):
    """Partial charges."""

    def forward(self, positions: Tensor, boxvectors: Tensor | None = None):  # type: ignore[override]
        return torch.ops.openmm_tensornet.partial_charges(positions, boxvectors, self.data, self.key, self.scripted)
