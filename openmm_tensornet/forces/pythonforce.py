"""TensorNetPythonForce: the same potential through OpenMM's own PythonForce, without openmmtorch."""

from __future__ import annotations

import json
import os
import pickle
import threading
import weakref
import xml.etree.ElementTree as ElementTree
from operator import attrgetter
from typing import Any

import numpy as np
import openmm
import torch
from openmm import unit
from torch import Tensor

from ..common.checks import either_order
from ..common.interrupts import Entry
from ..export.compiled import Exported
from ..export.exported import parse_metadata
from ..graph.capture import copied
from ..models.tensornet import TensorNet
from .base import PotentialForce

if not hasattr(openmm, "PythonForce"):
    raise ImportError(
        f"TensorNetPythonForce needs OpenMM 8.5 or newer, but OpenMM {openmm.__version__} is installed; "
        "run `pip install 'openmm>=8.5'`, or use TensorNetForce"
    )


class TensorNetPythonForce(PotentialForce, openmm.PythonForce):
    """A TensorNet potential that `System.addForce` takes, for OpenMM 8.5 and newer, where openmmtorch is missing or does not fit.

    The module is that of :class:`~openmm_tensornet.TensorNetForce`, and so are energies and forces. Four things differ:

    * The module runs in Python, and nothing of TorchScript is used, which PyTorch has deprecated. On a CPU that costs nothing with fused
      kernels; portable kernels take about 1.4 times as long.
    * OpenMM hands positions over in the memory of the host, whatever the platform, so a GPU waits for copies at every step. What
      it hands over does not tell the Context's ``DeviceIndex``: where that is not the first GPU, name the same one with `device`.
      All Contexts of a force share its GPU.
    * PythonForce has no derivatives by parameters. For that by the scale parameter put the force into a CustomCVForce:
      ``cv = CustomCVForce("lambda_ml*E"); cv.addCollectiveVariable("E", force)``.
    * XML of it holds a pickled object. Reading such XML unpickles it, **which can run any code: read only files that you trust**.

    Parameters
    ----------
    model, topology, **arguments
        As in TensorNetForce.
    device : str, optional
        Where the network runs, as torch names it: "cpu", "cuda", "cuda:1". By default PyTorch's current GPU where there is one, whatever
        the platform of the Context and its ``DeviceIndex``. In the thread in which the CUDA platform calls the force that is the first GPU.
    """

    _scripted = False

    @either_order
    def __init__(
        self, model: str | os.PathLike | TensorNet, topology: Any = None, *, device: str | None = None, **arguments: Any
    ):
        if device is not None:
            try:
                torch.device(device)
            except (RuntimeError, TypeError):
                raise ValueError(f"device: expected 'cpu', 'cuda' or 'cuda:N', received {device!r}") from None
        self._device = device
        super().__init__(model, topology, **arguments)

    def _build(self, exported: Exported, cuda_graphs: bool, warmup_steps: int) -> None:
        scale = exported.metadata["scale_parameter"]
        computation = Computation(exported, self._device, warmup_steps if cuda_graphs else None)
        openmm.PythonForce.__init__(self, computation, {} if scale is None else {scale: 1.0})

    def _adopt(self, force: openmm.Force) -> Exported:
        pickled = b""
        if isinstance(force, openmm.PythonForce):
            pickled = bytes.fromhex(ElementTree.fromstring(openmm.XmlSerializer.serialize(force)).attrib["function"])
        if __name__.encode() not in pickled:
            raise TypeError(f"force: expected a TensorNetPythonForce, received {force.getName()}")
        self.this, self._view, force._view = force.this, force, self
        computation = pickle.loads(pickled)
        self._device = computation.device
        return computation.exported


