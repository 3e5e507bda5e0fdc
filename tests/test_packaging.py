"""The files that say what to install agree: setup.cfg is the source, the others must follow it. Wheel and sdist hold what they should."""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
OPENMMTORCH = "acellera-openmmtorch-"
OPENMMTORCH_EXTRAS = ("cpu", "cuda12", "cuda13")
# Only conda has it, so setup.cfg cannot name it.
CONDA_ONLY = {"nnpops"}
MAKE_TARGETS = {
    "help",
    "install",
    "constraints",
    "models",
    "soak",
    "soak-long",
    "soak-minimize",
    "demo",
    "docs",
    "test",
    "test-alone",
    "test-slow",
    "test-mutations",
    "test-matrix",
    "lint",
    "format",
    "bench",
    "bench-peers",
    "bench-gpu",
    "oracle",
    "train",
    "clean",
}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read_string(read("setup.cfg"))
    return config


def parse(lines: str) -> list[Requirement]:
    return [Requirement(line) for line in lines.split("\n") if line.strip()]


def extra(name: str) -> list[Requirement]:
    return parse(setup_cfg()["options.extras_require"][name])


def install_requires() -> list[Requirement]:
    return parse(setup_cfg()["options"]["install_requires"])


def conda_name(requirement: Requirement) -> str:
    name = requirement.name.lower()
    if name.startswith(OPENMMTORCH):
        return "openmm-torch"
    # conda's matplotlib brings Qt too, for windows that this package does not open
    return {"torch": "pytorch", "openmmml": "openmm-ml", "matplotlib": "matplotlib-base"}.get(name, name)


def conda_specs(lines: list) -> dict[str, SpecifierSet]:
    """Name and bounds of each conda requirement; a build string after the bounds is dropped."""
    specs = {}
    for line in lines:
        name, *rest = line.split()
        assert name not in specs, f"{name} is listed twice"
        specs[name] = SpecifierSet(rest[0] if rest else "")
    return specs


def wanted_specs(requirements: list[Requirement]) -> dict[str, SpecifierSet]:
    """What conda must ask for: every bound that setup.cfg puts on a package, joined."""
    specs: dict[str, SpecifierSet] = {}
    for requirement in requirements:
        name = conda_name(requirement)
        # conda numbers openmm-torch in its own way and builds it for the OpenMM and PyTorch beside it
        bounds = SpecifierSet() if name == "openmm-torch" else requirement.specifier
        specs[name] = specs.get(name, SpecifierSet()) & bounds
    return specs


def runtime_specs() -> dict[str, SpecifierSet]:
    python = SpecifierSet(setup_cfg()["options"]["python_requires"])
    return {"python": python, **wanted_specs(install_requires() + extra("cpu") + extra("md"))}


def environment_specs() -> dict[str, SpecifierSet]:
    return conda_specs(yaml.safe_load(read("environment.yml"))["dependencies"])


def recipe() -> dict:
    """The recipe with the variables of its context put in."""
    text = read("conda/recipe.yaml")
    for name, value in yaml.safe_load(text)["context"].items():
        text = text.replace("${{ " + name + " }}", value)
    assert "${{" not in text
    return yaml.safe_load(text)


def tracked_files() -> set[Path]:
    """What git knows of, relative to the root of the repository."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, which would say what belongs to the package")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {Path(file) for file in listed.stdout.split("\0") if file}


def package_files() -> set[Path]:
    """Those of them that are to be installed."""
    return {file for file in tracked_files() if file.parts[0] == "openmm_tensornet"}


def without_checkout() -> dict[str, str]:
    """Environment variables with nothing that leads Python to this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_recipe_runs_with_what_setup_cfg_asks_for():
    specs = conda_specs(recipe()["requirements"]["run"])
    assert CONDA_ONLY <= set(specs)
    assert {name: bounds for name, bounds in specs.items() if name not in CONDA_ONLY} == runtime_specs()


def test_recipe_holds_optional_packages_to_the_bounds_of_setup_cfg():
    assert conda_specs(recipe()["requirements"]["run_constraints"]) == wanted_specs(extra("mixed"))


def test_recipe_builds_with_what_pyproject_asks_for():
    (asked,) = re.findall(r'^requires = \["(.+)"\]$', read("pyproject.toml"), re.MULTILINE)
    specs = conda_specs(recipe()["requirements"]["host"])
    assert specs["setuptools"] == Requirement(asked).specifier
    assert specs["python"] == runtime_specs()["python"]


def test_environment_has_what_setup_cfg_asks_for():
    specs = environment_specs()
    tests = wanted_specs(extra("test"))
    wanted = runtime_specs()
    assert CONDA_ONLY <= set(specs)
    assert {name: specs.get(name) for name in wanted} == wanted
    more = set(specs) - set(wanted) - CONDA_ONLY - {"pip"}
    assert more <= set(tests), "packages that setup.cfg does not name"
    assert {name: specs[name] for name in more} == {name: tests[name] for name in more}
    assert "pytest" in more


