"""Breakages of one line each, to see whether the tests notice."""
