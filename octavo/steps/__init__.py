"""The seam between deciding and executing: the messages that an executor carries out, and the bytes of a step."""
