"""Models by name: the one in the package, and published ones without any network."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import WEIGHTS
from openmm.app import PDBFile

from openmm_tensornet import TensorNetForce, load_model
from openmm_tensornet.md import cli
from openmm_tensornet.models import registry
from openmm_tensornet.models.registry import MODELS, KnownModel, find_model

NAME = "alanine-dipeptide-gfn2"


@pytest.fixture(scope="module")
def bundled():
    return load_model(NAME)


@pytest.fixture(scope="module")
def dipeptide(request):
    return PDBFile(str(request.config.rootpath / "examples" / "alanine_dipeptide.pdb"))


def test_the_file_in_the_package(bundled):
    path = find_model(NAME)
    assert path.stat().st_size < 1_000_000
    assert bundled.elements == MODELS[NAME].elements == (1, 6, 7, 8)
    assert bundled.about["molecule"]["name"] == "alanine dipeptide"
    assert bundled.about["level_of_theory"].startswith("GFN2-xTB")
    assert torch.load(path, weights_only=True)["openmm_tensornet"] == bundled.about


def test_energy_is_the_total_energy_of_gfn2(bundled, dipeptide):
    """−896.38 eV by tblite at the example's structure, which is no frame of the training; half a kcal/mol is 0.02 eV."""
    from openmm_tensornet.common.atoms import Atoms
    from openmm_tensornet.models.accuracy import reference_energy_and_forces

    atoms = Atoms.make([atom.element.atomic_number for atom in dipeptide.topology.atoms()])
    x = torch.tensor(dipeptide.getPositions(asNumpy=True)._value)
    energy, _ = reference_energy_and_forces(bundled.double(), atoms, x)
    assert float(energy) / 96.48533212331 == pytest.approx(-32.94139929868 * 27.211386245988, abs=0.1)
    bundled.float()


def test_force_by_name(dipeptide):
    force = TensorNetForce(NAME, dipeptide.topology, positions=dipeptide.positions)
    assert force.metadata["model"]["about"]["name"] == NAME


def test_another_molecule_is_refused_unless_told(bundled):
    text = r"trained for alanine dipeptide \(22 atoms\) and nothing else, .* \(3 atoms\).*any_molecule=True \(--any-molecule\)"
    with pytest.raises(ValueError, match=text):
        TensorNetForce(bundled, atomic_numbers=[8, 1, 1])
    force = TensorNetForce(bundled, atomic_numbers=[8, 1, 1], any_molecule=True, kernels="portable")
    assert force.metadata["atomic_numbers"] == [8, 1, 1]


def test_replicas_of_the_molecule_are_taken(bundled):
    numbers = bundled.about["molecule"]["atomic_numbers"]
    TensorNetForce(bundled, atomic_numbers=numbers * 2, replicas=[0] * 22 + [1] * 22)


def test_other_elements_are_refused(bundled):
    with pytest.raises(ValueError, match="expected an atomic number below the model's max_z, 9, received 16"):
        TensorNetForce(bundled, atomic_numbers=[16, 1, 1])


def test_list_of_models(capsys):
    assert cli.main(["models"]) == 0
    text = capsys.readouterr().out
    for name, model in MODELS.items():
        assert name in text and model.description in text
    for repository in ("Acellera/AceFF-1.0", "Acellera/AceFF-1.1", "Acellera/AceFF-2.0"):
        assert f"https://huggingface.co/{repository} (aceff_v{repository[-3:]}.ckpt)" in text


def test_a_file_comes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).write_bytes(b"mine")
    assert find_model(NAME).read_bytes() == b"mine"


def test_unknown_names():
    with pytest.raises(
        FileNotFoundError, match=r"or one of alanine-dipeptide-gfn2, .*, received 'aceff-3', which does not"
    ):
        find_model("aceff-3")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.published(name)) for name in WEIGHTS])
def test_published_weights(name):
    path, _ = WEIGHTS[name]
    assert path.stat().st_size > 1_000_000
    assert load_model(path).elements == (1, 5, 6, 7, 8, 9, 14, 15, 16, 17, 35, 53)


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """No folder of this machine that holds published models."""
    monkeypatch.delenv(registry.FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(registry, "_BESIDE_CHECKOUT", tmp_path / "nothing")


@pytest.mark.parametrize("download", [True, False])
def test_without_huggingface_hub(nowhere, monkeypatch, download):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ImportError,
        match=r"`pip install huggingface_hub`, or download aceff_v1.1.ckpt from https://huggingface\S+ and pass its "
        "path, or name its folder in OPENMM_TENSORNET_MODELS",
    ):
        find_model("aceff-1.1", download=download)


CONTENT = b"weights"
KNOWN = KnownModel("", "f.ckpt", "a/b", "main", hashlib.sha256(CONTENT).hexdigest())


