"""README and docs/: the pages build without a warning, their code runs, and what they quote and draw is up to date."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import openmm
import pytest
from test_packaging import MAKE_TARGETS

import openmm_tensornet
from benchmarks import report
from openmm_tensornet.md import cli

ROOT = Path(__file__).resolve().parent.parent
PDB = ROOT / "examples" / "alanine_dipeptide.pdb"
PAGES = {
    path.name: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
# A block that cannot run everywhere says why in a comment before it.
BLOCK = re.compile(r"(?:^<!-- not run: (?P<reason>.+) -->\n)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
WITH_CODE = [name for name, text in PAGES.items() if any(not block["reason"] for block in BLOCK.finditer(text))]


def test_pages_build_without_a_warning_and_have_the_whole_api(tmp_path):
    needed = ("sphinx", "myst_parser", "furo", "openmmtorch", "openmmtools")
    missing = [name for name in needed if find_spec(name) is None]
    if missing or not hasattr(openmm, "PythonForce"):
        pytest.skip(f"the documentation needs {', '.join(missing) or 'OpenMM 8.5 or newer'}")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    assert not [name for name in openmm_tensornet.__all__ if f'id="openmm_tensornet.{name}"' not in api]


def mixed_example() -> dict:
    """What the README takes as given: a molecule, a System with a force field for it, and one without forces."""
    from openmm import System
    from openmm.app import ForceField, PDBFile

    topology = PDBFile(str(PDB)).topology
    system = System()
    for atom in topology.atoms():
        system.addParticle(atom.element.mass)
    mm_system = ForceField("amber14-all.xml").createSystem(topology)
    return {"topology": topology, "system": system, "mm_system": mm_system, "peptide_atoms": range(22)}


@pytest.mark.parametrize("page", WITH_CODE)
def test_blocks_run_in_order(page, model_path, tmp_path, monkeypatch):
    for package in ("openmmtorch", "openmmml", "matplotlib"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    os.symlink(PDB, tmp_path / PDB.name)
    for name in ("aceff-1.1.ckpt", "in-atomic-units.ckpt"):
        os.symlink(model_path("aceff-1.1"), tmp_path / name)
    monkeypatch.chdir(tmp_path)
    namespace = mixed_example() if page == "README.md" else {}
    for block in BLOCK.finditer(PAGES[page]):
        code = compile(block["code"], f"{page}: {block['code'].splitlines()[0]}", "exec")
        if not block["reason"]:
            exec(code, namespace)


def test_every_block_of_python_is_found():
    assert sum(text.count("```python") for text in PAGES.values()) == sum(
        len(list(BLOCK.finditer(text))) for text in PAGES.values()
    )


@pytest.mark.parametrize("page", PAGES)
def test_commands_options_and_targets_exist(page, capsys):
    text = PAGES[page]
    for line in re.findall(r"^ {4}(openmm-tensornet .+)$", text, re.MULTILINE):
        with pytest.raises(SystemExit) if line.endswith("--help") else nullcontext():
            cli._parser().parse_args(shlex.split(line, comments=True)[1:])
    help_of = {}
    for command in {"simulate", *re.findall(r"(?:^ {4}|`)openmm-tensornet ([a-z]+)", text, re.MULTILINE)}:
        with pytest.raises(SystemExit) as stop:
            cli.main([command, "--help"])
        help_of[command] = capsys.readouterr().out
        assert stop.value.code == 0, f"openmm-tensornet {command}"
    for script in re.findall(r"examples/(\w+\.py)", text):
        help_of[script] = (ROOT / "examples" / script).read_text(encoding="utf-8")
    for option in re.findall(r"`(--[a-z-]+)`", text):
        assert any(re.search(rf"{option}\b", shown) for shown in help_of.values()), option
    assert set(re.findall(r"(?:^ {4}|`)make ([a-z-]+)", text, re.MULTILINE)) <= MAKE_TARGETS


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    folder = ROOT if page == "README.md" else ROOT / "docs"
    named = [folder / target for target in re.findall(r"\]\((?!https?:)([^)#]+)", PAGES[page])]
    named += [
        ROOT / path
        for path in re.findall(r"`(?:python )?((?:examples|docs|benchmarks|openmm_tensornet)/\S+\.\w+)`", PAGES[page])
    ]
    assert not [path for path in named if not path.exists()]


def test_each_promise_about_security_names_a_test():
    """In its row of the table, or its paragraph; the tests are there."""
    _, rows, *paragraphs = PAGES["security.md"].split("\n\n")[1:]
    for promise in rows.splitlines()[2:] + paragraphs:
        named = re.findall(r"`(test_\w+)`(?: in `(tests/[\w/]+\.py)`)?", promise)
        assert named, promise
        for test, file in named:
            source = (ROOT / (file or "tests/export/test_security.py")).read_text(encoding="utf-8")
            assert f"\ndef {test}(" in source, test


def test_figures_are_what_their_script_draws(tmp_path):
    """Their texts, since versions of matplotlib write the same picture differently."""
    if find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    runpy.run_path(str(ROOT / "docs" / "figures.py"))["main"](tmp_path)
    drawn = list(tmp_path.iterdir())
    assert {path.name for path in drawn} == {path.name for path in (ROOT / "docs").glob("*.svg")} != set()
    for path in drawn:
        mine, kept = (
            re.findall(r"<text[^>]*>(.+?)</text>", p.read_text(encoding="utf-8"))
            for p in (path, ROOT / "docs" / path.name)
        )
        assert mine == kept != []


def test_readme_quotes_the_results_of_the_benchmark():
    results = (ROOT / "benchmarks" / "results" / "full-peers.md").read_text(encoding="utf-8")
    assert PAGES["README.md"] == report.quote(PAGES["README.md"], results)
