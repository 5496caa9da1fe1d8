"""Flags that say how to sample, for the commands that generate text in a terminal."""

from __future__ import annotations

import argparse
from typing import Any

FLAGS: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "most tokens to generate"),
    ("temperature", float, "0 is greedy"),
    ("top_p", float, "sample from the most likely tokens that make up this probability"),
    ("top_k", int, "sample from this many most likely tokens"),
    ("min_p", float, "drop tokens less likely than this share of the best one's probability"),
    ("repetition_penalty", float, "above 1: tokens seen before get less likely"),
    ("presence_penalty", float, "above 0: tokens generated before get less likely"),
    ("frequency_penalty", float, "above 0: the more so, the more often they were generated"),
)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each way to sample; what is not given is not in ``sampling_values``."""
    group = parser.add_argument_group("sampling", "How to choose tokens, and when to stop.")
    for name, kind, help in FLAGS:
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar=kind.__name__.upper(), help=help)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were given, by the names of ``SamplingParams`` and of the OpenAI API."""
    names = [*(name for name, _, _ in FLAGS), "stop"]
    return {name: value for name in names if (value := getattr(args, name)) is not None}
