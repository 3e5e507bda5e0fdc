"""``python -m openmm_tensornet``: the program of :mod:`.cli`."""

import sys

from .md.cli import main

if __name__ == "__main__":
    sys.exit(main())
