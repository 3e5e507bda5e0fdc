"""The operators' kernels for NVIDIA GPUs, in Triton; :mod:`.definitions` says what each computes.

One launch each, except that the backward pass of a layer takes two. Sums over neighbors are gathered by the atom that receives them,
from the entries of `by_atom`, with all neighbors of a small molecule at once: nothing is added atomically, and the same input gives the
same bits.
"""

from .cuda_atoms import *  # noqa: F403
from .cuda_charges import *  # noqa: F403
from .cuda_coulomb import *  # noqa: F403
from .cuda_pairs import *  # noqa: F403
from .cuda_perceptron import *  # noqa: F403
from .cuda_sums import *  # noqa: F403
