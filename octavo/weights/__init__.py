"""Checkpoints: from files, which may be hostile, to named weights."""
