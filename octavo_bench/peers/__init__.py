"""Other engines on the same work. Each file is a script for the peer's own Python interpreter."""
