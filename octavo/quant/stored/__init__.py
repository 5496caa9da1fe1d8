"""Matrices as they are stored, and their packing for kernels."""
