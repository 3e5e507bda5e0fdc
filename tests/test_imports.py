"""Who imports whom, and what `import openmm_tensornet` needs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "openmm_tensornet"
# Folders, and the modules in them, in the order in which imports go: a module imports only from those before it. It may import
# openmm_tensornet itself, which imports nothing.
FOLDERS = {
    "common": ("module", "jit", "interrupts", "float32", "checks", "atoms", "units", "files"),
    "neighbors": ("reference", "plan", "lists"),
    "models": ("tensors", "radial", "priors", "tensornet", "coulomb", "tensornet2", "registry", "checkpoint", "accuracy"),
    "graph": ("capture", "captured", "record"),
    "kernels": ("intervals", "definitions", "table"),
    "kernels.cpu": ("simd", "steps", "pairs", "matmul", "atoms", "sums", "charges", "aten", "program"),
    "kernels.cuda": ("steps", "atoms", "charges", "coulomb", "pairs", "perceptron", "sums"),
    "kernels ": ("operators", "lowering"),
    "static": (
        "tables", "aggregation", "network", "network2", "fused", "fused_gpu", "program", "potential", "positions",
    ),
    "export": ("modules", "torchscript", "specification", "programs", "compiled", "exported"),
    "forces": ("arguments", "base", "torchforce", "pythonforce", "system", "replicas", "openmmtools", "mixed"),
    "md": (
        "quantities", "signature", "runfiles", "sentinels", "reports", "simulation", "analysis", "structures", "validation", "description",
        "cli",
    ),
}  # fmt: skip
ORDER = (
    *(f"{folder.strip()}.{module}" for folder, modules in FOLDERS.items() for module in modules),
    # What people and other packages name.
    "mlpotential",
    "check",
    "__main__",
)
# Not installed everywhere (fcntl is missing on Windows), or slow to import.
OPTIONAL = (
    "fcntl",
    "openmmtorch",
    "mdtraj",
    "openmmml",
    "matplotlib",
    "tqdm",
    "NNPOps",
    "numba",
    "triton",
    "huggingface_hub",
    "rdkit",
)
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if path.stem != "__init__"
)


def imports(source: str, *, typing_too: bool = False, package: str = "openmm_tensornet") -> set[str]:
    """Full names of what a module imports, inside functions too; a name from a package counts as a module."""
    tree = ast.parse(source)
    skipped = set()
    if not typing_too:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                skipped |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            assert above or not node.level
            home = ".".join(filter(None, [*above, node.module]))
            found |= {f"{home}.{alias.name}" for alias in node.names}
    return found


def own_modules(names: set[str]) -> set[str]:
    """Modules of the package among imported names."""
    found = set()
    for name in names:
        first, *parts = name.split(".")
        if first == "openmm_tensornet" and parts not in ([], ["__version__"]):
            starts = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
            found.add(next((start for start in starts if start in MODULES), starts[0]))
    return found


def read(module: str) -> str:
    return PACKAGE.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")


def imported_by(module: str, **options) -> set[str]:
    return imports(read(module), package=".".join(["openmm_tensornet", *module.split(".")[:-1]]), **options)


def test_reading_imports():
    source = (
        "from __future__ import annotations\nimport torch.nn as nn\nfrom . import __version__, mlpotential\n"
        "from .models.tensornet import TensorNet\nif TYPE_CHECKING:\n    from .static.potential import Atoms\n"
        "def f():\n    from openmm_tensornet.forces.torchforce import openmmtorch\n"
    )
    assert own_modules(imports(source)) == {"mlpotential", "models.tensornet", "forces.torchforce"}
    assert own_modules(imports(source, typing_too=True)) == {
        "mlpotential", "models.tensornet", "forces.torchforce", "static.potential",
    }  # fmt: skip
    assert "torch.nn" in imports(source)


def test_every_module_has_its_place():
    assert set(MODULES) == set(ORDER)
    folders = {".".join(path.parent.relative_to(PACKAGE).parts) for path in PACKAGE.rglob("*.py")}
    assert folders == {folder.strip() for folder in FOLDERS} | {""}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_up_the_table(module):
    below = own_modules(imported_by(module)) - set(ORDER[: ORDER.index(module)])
    assert not below, f"{module}.py imports {sorted(below)}, which come after it"


@pytest.mark.parametrize("module", [*MODULES, "__init__"])
def test_only_force_imports_openmmtorch(module):
    imported = {name.split(".")[0] for name in imported_by(module, typing_too=True)}
    assert ("openmmtorch" in imported) == (module == "forces.torchforce")


def test_models_are_readable_without_openmm():
    """From units to export, openmm is needed by nothing but the conversion of its units, inside a function."""
    for module in ORDER[: ORDER.index("forces.arguments")]:
        names = {name.split(".")[0] for name in imported_by(module, typing_too=True)}
        assert ("openmm" in names) == (module == "common.units"), module


def run(code: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)


def test_importing_the_package_imports_nothing_else():
    code = (
        "import sys; before = set(sys.modules); import openmm_tensornet as ot; ot.__version__; dir(ot)\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "openmm_tensornet" in loaded
    assert not loaded & {*OPTIONAL, "torch", "openmm", "numpy"}


BLOCKED = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL!r}))\n"  # an import of None raises ImportError


def test_without_optional_packages_all_but_the_force_works_and_that_says_what_to_install(model_path):
    code = BLOCKED + (
        "import openmm, torch, openmm_tensornet as ot, openmm_tensornet.md.cli\n"
        "from openmm.app import Element, Topology\n"
        "for name in ot.__all__:\n"
        "    if name != 'TensorNetForce' and (name != 'TensorNetPythonForce' or hasattr(openmm, 'PythonForce')):\n"
        "        assert getattr(ot, name) is not None\n"
        "from openmm_tensornet.static.potential import Atoms, Options\n"
        "potential = ot.StaticPotential.make(ot.load_model(sys.argv[1]), Atoms.make([8, 1, 1]), Options(tabulate=False))\n"
        "energy, forces = potential(torch.tensor([[0.0, 0, 0], [0.1, 0, 0], [0, 0.1, 0]]))\n"
        "assert torch.isfinite(energy) and torch.isfinite(forces).all()\n"
        "topology = Topology()\n"
        "topology.addAtom('He', Element.getByAtomicNumber(2), topology.addResidue('He', topology.addChain()))\n"
        "mixed = lambda: ot.create_mixed_system(topology, None, [0], 'no-such-file.ckpt')\n"
        "for attempt in (lambda: ot.TensorNetForce, lambda: ot.create_system(topology, '', backend='torch'), mixed):\n"
        "    try:\n"
        "        attempt()\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
        f"assert not [name for name in {OPTIONAL!r} if sys.modules[name] is not None]\n"
    )
    done = run(code, str(model_path("variants/zero-layers")))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert "create_mixed_system needs openmm-ml" in lines[2] and "pip install openmmml" in lines[2]
    for line in lines[:2]:
        for text in (
            "TensorNetForce needs openmmtorch",
            "pip install openmm-tensornet[cpu]",
            "conda-forge openmm-torch",
            "TensorNetPythonForce needs none of it, only OpenMM 8.5 or newer",
        ):
            assert text in line


def test_nothing_is_fetched_unless_a_model_is_asked_for_by_name(model_path):
    """Importing everything, making a force from a file and from the package, and evaluating it, without any network."""
    code = (
        "import socket, sys\n"
        "def refuse(*_, **__):\n"
        "    raise AssertionError('a connection was opened')\n"
        "def watch(event, arguments):\n"
        "    if event in ('socket.connect', 'socket.getaddrinfo', 'socket.gethostbyname', 'socket.sendto', 'urllib.Request'):\n"
        "        refuse()\n"
        "sys.addaudithook(watch)\n"
        "import importlib, openmm, openmmml, openmm_tensornet as ot\n"
        f"for name in {[name for name in MODULES if name not in ('forces.torchforce', 'forces.pythonforce', 'forces.openmmtools')]!r}:\n"
        "    importlib.import_module(f'openmm_tensornet.{name}')\n"
        "from openmm_tensornet.forces.system import force_class\n"
        "system = openmm.System()\n"
        "for _ in range(3):\n"
        "    system.addParticle(1)\n"
        "system.addForce(force_class()(sys.argv[1], atomic_numbers=[8, 1, 1], kernels='portable'))\n"
        "context = openmm.Context(system, openmm.VerletIntegrator(1e-3), openmm.Platform.getPlatformByName('Reference'))\n"
        "context.setPositions([[0, 0, 0], [0.1, 0, 0], [0, 0.1, 0]])\n"
        "context.getState(energy=True)\n"
        "assert ot.load_model('alanine-dipeptide-gfn2').elements\n"
        "try:\n"
        "    socket.create_connection(('192.0.2.1', 9), 1)\n"
        "except AssertionError:\n"
        "    print('and the trap works')\n"
    )
    done = run(code, str(model_path("variants/zero-layers")))
    assert (done.returncode, done.stdout) == (0, "and the trap works\n"), done.stderr


def test_public_names_have_types():
    """What type checkers see is what `__getattr__` gives."""
    import openmm_tensornet

    tree = ast.parse(read("__init__"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    typed = {alias.asname: node.module for node in block.body for alias in node.names if alias.asname == alias.name}
    assert typed == openmm_tensornet._HOME


@pytest.mark.slow
def test_a_misspelt_argument_is_found_by_mypy(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from openmm_tensornet import TensorNetForce\nTensorNetForce('m.ckpt', percision='double')\n")
    options = ["--ignore-missing-imports", "--follow-imports=silent", f"--cache-dir={tmp_path}"]
    done = subprocess.run([sys.executable, "-m", "mypy", *options, script], capture_output=True, text=True, timeout=300)
    assert 'Unexpected keyword argument "percision" for "TensorNetForce"' in done.stdout, done.stdout + done.stderr


def test_unknown_names_are_attribute_errors():
    import openmm_tensornet

    with pytest.raises(AttributeError, match=r"module 'openmm_tensornet' has no attribute 'TensorNet3'"):
        _ = openmm_tensornet.TensorNet3
    assert set(openmm_tensornet.__all__) <= set(dir(openmm_tensornet))
