"""Products with weights of 4 or 8 bits that have scales for groups of inputs."""
