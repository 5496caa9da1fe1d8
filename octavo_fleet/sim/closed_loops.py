"""Closed-loop benchmark workloads: named loads of random prompts."""

from __future__ import annotations

from typing import NamedTuple

from octavo.errors import ConfigError


class ClosedLoopSpec(NamedTuple):
    """``prompts`` requests, at most ``concurrency`` at a time, each sent as soon as that allows.

    Lengths are drawn evenly from ``length * (1 - spread)`` to ``length * (1 + spread)``.
    """

    prompts: int
    input_len: int
    output_len: int
    spread: float
    concurrency: int


WORKLOADS = {
    "W1": ClosedLoopSpec(100, 256, 64, 0.5, 16),
    "W2": ClosedLoopSpec(8, 128, 256, 0.0, 1),
    "W3": ClosedLoopSpec(256, 1024, 256, 0.0, 64),
    "W4": ClosedLoopSpec(512, 512, 256, 0.0, 256),
    "W5": ClosedLoopSpec(4, 4096, 64, 0.0, 1),
    "W6": ClosedLoopSpec(2, 32512, 128, 0.0, 1),
    "W7": ClosedLoopSpec(8, 32512, 128, 0.0, 8),
    "W8": ClosedLoopSpec(2, 130_560, 128, 0.0, 1),
    "S1": ClosedLoopSpec(4, 64, 16, 0.0, 2),
}
"""W1: a few users with short, uneven requests. W2: one user. W3, W4: many and very many at once. W5: one long prompt.
W6, W7: prompts of 32k, one and eight at a time. W8: prompts of 128k. S1: small, for trying out a measurement."""


def named_workloads(names: str) -> list[str]:
    """The names in a comma-separated list, checked; raise ``ConfigError`` for one that is not known."""
    found = names.split(",")
    for name in found:
        if name not in WORKLOADS:
            raise ConfigError(f"workloads: {name!r} is not one of {', '.join(WORKLOADS)}")
    return found


def warm_up(load: ClosedLoopSpec) -> ClosedLoopSpec:
    """A short pass over the same shapes: every batch size once, few tokens."""
    return load._replace(prompts=min(load.prompts, max(2, load.concurrency)), output_len=min(load.output_len, 32))
