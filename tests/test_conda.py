"""The conda package, built as the recipe says, without a network: from a channel of stand-ins for what it requires.

A stand-in has the name and the lowest version that the recipe asks for, and the metadata in which pip finds them.
pip and setuptools are the installed ones, and python is a virtual environment of the interpreter that runs the tests.
"""

import asyncio
import json
import os
import platform
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest
from test_packaging import ROOT, conda_name, conda_specs, install_requires, package_files, recipe, tracked_files

pytest.importorskip("rattler", reason="py-rattler is not installed")
rattler_build = pytest.importorskip("rattler_build", reason="py-rattler-build is not installed")
pytest.importorskip("setuptools", minversion="77")

from rattler.index import index_fs  # noqa: E402
from rattler.package_streaming import extract  # noqa: E402
from rattler.platform import Subdir  # noqa: E402
from rattler_build.progress import SimpleProgressCallback  # noqa: E402

# In the channel to work, not for their names alone.
REAL = {"python", "pip", "setuptools"}
SELF_TEST = "python -m openmm_tensornet.check"


def make_channel(channel: Path, scratch: Path, requirements: list[str]) -> None:
    """Make a conda channel with a package for each requirement."""
    here = str(Subdir.current())

    def add(name: str, version: str, files: list, subdir: str = "noarch") -> None:
        python = {"noarch": "python", "depends": ["python"]} if subdir == "noarch" else {}
        folder = channel / subdir
        folder.mkdir(parents=True, exist_ok=True)
        rattler_build.assemble_package(name, version, subdir, "0", folder, files=files, compression_level=1, **python)

    venv.create(scratch / "python", symlinks=True)
    # A program too, else the recipe's pip check would take one from outside its environment.
    pip = scratch / "python" / "bin" / "pip"
    pip.write_text('#!/bin/sh\nexec "${0%/*}/python" -m pip "$@"\n', encoding="utf-8")
    pip.chmod(0o755)
    programs = rattler_build.collect_files(scratch / "python", include_globs=["bin/p*", "pyvenv.cfg"])
    add("python", platform.python_version(), programs, here)
    for name in REAL - {"python"}:
        installed = distribution(name)
        files = [file for file in installed.files if ".." not in file.parts and file.suffix != ".pyc"]
        entries = [rattler_build.FileEntry.from_paths(file.locate(), Path("site-packages", file)) for file in files]
        add(name, installed.version, entries)
    pip_names = {conda_name(requirement): requirement.name for requirement in install_requires()}
    for name, bounds in conda_specs([line for line in requirements if line.split()[0] not in REAL]).items():
        version = next((bound.version for bound in bounds if bound.operator == ">="), "0.1")
        pip_name = pip_names.get(name, name)
        folder = f"{pip_name.replace('-', '_')}-{version}.dist-info"
        metadata = scratch / name / "site-packages" / folder / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {pip_name}\nVersion: {version}\n", encoding="utf-8")
        add(name, version, rattler_build.collect_files(scratch / name))
    asyncio.run(index_fs(channel))


@pytest.fixture(scope="module")
def channel(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("channel")
    requirements = recipe()["requirements"]
    make_channel(folder, tmp_path_factory.mktemp("stand-ins"), [*requirements["host"], *requirements["run"]])
    return folder.as_uri()


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory):
    """A cache of its own, and nothing that leads Python to the checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATTLER_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("PYTHONPATH", raising=False)
        yield


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("output")


@pytest.fixture(scope="module")
def package(channel, output):
    """The package that the recipe builds, from the checkout as it is."""
    (variant,) = rattler_build.Stage0Recipe.from_file(ROOT / "conda" / "recipe.yaml").render()
    keep = rattler_build.ToolConfiguration(keep_build=True)
    result = variant.run_build(keep, output, [channel], progress_callback=SimpleProgressCallback())
    (path,) = result.packages
    return rattler_build.Package.from_file(path)


@pytest.fixture(scope="module")
def unpacked(package, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    extract(package.path, folder)
    return folder


def test_build_copies_only_what_it_needs(package, output):
    (source,) = output.glob("bld/*/work")
    in_checkout = {".git", ".venv", *(file.parts[0] for file in tracked_files())}
    assert {path.name for path in source.iterdir()} & in_checkout == {
        "LICENSE", "README.md", "pyproject.toml", "setup.cfg", "openmm_tensornet"
    }  # fmt: skip


def test_package_has_the_files_of_the_repository(package, unpacked):
    site_packages = Path("site-packages")
    metadata = site_packages / f"openmm_tensornet-{package.version}.dist-info"
    files = {Path(file) for file in package.files}
    assert {file for file in files if metadata not in file.parents} == {
        site_packages / file for file in package_files()
    }
    assert {metadata / "METADATA", metadata / "entry_points.txt", metadata / "licenses" / "LICENSE"} <= files
    for file in package_files():
        assert (unpacked / site_packages / file).read_bytes() == (ROOT / file).read_bytes()
    assert (unpacked / "info" / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_package_asks_for_what_the_recipe_says(unpacked):
    index = json.loads((unpacked / "info" / "index.json").read_text())
    wanted = recipe()
    assert (index["name"], index["version"]) == (wanted["package"]["name"], wanted["package"]["version"])
    assert (index["noarch"], index["subdir"], index["license"]) == ("python", "noarch", "MIT")
    assert index["depends"] == wanted["requirements"]["run"]
    assert index["constrains"] == wanted["requirements"]["run_constraints"]
    link = json.loads((unpacked / "info" / "link.json").read_text())
    assert link["noarch"]["entry_points"] == wanted["build"]["python"]["entry_points"]


def needs_real_packages(test) -> bool:
    """Whether a test of the recipe cannot run with stand-ins: one that leaves pip's check to another test, and the self-test."""
    if isinstance(test, rattler_build.PythonTest):
        return not test.pip_check
    return isinstance(test, rattler_build.CommandsTest) and SELF_TEST in str(test.script)


def test_recipes_tests_pass_where_the_package_is_installed(package, channel):
    """All but the last two, and that of the contents, which the build has run."""
    tests = [test for test in package.tests if not needs_real_packages(test)]
    assert [type(test) for test in tests] == [rattler_build.PythonTest, rattler_build.CommandsTest]
    for test in tests:
        result = package.run_test(test.index, channel=[channel])
        assert result.success, "\n".join(result.output)


def test_unpacked_package_runs(package, unpacked, tmp_path):
    """With the real packages, which the recipe's last tests need; the self-test is run by test_check.py."""
    test, self_test = filter(needs_real_packages, package.tests)
    assert SELF_TEST in str(self_test.script)
    code = (
        f"import sys, {', '.join(test.imports)}\n"
        "from openmm_tensornet import check\nfrom openmm_tensornet.md import cli\n"
        "check.read_reference()\n"
        "print(openmm_tensornet.__file__)\n"
        "sys.exit(cli.main(['info', 'alanine-dipeptide-gfn2', '--json']))\n"
    )
    site_packages = unpacked / "site-packages"
    environment = os.environ | {"PYTHONPATH": str(site_packages), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    imported, description = done.stdout.split("\n", 1)
    assert Path(imported).is_relative_to(site_packages)
    assert Path(json.loads(description)["file"]).is_relative_to(site_packages)
