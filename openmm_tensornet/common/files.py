"""Files: written whole or not at all, told apart by what is in them, and checked before they are unpacked."""

from __future__ import annotations

import io
import os
import secrets
import stat
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

# No model that the package runs comes near it; a larger file, or what unpacks to more, is refused before memory is gone.
LARGEST_FILE = 1 << 31  # bytes
# The end records of an archive, those for large ones too, and the most that its directory may take: zipfile reads that at once.
_END, _LARGE = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ4s2L4Q4sLQL")
LARGEST_DIRECTORY = 1 << 24  # bytes
# To open no link and wait for no pipe, where the system can be asked for that: Windows cannot.
NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
# What zipfile raises on a damaged archive, also for sizes, places and methods that cannot be, and json on what is nested too deep.
DAMAGED = (zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError, ValueError, RecursionError)


def replace_file(path: str | os.PathLike, content: bytes) -> None:
    """Write a file so that a reader, or a crash, finds the old content or the new and nothing between."""
    target = Path(path)
    # Where others may write too, a name that they can foresee, or that is there already, could be a link to another file.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def others_can_write(folder: str | os.PathLike) -> bool:
    """Whether every user may put files there, or another folder in its place; a group is trusted. False on Windows."""
    if os.name != "posix":
        return False
    own = Path(folder).resolve()
    above = (parent.stat().st_mode for parent in own.parents)
    return any(mode & stat.S_IWOTH for mode in (own.stat().st_mode, *(m for m in above if not m & stat.S_ISVTX)))


def open_own(path: str | os.PathLike, mode: str, **options: Any) -> IO:
    """Open a file to write to it in place, as `open` does; ValueError where that would change something else, to which it is a link."""
    return open(path, mode, opener=_without_links, **options)


def _without_links(path: str, flags: int) -> int:
    linked = ValueError(
        f"{path}: expected a file of its own, received a link, a file with a second name, or a device, and something else would be "
        "written to; put a copy in its place"
    )
    if os.path.islink(path):
        raise linked
    descriptor = os.open(path, flags | NO_LINKS, 0o666)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        raise linked
    return descriptor


@contextmanager
def lock(path: str | os.PathLike) -> Iterator[None]:
    """Hold a lock that ends with the process, however that ends; BlockingIOError where another process, or thread, holds it.

    Where the system (Windows) or the file system has no such locks there is a warning, and no lock.

    Parameters
    ----------
    path : path
        A file for this alone, which is made and stays.
    """
    with open_own(path, "a") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except (ImportError, OSError) as error:
            warnings.warn(f"{os.fspath(path)}: cannot be locked ({error}); start no second run there", stacklevel=2)
        yield


def check_file(path: str | os.PathLike, expected: str, largest: int = LARGEST_FILE) -> None:
    """ValueError for what is no file (a directory, a pipe), or larger than it can be.

    Parameters
    ----------
    expected : str
        What the file should be, for the message.
    largest : int
        Bytes.
    """
    if os.path.isdir(path):
        raise ValueError(f"{os.fspath(path)}: expected {expected}, received a directory; name the file in it")
    if not os.path.isfile(path):
        raise ValueError(f"{os.fspath(path)}: expected {expected}, received a pipe or a device; name a file")
    size = os.path.getsize(path)
    if size > largest:
        raise ValueError(
            f"{os.fspath(path)}: expected {expected} of at most {largest} bytes, received {size} bytes; name another file"
        )


@contextmanager
def open_archive(file: IO[bytes]) -> Iterator[zipfile.ZipFile]:
    """An archive; BadZipFile where something stands before or after it.

    Readers disagree about which of two archives in a file they take, and the one that was checked must be the one that is read.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END.size))
    record = file.read()
    if len(record) < _END.size or not record.startswith(b"PK\5\6"):
        raise zipfile.BadZipFile("it is no zip file, truncated, or has something behind the archive")
    *_, entries, length, offset, comment = _END.unpack(record)
    file.seek(min(offset + length, size))
    found = file.read(_LARGE.size + _END.size + 1)
    if found != record and len(found) == _LARGE.size + _END.size:
        # PyTorch writes the records for large archives, too, and readers may prefer them.
        same = _LARGE.pack(
            b"PK\6\6", 44, found[12:16], 0, 0, entries, entries, length, offset, b"PK\6\7", 0, offset + length, 1
        )
        found = found.removeprefix(same)
    if comment or found != record:
        raise zipfile.BadZipFile("it is truncated, or has something before or behind the archive")
    file.seek(0)
    if entries and file.read(4) != b"PK\3\4":
        raise zipfile.BadZipFile("it has something before the archive")
    if length > LARGEST_DIRECTORY:
        raise zipfile.BadZipFile(f"its directory has {length} bytes, and at most {LARGEST_DIRECTORY} are read")
    with zipfile.ZipFile(file) as archive:
        if len(archive.namelist()) != entries:  # one can hide the next one in its comment
            raise zipfile.BadZipFile(f"its directory has {len(archive.namelist())} members, and {entries} are expected")
        yield archive


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
    # Python would get memory for as much as a member declares.
    if any(member.header_offset + member.compress_size > archive.start_dir for member in members):
        raise zipfile.BadZipFile("a member is longer than the archive")
    damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"checksum of the member {damaged!r} is wrong")


def read_members(archive: zipfile.ZipFile, largest: Mapping[str, int]) -> dict[str, bytes]:
    """The members of an archive that may have these and no others, each of at most so many bytes; BadZipFile otherwise."""
    for member in archive.infolist():
        if member.file_size > largest.get(member.filename, -1):
            most = largest.get(member.filename)
            limit = "no such member is read" if most is None else f"at most {most} are read"
            raise zipfile.BadZipFile(f"its member {member.filename!r} has {member.file_size} bytes, and {limit}")
    check_archive(archive)
    return {name: archive.read(name) for name in archive.namelist()}


def rewrite_archive(archive: zipfile.ZipFile) -> bytes:
    """The archive written anew after :func:`check_archive`, for PyTorch.

    Its reader does not compare checksums, and takes other fields of the archive's directory at their word than Python's does.
    """
    check_archive(archive)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as new:
        for name in archive.namelist():
            if not name.endswith(".debug_pkl"):  # places in the source of the code, for tracebacks
                new.writestr(zipfile.ZipInfo(name), archive.read(name))
    return buffer.getvalue()


def file_kind(path: str | os.PathLike) -> str:
    """What a file of a model seems to be: "checkpoint", "exported" (safetensors) or "TorchScript"."""
    try:
        with open(path, "rb") as file:
            if file.read(9)[8:] == b"{":  # after the length of a header in JSON
                return "exported"
            with open_archive(file) as archive:
                return "TorchScript" if any(n.endswith("/constants.pkl") for n in archive.namelist()) else "checkpoint"
    except DAMAGED:
        return "checkpoint"  # whoever reads it says what is wrong
