"""The kernels for GPUs on a machine without one: interpreted on the CPU, and compiled for a GPU that is not there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton, which compiles the kernels for GPUs, is not installed")

ROOT = Path(__file__).resolve().parents[2]
# Those of tests/kernels/test_kernels.py that hold operators against their definitions. Pairs are found without cells on a GPU, so that the
# geometries that differ in them are the same to it.
CHOSEN = (
    "definitions or by_atom or geometry_in_a_box or other_option or activated or passing or far_near or scaled_by_zero "
    "or (near_pairs and double and triclinic and three and not wide and not many and not room)"
)


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_interpreted():
    """Results, gradients, awkward sizes and what is NaN, as on the CPU."""
    # The interpreter computes lanes that a mask leaves out, and numpy warns of them.
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", "-k", CHOSEN]
    done = run(["-m", "pytest", *options, "tests/kernels/test_kernels.py"], TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 40


# Bytes of shared memory that a block may have, by compute capability. No thread has more than 255 registers anywhere: what needs more
# is spilled to memory, which shows as a stack.
SHARED_MEMORY = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
COMPILE = r"""
import re
import subprocess
import sys
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

sys.path[:0] = ["tests", "tests/kernels"]
import test_kernels
from openmm_tensornet.kernels import cuda, operators

CAPABILITY, SHARED, FILE = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
READER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TYPES = {torch.float32: "*fp32", torch.float64: "*fp64", torch.int64: "*i64"}
compiled, too_large = set(), {}


def launch(kernel, *args, grid, warmup, **options):
    signature, constants = {}, {}
    for number, (parameter, value) in enumerate(zip(kernel.params, [*args, *options.values()])):
        if parameter.is_constexpr:
            signature[parameter.name], constants[(number,)] = "constexpr", options[parameter.name]
        else:
            signature[parameter.name] = TYPES[value.dtype] if torch.is_tensor(value) else "fp32" if isinstance(value, float) else "i32"
    made = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", CAPABILITY, 32))
    FILE.write_bytes(made.asm["cubin"])
    used = subprocess.run([READER, "-res-usage", FILE], capture_output=True, text=True, check=True).stdout
    fits = re.findall(r"STACK:(\d+)", used) == ["0"] and made.metadata.shared <= SHARED
    too_large.update({} if fits else {(kernel.__name__, dtype): (made.metadata.shared, used)})
    compiled.add(kernel.__name__)


JITFunction.run = launch  # what is asked for is compiled, and not run
operators.RUNNERS["CPU"] = operators.RUNNERS["CUDA"]
for dtype in map(torch.__dict__.get, sys.argv[4:]):
    case = test_kernels.Case(23, 128, dtype)
    for name in test_kernels.MOVING:
        if name not in test_kernels.FOR_CPUS:
            arguments = case.arguments(name)
            test_kernels.values_and_gradients(test_kernels.fused(name), arguments, test_kernels.MOVING[name])
    positions, _, *rest = case.arguments("geometry")
    box = torch.eye(3, dtype=torch.float64)
    torch.ops.openmm_tensornet.geometry(positions, box, *rest)
    for x in (positions, positions.float()):
        torch.ops.openmm_tensornet.near_pairs(x, box.to(x.dtype), torch.zeros(23, dtype=torch.long), 0.5, 100)
modules = [m for name, m in sys.modules.items() if name.startswith("openmm_tensornet.kernels.cuda")]
functions = {name: f for m in modules for name, f in vars(m).items() if isinstance(f, JITFunction)}
called = {name for f in functions.values() for name in re.findall(r"(\w+)\(", f.src.partition(":\n")[2])}
assert compiled == functions.keys() - called, compiled ^ (functions.keys() - called)
assert not too_large, too_large
print(len(compiled))
"""


@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [
        (75, ["float64"]),  # needs most registers and has least shared memory
        pytest.param(75, ["float32"], marks=pytest.mark.slow),
        *(pytest.param(c, ["float32", "float64"], marks=pytest.mark.slow) for c in (80, 86, 89, 90, 120)),
    ],
)
def test_compiled_for_gpus(capability, dtypes, tmp_path):
    """Every kernel that is launched, without spilling registers, in the shared memory that there is."""
    arguments = [str(capability), str(SHARED_MEMORY[capability]), str(tmp_path / "kernel.cubin"), *dtypes]
    done = run(["-c", COMPILE, *arguments], TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 30
