"""Short scripts as users write them, each in a process of its own: what once crashed must not take the tests with it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from openmm.app import PDBFile

from openmm_tensornet import export_potential, load_model
from openmm_tensornet.common.interrupts import Entry, deliver, delivered
from openmm_tensornet.md.runfiles import DCD_HEADER_BYTES, RunFiles

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "alanine_dipeptide.pdb"

ATOMS_BEYOND = """
import sys
import openmm, openmm_tensornet
model, kind, kernels, platform = sys.argv[1:]
force = getattr(openmm_tensornet, kind)(model, atomic_numbers=[8, 1, 1], atoms=[1, 2, 7], kernels=kernels)
system = openmm.System()
for mass in (16, 1, 1):
    system.addParticle(mass)
system.addForce(force)
try:
    context = openmm.Context(system, openmm.VerletIntegrator(0.0005), openmm.Platform.getPlatformByName(platform))
    context.setPositions([[0, 0, 0], [0.0957, 0, 0], [-0.024, 0.0927, 0]])
    context.getState(energy=True)
except Exception as error:
    print(error)
"""

SPAWNED = """
import multiprocessing, random, sys
from concurrent.futures import ProcessPoolExecutor
import numpy, openmm, torch
from openmm.app import PDBFile
from openmm_tensornet import create_system

def energy(system, file):
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), openmm.Platform.getPlatformByName("Reference"))
    context.setPositions(PDBFile(file).positions)
    return context.getState(energy=True).getPotentialEnergy()._value

def states():
    return torch.random.get_rng_state().tolist(), str(numpy.random.get_state()), random.getstate()

if __name__ == "__main__":
    model, file = sys.argv[1:]
    before = states()
    system = create_system(PDBFile(file).topology, model, kernels="fused")
    print("random numbers kept", states() == before)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        print("same energy", abs(pool.submit(energy, system, file).result(timeout=100) - energy(system, file)) < 1e-3)
"""


def run(script: str, *arguments) -> str:
    """What a script prints; a crash fails the test."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr}"
    return done.stdout


@pytest.mark.parametrize(
    ("kind", "kernels", "platform"),
    [
        ("TensorNetForce", "fused", "CPU"),
        ("TensorNetForce", "portable", "Reference"),
        ("TensorNetPythonForce", "fused", "Reference"),
    ],
)
def test_atoms_that_the_system_has_not(model_path, kind, kernels, platform):
    said = run(ATOMS_BEYOND, model_path("variants/zero-layers"), kind, kernels, platform)
    assert "atoms: expected indices below the number of the System's particles, 3, received 7" in said


