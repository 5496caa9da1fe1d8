"""How kernels are cut for shapes: plain tables, taken from measurements, each with a default for every other shape."""
