"""Models that are known by name: the one in the package, and published ones that are found on this machine or fetched."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

# A folder that holds published models, under their names or those of their files.
FOLDER_VARIABLE = "OPENMM_TENSORNET_MODELS"
# The same beside a checkout of the repository; nothing stands there for an installed package.
_BESIDE_CHECKOUT = Path(__file__).parents[3] / "shared" / "models"
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


def find_model(model: str | os.PathLike, *, download: bool = True) -> Path:
    """Find the file of a model that is given by path or by name.

    A file at that path comes first. A published model is looked for in the folder that the environment variable
    ``OPENMM_TENSORNET_MODELS`` names, in ``shared/models`` beside a checkout of the repository, and in the cache of
    huggingface_hub, which downloads it otherwise. Its SHA-256 is verified where it is known.

    Parameters
    ----------
    model : path or str
        A path, or a key of :data:`MODELS`.
    download : bool
        Whether a published model may be downloaded.

    Returns
    -------
    Path

    Raises
    ------
    FileNotFoundError
        If there is neither a file nor a model of that name, or the model is not on this machine and cannot be
        downloaded.
    ImportError
        If huggingface_hub is needed and missing.
    ValueError
        If the file found is another version than the one that is known.
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
        return Path(__file__).parent / known.file
    for folder in _folders():
        for file in (known.file, f"{name}.ckpt"):
            if (folder / file).is_file():
                return _verified(name, known, folder / file)
    return _fetch(name, known, download)


def _folders() -> list[Path]:
    given = os.environ.get(FOLDER_VARIABLE)
    if given and not Path(given).is_dir():
        raise FileNotFoundError(f"{FOLDER_VARIABLE}: expected a folder, received {given!r}, which is none")
    return [*([Path(given)] if given else []), _BESIDE_CHECKOUT]


def _verified(name: str, known: KnownModel, path: Path) -> Path:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if known.sha256 and digest != known.sha256:
        raise ValueError(
            f"model: {name}: expected a file with SHA-256 {known.sha256}, received {digest} in {path}, "
            "another version of the model; pass the path if you trust it"
        )
    return path


def _fetch(name: str, known: KnownModel, download: bool) -> Path:
    """The file in huggingface_hub's cache, after a download where there is none or another version."""
    by_hand = (
        f"download {known.file} from https://huggingface.co/{known.repository} and pass its path, "
        f"or name its folder in {FOLDER_VARIABLE}"
    )
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise ImportError(
            f"model: {name} is fetched with huggingface_hub, which cannot be imported ({error}); "
            f"`pip install huggingface_hub`, or {by_hand}"
        ) from error
    problem: Exception
    for cached in (True, False) if download else (True,):
        try:
            path = hf_hub_download(known.repository, known.file, revision=known.revision, local_files_only=cached)
        except Exception as error:  # whatever its network library raises
            reason = next(iter(str(error).splitlines()), type(error).__name__)[:200]
            problem = FileNotFoundError(f"model: {name} could not be fetched ({reason}); {by_hand}")
            problem.__cause__ = error
            continue
        try:
            return _verified(name, known, Path(path))
        except ValueError as error:
            problem = error
    raise problem
