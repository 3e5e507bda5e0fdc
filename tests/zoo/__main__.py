"""Runs scripts of this folder in one interpreter, and prints what became of each as a line of JSON.

    echo torch CPU minimize | python tests/zoo FOLDER

Each line of the input names a back end, an OpenMM platform and a script. The scripts are as users write them; back end and platform
are set around them. FOLDER has the files that they read: tests/test_zoo.py makes it.
"""

import io
import json
import os
import runpy
import shutil
import sys
import tempfile
import traceback
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import torch

import openmm_tensornet
from openmm_tensornet.forces import system

ZOO = Path(__file__).parent
CLASSES = {backend: system.force_class(backend) for backend in system.BACKENDS}


def outcome(folder: Path, backend: str, platform: str, name: str) -> tuple[str | None, list[str]]:
    """The traceback of a script, or None, and the warnings that it caused."""
    os.environ["OPENMM_DEFAULT_PLATFORM"] = platform
    system.force_class = lambda _=None: CLASSES[backend]
    openmm_tensornet.TensorNetForce = CLASSES[backend]
    with tempfile.TemporaryDirectory() as there, warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        shutil.copytree(folder, there, dirs_exist_ok=True)
        os.chdir(there)
        problem = None
        try:
            with redirect_stdout(io.StringIO()):
                runpy.run_path(str(ZOO / f"{name}.py"), run_name="__main__")
        except BaseException:
            problem = traceback.format_exc()
        os.chdir(ZOO)
    return problem, [str(warning.message) for warning in caught]


if __name__ == "__main__":
    os.environ["OPENMM_CPU_THREADS"] = "1"
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(outcome(Path(sys.argv[1]), *line.split())), flush=True)
