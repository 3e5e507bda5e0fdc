"""What a file of a model is, for people: `openmm-tensornet info`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from openmm_tensornet.common.files import file_kind

if TYPE_CHECKING:
    pass


def describe_model(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a model file is, as plain values.

    Parameters
    ----------
    path : path
        A TorchMD-Net checkpoint, an exported file, or the name of a known model.

    Returns
    -------
    dict
        ``file``, ``kind`` ("checkpoint", "exported" or "TorchScript"), ``bytes`` and ``sha256``, and the metadata of the
        model or of the export; for a checkpoint also ``dtype``, ``parameters`` (their number) and
        ``cutoff`` of the network in its unit of length.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is neither, or cannot be honoured.
    """
    from openmm_tensornet.models.registry import find_model

    path = find_model(path)
    if not path.is_file():
        raise ValueError(f"{path}: expected a checkpoint or an exported file, received a directory")
    description: dict[str, Any] = {
        "file": str(path),
        "kind": file_kind(path),
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    if description["kind"] != "checkpoint":
        from openmm_tensornet.export.exported import read_metadata

        return description | read_metadata(path)
    from openmm_tensornet.models.checkpoint import load_model

    model = load_model(path)
    parameters = list(model.parameters())
    return description | {
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in parameters),
        "cutoff": model.network_cutoff,
        **model.metadata,
    }


def lines(values: dict[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from lines(value, indent + "  ")
        elif isinstance(value, (list, tuple)):
            yield f"{indent}{name}: {', '.join(map(str, value)) or 'none'}"
        else:
            yield f"{indent}{name}: {'unknown' if value is None else value}"
