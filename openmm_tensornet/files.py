"""Files that are there whole or not at all."""

from __future__ import annotations

import os
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
