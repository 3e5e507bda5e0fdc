"""Matrix products in IEEE float32, and the user's settings of them left as they were."""

import subprocess
import sys
from threading import Event, Thread

import openmm
import pytest
import torch
from conftest import VARIANTS

from openmm_tensornet.common.atoms import Atoms
from openmm_tensornet.common.float32 import ieee_float32
from openmm_tensornet.export.compiled import compile_potential
from openmm_tensornet.forces.system import force_class
from openmm_tensornet.models.checkpoint import load_model

CUDA, CPU = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


def level():
    torch.set_float32_matmul_precision("high")


def lowest_level():
    torch.set_float32_matmul_precision("medium")


def flag():
    CUDA.allow_tf32 = True


def new_flag():
    CUDA.fp32_precision = "tf32"


def flag_of_all():
    torch.backends.fp32_precision = "tf32"


def nothing():
    pass


def precisions() -> tuple[str, ...]:
    """The level is unknown where it contradicts the flags."""
    try:
        first = torch.get_float32_matmul_precision()
    except RuntimeError:
        first = "unknown"
    return first, CUDA.fp32_precision, CPU.fp32_precision, torch.backends.fp32_precision


def are_off(found: tuple[str, ...]) -> bool:
    return found[0] == "highest" and {"tf32", "bf16"}.isdisjoint(found[1:3])


@pytest.fixture(autouse=True)
def _default():
    """As a process begins, and afterwards too."""

    def reset():
        torch.set_float32_matmul_precision("highest")
        for backend in (CUDA, CPU, torch.backends):
            backend.fp32_precision = "none"

    reset()
    yield
    reset()


@pytest.mark.parametrize("choose", [nothing, level, lowest_level, flag, new_flag, flag_of_all])
def test_settings_are_put_back(choose):
    choose()
    before = precisions()
    with ieee_float32, ieee_float32:
        assert are_off(precisions())
    assert precisions() == before
    if choose is flag_of_all:  # which still decides
        torch.backends.fp32_precision = "ieee"
        assert CUDA.fp32_precision == CPU.fp32_precision == "ieee"


def test_of_two_threads_the_last_one_puts_them_back():
    level()
    inside, leave = Event(), Event()

    def run():
        with ieee_float32:
            inside.set()
            leave.wait(60)

    thread = Thread(target=run)
    with ieee_float32:
        thread.start()
        inside.wait(60)
    assert are_off(precisions())
    leave.set()
    thread.join()
    assert precisions()[:3] == ("high", "tf32", "tf32")


def test_an_exception():
    level()
    with pytest.raises(ZeroDivisionError), ieee_float32:
        1 / 0  # noqa: B018
    assert precisions()[0] == "high"


def test_while_a_potential_is_made_and_checked(monkeypatch):
    found = []
    lowest_level()
    monkeypatch.setattr("openmm_tensornet.export.compiled._compare", lambda *_: found.append(precisions()) or {})
    compile_potential(load_model(VARIANTS["zero-layers"].checkpoint), Atoms.make([8, 1, 1]))
    assert are_off(found[0])
    assert precisions()[:3] == ("medium", "tf32", "bf16")


FRESH = """
import sys, openmm, torch
from openmm_tensornet.export import programs

found, prepared = [], programs._prepared

def spied(*given):
    own = prepared(*given)
    def evaluate(*arguments):
        found.append((torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32))
        return own.evaluate(*arguments)
    return own._replace(evaluate=evaluate)

programs._prepared = spied
def check():
    context.getState(energy=True, forces=True)
    context.getIntegrator().step(2)
    assert found and set(found) == {("highest", False)}, found
    assert torch.get_float32_matmul_precision() == "high" and torch.backends.cuda.matmul.allow_tf32
    found.clear()

torch.set_float32_matmul_precision("high")
system = openmm.XmlSerializer.deserialize(open(sys.argv[1]).read())
context = openmm.Context(system, openmm.VerletIntegrator(0.001), openmm.Platform.getPlatformByName("Reference"))
context.setPositions([[0, 0, 0], [0.1, 0, 0], [0, 0.1, 0]])
check()
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cuda.matmul.allow_tf32 = True
check()
"""


@pytest.mark.parametrize("backend", ["torch", "python"])
def test_a_force_read_from_xml_in_a_fresh_process(backend, tmp_path):
    """With TF32 switched on before it is read, and again after."""
    if backend == "torch":
        pytest.importorskip("openmmtorch", reason="TensorNetForce: openmmtorch is not installed")
    elif not hasattr(openmm, "PythonForce"):
        pytest.skip("TensorNetPythonForce: this OpenMM has no PythonForce")
    system = openmm.System()
    for mass in (16.0, 1.0, 1.0):
        system.addParticle(mass)
    model = load_model(VARIANTS["zero-layers"].checkpoint)
    system.addForce(force_class(backend)(model, atomic_numbers=[8, 1, 1], kernels="portable"))
    path = tmp_path / "system.xml"
    path.write_text(openmm.XmlSerializer.serialize(system))
    done = subprocess.run([sys.executable, "-c", FRESH, str(path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
