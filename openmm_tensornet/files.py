"""Files: written whole or not at all, told apart by what is in them, and checked before they are unpacked."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from pathlib import Path

# No model that the package runs comes near it; a larger file, or what unpacks to more, is refused before memory is gone.
LARGEST_FILE = 1 << 31  # bytes
# What zipfile raises on a damaged archive: also for sizes, places and methods that cannot be.
DAMAGED = (zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError, ValueError)


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


def check_file(path: str | os.PathLike, expected: str) -> None:
    """ValueError for what is no file (a directory, a pipe), or larger than any model.

    Parameters
    ----------
    expected : str
        What the file should be, for the message.
    """
    if os.path.isdir(path):
        raise ValueError(f"{os.fspath(path)}: expected {expected}, received a directory; name the file in it")
    if not os.path.isfile(path):
        raise ValueError(f"{os.fspath(path)}: expected {expected}, received a pipe or a device; name a file")
    size = os.path.getsize(path)
    if size > LARGEST_FILE:
        raise ValueError(
            f"{os.fspath(path)}: expected {expected} of at most {LARGEST_FILE} bytes, received {size} bytes; name another file"
        )


def check_archive(archive: zipfile.ZipFile) -> None:
    """BadZipFile for an archive with a member that is damaged or there twice, or with members too large in all.

    Members are read in pieces, up to the size that they declare.
    """
    members = archive.infolist()
    size = sum(member.file_size for member in members)
    if size > LARGEST_FILE:
        raise zipfile.BadZipFile(f"it unpacks to {size} bytes, and at most {LARGEST_FILE} are read")
    names = [member.filename for member in members]
    if len(set(names)) < len(names):
        raise zipfile.BadZipFile("a member is there twice")
    if any(member.flag_bits & 1 for member in members):
        raise zipfile.BadZipFile("it is encrypted")
    damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"checksum of the member {damaged!r} is wrong")


def rewrite_archive(archive: zipfile.ZipFile) -> bytes:
    """The archive written anew after :func:`check_archive`, for PyTorch.

    Its reader does not compare checksums, and takes other fields of the archive's directory at their word than Python's does.
    """
    check_archive(archive)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as new:
        for name in archive.namelist():
            new.writestr(zipfile.ZipInfo(name), archive.read(name))
    return buffer.getvalue()


def is_torchscript(path: str | os.PathLike) -> bool:
    """Whether a file is a TorchScript archive rather than a checkpoint."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except DAMAGED:
        return False  # whoever reads it says what is wrong
