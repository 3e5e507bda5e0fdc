"""Kernels in Numba, and the interpreter that runs a sequence of them."""
