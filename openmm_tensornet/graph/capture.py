"""Proof, on a machine without a GPU, that a module can be captured in a CUDA graph.

The module is run once on fake tensors of a pretended CUDA device: nothing is computed, but every operator is recorded, and
whatever would need the values of a tensor on the host, a shape that depends on them, or a tensor that lives on the host, is found.
"""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from ..common.interrupts import undisturbed

_ATEN = torch.ops.aten
# Operators that only give another view of their input and launch nothing.
VIEWS = frozenset(
    {
        _ATEN._reshape_alias.default,
        _ATEN._unsafe_view.default,
        _ATEN.alias.default,
        _ATEN.as_strided.default,
        _ATEN.detach.default,
        _ATEN.diagonal.default,
        _ATEN.expand.default,
        _ATEN.narrow.default,
        _ATEN.permute.default,
        _ATEN.select.int,
        _ATEN.slice.Tensor,
        _ATEN.split.Tensor,
        _ATEN.split_with_sizes.default,
        _ATEN.squeeze.default,
        _ATEN.squeeze.dim,
        _ATEN.squeeze.dims,
        _ATEN.t.default,
        _ATEN.transpose.int,
        _ATEN.unbind.int,
        _ATEN.unfold.default,
        _ATEN.unsqueeze.default,
        _ATEN.view.default,
        _ATEN.view.dtype,
    }
)
# Allocation without a kernel.
_ALLOCATIONS = frozenset(
    {_ATEN.empty.memory_format, _ATEN.empty_like.default, _ATEN.empty_strided.default, _ATEN.new_empty.default}
)
# Operators that copy a value to the host or wait for one, and those whose result's shape depends on values.
_SYNCHRONISING = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"}
_DATA_DEPENDENT = {
    "nonzero", "masked_select", "unique_dim", "_unique", "_unique2", "unique_consecutive", "bincount", "argwhere",
}  # fmt: skip
_INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
_HOST = "a tensor lives on the host (a constant made in forward?); register it as a buffer"
# NNPOps fills three results and a counter, then searches.
_LAUNCHES: dict[str, int] = {"openmm_tensornet::nnpops_pairs": 5}


# Of a custom operator what runs it, where that can be looked into.
_INSIDE: dict[str, Callable[..., int]] = {}


def declare_launches(operator: str, launches: int, inside: Callable[..., int] | None = None) -> None:
    """Say how many kernels a custom operator launches.

    Parameters
    ----------
    operator : str
        "namespace::name", as registered with torch.library.
    launches : int
    inside : callable, optional
        Does with the operator's arguments, which are fake tensors, what it does on a GPU, except that it launches no kernels of its own,
        but gives their number. PyTorch's operators that it calls are recorded, and add to that.
    """
    _LAUNCHES[operator] = launches
    _INSIDE.pop(operator, None)
    if inside is not None:
        _INSIDE[operator] = inside


# Of a custom operator the module that it runs.
_MODULES: dict[str, Callable[..., nn.Module]] = {}


def declare_module(operator: str, module_of: Callable[..., nn.Module]) -> None:
    """Say that a custom operator runs a module, which is checked too.

    Parameters
    ----------
    operator : str
        "namespace::name", as registered with torch.library.
    module_of : callable
        From the operator's arguments, of which the tensors of the checked module have their values, to the module that it runs on a GPU
        with those of the first two that are tensors.
    """
    _MODULES[operator] = module_of


