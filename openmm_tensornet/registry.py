"""Models that are known by their file's SHA-256."""

from __future__ import annotations

# name: (SHA-256 of the file, atomic numbers that it was trained on)
_ACEFF_ELEMENTS = (1, 5, 6, 7, 8, 9, 14, 15, 16, 17, 35, 53)
KNOWN = {
    "aceff-1.1": ("c5a3d53cd2b910faf63eec986e7096ab2f76970f0883a82cb4d16f7238f1e1e0", _ACEFF_ELEMENTS),
    "aceff-2.0": ("f9ae4a02f5ea0f853c255f884279029bfa2e17fb08c19911447bc8ba5c7dca00", _ACEFF_ELEMENTS),
}


def known_elements(sha256: str) -> tuple[int, ...] | None:
    """Atomic numbers that a known model was trained on; None where that is not known."""
    return next((elements for digest, elements in KNOWN.values() if digest == sha256), None)
