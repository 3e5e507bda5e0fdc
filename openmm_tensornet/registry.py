"""Models that are known by name: the one in the package, and published ones that are fetched when asked for."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

_ACEFF_ELEMENTS = (1, 5, 6, 7, 8, 9, 14, 15, 16, 17, 35, 53)


@dataclass(frozen=True)
class KnownModel:
    """A model that has a name.

    Attributes
    ----------
    description : str
        One line for people.
    file : str
        Name of the file, in the package's folder ``models`` or in `repository`.
    repository : str
        On Hugging Face; empty for a model in the package.
    revision : str, optional
        Of the repository; its newest by default, which `sha256` holds to be the file that was tested.
    sha256 : str
        Of the file; empty where it is not known.
    elements : tuple of int
        Atomic numbers that the model was trained on.
    """

    description: str
    file: str
    repository: str = ""
    revision: str | None = None
    sha256: str = ""
    elements: tuple[int, ...] = ()

    @property
    def source(self) -> str:
        """Where the file comes from, for people."""
        return f"https://huggingface.co/{self.repository} ({self.file})" if self.repository else "in the package"


MODELS = {
    "alanine-dipeptide-gfn2": KnownModel(
        "alanine dipeptide in vacuum and nothing else, trained on GFN2-xTB",
        "alanine-dipeptide-gfn2.ckpt",
        elements=(1, 6, 7, 8),
    ),
    "aceff-1.0": KnownModel(
        "small molecules, neutral and charged",
        "aceff_v1.0.ckpt",
        "Acellera/AceFF-1.0",
    ),
    "aceff-1.1": KnownModel(
        "small molecules, neutral and charged",
        "aceff_v1.1.ckpt",
        "Acellera/AceFF-1.1",
        sha256="c5a3d53cd2b910faf63eec986e7096ab2f76970f0883a82cb4d16f7238f1e1e0",
        elements=_ACEFF_ELEMENTS,
    ),
    "aceff-2.0": KnownModel(
        "small molecules, neutral and charged; TensorNet2 with Coulomb interaction",
        "aceff_v2.0.ckpt",
        "Acellera/AceFF-2.0",
        sha256="f9ae4a02f5ea0f853c255f884279029bfa2e17fb08c19911447bc8ba5c7dca00",
        elements=_ACEFF_ELEMENTS,
    ),
}


def known_elements(sha256: str) -> tuple[int, ...] | None:
    """Atomic numbers that a known model was trained on; None where that is not known."""
    return next((model.elements for model in MODELS.values() if model.sha256 == sha256), None)


def find_model(model: str | os.PathLike) -> Path:
    """The file of a model that is given by path or by name.

    A file of that name comes first. A published model is fetched with huggingface_hub, into its cache, and held against its SHA-256.

    Parameters
    ----------
    model : path or str
        A path, or a key of :data:`MODELS`.

    Returns
    -------
    Path

    Raises
    ------
    FileNotFoundError
        If there is neither a file nor a model of that name, or the file cannot be fetched.
    ImportError
        If huggingface_hub is needed and missing.
    ValueError
        If the fetched file is not the one that is known.
    """
    name = os.fspath(model)
    if os.path.exists(name):
        return Path(name)
    known = MODELS.get(name)
    if known is None:
        raise FileNotFoundError(
            f"model: expected a checkpoint, an exported file or one of {', '.join(MODELS)}, received {name!r}, "
            "which does not exist"
        )
    if not known.repository:
        return Path(__file__).parent / "models" / known.file
    return _fetch(name, known)


def _fetch(name: str, known: KnownModel) -> Path:
    by_hand = f"download {known.file} from https://huggingface.co/{known.repository} and pass its path"
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise ImportError(
            f"model: {name} is fetched with huggingface_hub, which cannot be imported ({error}); "
            f"`pip install huggingface_hub`, or {by_hand}"
        ) from error
    try:
        path = Path(hf_hub_download(known.repository, known.file, revision=known.revision))
    except Exception as error:  # whatever its network library raises
        raise FileNotFoundError(
            f"model: {name} could not be fetched ({str(error).splitlines()[0][:200]}); {by_hand}"
        ) from error
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if known.sha256 and digest != known.sha256:
        raise ValueError(
            f"model: {name}: expected a file with SHA-256 {known.sha256}, received {digest} in {path}; "
            "the published file has changed: pass the path if you trust it"
        )
    return path
