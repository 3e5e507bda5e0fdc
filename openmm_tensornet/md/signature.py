"""Signatures of what only this user's own runs have written.

OpenMM takes a memory image at its word: whoever makes one can write anywhere in the process. A checksum is no help, since whoever makes an
image makes its checksum as well. So an image is signed (HMAC-SHA256) with a random key that never leaves the user's home directory.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from ..common.files import NO_LINKS

KEY_BYTES = 32


def sign(parts: Iterable[bytes]) -> bytes | None:
    """A signature of some texts in this order; None where the user has no key and none can be made."""
    key = _key()
    if key is None:
        return None
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def is_signed(parts: Iterable[bytes], signature: bytes) -> bool:
    """Whether these texts were signed with the user's key."""
    own = sign(parts)
    return own is not None and hmac.compare_digest(own, signature)


def key_file() -> Path:
    """Where the key is, by the XDG Base Directory Specification; RuntimeError where the user has no home directory."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "openmm-tensornet" / "key"


def _key() -> bytes | None:
    if not hasattr(os, "geteuid"):  # Windows, where a file's mode does not say who can read it
        return None
    try:
        path = key_file()
        if not path.exists():
            _make(path)
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | NO_LINKS)) as file:
            found = os.fstat(file.fileno())
            private = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
            key = file.read(KEY_BYTES + 1) if private else b""
    except (OSError, RuntimeError):
        return None
    return key if len(key) == KEY_BYTES else None


def _make(path: Path) -> None:
    """Write a new key, whole, unless another process has been faster."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".key.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink(missing_ok=True)
