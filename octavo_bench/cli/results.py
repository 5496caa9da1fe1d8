"""What measurements do with their results: print the record, keep it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo_bench.report import publish


def add_results(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    results = parser.add_argument_group("results")
    results.add_argument("--output", type=Path, metavar="FILE", help="also write the record, as JSON, to this file")


def finish(args: argparse.Namespace, result: Mapping[str, Any]) -> int:
    """Print the record, and do what the flags say. Returns the exit code. Raises ``ConfigError``."""
    publish(args.kind, result, args.output)
    return 0
