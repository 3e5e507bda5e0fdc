"""One sign wrong at a time: tests that need none of AceFF's weights must fail.

    python tests/mutations.py [--only NAME ...]

Each wrong sign stands in a clone of the last commit, in an empty folder from which no weights are found. Before that the same tests must
pass there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEP = "(c[6] - c[1]) * HALF"  # a component of a product of tensors
# Name: a file, what stands there once, what takes its place, and the tests that must notice.
MUTATIONS = {
    "fused kernel, CPU": (
        "kernels/cpu/steps.py",
        STEP,
        STEP.replace("-", "+"),
        "kernels/test_kernels.py -k definitions",
    ),
    "fused kernel, GPU": (
        "kernels/cuda/steps.py",
        STEP,
        STEP.replace("-", "+"),
        "kernels/test_triton.py -k interpreted",
    ),
    "tables": (
        "static/tables.py",
        "torch.pow((position - row)",
        "torch.pow((row - position)",
        "static/test_potential.py -k tables_stay",
    ),
    "charges": (
        "models/tensornet2.py",
        "unsqueeze(-1) - zeros",
        "unsqueeze(-1) + zeros",
        "models/test_charges.py -k oracle",
    ),
    "charges, portable": (
        "static/network.py",
        "(1) - _Equilibrate",
        "(1) + _Equilibrate",
        "static/test_charge_potential.py -k untabulated",
    ),
    "charges, CPU": ("kernels/cpu/charges.py", "k] -= h", "k] += h", "kernels/test_kernels.py -k definitions"),
    "definition": ("kernels/definitions.py", "(1) - zeros", "(1) + zeros", "kernels/test_kernels.py -k plain_pytorch"),
}


def passes(clone: Path, tests: str) -> bool:
    """Whether the tests pass in the clone; RuntimeError if they cannot be run."""
    file, *selected = tests.split(" ", 2)
    environment = os.environ | {
        "PYTHONPATH": str(clone), "OPENMM_TENSORNET_MODELS": "", "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(clone.parent / "hub"),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{file}", *selected]
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def main() -> int:
    """Try all, print what was noticed, and return 1 if something was not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MUTATIONS, metavar="NAME", default=list(MUTATIONS))
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        for name in parser.parse_args().only:
            file, right, wrong, tests = MUTATIONS[name]
            path = clone / "openmm_tensornet" / file
            source = path.read_text(encoding="utf-8")
            if source.count(right) != 1:
                raise RuntimeError(
                    f"{file}: expected {right!r} once, found it {source.count(right)} times; name another place"
                )
            sound = passes(clone, tests)
            path.write_text(source.replace(right, wrong), encoding="utf-8")
            noticed = not passes(clone, tests)
            path.write_text(source, encoding="utf-8")
            missed += not (sound and noticed)
            print(
                f"{'found' if noticed else 'MISSED':6}  {name} ({tests}){'' if sound else ': FAILS WITHOUT IT, TOO'}",
                flush=True,
            )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
