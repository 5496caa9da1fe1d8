"""Tiling of kernels by shape: plain tables of measured configurations, each with a default for other shapes."""
