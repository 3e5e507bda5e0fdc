"""Single precision as IEEE float32, whatever a process allows PyTorch's matrix products otherwise."""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from typing import Any

import torch


def _products() -> tuple[Any, Any]:
    """PyTorch's settings of matrix products on GPUs and on CPUs."""
    backends: Any = torch.backends
    return backends.cuda.matmul, backends.mkldnn.matmul


class _IeeeFloat32(ContextDecorator):
    """Switches TF32 and bfloat16 off in float32 matrix products, and afterwards on again where the user has them on.

    The settings are the process's, so the first thread that enters switches them off, and the last one that leaves switches them on. A
    CUDA graph keeps those of its capture.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: tuple[str | None, list[str]] | None = None

    def __enter__(self) -> None:
        with self._lock:
            own = [products.fp32_precision for products in _products()]
            if not {"tf32", "bf16"}.isdisjoint(own):
                try:
                    level = torch.get_float32_matmul_precision()
                except RuntimeError:  # PyTorch's two ways to say it were mixed
                    level = None
                self._before = self._before or (level, own)
                torch.set_float32_matmul_precision("highest")
            self._inside += 1  # last: a signal's handler may raise before, and then nobody leaves

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside or self._before is None:
                return
            (level, own), self._before = self._before, None
            if level is not None:
                torch.set_float32_matmul_precision(level)
            for products, precision in zip(_products(), own, strict=True):
                products.fp32_precision = "none"  # that of torch.backends.fp32_precision
                if products.fp32_precision != precision:
                    products.fp32_precision = precision


ieee_float32 = _IeeeFloat32()
