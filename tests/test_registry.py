"""Models by name: the one in the package, and published ones without any network."""

import hashlib
import sys
from types import SimpleNamespace

import pytest
import torch
from openmm.app import PDBFile

from openmm_tensornet import TensorNetForce, cli, load_model, registry
from openmm_tensornet.registry import MODELS, KnownModel, find_model

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
    from openmm_tensornet.atoms import Atoms
    from openmm_tensornet.testing import reference_energy_and_forces

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
    TensorNetForce(bundled, atomic_numbers=numbers * 2, molecules=[0] * 22 + [1] * 22)


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


def test_known_hashes(model_path):
    for name in ("aceff-1.1", "aceff-2.0"):
        assert hashlib.sha256(model_path(name).read_bytes()).hexdigest() == MODELS[name].sha256


def test_without_huggingface_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ImportError, match=r"`pip install huggingface_hub`, or download aceff_v1.1.ckpt from https://huggingface"
    ):
        find_model("aceff-1.1")


@pytest.fixture
def published(monkeypatch, tmp_path):
    """A repository that holds one file, as huggingface_hub would fetch it."""
    path = tmp_path / "file.ckpt"
    path.write_bytes(b"weights")
    asked = []

    def download(*arguments, **options):
        asked.append((arguments, options))
        return str(path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=download))
    known = KnownModel("", "f.ckpt", "a/b", "main", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setitem(registry.MODELS, "published", known)
    return SimpleNamespace(path=path, asked=asked)


def test_fetching(published):
    assert find_model("published") == published.path
    assert published.asked == [(("a/b", "f.ckpt"), {"revision": "main"})]


def test_a_file_that_has_changed(published):
    published.path.write_bytes(b"others")
    with pytest.raises(
        ValueError, match=r"published: expected a file with SHA-256 .*, received .* the published file has changed"
    ):
        find_model("published")


def test_without_network(published, monkeypatch):
    def fail(*_, **__):
        raise OSError("no route to host\nand more")

    monkeypatch.setattr(sys.modules["huggingface_hub"], "hf_hub_download", fail)
    with pytest.raises(
        FileNotFoundError, match=r"could not be fetched \(no route to host\); download f.ckpt from .*a/b"
    ):
        find_model("published")
