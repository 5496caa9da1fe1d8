"""The suites that GPT-2 is measured by, with the figures that another engine published for them.

The figures are those of https://github.com/achi9629/llm-inference-engine for GPT-2 124M in float32 on an A100 of 80 GB,
with its contiguous cache in this process and its paged one over HTTP. The work is as it describes it; where it does not
say how long prompts are, they are short.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

PUBLISHED: dict[str, dict[str, float]] = {
    "latency s": {"64": 0.277, "256": 0.279, "512": 0.286},
    "throughput tok/s": {"200": 173.1, "500": 172.5, "1000": 172.0},
    "batch tok/s": {"1": 155, "8": 1138, "128": 11368, "512": 18346},
    "memory ratio": {"1": 0.2, "16": 0.8, "32": 1.5, "64": 2.6, "256": 8.7},
    "http tok/s": {"short, 64": 1840, "medium, 64": 1749, "long, 64": 1582},
}
"""By suite and case. Of ``latency s`` less is better, of all others more."""

PROMPT_WORDS = {"short": 5, "medium": 40, "long": 150}


class SuiteSizes(NamedTuple):
    """What each suite asks for."""

    output: int
    """Tokens of each answer, where a suite does not say otherwise."""
    prompts: tuple[int, ...]
    """Latency: lengths of a prompt computed alone."""
    outputs: tuple[int, ...]
    """Throughput: lengths of an answer made alone."""
    batches: tuple[int, ...]
    """Batch, memory: answers made together."""
    uneven: int
    """Continuous: answers of lengths from a fifth to nine fifths of ``output``, a few at a time."""
    places: int
    """Continuous: how many at a time."""
    pressed: int
    """Pressure: answers made together, with blocks for a quarter of them."""
    arrivals: int
    """HTTP: requests of each pattern of arrivals."""
    concurrencies: tuple[int, ...]
    """HTTP: requests under way at once."""
    repeats: int
    """HTTP: requests of each place."""
    published: Mapping[str, Mapping[str, float]] = {}
    """Figures for these sizes, as in ``PUBLISHED``."""


FULL = SuiteSizes(
    output=50,
    prompts=(64, 256, 512),
    outputs=(200, 500, 1000),
    batches=(1, 8, 16, 32, 64, 128, 256, 512),
    uneven=24,
    places=4,
    pressed=64,
    arrivals=100,
    concurrencies=(1, 4, 8, 16, 32, 64),
    repeats=4,
    published=PUBLISHED,
)
SMALL = SuiteSizes(
    output=8,
    prompts=(16, 64),
    outputs=(20, 60),
    batches=(1, 4, 16),
    uneven=8,
    places=4,
    pressed=8,
    arrivals=6,
    concurrencies=(1, 4),
    repeats=2,
)
"""For trying out, and for machines without a GPU."""
