"""`octavo bench suites`: GPT-2 at its real size, with random weights, by the suites of a published measurement."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.settings import load_config, positive, refuse_settings, setting_flags
from octavo.config import EngineConfig, cache_dir
from octavo.errors import ConfigError
from octavo_bench.cli.results import add_kind, say

if TYPE_CHECKING:
    from octavo_bench.suites import SuiteSizes

SUITES = ("alone", "uneven", "pressed", "http")


def add_kinds(kinds: Any) -> None:
    """Add the sub-command; it keeps what it has after each figure."""
    help = "GPT-2 with random weights, beside published figures, in process and over HTTP"
    suites = add_kind(kinds, "suites", help, _suites, has_engine=True)
    suites.add_argument("--shape", default="gpt2", help="of `octavo bench shape`")
    suites.add_argument("--suites", default=",".join(SUITES), help="of all, comma-separated")
    suites.add_argument("--small", action="store_true", help="little of each, for trying out and for CPUs")
    suites.add_argument("--rounds", type=positive, default=3, help="runs of each case; medians are reported")


def _suites(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one figure after the other; the file that ``--output`` names has all so far."""
    from octavo_bench.dummy_models import model_folder
    from octavo_bench.report import keep
    from octavo_bench.suites import FULL, SMALL

    wanted = args.suites.split(",")
    if unknown := [name for name in wanted if name not in SUITES]:
        raise ConfigError(f"suites: {unknown[0]!r} is not one of {', '.join(SUITES)}")
    folder = model_folder(args.shape, cache_dir() / "shapes")
    refuse_settings(args, {"model", "load_format"}, "`bench suites` makes its own model; --shape says which")
    given = load_config(EngineConfig, args)
    result: dict[str, Any] = {"model": args.shape, "size": "small" if args.small else "full", "rows": []}
    sizes = SMALL if args.small else FULL if args.shape == "gpt2" else FULL._replace(published={})
    for row in _rows(wanted, folder, given, sizes, args.rounds):
        result["rows"].append(row)
        keep("suites", result, args.output)
        say(f"{row['suite']} {row['case']}: {row['value']['median']}")
    return result


def _rows(
    wanted: list[str], folder: Path, given: EngineConfig, sizes: SuiteSizes, rounds: int
) -> Iterator[dict[str, Any]]:
    from octavo_bench import suites

    config = dataclasses.replace(given, model=dataclasses.replace(given.model, model=str(folder), load_format="dummy"))
    in_process = {"alone": suites.alone_and_together, "uneven": suites.uneven, "pressed": suites.pressed}
    for name in wanted:
        if name in in_process:
            yield from in_process[name](config, sizes, rounds)
            continue
        arguments = [*setting_flags(config), "--max-num-seqs", str(max(*sizes.concurrencies, sizes.arrivals))]
        with tempfile.TemporaryDirectory() as logs:
            yield from suites.served(folder, arguments, sizes, rounds, Path(logs) / "server.log")
