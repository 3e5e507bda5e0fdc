"""Merge consecutive operators of a flat graph into one call that runs their kernels on a CPU (:mod:`.cpu.program`).

Matrix products with constant weights become kernels too. What there is no kernel for stays as it is, between the calls.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from .cpu.matmul import pack
from .cpu.program import FIELDS, Kernel, encode
from .operators import DTYPES, NAMESPACE

_ATEN = torch.ops.aten
_DOUBLE = torch.float64
_VIEWS = (_ATEN.view.default, _ATEN._unsafe_view.default)
ALIGNMENT = 64  # bytes: a line of the cache
# Base addresses: of what lives within the call, of its constants, real ones and integers; those of inputs and results follow.
ARENA, REAL, INTEGER, FIRST = 0, 1, 2, 3
# Constants of at most so many bytes are copied, so that a call takes few tensors; larger ones are held once.
SMALL = 1 << 16
# Products of more rows stay with the library, which uses several threads.
MOST_ROWS = 4096


class _Place(NamedTuple):
    """One of the results of a node."""

    node: fx.Node
    result: int


class _Array(NamedTuple):
    """A piece of a result, or of a call's constants (`place` is which): where it begins, in bytes, and its shape."""

    place: _Place | int
    offset: int
    shape: tuple[int, ...]


class _Call(NamedTuple):
    kernel: Kernel
    arrays: list[_Array]
    numbers: list[float]


def lower(program: fx.GraphModule) -> fx.GraphModule:
    """A graph that computes the same on a CPU; large buffers are shared.

    Parameters
    ----------
    program : GraphModule
        From :func:`openmm_tensornet.graph.record.flatten`.
    """
    return _Lowering(program).result()


