"""TorchScript's functions without their deprecation warnings: OpenMM's plugin reads nothing else, so users can do nothing about it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """For what calls TorchScript; also a decorator."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        yield


script: Callable[..., Any] = quiet()(torch.jit.script)
freeze: Callable[..., Any] = quiet()(torch.jit.freeze)
save: Callable[..., Any] = quiet()(torch.jit.save)
load: Callable[..., Any] = quiet()(torch.jit.load)
