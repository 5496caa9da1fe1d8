"""Kernels in Gluon for GPUs of compute capability 9.0, where those in ``octavo_kernels.triton`` call them."""
