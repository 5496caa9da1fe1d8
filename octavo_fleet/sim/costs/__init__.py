"""How long a step takes: on the roofline of a device, as fitted to a measured one, or as given."""
