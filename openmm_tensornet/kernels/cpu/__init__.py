"""Kernels in Numba, and the interpreter that runs a sequence of them.

Most are written for some channels at a time (:mod:`.simd`); of plain loops LLVM makes vector instructions. Literals are cast
there, since Numba computes with float64 otherwise. Each kernel runs on one thread in a fixed order, so that the same input gives the
same bits. :mod:`openmm_tensornet.kernels.definitions` says what each computes.
"""
