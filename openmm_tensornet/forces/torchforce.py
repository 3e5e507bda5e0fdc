"""TensorNetForce: a TensorNet as an OpenMM force; the only module that imports openmmtorch."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
from collections.abc import Callable
from typing import Any

import openmm
import torch

from ..common.jit import quiet
from ..export.compiled import Exported
from ..export.exported import parse_metadata
from .base import PotentialForce

# Builds of openmmtorch on PyPI, and the versions of torch and OpenMM that each was found to work with (from, below).
_BUILDS = {"1.10": (((2, 10), (2, 13)), ((8, 4), (8, 6)))}


def _is_not_about_simtk(record: logging.LogRecord) -> bool:
    """Leaves out the warning about OpenMM's former name, under which openmmtorch imports it."""
    return "simtk" not in record.getMessage()


def _import_openmmtorch():
    root = logging.getLogger()
    root.addFilter(_is_not_about_simtk)
    try:
        import openmmtorch
    except ImportError as error:
        raise ImportError(
            f"TensorNetForce needs openmmtorch, which cannot be imported ({error}); install it with "
            "`pip install openmm-tensornet[cpu]` (or [cuda12], [cuda13]), or `conda install -c conda-forge openmm-torch`; "
            "TensorNetPythonForce needs none of it, only OpenMM 8.5 or newer"
        ) from error
    finally:
        root.removeFilter(_is_not_about_simtk)
    for name in importlib.metadata.packages_distributions().get("openmmtorch", ()):
        check_versions(name, importlib.metadata.version(name), torch.__version__, openmm.__version__)
    return openmmtorch


def check_versions(distribution: str, version: str, torch_version: str, openmm_version: str) -> None:
    """Refuse a torch or an OpenMM that an openmmtorch build from PyPI is known not to fit.

    Raises
    ------
    ImportError
        Which version is installed, and which ones fit.
    """
    if version not in _BUILDS or not distribution.startswith("acellera-openmmtorch"):
        return
    for package, installed, (first, below) in zip(
        ("torch", "openmm"), (torch_version, openmm_version), _BUILDS[version], strict=True
    ):
        match = re.match(r"(\d+)\.(\d+)", installed)
        if match and not first <= (int(match[1]), int(match[2])) < below:
            bounds = f">={first[0]}.{first[1]},<{below[0]}.{below[1]}"
            raise ImportError(
                f"{distribution} {version} works with {package}{bounds}, but {package} {installed} is installed; "
                f"run `pip install '{package}{bounds}'`, or use TensorNetPythonForce, which needs no openmmtorch"
            )


openmmtorch = _import_openmmtorch()


def _name_archive(attribute: re.Match) -> str:
    """The XML attribute with a module's archive (hexadecimal), whose top folder gets a constant name of the same length."""
    text = attribute[0]
    content = text.partition('"')[2]
    if not content.startswith(b"PK\3\4".hex()):
        return text
    length = int.from_bytes(bytes.fromhex(content[52:56]), "little")  # of the name of the archive's first member
    folder = bytes.fromhex(content[60 : 60 + 2 * length]).partition(b"/")[0]
    return text.replace((folder + b"/").hex(), (b"module".ljust(len(folder), b"_")[: len(folder)] + b"/").hex())


def _with_constant_names(serialize: Callable[[Any], str]) -> Callable[[Any], str]:
    """Make a function of OpenMM's XmlSerializer write the same XML whenever it is given the same TorchForce.

    openmmtorch writes the module to a temporary file, whose random name becomes that of the archive's top folder. openmmtools
    compares Systems by their XML: without this, no two states of a System with a TorchForce are compatible.
    """

    @functools.wraps(serialize)
    def serialize_with_constant_names(thing: Any) -> str:
        return re.sub(r'encodedFileContents="[^"]*', _name_archive, serialize(thing))

    return serialize_with_constant_names


for _name in ("serializeSystem", "_serializeForce"):  # which XmlSerializer.serialize and pickling call
    setattr(openmm.XmlSerializer, _name, staticmethod(_with_constant_names(getattr(openmm.XmlSerializer, _name))))


