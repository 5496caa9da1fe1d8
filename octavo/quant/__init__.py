"""How checkpoints store matrices, and what kernels compute with."""
