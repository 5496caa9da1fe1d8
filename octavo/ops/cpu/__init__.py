"""Kernels for the CPU, compiled by numba; importing this package registers them with their ops.

Every kernel keeps one promise: what it computes for a row depends on nothing but that row (and, in
attention, its sequence's cache), to the bit: not on the other rows, on how a prompt was cut into chunks, or
on the number of threads. Sums therefore have one fixed order, and no fast-math flag is ever set.
"""

from octavo.ops.cpu import apply_rope, block_linear, linear, paged_attention, rms_norm, silu_and_mul, store_kv

__all__ = ["apply_rope", "block_linear", "linear", "paged_attention", "rms_norm", "silu_and_mul", "store_kv"]