@dataclass
class GraphSafety:
    """What a run on fake tensors found.

    Attributes
    ----------
    kernels : int
        Launches of one evaluation: every operator that is not a view counts one, a custom one what it declares, or more where more are
        counted inside of it (arguments that are not contiguous are copied).
    counted : int
        The same, where a custom operator that can be looked into counts what is seen there. (PyTorch's may launch several kernels.)
    operators : Counter
        How often each operator was called, views left out.
    fixed_results : bool
        Whether all results lie in memory of the module, the same at every call and in every graph that is captured of it. TorchForce
        captures one graph with forces and one without, and reads the results of the last capture whichever it replays.
    """

    kernels: int = 0
    counted: int = 0
    operators: Counter = field(default_factory=Counter)
    fixed_results: bool = False


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.result = GraphSafety()
        self.last = "the start of the module"
        # Kept, since TorchScript's interpreter turns an exception into one of its own without the text.
        self.refusal: GraphSafetyError | None = None
        self.values = WeakTensorKeyDictionary()  # of the checked module, by the tensors that stand for them
        self.inside: list[tuple[Callable[..., nn.Module], list, list[Tensor]]] = []

    def refuse(self, func, reason: str) -> GraphSafetyError:
        self.refusal = _refused(func, reason)
        return self.refusal

    @contextmanager
    def named(self) -> Iterator[None]:
        """Raise what was refused meanwhile, or name the last operator before something else that failed."""
        try:
            yield
        except Exception as error:
            if self.refusal is None:
                text = str(error).strip().splitlines()
                raise _refused(f"after {self.last}", text[-1] if text else type(error).__name__) from error
        if self.refusal is not None:
            raise self.refusal

    def look_inside(self, func, args) -> int:
        """Kernels that a custom operator launches, as far as that can be seen; what it calls keeps to the same rules."""
        name = func._schema.name
        if name not in _INSIDE:
            return _LAUNCHES[name]
        inner = _Recorder()
        try:
            with inner:
                counted = _INSIDE[name](*args)
        except GraphSafetyError as error:
            raise self.refuse(func, f"inside of it, {error}") from error
        return counted + inner.result.counted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a query (device, layout), not a computation
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        self.last = str(func)
        if name in _SYNCHRONISING:
            raise self.refuse(
                func, "it copies a value to the host and waits for it (.item(), a Python `if` or `float()`)"
            )
        if name in _DATA_DEPENDENT or (name in _INDEXING and _has_mask(args[1])):
            raise self.refuse(
                func,
                "the shape of its result depends on values (a boolean mask, nonzero, unique); use torch.where",
            )
        if name == "repeat_interleave" and kwargs.get("output_size") is None and isinstance(args[0], Tensor):
            raise self.refuse(func, "the shape of its result depends on values; give output_size or use index_select")
        if _on_host((args, kwargs)):
            raise self.refuse(func, _HOST)
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise self.refuse(func, "its result depends on values that a CUDA graph does not know") from None
        if _on_host(result):
            raise self.refuse(func, _HOST)
        if func in VIEWS or func in _ALLOCATIONS:
            return result
        if func._schema.name in _MODULES:
            with unset_fake_temporarily():
                values = [self.values.get(a, a) if isinstance(a, Tensor) else a for a in args]
                inputs = [torch.zeros(a.shape, dtype=a.dtype) for a in args[:2] if isinstance(a, Tensor)]
                self.inside.append((_MODULES[func._schema.name], values, inputs))
            return result
        if func.namespace != "aten":
            if func._schema.name not in _LAUNCHES:
                raise self.refuse(
                    func,
                    "it does not declare its launches; see openmm_tensornet.graph.capture.declare_launches",
                )
            counted = self.look_inside(func, args)
            self.result.kernels += max(counted, _LAUNCHES[func._schema.name])
            self.result.counted += counted
        else:
            self.result.kernels += 1
            self.result.counted += 1
        self.result.operators[str(func)] += 1
        return result


def _on_host(values) -> bool:
    tensors = [t for t in torch.utils._pytree.tree_leaves(values) if isinstance(t, Tensor)]
    return any(t.device.type == "cpu" or not (isinstance(t, FakeTensor) or t.is_meta) for t in tensors)


def _has_mask(indices) -> bool:
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


class GraphSafetyError(ValueError):
    """The module cannot be captured in a CUDA graph."""


def _refused(func, reason: str) -> GraphSafetyError:
    return GraphSafetyError(f"the module cannot be captured in a CUDA graph: {func}: {reason}")