class _Lowering:
    """Takes the nodes one by one: they join the open run of kernels, or are written to the new graph, before the run or after it."""

    def __init__(self, program: fx.GraphModule):
        self.program = program
        self.root, self.graph = nn.Module(), fx.Graph()
        self.written: dict[fx.Node, fx.Node] = {}
        real = [n.meta["tensors"][0].dtype for n in program.graph.nodes if _name(n) == "geometry"]
        self.real = real[0] if real else torch.float32
        self._begin()

    def _begin(self) -> None:
        self.run: list[fx.Node] = []
        self.calls: list[_Call] = []
        self.places: dict[fx.Node, _Place] = {}  # of the nodes of the run, views among them
        self.constants = {REAL: _Constants(self.real), INTEGER: _Constants(torch.int64)}
        self.copies: dict[fx.Node, _Array] = {}  # of small constants of the program

    def result(self) -> fx.GraphModule:
        for node in self.program.graph.nodes:
            self._take(node)
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph)

    # ------------------------------------------------------------------------------------------------------ nodes

    def _take(self, node: fx.Node) -> None:
        inside = [n for n in node.all_input_nodes if n in self.run]
        if inside and (node.target in _VIEWS or node.target is operator.getitem):
            source = inside[0]
            which: Any = node.args[1] if node.target is operator.getitem else self.places[source].result
            self.places[node] = _Place(self.places[source].node, which)
            self.run.append(node)
            return
        calls = self._encode(node)
        if calls:
            self.calls += calls
            self.places[node] = _Place(node, 0)
            self.run.append(node)
            return
        mutable = node.op == "call_function" and getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        if inside or mutable:
            self._close()
        self._write(node)

    def _write(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            name = str(node.target)
            self.root.register_buffer(name, getattr(self.program, name))
        self.written[node] = self.graph.node_copy(node, self.written.__getitem__)

    def _encode(self, node: fx.Node) -> list[_Call] | None:
        """The kernels that compute a node; None where there are none."""
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            return None
        arguments = tuple(t for n in node.all_input_nodes for t in self._tensors(n))
        if not all(t.is_contiguous() for t in (*arguments, *self._tensors(node))):
            return None
        if _name(node) in Kernel.__members__:
            return self._own(node)
        encoder: Callable | None = _ENCODERS.get(node.target)
        return None if encoder is None else encoder(self, node, {t.dtype for t in arguments})

    def _tensors(self, node: fx.Node) -> tuple[Tensor, ...]:
        """A constant, or what is known of the results of a node."""
        return (getattr(self.program, str(node.target)),) if node.op == "get_attr" else node.meta["tensors"]

    def _array(self, node: fx.Node, result: int = 0, flat: bool = False) -> _Array:
        tensor = self._tensors(node)[result]
        shape = (tensor.numel(),) if flat else tuple(tensor.shape)
        kind = {self.real: REAL, torch.int64: INTEGER}.get(tensor.dtype)
        if node.op == "get_attr" and kind is not None and tensor.nbytes <= SMALL:
            if node not in self.copies:
                self.copies[node] = _Array(kind, self.constants[kind].add(tensor.flatten()), shape)
            return self.copies[node]._replace(shape=shape)
        return _Array(self.places.get(node, _Place(node, 0)) if result == 0 else _Place(node, result), 0, shape)

    def _own(self, node: fx.Node) -> list[_Call]:
        arrays = [self._array(a) for a in node.args if isinstance(a, fx.Node)]
        arrays += [self._array(node, k) for k in range(len(self._tensors(node)))]
        numbers = [float(a) for a in node.args if not isinstance(a, fx.Node)]  # type: ignore[arg-type]
        return [_Call(Kernel[_name(node)], arrays, numbers)]

    def silu(self, node: fx.Node, dtypes: set) -> list[_Call] | None:
        if dtypes != {self.real} or node.kwargs:
            return None
        return self._flat(Kernel[node.target._opname], node)  # type: ignore[union-attr]

    def widen(self, node: fx.Node, dtypes: set) -> list[_Call] | None:
        return (
            self._flat(Kernel["widen"], node) if dtypes == {self.real} and node.kwargs == {"dtype": _DOUBLE} else None
        )

    def addmv(self, node: fx.Node, dtypes: set) -> list[_Call] | None:
        if dtypes != {_DOUBLE} or node.kwargs:
            return None
        return [_Call(Kernel["addmv"], [self._array(n) for n in (*node.args, node)], [])]  # type: ignore[arg-type]

    def add(self, node: fx.Node, dtypes: set) -> list[_Call] | None:
        factor: Any = node.kwargs.get("alpha", 1)
        shapes = {tuple(self._tensors(n)[0].shape) for n in (*node.all_input_nodes, node)}
        if dtypes == {self.real} and not node.kwargs and len(node.all_input_nodes) == 2 and len(shapes) == 1:
            return self._flat(Kernel["plus"], node)
        if dtypes != {_DOUBLE} or len(node.all_input_nodes) < 2 or self._tensors(node.args[1])[0].numel() != 1:  # type: ignore[arg-type]
            return None
        return self._flat(Kernel["add"], node, factor)

    def _flat(self, kernel: Kernel, node: fx.Node, *numbers: float) -> list[_Call]:
        """A kernel that works on numbers one by one."""
        return [_Call(kernel, [self._array(n, flat=True) for n in (*node.args, node)], list(numbers))]  # type: ignore[arg-type]

    def product(self, node: fx.Node, dtypes: set) -> list[_Call] | None:
        """Of (start, x, weight) or (x, weight), where matrices of several in a row may be equal: those are one product."""
        *start, x, weight = node.args
        if dtypes != {self.real} or node.kwargs or weight.op != "get_attr":  # type: ignore[union-attr]
            return None
        matrices = self._tensors(weight)[0]  # type: ignore[arg-type]
        matrices = matrices if matrices.dim() == 3 else matrices.unsqueeze(0)
        rows, columns = self._tensors(node)[0].shape[-2:]
        depth, size = matrices.shape[1], matrices.element_size()
        if rows * len(matrices) > MOST_ROWS:
            return None
        calls, first = [], 0
        nothing = _Array(REAL, 0, (0,))
        for last in range(1, len(matrices) + 1):
            if last < len(matrices) and torch.equal(matrices[last], matrices[first]):
                continue
            count, begin = rows * (last - first), rows * first
            x_part = self._array(x)._replace(offset=begin * depth * size, shape=(count, depth))  # type: ignore[arg-type]
            out = self._array(node)._replace(offset=begin * columns * size, shape=(count, columns))
            added = nothing
            if start:
                added = self._array(start[0], flat=True)  # type: ignore[arg-type]
                if added.shape[0] > columns:
                    added = added._replace(offset=out.offset, shape=(count * columns,))
            calls.append(_Call(Kernel["linear"], [x_part, self._pack(matrices[first]), added, out], []))
            first = last
        return calls

    def _pack(self, weight: Tensor) -> _Array:
        panels = pack(weight)
        return _Array(REAL, self.constants[REAL].add(panels), tuple(panels.shape))

    # -------------------------------------------------------------------------------------------------------- runs

    def _close(self) -> None:
        """Write the open run as one call; a single operator of PyTorch's stays what it is."""
        if len(self.calls) < 2 and not any(map(_name, self.run)):
            for node in self.run:
                self._write(node)
        elif self.calls:
            self._write_run()
        self._begin()

    def _write_run(self) -> None:
        inside = set(self.run)
        tensors = {_Place(n, k): t for n in self.run if n.target is not operator.getitem and n.target not in _VIEWS
                   for k, t in enumerate(self._tensors(n))}  # fmt: skip
        arrays = [array for call in self.calls for array in call.arrays]
        places = dict.fromkeys(a.place for a in arrays if isinstance(a.place, _Place))
        inputs = [p.node for p in places if p not in tensors]
        wanted = [n for n in self.run if any(user not in inside for user in n.users)]
        outputs = list(dict.fromkeys(self.places[n] for n in wanted))
        bases = {_Place(n, 0): FIRST + k for k, n in enumerate(inputs)}
        bases |= {place: FIRST + len(inputs) + k for k, place in enumerate(outputs)}
        offsets, arena = _plan(self.calls, {p: t.nbytes for p, t in tensors.items() if p not in bases})

        width = max(len(c.arrays) for c in self.calls)
        code = torch.zeros(len(self.calls), 1 + FIELDS * width, dtype=torch.int64)
        numbers = torch.zeros(len(self.calls), max(1, *(len(c.numbers) for c in self.calls)), dtype=torch.float64)
        for call, row, given in zip(self.calls, code, numbers, strict=True):
            entries = [
                (
                    a.place if isinstance(a.place, int) else bases.get(a.place, ARENA),
                    a.offset + offsets.get(a.place, 0),  # type: ignore[arg-type]
                    a.shape,
                )
                for a in call.arrays
            ]
            encoded = encode(call.kernel, entries)
            row[: len(encoded)] = torch.tensor(encoded)
            given[: len(call.numbers)] = torch.tensor(call.numbers, dtype=_DOUBLE)
        constants = {kind: self._constant(self.constants[kind].together()) for kind in self.constants}
        layout = [len(inputs), *(DTYPES.index(self._tensors(n)[0].dtype) for n in inputs)]
        for place in outputs:
            layout += [DTYPES.index(tensors[place].dtype), tensors[place].dim(), *tensors[place].shape]
        arguments: Any = (
            [self.written[n] for n in inputs],
            *constants.values(),
            *map(self._constant, (code, numbers)),
            arena,
            layout,
        )
        run = self.graph.call_function(torch.ops.openmm_tensornet.run.default, arguments)
        results = {p: self.graph.call_function(operator.getitem, (run, k)) for k, p in enumerate(outputs)}
        for node in wanted:
            found = results[self.places[node]]
            shape = tuple(self._tensors(node)[0].shape)
            if node.target in _VIEWS:
                found = self.graph.call_function(_ATEN.view.default, (found, shape))
            self.written[node] = found

    def _constant(self, value: Tensor) -> fx.Node:
        name = f"run{len(self.root._buffers)}"
        self.root.register_buffer(name, value)
        return self.graph.get_attr(name)


class _Constants:
    """Tensors of one dtype, flat, one after the other, each at the beginning of a line of the cache."""

    def __init__(self, dtype: torch.dtype):
        self.parts = [torch.zeros(ALIGNMENT // dtype.itemsize, dtype=dtype)]  # so that there is one
        self.size = ALIGNMENT

    def add(self, tensor: Tensor) -> int:
        """Where it begins, in bytes."""
        begin = self.size
        self.parts.append(nn.functional.pad(tensor, (0, -tensor.nbytes % ALIGNMENT // tensor.itemsize)))
        self.size += self.parts[-1].nbytes
        return begin

    def together(self) -> Tensor:
        return torch.cat(self.parts)


def _name(node: fx.Node) -> str:
    """Of an operator of this package."""
    namespace, _, name = getattr(getattr(node.target, "_schema", None), "name", "").partition("::")
    return name if namespace == NAMESPACE else ""


def _plan(calls: list[_Call], sizes: dict[_Place, int]) -> tuple[dict[_Place, int], int]:
    """Where in the arena each place lies, and its size: the lowest gap among what is needed at the same time."""
    used: dict[_Place, list[int]] = {}
    for k, call in enumerate(calls):
        for array in call.arrays:
            if array.place in sizes:
                used.setdefault(array.place, []).append(k)  # type: ignore[arg-type]
    taken: list[tuple[int, int, int, int]] = []  # first and last call, begin and end
    offsets: dict[_Place, int] = {}
    for place, when in used.items():
        begin = 0
        for first, last, low, high in sorted(taken, key=lambda t: t[2]):
            if first <= when[-1] and when[0] <= last and low < begin + sizes[place]:
                begin = max(begin, high)
        offsets[place] = begin
        taken.append((when[0], when[-1], begin, begin + math.ceil(sizes[place] / ALIGNMENT) * ALIGNMENT))
    return offsets, max((t[3] for t in taken), default=0)


_ENCODERS: dict = {
    _ATEN.silu.default: _Lowering.silu,
    _ATEN.silu_backward.default: _Lowering.silu,
    _ATEN._to_copy.default: _Lowering.widen,
    _ATEN.addmv.default: _Lowering.addmv,
    _ATEN.add.Tensor: _Lowering.add,
    _ATEN.mm.default: _Lowering.product,
    _ATEN.addmm.default: _Lowering.product,
    _ATEN.bmm.default: _Lowering.product,
    _ATEN.baddbmm.default: _Lowering.product,
}