def test_a_spawned_worker(model_path, tmp_path):
    """It imports no more than the script does, and has the operators of the fused kernels."""
    script = tmp_path / "script.py"
    script.write_text(SPAWNED)
    command = [sys.executable, script, model_path("variants/zero-layers"), EXAMPLE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stdout == "random numbers kept True\nsame energy True\n", done.stderr


WITHOUT_WARNINGS = """
import copy, sys
import openmm
from openmm.app import PDBFile, Simulation
import openmm_tensornet
from openmm_tensornet import tensornet_forces

model, file, folder = sys.argv[1:]
pdb = PDBFile(file)
for backend in ("torch", "python"):
    system = openmm_tensornet.create_system(model, pdb.topology, positions=pdb.positions, backend=backend)
    integrator = openmm.LangevinMiddleIntegrator(300, 1, 0.0005)
    simulation = Simulation(pdb.topology, system, integrator, openmm.Platform.getPlatformByName("Reference"))
    simulation.context.setPositions(pdb.positions)
    simulation.step(3)
    (force,) = tensornet_forces(copy.deepcopy(system))
loaded, numbers = openmm_tensornet.load_model(model), force.metadata["atomic_numbers"]
for write in (openmm_tensornet.export_potential, openmm_tensornet.export_torchscript):
    path = f"{folder}/{write.__name__}"
    write(loaded, path, atomic_numbers=numbers)
openmm_tensornet.TensorNetForce(f"{folder}/export_potential", atomic_numbers=numbers)
print("done")
"""


def test_no_warnings_reach_the_user(model_path, tmp_path):
    """Nor what libraries deprecate: `python -W error` runs a script to its end."""
    pytest.importorskip("openmmtorch", reason="TensorNetForce: openmmtorch is not installed")
    arguments = (model_path("variants/zero-layers"), EXAMPLE, tmp_path)
    command = [sys.executable, "-W", "error", "-c", WITHOUT_WARNINGS, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


WITHOUT_TORCHSCRIPT = """
import copy, sys
import torch

def refuse(*_, **__):
    raise AssertionError("TorchScript was called")

for name in ("script", "trace", "freeze", "save", "load"):
    setattr(torch.jit, name, refuse)

import openmm
from openmm.app import PDBFile
from openmm_tensornet import TensorNetPythonForce

model, charged, file, exported = sys.argv[1:]
pdb = PDBFile(file)
numbers = [atom.element.atomic_number for atom in pdb.topology.atoms()]
for kernels in ("portable", "fused"):
    forces = [
        TensorNetPythonForce(charged, pdb.topology, kernels=kernels),
        TensorNetPythonForce(exported, pdb.topology),
        TensorNetPythonForce(model, pdb.topology, kernels=kernels, scale_parameter="scale"),
    ]
    for force in forces:
        system = openmm.System()
        for _ in numbers:
            system.addParticle(1)
        system.addForce(force)
        energies = []
        for one in (system, copy.deepcopy(system), openmm.XmlSerializer.deserialize(openmm.XmlSerializer.serialize(system))):
            integrator = openmm.VerletIntegrator(0.0001)
            context = openmm.Context(one, integrator, openmm.Platform.getPlatformByName("Reference"))
            context.setPositions(pdb.positions)
            integrator.step(2)
            energies.append(context.getState(energy=True).getPotentialEnergy()._value)
            seen = TensorNetPythonForce.cast(one.getForce(0))
            assert seen.diagnose(context) is None and seen.replica_energies(context).shape == (1,)
            assert force is not forces[0] or abs(seen.partial_charges(context).sum()) < 1e-6
        assert energies[1:] == energies[:1] * 2, energies
loaded = [name for name in sys.modules if name.startswith("openmm_tensornet") and name.endswith(("jit", "torchscript"))]
assert not loaded, loaded
print("done")
"""


def test_a_python_force_needs_no_torchscript(model_path, tmp_path):
    """It is deprecated in PyTorch: a force is made, copied, written, read and evaluated without it."""
    pytest.importorskip("openmm_tensornet.forces.pythonforce", reason="TensorNetPythonForce: needs OpenMM 8.5")
    model, exported = model_path("variants/zero-layers"), tmp_path / "exported"
    numbers = [atom.element.atomic_number for atom in PDBFile(str(EXAMPLE)).topology.atoms()]
    export_potential(load_model(model), exported, atomic_numbers=numbers)
    arguments = (model, model_path("so3"), EXAMPLE, exported)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCHSCRIPT, *map(str, arguments)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


FORMER_NAMES = """
import sys
from openmm_tensornet import create_system, export_potential, load_model
import openmm_tensornet

model, file, folder = sys.argv[1:]
from openmm.app import PDBFile
pdb = PDBFile(file)
count = pdb.topology.getNumAtoms()
calls = [
    lambda: openmm_tensornet.TensorNetPythonForce(model, pdb.topology, molecules=[0] * count),
    lambda: create_system(model, pdb.topology, backend="python", molecules=[0] * count),
    lambda: export_potential(load_model(model), f"{folder}/file", atomic_numbers=[8, 1], molecules=[0, 0]),
]
for k, call in enumerate(calls):
    print(k, file=sys.stderr)
    call()
"""


def test_former_names_warn_whoever_calls(model_path, tmp_path):
    """With Python's own filters, which hide what is attributed to a library."""
    arguments = (model_path("variants/zero-layers"), EXAMPLE, tmp_path)
    command = [sys.executable, "-c", FORMER_NAMES, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    told = [line for line in done.stderr.splitlines() if "is called replicas now" in line or line.isdigit()]
    assert [line.isdigit() for line in told] == [True, False] * 3, done.stderr


INTERRUPTED = """
import os, signal, sys, threading
import openmm
from openmm.app import PDBFile, Simulation
from openmm_tensornet import create_system

class Stop(Exception):
    pass

def handler(*_):
    raise Stop("from the handler")

signal.signal(signal.SIGUSR1, handler)
pdb = PDBFile(sys.argv[1])
system = create_system(pdb.topology, "alanine-dipeptide-gfn2", backend=sys.argv[3])
simulation = Simulation(
    pdb.topology, system, openmm.LangevinMiddleIntegrator(300, 1, 0.0005), openmm.Platform.getPlatformByName(sys.argv[2])
)
simulation.context.setPositions(pdb.positions)
simulation.step(5)
for number, kind in ((signal.SIGINT, KeyboardInterrupt), *[(signal.SIGUSR1, Stop)] * 10):
    threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
    try:
        simulation.integrator.step(10**6)  # one call of OpenMM
    except kind as error:
        print(repr(error))
simulation.step(5)
print("goes on")
"""


@pytest.mark.parametrize("backend", ["torch", "python"])
@pytest.mark.parametrize("platform", ["Reference", "CPU"])
def test_signals_reach_the_user(platform, backend, tmp_path):
    """Ctrl-C, and the exception of a handler of the user's own, end one long step; the Context is as good as before."""
    pytest.importorskip("numba", reason="numba is not installed, and portable kernels run no Python")
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    command = [sys.executable, script, EXAMPLE, platform, backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    expected = "KeyboardInterrupt()\n" + 10 * "Stop('from the handler')\n" + "goes on\n"
    assert (done.returncode, done.stdout) == (0, expected), done.stderr[-2000:]


def test_a_signal_where_openmm_makes_python_objects():
    """Python makes a SystemError of what a handler raises in C++ code that calls Python again; the cause is delivered."""

    def callback(_):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise SystemError("returned a result with an exception set") from error

    with pytest.raises(RuntimeError, match=r"^KeyboardInterrupt: $"):
        Entry(lambda: callback).send(None)


@pytest.mark.parametrize("wrap", [deliver, lambda callback: callback])
def test_a_signal_in_torchscript_outside_of_openmm(wrap):
    """As while a force is made, whether the handler ran in an operator or before its first line."""

    def run(x):
        raise KeyboardInterrupt

    library = torch.library.Library("interrupted", "FRAGMENT")
    library.define("run(Tensor x) -> Tensor")
    library.impl("run", wrap(run), "CPU")
    scripted = torch.jit.CompilationUnit("def call(x):\n  return torch.ops.interrupted.run(x)\n")
    with pytest.raises(KeyboardInterrupt), delivered():
        scripted.call(torch.ones(1))
    library._destroy()


def test_an_error_without_a_text_is_no_signal():
    with pytest.raises(RuntimeError), delivered():
        raise RuntimeError


RUN = """
import os, signal, sys, threading, time
from pathlib import Path
import openmm_tensornet.forces.system
from openmm.app import Simulation
from openmm_tensornet.md import cli

model, structure = sys.argv[1:]

def simulate(output, *options):
    print(cli.main(
        ["simulate", structure, "--model", model, "--output", output, "--time", "1 ps", "--equilibration-time", "0.01 ps",
         "--report-interval", "10", "--seed", "3", "--platform", "Reference", "--quiet", *options]
    ), file=sys.stderr)

def during(function, number):
    # What sends a signal to its own process and goes on.
    def run(*arguments, **options):
        os.kill(os.getpid(), number)
        return function(*arguments, **options)
    return run

def after_rows(count, number):
    energies = Path("stopped", "energies.csv")
    while not (energies.exists() and energies.read_text().count("\\n") > count):
        time.sleep(0.001)
    os.kill(os.getpid(), number)

create, minimize = openmm_tensornet.forces.system.create_system, Simulation.minimizeEnergy
openmm_tensornet.forces.system.create_system = during(create, signal.SIGTERM)
simulate("stopped")
openmm_tensornet.forces.system.create_system = create
Simulation.minimizeEnergy = during(minimize, signal.SIGTERM)
simulate("stopped")
Simulation.minimizeEnergy = minimize
for rows, number, options in ((3, signal.SIGINT, ()), (30, signal.SIGTERM, ("--resume",))):
    threading.Thread(target=after_rows, args=(rows, number), daemon=True).start()
    simulate("stopped", *options)
    print(Path("stopped", "energies.csv").read_text().count("\\n") > rows, file=sys.stderr)
simulate("stopped", "--resume")
simulate("undisturbed")
print(int(signal.getsignal(signal.SIGTERM)), file=sys.stderr)
"""


def test_a_run_that_is_interrupted_is_resumed(tmp_path):
    """By SIGINT and SIGTERM: one line, a checkpoint of the last report, status 130; the output is that of an undisturbed run."""
    command = [sys.executable, "-c", RUN, "alanine-dipeptide-gfn2", EXAMPLE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    resumes = "interrupted; resuming continues from stopped/checkpoint.zip"
    assert done.stderr.splitlines() == [
        "interrupted: before the run began, no checkpoint was written", "130",
        "interrupted: minimisation, before the first checkpoint; start again", "130",
        resumes, "130", "True",
        resumes, "130", "True",
        "0", "0", "0",
    ]  # fmt: skip
    first, second = (RunFiles.in_directory(tmp_path / name) for name in ("stopped", "undisturbed"))
    for name in ("energies", "final"):
        assert getattr(first, name).read_bytes() == getattr(second, name).read_bytes()
    frames = [files.trajectory.read_bytes()[DCD_HEADER_BYTES:] for files in (first, second)]
    assert frames[0] == frames[1] != b""