class Hub:
    """huggingface_hub with one repository: what is downloaded stays in the cache."""

    def __init__(self, folder):
        self.published, self.cached = folder / "published.ckpt", folder / "cached.ckpt"
        self.published.write_bytes(CONTENT)
        self.asked = []

    def hf_hub_download(self, repo_id, filename, *, revision=None, local_files_only=False):
        self.asked.append((repo_id, filename, revision, local_files_only))
        if not local_files_only:
            self.cached.write_bytes(self.published.read_bytes())
        elif not self.cached.exists():
            raise FileNotFoundError("not in the cache\nand more")
        return str(self.cached)


@pytest.fixture
def hub(nowhere, monkeypatch, tmp_path):
    made = Hub(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", made)
    monkeypatch.setitem(MODELS, "published", KNOWN)
    return made


def test_a_download_happens_once(hub):
    assert find_model("published") == hub.cached
    assert hub.asked == [("a/b", "f.ckpt", "main", True), ("a/b", "f.ckpt", "main", False)]
    assert find_model("published") == hub.cached
    assert hub.asked[2:] == [("a/b", "f.ckpt", "main", True)]


def test_no_download_where_none_is_wanted(hub):
    with pytest.raises(
        FileNotFoundError, match=r"published could not be fetched \(not in the cache\); download f.ckpt"
    ):
        find_model("published", download=False)
    assert [local for *_, local in hub.asked] == [True]


def test_another_version_in_the_cache_is_replaced(hub):
    hub.cached.write_bytes(b"older")
    with pytest.raises(ValueError, match="another version of the model"):
        find_model("published", download=False)
    assert find_model("published").read_bytes() == CONTENT


def test_a_published_file_that_has_changed(hub):
    hub.published.write_bytes(b"newer")
    with pytest.raises(
        ValueError,
        match=rf"published: expected a file with SHA-256 {KNOWN.sha256}, received \w+ in \S+, another version",
    ):
        find_model("published")


@pytest.mark.parametrize(
    ("error", "said"), [(OSError("no route to host\nand more"), "no route to host"), (TimeoutError(), "TimeoutError")]
)
def test_without_network(hub, monkeypatch, error, said):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(hub, "hf_hub_download", fail)
    with pytest.raises(FileNotFoundError, match=rf"could not be fetched \({said}\); download f.ckpt from .*a/b"):
        find_model("published")


def test_the_cache_of_the_real_huggingface_hub(nowhere, monkeypatch, tmp_path):
    """Its layout, and its error where the file is not in it."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setitem(MODELS, "published", KNOWN)
    with pytest.raises(FileNotFoundError, match=r"published could not be fetched \(Cannot find .*\); download f.ckpt"):
        find_model("published", download=False)
    repository, commit = tmp_path / "models--a--b", "0" * 40
    for file, content in (("refs/main", commit.encode()), (f"snapshots/{commit}/f.ckpt", CONTENT)):
        (repository / file).parent.mkdir(parents=True)
        (repository / file).write_bytes(content)
    assert find_model("published").read_bytes() == CONTENT


@pytest.mark.parametrize("file", ["f.ckpt", "published.ckpt"])
@pytest.mark.parametrize("where", ["named", "beside"])
def test_folders_come_before_the_cache(hub, monkeypatch, tmp_path, where, file):
    folders = {name: tmp_path / name for name in ("named", "beside")}
    for folder in folders.values():
        folder.mkdir()
    monkeypatch.setenv(registry.FOLDER_VARIABLE, str(folders["named"]))
    monkeypatch.setattr(registry, "_BESIDE_CHECKOUT", folders["beside"])
    (folders[where] / file).write_bytes(CONTENT)
    assert find_model("published") == folders[where] / file
    (folders[where] / file).write_bytes(b"newer")
    with pytest.raises(ValueError, match="another version of the model; pass the path if you trust it"):
        find_model("published")
    assert not hub.asked


def test_a_folder_of_models_that_does_not_exist(hub, monkeypatch):
    monkeypatch.setenv(registry.FOLDER_VARIABLE, "/no/such/folder")
    with pytest.raises(
        FileNotFoundError, match="OPENMM_TENSORNET_MODELS: expected a folder, received '/no/such/folder'"
    ):
        find_model("published")


@pytest.mark.parametrize("required", [False, True])
def test_comparisons_without_the_weights_are_skipped_and_said(tmp_path, required):
    """Or fail, where `--require-models` asks for them."""
    (tmp_path / "aceff_v1.1.ckpt").write_bytes(b"another version")
    (tmp_path / "aceff_v2.0.ckpt").write_bytes(b"another version")
    options = ["--require-models"] if required else []
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"{__file__}::test_published_weights",
            *options,
        ],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {registry.FOLDER_VARIABLE: str(tmp_path), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == required
    if required:
        assert "2 errors" in done.stdout and done.stdout.count("Failed: compares with the numbers of aceff-") >= 2
        assert "`make models` fetches its weights" in done.stdout and "another version" in done.stdout
    else:
        assert "2 skipped" in done.stdout
        assert (
            "2 tests that compare with published numbers were skipped: the weights of aceff-1.1 and aceff-2.0 are not here. "
            "To run them: make models" in done.stdout
        )
