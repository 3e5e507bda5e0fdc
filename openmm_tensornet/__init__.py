"""TensorNet neural potentials as OpenMM forces."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the same names for editors and type checkers
    from .charges import TensorNet2 as TensorNet2
    from .charges import TensorNet2Config as TensorNet2Config
    from .checkpoint import load_model as load_model
    from .export import export_potential as export_potential
    from .export import export_torchscript as export_torchscript
    from .force import TensorNetForce as TensorNetForce
    from .graphsafety import check_graph_safety as check_graph_safety
    from .mixed import create_mixed_system as create_mixed_system
    from .model import TensorNet as TensorNet
    from .model import TensorNetConfig as TensorNetConfig
    from .potential import StaticPotential as StaticPotential
    from .pythonforce import TensorNetPythonForce as TensorNetPythonForce
    from .simulation import simulate as simulate
    from .system import create_system as create_system

__version__ = "0.1.0"

# Names are imported on first use, so that `import openmm_tensornet` works, and stays fast, where an
# optional package is missing; the name that needs the package says what to install.
_HOME = {
    "TensorNet": "model",
    "TensorNetConfig": "model",
    "TensorNet2": "charges",
    "TensorNet2Config": "charges",
    "load_model": "checkpoint",
    "StaticPotential": "potential",
    "export_potential": "export",
    "export_torchscript": "export",
    "check_graph_safety": "graphsafety",
    "TensorNetForce": "force",
    "TensorNetPythonForce": "pythonforce",
    "create_system": "system",
    "create_mixed_system": "mixed",
    "simulate": "simulation",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_HOME])
