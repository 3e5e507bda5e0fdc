"""TensorNet neural potentials as OpenMM forces."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the same names for editors and type checkers
    from .export.exported import export_potential as export_potential
    from .export.exported import export_torchscript as export_torchscript
    from .forces.mixed import create_mixed_system as create_mixed_system
    from .forces.pythonforce import TensorNetPythonForce as TensorNetPythonForce
    from .forces.replicas import replicate as replicate
    from .forces.system import create_system as create_system
    from .forces.system import tensornet_forces as tensornet_forces
    from .forces.torchforce import TensorNetForce as TensorNetForce
    from .graph.capture import check_graph_safety as check_graph_safety
    from .md.simulation import simulate as simulate
    from .models.checkpoint import load_model as load_model
    from .models.checkpoint import save_model as save_model
    from .models.tensornet import TensorNet as TensorNet
    from .models.tensornet import TensorNetConfig as TensorNetConfig
    from .models.tensornet2 import TensorNet2 as TensorNet2
    from .models.tensornet2 import TensorNet2Config as TensorNet2Config
    from .static.potential import StaticPotential as StaticPotential

__version__ = "0.1.0"

# Names are imported on first use, so that `import openmm_tensornet` works, and stays fast, where an
# optional package is missing; the name that needs the package says what to install.
_HOME = {
    "TensorNet": "models.tensornet",
    "TensorNetConfig": "models.tensornet",
    "TensorNet2": "models.tensornet2",
    "TensorNet2Config": "models.tensornet2",
    "load_model": "models.checkpoint",
    "save_model": "models.checkpoint",
    "check_graph_safety": "graph.capture",
    "StaticPotential": "static.potential",
    "export_potential": "export.exported",
    "export_torchscript": "export.exported",
    "TensorNetForce": "forces.torchforce",
    "TensorNetPythonForce": "forces.pythonforce",
    "replicate": "forces.replicas",
    "create_system": "forces.system",
    "tensornet_forces": "forces.system",
    "create_mixed_system": "forces.mixed",
    "simulate": "md.simulation",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_HOME])
