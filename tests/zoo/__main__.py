"""Runs the scripts of this folder, one after another in this interpreter, and prints what became of each as a line of JSON.

    python tests/zoo FOLDER BACKEND PLATFORM [NAME ...]

The scripts are as users write them. What differs between runs, OpenMM's platform and the back end of forces, is set around them.
FOLDER has the files that they read: tests/test_zoo.py makes it.
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

ZOO = Path(__file__).parent


def main(folder: Path, backend: str, platform: str, names: list[str]) -> None:
    os.environ |= {"OPENMM_DEFAULT_PLATFORM": platform, "OPENMM_CPU_THREADS": "1"}
    import torch

    import openmm_tensornet
    from openmm_tensornet import system

    torch.set_num_threads(1)
    chosen = system.force_class(backend)
    system.force_class = lambda backend=None: chosen
    openmm_tensornet.TensorNetForce = chosen
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
    for name in names or sorted(path.stem for path in ZOO.glob("[!_]*.py")):
        with tempfile.TemporaryDirectory() as there, warnings.catch_warnings(record=True) as caught:
            shutil.copytree(folder, there, dirs_exist_ok=True)
            os.chdir(there)
            problem = None
            try:
                with redirect_stdout(io.StringIO()):
                    runpy.run_path(str(ZOO / f"{name}.py"), run_name="__main__")
            except BaseException:
                problem = traceback.format_exc()
            os.chdir(ZOO)
        print(json.dumps([name, problem, [str(warning.message) for warning in caught]]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:4], sys.argv[4:])