def copied(module: nn.Module) -> Any:
    """A copy; of a ScriptModule its code too, with which TorchScript keeps plans, and would run one for a GPU on the CPU later."""
    if not isinstance(module, torch.jit.ScriptModule):
        return copy.deepcopy(module)
    from ..common import jit  # loaded for TorchForce alone

    buffer = io.BytesIO()
    jit.save(module, buffer)
    buffer.seek(0)
    return jit.load(buffer, map_location="cpu")


@undisturbed
def check_graph_safety(module: nn.Module, *inputs: Tensor) -> GraphSafety:
    """Check that a module can be captured in a CUDA graph, and count its kernels.

    Parameters
    ----------
    module : nn.Module or ScriptModule
        Is not changed.
    *inputs : Tensor
        Positions, and box vectors and global parameters where it takes them; only shapes and dtypes matter. Where some require
        gradients, as parameters do by which TorchForce differentiates the energy, the backward pass is checked and counted too.

    Returns
    -------
    GraphSafety

    Raises
    ------
    GraphSafetyError
        A ValueError that names the operator and the reason: a value needed on the host, a shape that depends on
        values, a tensor on the host, or a custom operator that does not declare its launches, or does one of these inside.
    """
    recorder, own = _Recorder(), _frozen(copied(module))
    with FakeTensorMode():

        def pretend(tensor: Tensor) -> Tensor:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
            recorder.values[fake] = tensor
            return fake

        _replace(own, pretend)
        fake = [pretend(t) for t in inputs]
        with recorder.named(), torch.no_grad(), recorder:
            results = own(*fake)
    for module_of, arguments, given in recorder.inside:
        with torch.enable_grad():  # modules may be made with autograd, which is out of reach inside of an operator
            inner = module_of(*arguments)
        found = check_graph_safety(inner, *given)
        recorder.result.kernels += found.kernels
        recorder.result.counted += found.counted
        recorder.result.operators += found.operators
    memories = {_memory(t) for t in (*own.parameters(), *own.buffers())}
    leaves = torch.utils._pytree.tree_leaves(results)
    recorder.result.fixed_results = all(_memory(t) in memories for t in leaves if isinstance(t, Tensor))
    if any(t.requires_grad for t in inputs):
        _differentiate(_frozen(copied(module)), inputs, recorder)
    return recorder.result


def _frozen(module: nn.Module) -> nn.Module:
    """A ScriptModule as TorchForce runs it, except that tensors stay attributes, which can be replaced."""
    if not isinstance(module, torch.jit.ScriptModule) or not hasattr(module, "training"):  # frozen already
        return module
    from ..common import jit

    tensors = (*module.named_parameters(), *module.named_buffers())
    return copied(jit.freeze(module.eval(), [name for name, _ in tensors]))


def _replace(module: nn.Module, tensors: Callable[[Tensor], Tensor]) -> None:
    """Put other tensors in the place of a module's."""
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):  # its _apply does not take parameters, only buffers
            for name, value in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
                part._c.setattr(name, tensors(value))
        else:
            part._apply(tensors, recurse=False)


def _differentiate(module: nn.Module, inputs: tuple[Tensor, ...], recorder: _Recorder) -> None:
    """Record the backward pass from the first result to the inputs that require gradients.

    On PyTorch's meta device, since autograd does not take a CUDA device that is only pretended.
    """
    _replace(module, lambda t: torch.empty_like(t, device="meta"))
    given = [torch.empty_like(t, device="meta", requires_grad=t.requires_grad) for t in inputs]
    with torch.enable_grad():
        results = module(*given)
        energy = results if isinstance(results, Tensor) else results[0]
        with recorder.named(), recorder:
            torch.autograd.grad(energy, [t for t in given if t.requires_grad])


def _memory(tensor: Tensor) -> int:
    """What tensors that share their numbers have in common, also fake ones."""
    return tensor.untyped_storage()._cdata
