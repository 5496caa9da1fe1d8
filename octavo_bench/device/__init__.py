"""Measurements of single kernels, of steps, and of what a GPU does at best."""
