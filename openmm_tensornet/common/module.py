"""The base class of the package's modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn


class Module(nn.Module):
    """nn.Module whose buffers a type checker takes as they come, not as `Tensor | Module`."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