class TensorNetForce(PotentialForce, openmmtorch.TorchForce):  # type: ignore[name-defined]
    """A TensorNet potential that `System.addForce` takes.

    Parameters
    ----------
    model : path, str or TensorNet
        A TorchMD-Net checkpoint, a file written by :func:`~openmm_tensornet.export_potential`, the name of a known
        model (`openmm-tensornet models` lists them), or a loaded model.
        An exported file keeps its precision, replicas and charges; arguments that contradict it are errors.
    topology : openmm.app.Topology, optional
        Gives the elements and the box. May also come before the model.
    atomic_numbers : sequence of int, optional
        Instead of a topology: the atomic number of each atom that the force acts on.
    atoms : sequence of int, optional
        Indices in the System of the atoms that the force acts on, in any order; all particles by default. The others get
        zero force.
    replicas : sequence of int, optional
        For each of the atoms, the index of its replica, a system that does not see the others; all are of one by default. (TorchMD-Net
        calls it batch. The molecules of a liquid are one replica.)
    total_charge : number or sequence of numbers
        In elementary charges: of the one replica, or one for each replica.
    periodic : bool, optional
        Whether nearest images interact; by default whether `box_vectors` is given or the topology has a box.
    positions : Quantity or array, shape (particles, 3), optional
        nm. Of all particles; checked for overlapping atoms, and used to check the accuracy of the force.
    box_vectors : Quantity or array, shape (3, 3), optional
        nm; the topology's by default. Checked against the cutoffs.
    coulomb_cutoff : Quantity or number, optional
        nm. Of a model with a Coulomb interaction of partial charges (AceFF-2.0), beyond which a reaction field stands; at most half
        the box. By default the model's own; where it has none, 1.2 nm with periodic boundaries and no cutoff in vacuum.
    max_pairs : int, optional
        Pairs i<j within the cutoff that the list of a large molecule or a box has room for. By default with a margin over what `positions`
        have, or over a dense liquid's. If a run ever exceeds it, energy and forces are NaN.
    kernels : str
        "fused" (few large kernels, for CPUs; needs numba, which compiles them once for each machine), "portable" (PyTorch's own
        operators, CPUs and GPUs), or "auto": fused where numba is installed and torch sees no GPU.
    precision : str
        Arithmetic of the network, "single" (IEEE float32) or "double".
    cuda_graphs : bool
        Whether TorchForce captures a CUDA graph; platforms without CUDA ignore it. With a `scale_parameter` it captures none: a graph
        would keep the value that the parameter had at its capture.
    warmup_steps : int
        Evaluations before the capture, 10 to 10,000 (fewer let a fuser compile during the capture).
    scale_parameter : str, optional
        Name of a Context parameter, 1 by default, that multiplies energy and forces. The energy's derivative by it is there
        for the asking (`context.getState(parameterDerivatives=True)`), and costs a little in every evaluation.
    name : str, optional
        Of the force; its class's by default. Unlike one given by `setName`, it survives XML and copies.
    any_molecule : bool
        Take a model that was trained for one molecule, as the bundled one, for others too, whose energies and forces will be wrong.
    molecules : sequence of int, optional
        Former name of `replicas`.

    Attributes
    ----------
    metadata : dict
        What the force says of itself: model, elements, replicas, charges, particles, cutoff, precision, name, ...

    Raises
    ------
    ValueError, TypeError, FileNotFoundError
        If an argument does not fit.
    ImportError
        If openmmtorch is missing or does not fit the installed torch or OpenMM.
    """

    _scripted = True

    def _build(self, exported: Exported, cuda_graphs: bool, warmup_steps: int) -> None:
        properties = {
            "useCUDAGraphs": "true" if cuda_graphs and exported.metadata["scale_parameter"] is None else "false",
            "CUDAGraphWarmupSteps": str(warmup_steps),
        }
        scale = exported.metadata["scale_parameter"]
        with quiet():
            openmmtorch.TorchForce.__init__(self, (exported if scale is None else exported.scaled()).module, properties)
        self.setOutputsForces(True)
        if scale is not None:
            self.addGlobalParameter(scale, 1.0)
            self.addEnergyParameterDerivative(scale)

    def _adopt(self, force: openmm.Force) -> Exported:
        torch_force = openmmtorch.TorchForce.cast(force) if openmmtorch.TorchForce.isinstance(force) else None
        with quiet():
            module: Any = None if torch_force is None else torch_force.getModule()
        if torch_force is None or not hasattr(module, "metadata"):
            raise TypeError(f"force: expected a TensorNetForce, received {force.getName()}")
        metadata = parse_metadata(module.metadata, "force")
        self.this = torch_force.this
        if force.thisown:  # one of the two owns the object, and each keeps the other
            force.thisown, self.thisown = False, True
        self._view, force._view = force, self
        return Exported(module if metadata["scale_parameter"] is None else module.plain, metadata)
