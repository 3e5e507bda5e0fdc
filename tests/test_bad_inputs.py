"""Every bad input gets one line with its cause, and nothing is written half."""

import re
import sys
import time
import warnings
from pathlib import Path

import pytest
from bad_inputs import BAD_INPUTS, CALLS, Given, table

from openmm_tensornet.models import registry

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "bad-inputs.md"


@pytest.fixture(scope="module")
def made(tmp_path_factory, model_path):
    """The files that many inputs are made from."""
    given = Given(tmp_path_factory.mktemp("made"), model_path("variants/zero-layers"))
    return given.model, given.exported, given.content


@pytest.fixture
def given(tmp_path, made, model_path, monkeypatch):
    folder = tmp_path / "given"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # and put back afterwards
    monkeypatch.setattr(registry, "MODELS", dict(registry.MODELS))
    given = Given(folder, model_path("variants/zero-layers"))
    given.__dict__.update(zip(("model", "exported", "content"), made, strict=True))
    return given


def listing(folder):
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("entry", BAD_INPUTS, ids=lambda e: f"{e.call}: {e.what}")
def test_bad_input(entry, given, tmp_path):
    arguments = entry.make(given)
    before, started = listing(tmp_path), time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        with pytest.raises(entry.error) as caught:
            CALLS[entry.call](**arguments) if isinstance(arguments, dict) else CALLS[entry.call](arguments)
    text = str(caught.value)
    expected = re.escape(entry.message).replace("…", ".*").replace("FILE", re.escape(str(given.file)))
    assert re.fullmatch(expected, text), text
    assert "\n" not in text
    assert type(caught.value) is entry.error
    assert not given.marker.exists(), "code of the file was run"
    assert time.perf_counter() - started < 10
    if "frame" not in entry.message:  # runs that stop keep what they have
        assert listing(tmp_path) == before
    else:
        assert (given.folder / "run" / "checkpoint.zip").exists()
        assert not (given.folder / "run" / "final.pdb").exists()


def test_the_attack_would_work(given):
    """Read without care, the file of the table runs its code."""
    import openmm
    from bad_inputs import _evil_state

    openmm.XmlSerializer.deserialize(_evil_state(given).decode())
    assert given.marker.exists()


def test_the_document_is_the_list():
    assert DOCUMENT.read_text(encoding="utf-8") == table(), f"run python tests/bad_inputs.py {DOCUMENT}"
