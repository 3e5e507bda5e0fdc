"""TensorNet neural potentials as OpenMM forces."""

from importlib import import_module

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
