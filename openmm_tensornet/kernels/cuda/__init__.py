"""The operators' kernels for NVIDIA GPUs, in Triton; :mod:`openmm_tensornet.kernels.definitions` says what each computes.

One launch each, with the exceptions that :mod:`openmm_tensornet.kernels.table` declares. Sums over neighbors are gathered by the atom that
receives them, from the entries of `by_atom`, with all neighbors of a small molecule at once: nothing is added atomically, and the same
input gives the same bits.
"""

from .atoms import *  # noqa: F403
from .charges import *  # noqa: F403
from .coulomb import *  # noqa: F403
from .pairs import *  # noqa: F403
from .perceptron import *  # noqa: F403
from .sums import *  # noqa: F403
