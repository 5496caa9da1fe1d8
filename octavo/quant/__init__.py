"""Quantisation: how checkpoints store matrices, and the weight formats that kernels compute with."""
