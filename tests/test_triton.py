"""The kernels for GPUs on a machine without one: interpreted on the CPU, and compiled for a GPU that is not there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton, which compiles the kernels for GPUs, is not installed")

TESTS = Path(__file__).parent
# Those of tests/test_kernels.py that hold operators against their definitions.
CHOSEN = (
    "definitions or by_atom or geometry_in_a_box or other_option or activated or passing or far_near or scaled_by_zero"
)


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=TESTS.parent,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_interpreted():
    """Results, gradients, awkward sizes and what is NaN, as on the CPU."""
    # The interpreter computes lanes that a mask leaves out, and numpy warns of them.
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", "-k", CHOSEN]
    done = run(["-m", "pytest", *options, "tests/test_kernels.py"], TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 40


COMPILE = r"""
import inspect
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

sys.path.insert(0, "tests")
import test_kernels
from openmm_tensornet.kernels import cuda, operators

TYPES = {torch.float32: "*fp32", torch.float64: "*fp64", torch.int64: "*i64"}
compiled = set()


def launch(kernel, *args, grid, warmup, **options):
    signature, constants = {}, {}
    for number, (parameter, value) in enumerate(zip(kernel.params, [*args, *options.values()])):
        if parameter.is_constexpr:
            signature[parameter.name], constants[(number,)] = "constexpr", options[parameter.name]
        else:
            signature[parameter.name] = TYPES[value.dtype] if torch.is_tensor(value) else "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(kernel, signature, constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
    compiled.add(kernel.__name__)


JITFunction.run = launch  # what is asked for is compiled, and not run
operators.RUNNERS["CPU"] = operators.RUNNERS["CUDA"]
for dtype in (torch.float32, torch.float64):
    case = test_kernels.Case(23, 40, dtype)
    for name in test_kernels.MOVING:
        arguments = case.arguments(name)
        test_kernels.values_and_gradients(test_kernels.fused(name), arguments, test_kernels.MOVING[name])
    positions, _, *rest = case.arguments("geometry")
    torch.ops.openmm_tensornet.geometry(positions, torch.eye(3, dtype=torch.float64), *rest)
launched = {name for name in re.findall(r"(\w+)\[[^\]]*\]\(", inspect.getsource(cuda)) if isinstance(vars(cuda).get(name), JITFunction)}
assert compiled == launched, compiled ^ launched
print(len(compiled))
"""


def test_compiled_for_a_gpu(tmp_path):
    """Every kernel that is launched, in both precisions."""
    done = run(["-c", COMPILE], TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 20
