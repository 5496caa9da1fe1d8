"""Kernels for CPUs (numba) and CUDA devices (Triton), which register themselves with the ops of ``octavo.ops``."""