def test_environment_cpu_variant_has_the_same_bounds():
    variants = re.findall(r"^ *# - (.+)$", read("environment.yml"), re.MULTILINE)
    assert variants, "no commented CPU variant"
    specs = environment_specs()
    for variant in variants:
        name, bounds, build = variant.split()
        assert specs[name] == SpecifierSet(bounds)
        assert build == "cpu*"


def test_every_extra_with_openmmtorch_is_known():
    extras = setup_cfg()["options.extras_require"]
    bringing = [name for name in extras if any(r.name.startswith(OPENMMTORCH) for r in extra(name))]
    assert sorted(bringing) == sorted(OPENMMTORCH_EXTRAS)


@pytest.mark.parametrize("name", OPENMMTORCH_EXTRAS)
def test_extra_with_openmmtorch_bounds_openmm_and_torch(name):
    """OpenMM 8.3 and 8.6, torch 2.9 and 2.13 do not work with these builds of openmmtorch."""
    by_name = {requirement.name: requirement for requirement in extra(name)}
    (build,) = (r for n, r in by_name.items() if n.startswith(OPENMMTORCH))
    assert build.name.removeprefix(OPENMMTORCH) == name.replace("cuda", "cu")
    assert str(build.specifier) == "==1.10"
    assert {v for v in ("8.3.1", "8.4.0", "8.5.2", "8.6.0") if v in by_name["openmm"].specifier} == {
        "8.4.0",
        "8.5.2",
    }
    # PyPI has torch for CUDA 12 up to 2.10, for CUDA 13 from 2.11 on; without a GPU each will do.
    allowed = {"cpu": {"2.10.0", "2.11.0", "2.12.1"}, "cuda12": {"2.10.0"}, "cuda13": {"2.11.0", "2.12.1"}}
    versions = ("2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1")
    assert {v for v in versions if v in by_name["torch"].specifier} == allowed[name]
    # so that OpenMM's CUDA platform has OpenMM's version
    assert by_name["openmm"].extras == ({name} if name.startswith("cuda") else set())


def test_package_itself_has_no_upper_bounds():
    for requirement in install_requires():
        assert all(bound.operator == ">=" for bound in requirement.specifier), requirement
        assert not requirement.name.startswith(OPENMMTORCH)


def test_the_documentation_is_built_by_the_tests():
    assert set(extra("docs")) <= set(extra("test")) | set(extra("md"))


def test_readme_says_how_to_build_the_recipe():
    command = read("conda/recipe.yaml").splitlines()[0].removeprefix("# ")
    assert f"\n    {command}\n" in read("README.md")


def test_version_and_licence_are_the_same_everywhere():
    from openmm_tensornet import __version__

    metadata = setup_cfg()["metadata"]
    citation = yaml.safe_load(read("CITATION.cff"))
    assert {__version__, citation["version"], recipe()["package"]["version"]} == {metadata["version"]}
    assert {citation["license"], recipe()["about"]["license"]} == {metadata["license"]} == {"MIT"}
    assert f"## {metadata['version']} " in read("CHANGELOG.md")
    assert read("LICENSE").startswith("MIT License")


def test_program_is_the_same_everywhere():
    (script,) = setup_cfg()["options.entry_points"]["console_scripts"].strip().split("\n")
    assert recipe()["build"]["python"]["entry_points"] == [script]
    assert script.split(" = ")[0] in read("README.md")


