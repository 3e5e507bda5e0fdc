"""``python -m openmm_tensornet``: the program of :mod:`.md.cli`."""

import sys

from .md.cli import main

if __name__ == "__main__":
    sys.exit(main())
