"""Kernels for GPUs, compiled by Triton. Those for one kind of GPU alone are in ``octavo_kernels.hopper``."""