class Computation:
    """What PythonForce calls with a State, for the energy (kJ/mol) and the forces (S, 3), kJ/mol/nm; can be pickled.

    Parameters
    ----------
    exported : Exported
    device : str or None
        None chooses when it is first called.
    warmup_steps : int or None
        Evaluations before the capture of a CUDA graph; None for no graph.
    """

    def __init__(self, exported: Exported, device: str | None, warmup_steps: int | None):
        self.exported, self.device, self.warmup_steps = exported, device, warmup_steps
        self._program: Any = None
        self._entry = Entry(weakref.WeakMethod(self._evaluate))
        self._lock = threading.Lock()  # Contexts share this object, and a graph its inputs

    def __getstate__(self) -> dict:
        return {
            "content": self.exported.content,
            "metadata": json.dumps(self.exported.metadata),
            "device": self.device,
            "warmup_steps": self.warmup_steps,
        }

    def __setstate__(self, state: dict) -> None:
        exported = Exported.of_data(parse_metadata(state["metadata"], "force"), state["content"])
        self.__init__(exported, state["device"], state["warmup_steps"])  # type: ignore[misc]

    __call__ = property(attrgetter("_entry.send"))  # no Python function, in which a signal's handler could raise

    def _evaluate(self, state: openmm.State) -> tuple[float, np.ndarray]:
        metadata = self.exported.metadata
        values = [state.getPositions(asNumpy=True)]
        if metadata["periodic"]:
            values.append(state.getPeriodicBoxVectors(asNumpy=True))
        inputs = [torch.tensor(value.value_in_unit(unit.nanometer)) for value in values]
        with self._lock, torch.no_grad():
            if self._program is None:
                device = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
                module = copied(self.exported.module).to(device)  # the force moves its own to other devices
                self._program = OnGpu(module, inputs, device, self.warmup_steps) if device.type == "cuda" else module
            energy, forces = self._program(*inputs)
            result = float(energy), forces.numpy().copy()  # the next call writes there
        scale = metadata["scale_parameter"]
        if scale is None:
            return result
        factor = state.getParameters()[scale]
        return factor * result[0], factor * result[1]


class OnGpu:
    """A module on a GPU whose inputs and results are on the host: one copy there and one back for each evaluation.

    Parameters
    ----------
    module : callable
        Takes tensors on the device, returns the energy and the forces; shapes are fixed and nothing waits for the device.
    inputs : list of Tensor of float64, shape (..., 3)
        On the host, of the shapes of all later inputs.
    device : torch.device
    warmup_steps : int or None
        Evaluations before the capture of a CUDA graph, in which compilers may still work; None for no graph.
    """

    def __init__(self, module: Any, inputs: list[Tensor], device: torch.device, warmup_steps: int | None):
        self._module = module  # kept, since a graph goes on reading its weights
        # The stream that torch.cuda.graph has by itself is on the device of the first capture in the process.
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._graph: torch.cuda.CUDAGraph | None = None
        with torch.cuda.stream(self._stream):
            self._sent = torch.cat(inputs).pin_memory()
            self._given = self._sent.to(device)
            self._inputs = self._given.split([len(value) for value in inputs])
            self._results = self._run()
            self._received = torch.empty(self._results.shape, dtype=self._results.dtype, pin_memory=True)
            if warmup_steps is not None:
                for _ in range(warmup_steps):
                    self._run()
                graph = torch.cuda.CUDAGraph()
                # OpenMM's main thread, which uses the GPU meanwhile, must not end the capture.
                with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                    self._results = self._run()
                self._graph = graph

    def _run(self) -> Tensor:
        energy, forces = self._module(*self._inputs)
        return torch.cat((energy.reshape(1), forces.flatten()))

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The energy, shape (), and the forces, shape (S, 3), float64, on the host; the next call overwrites them."""
        torch.cat(inputs, out=self._sent)
        with torch.cuda.stream(self._stream):
            self._given.copy_(self._sent, non_blocking=True)
            if self._graph is None:
                self._results = self._run()
            else:
                self._graph.replay()
            self._received.copy_(self._results, non_blocking=True)
        self._stream.synchronize()
        return self._received[0], self._received[1:].view(-1, 3)
