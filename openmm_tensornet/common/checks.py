"""Checks of plain arguments: the value, or an error that says what was expected and what came."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# At this distance from the origin float64 still resolves 1e-10 nm; nothing that is meant lies beyond it.
LARGEST_LENGTH = 1e6  # nm
TRUTH_VALUES = (bool, np.bool_)  # neither of which is a number
P = ParamSpec("P")
R = TypeVar("R")


def is_topology(value: Any) -> bool:
    """Whether a value can serve as an openmm.app.Topology."""
    return hasattr(value, "atoms") and hasattr(value, "getPeriodicBoxVectors")


def either_order(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function of `model`, `topology` and others be called with a topology in the place of the model, which then comes last."""
    kinds = inspect.signature(function).parameters.values()
    names = [p.name for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD]
    place = names.index("model")
    other = [name for name in names if name != "model"] + ["model"]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # A PDBFile, which has a topology, is refused where that belongs.
        if place < len(args) <= len(names) and is_topology(getattr(args[place], "topology", args[place])):
            return function(**dict(zip(other, args, strict=False)), **kwargs)  # type: ignore[arg-type, call-arg]
        return function(*args, **kwargs)

    return call


def flag(name: str, value: Any) -> bool:
    """True or False, also of numpy's, and nothing that merely counts as one ("no" and 0 do too); TypeError otherwise."""
    if not isinstance(value, TRUTH_VALUES):
        raise TypeError(f"{name}: expected True or False, received {value!r}")
    return bool(value)


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An integer, also of numpy's, within bounds; ValueError otherwise."""
    number = None if isinstance(value, TRUTH_VALUES) or not hasattr(value, "__index__") else value.__index__()
    if number is None or number < least or (most is not None and number > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}: expected an integer {bounds}, received {value!r}")
    return number


def one_of(name: str, value: Any, allowed: Iterable[str]) -> str:
    """One of some words; ValueError otherwise."""
    words = tuple(allowed)
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"{name}: expected one of {', '.join(words)}, received {value!r}")
    return value


def array(name: str, value: Any, shape: tuple[int | None, int]) -> NDArray:
    """Lengths in nm as an array of float64, of a shape in which None is any number; TypeError or ValueError otherwise."""
    if hasattr(value, "value_in_unit"):  # numpy would drop the unit
        raise TypeError(
            f"{name}: expected lengths in nm, received a {type(value).__name__}; pass value.value_in_unit(nanometer)"
        )
    try:
        found = np.array(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: expected lengths in nm, received {type(value).__name__} ({error})") from None
    if found.size and found.dtype.kind not in "iuf":
        raise TypeError(f"{name}: expected lengths in nm, received {type(value).__name__} of {found.dtype}")
    if found.ndim != 2 or found.shape[1] != shape[1] or shape[0] not in (None, len(found)):
        expected = "particles" if shape[0] is None else shape[0]
        raise ValueError(f"{name}: expected shape ({expected}, {shape[1]}), received {found.shape}")
    found = found.astype(np.float64)
    largest = np.abs(found, where=np.isfinite(found), out=np.zeros_like(found)).max(initial=0.0)
    if largest > LARGEST_LENGTH:
        raise ValueError(f"{name}: expected lengths of at most {LARGEST_LENGTH:g} nm, received {largest:g} nm")
    return found


def renamed(name: str, value: Any, former: str, given: Any) -> Any:
    """The value of an argument that may still be given by its former name, with a warning that users see."""
    if given is None:
        return value
    if value is not None:
        raise ValueError(f"{former}: expected {name} alone, the new name of this argument, received both")
    warnings.warn(f"{former}: this argument is called {name} now", FutureWarning, stacklevel=4)
    return given
