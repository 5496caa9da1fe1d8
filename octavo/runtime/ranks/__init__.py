"""Ranks: the processes among which tensor parallelism divides a model."""
