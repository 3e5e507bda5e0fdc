"""Files: written whole or not at all, and told apart by what is in them."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path


def replace_file(path: str | os.PathLike, content: bytes) -> None:
    """Write a file so that a reader, or a crash, finds the old content or the new and nothing between."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def is_torchscript(path: str | os.PathLike) -> bool:
    """Whether a file is a TorchScript archive rather than a checkpoint."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())
