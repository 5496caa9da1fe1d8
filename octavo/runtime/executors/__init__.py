"""Executors, which execute the messages of the deciding tower, and the program of a step."""
