"""Sampling flags of the commands that generate text in a terminal."""

from __future__ import annotations

import argparse
from typing import Any

from octavo.sampling_params import OPTIONS

FLAGS: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "maximum tokens to generate"),
    *((name, option.kind, option.help) for name, option in OPTIONS.items() if option.help),
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
