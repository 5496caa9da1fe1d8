"""Checkpoints: reads named weights from files, which are not trusted."""
