"""Sampling flags of the commands that generate text in a terminal."""

from __future__ import annotations

import argparse
from typing import Any

FLAGS: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "maximum tokens to generate"),
    ("temperature", float, "sampling temperature; 0 is greedy"),
    ("top_p", float, "sample from the smallest set of most likely tokens with this total probability"),
    ("top_k", int, "sample from the K most likely tokens; 0 or -1: all"),
    ("min_p", float, "drop tokens less likely than this fraction of the most likely token's probability"),
    ("repetition_penalty", float, "above 1 makes tokens of the prompt and the output less likely"),
    ("presence_penalty", float, "above 0 makes tokens of the output less likely"),
    ("frequency_penalty", float, "above 0 makes tokens less likely in proportion to their count in the output"),
)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the sampling flags; flags that are not given are absent from ``sampling_values``."""
    group = parser.add_argument_group("sampling", "Sampling and stopping parameters.")
    for name, kind, help in FLAGS:
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar=kind.__name__.upper(), help=help)
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop before this string; may be repeated")


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were given, under their names in ``SamplingParams`` and the OpenAI API."""
    names = [*(name for name, _, _ in FLAGS), "stop"]
    return {name: value for name in names if (value := getattr(args, name)) is not None}
