"""A pretended machine with GPUs: tensors stay on the host, and streams and graphs keep to the rules of the real ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class Stream:
    """Of a device; made without one, of the current one."""

    current: Stream

    def __init__(self, device: Any = None, default: bool = False):
        device = None if device is None else torch.device(device)
        index = Stream.current.device.index if device is None or device.index is None else device.index
        self.device, self.default = torch.device("cuda", index), default

    def wait_stream(self, other: Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, chosen
    try:
        yield
    finally:
        Stream.current = before


class Graph:
    """What was called while it was captured; a replay does it again in the same memory."""

    all: list[Graph]

    class Recorder(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            self.calls.append((func, args, kwargs or {}, result))
            return result

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if Stream.current.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self.device, self.error_mode = Stream.current.device, capture_error_mode
        self.recorder = Graph.Recorder()
        Graph.all.append(self)
        self.recorder.__enter__()

    def capture_end(self) -> None:
        self.recorder.__exit__(None, None, None)
        if Stream.current.device != self.device:
            raise RuntimeError("a capture must end on the stream on which it began")

    def replay(self) -> None:
        for func, args, kwargs, recorded in self.recorder.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(recorded), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@dataclass
class Machine(TorchFunctionMode):
    """Devices that tensors were sent to, captured graphs, and copies between GPUs and pinned memory of the host."""

    devices: set[str] = field(default_factory=set)
    graphs: list[Graph] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._pinned: list[StorageWeakRef] = []

    def _is_pinned(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and StorageWeakRef(tensor.untyped_storage()) in self._pinned

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def _on_host(self, value: Any) -> Any:
        if isinstance(value, torch.device | str) and str(value).startswith("cuda"):
            self.devices.add(str(value))
            return torch.device("cpu")
        return value

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        pin = kwargs.pop("pin_memory", False)
        if func is not torch.device:
            args, kwargs = tree_map(self._on_host, (args, kwargs))
        if func is Tensor.pin_memory:
            return self._pin(args[0].clone())
        if func is Tensor.to and self._is_pinned(args[0]):
            return args[0].clone()
        if func is Tensor.copy_:
            to, source = (self._is_pinned(t) for t in args[:2])
            self.copies += ["to the host"] * to + ["to the GPU"] * source
        result = func(*args, **kwargs)
        return self._pin(result) if pin else result


@contextmanager
def pretended(monkeypatch) -> Iterator[Machine]:
    """Two GPUs, of which the first is the current one."""
    defaults = [Stream(f"cuda:{k}", default=True) for k in range(2)]
    monkeypatch.setattr(Stream, "current", defaults[0], raising=False)

    def current_stream(device: Any = None) -> Stream:
        index = None if device is None else torch.device(device).index
        return Stream.current if index in (None, Stream.current.device.index) else defaults[index]

    stand_ins = {"Stream": Stream, "stream": stream, "current_stream": current_stream, "CUDAGraph": Graph}
    for name in ("synchronize", "empty_cache"):
        stand_ins[name] = lambda *_: None
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    # The class `torch.cuda.graph` is the real one.
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    with Machine() as machine:
        monkeypatch.setattr(Graph, "all", machine.graphs, raising=False)
        yield machine
