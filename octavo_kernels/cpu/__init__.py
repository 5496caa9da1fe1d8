"""Kernels for the CPU, compiled by numba.

Every kernel is batch-invariant: its result for a row is bitwise a function of that row alone (and, in attention, of
its sequence's cache), independent of the other rows, of how a prompt was chunked, and of the number of threads. Sums
therefore have one fixed order, and no fast-math flag is ever set.
"""