def test_makefile_documents_its_targets():
    rules = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    assert MAKE_TARGETS <= rules
    shown = subprocess.run(
        ["make", "-s", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert {line.split()[0] for line in shown.stdout.splitlines()} == MAKE_TARGETS


@pytest.mark.parametrize(("given", "model"), [("", "alanine-dipeptide-gfn2"), ("mine.ckpt", "mine.ckpt")])
def test_demo_runs_a_model_and_draws(given, model):
    shown = subprocess.run(
        ["make", "-n", "demo", f"MODEL={given}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    simulate, analyze = (
        line
        for line in shown.stdout.replace("\\\n", " ").splitlines()
        if "openmm-tensornet " in line and "out/demo" in line
    )
    assert f'simulate --model "{model}" examples/alanine_dipeptide.pdb' in simulate
    assert f'analyze out/demo --model "{model}"' in analyze


def test_readme_names_the_two_commands_and_real_targets():
    text = read("README.md")
    assert re.search(r"^ {4}make demo\b", text, re.MULTILINE)
    assert re.search(r"^ {4}make test\b", text, re.MULTILINE)
    named = set(re.findall(r"(?:^ {4}|`)make ([a-z-]+)", text, re.MULTILINE))
    assert {"demo", "test"} <= named <= MAKE_TARGETS


def test_readme_lists_the_versions_of_setup_cfg():
    text = read("README.md")
    options = setup_cfg()["options"]
    for name in OPENMMTORCH_EXTRAS:
        (row,) = (line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        listed = {Requirement(cell) for cell in re.findall(r"`([^`]+)`", row)[1:]}
        assert listed == set(extra(name))
    (row,) = (line for line in text.splitlines() if line.startswith("| conda |"))
    listed = conda_specs(re.findall(r"`([^`]+)`", row))
    assert listed == {name: environment_specs()[name] for name in ("openmm-torch", "openmm", "pytorch")}
    python = SpecifierSet(options["python_requires"])
    allowed = [v for v in ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14") if v in python]
    assert f"Python {allowed[0]} to {allowed[-1]}" in text


def test_ci_runs_the_readmes_test_command():
    text = read(".ci/run")
    assert re.search(r"^make test$", text, re.MULTILINE)
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> tuple[Path, Path]:
    """Sdist and wheel, made from a copy of the repository that also has what work leaves behind."""
    pytest.importorskip("build")
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("repository")
    for file in tracked_files():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, folder / file)
    for name in (
        ".venv/lib/module.py",
        "build/lib/openmm_tensornet/removed.py",
        "openmm_tensornet/__pycache__/cli.cpython-311.pyc",
        "benchmarks/results/quick.json",
        "openmm_tensornet/models/mine.ckpt",
        "out/demo/trajectory.dcd",
        "scratch.py",
        "tests/__pycache__/conftest.cpython-311.pyc",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    # The wheel is built from the sdist, with the setuptools at hand.
    made = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", folder],
        env=without_checkout(),
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


def test_wheel_has_the_files_of_the_package_and_no_others(distributions):
    with zipfile.ZipFile(distributions[1]) as wheel:
        files = {Path(name) for name in wheel.namelist()}
    (metadata,) = {file.parts[0] for file in files} - {"openmm_tensornet"}
    written = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    assert files == {*package_files(), *(Path(metadata, name) for name in written)}
    assert Path("openmm_tensornet/models/alanine-dipeptide-gfn2.ckpt") in files


def test_sdist_has_the_repository_and_nothing_else(distributions):
    """So that `make test` works where it is unpacked."""
    with tarfile.open(distributions[0]) as sdist:
        files = {Path(*Path(member.name).parts[1:]) for member in sdist.getmembers() if member.isfile()}
    ours = {file for file in files if file.parts[0] != "openmm_tensornet.egg-info"}
    assert ours == {file for file in tracked_files() if file.name != ".gitignore"} | {Path("PKG-INFO")}


def test_wheel_runs_where_it_is_installed(distributions, tmp_path):
    """In an environment of its own: first with nothing else, then with the packages at hand."""
    venv.create(tmp_path / "env", symlinks=True)
    python, program = tmp_path / "env" / "bin" / "python", tmp_path / "env" / "bin" / "openmm-tensornet"

    def run(*command) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=without_checkout(), capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", distributions[1])
    package = Path(run(python, "-c", "import openmm_tensornet; print(openmm_tensornet.__file__)").strip()).parent
    assert package.is_relative_to(tmp_path / "env")
    assert "simulate" in run(program, "--help")
    assert "alanine-dipeptide-gfn2" in run(program, "models")
    # Python reads no .pth files of the folders that one names, so nothing leads to an editable install.
    paths = sysconfig.get_paths()
    (package.parent / "others.pth").write_text("\n".join({paths["purelib"], paths["platlib"]}), encoding="utf-8")
    described = json.loads(run(program, "info", "alanine-dipeptide-gfn2", "--json"))
    assert Path(described["file"]) == package / "models" / "alanine-dipeptide-gfn2.ckpt"


def test_constraints_fit_what_setup_cfg_asks_for():
    """Each package that the default extras name, at a version that they allow."""
    pinned = {
        r.name: r for r in parse("\n".join(line for line in read("constraints.txt").splitlines() if line[0] != "#"))
    }
    asked = parse(setup_cfg()["options"]["install_requires"]) + extra("cpu") + extra("md") + extra("test")
    for requirement in asked:
        (version,) = pinned[canonicalize_name(requirement.name)].specifier
        assert version.operator == "=="
        assert version.version in requirement.specifier, requirement
    assert {str(r.marker) for r in pinned.values()} == {'python_version == "3.11"'}


@pytest.mark.parametrize(("extras", "constrained"), [("cpu,md,test", True), ("cuda12,md", False)])
def test_install_keeps_to_the_constraints(extras, constrained):
    shown = subprocess.run(
        ["make", "-n", "-W", "setup.cfg", "install", f"EXTRAS={extras}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = (line for line in shown.stdout.splitlines() if "pip install" in line and "-e" in line)
    assert ("-c constraints.txt" in line) == constrained
