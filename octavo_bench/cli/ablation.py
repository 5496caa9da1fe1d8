"""`octavo bench ablation`: what each optimisation brings, one after the other."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from octavo.cli.settings import add_some_settings, load_config
from octavo.config import EngineConfig
from octavo_bench.cli.arguments import with_folder
from octavo_bench.cli.results import add_kind, say

OFFERED = ("model", "load_format", "device", "seed", "revision", "download_dir", "kv_cache_dtype", "max_num_seqs")
"""Settings that are the same for every engine of the table; all others are the table's own."""
SIZES = {
    "num_prompts": "requests of a visit",
    "shared_len": "tokens with which every prompt begins",
    "input_len": "tokens of each prompt after these",
    "output_len": "output tokens of each",
    "contexts": "whole contexts that the KV cache has room for",
}


def add_kinds(kinds: Any) -> None:
    """Add the sub-command, which prints its table itself."""
    help = "throughput and latency with one optimisation after another"
    ablation = add_kind(kinds, "ablation", help, _ablation, show=_table)
    add_some_settings(ablation, OFFERED)
    ablation.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
    for name, help in SIZES.items():
        ablation.add_argument("--" + name.replace("_", "-"), type=int, help=help)
    ablation.add_argument("--gap", type=float, help="seconds between two requests")
    ablation.add_argument("--rounds", type=int, default=3, help="visits to each engine, in turns; medians are reported")
    ablation.add_argument(
        "--deadline",
        type=float,
        default=280,
        help="seconds; after the first round, none begins that would not end by then",
    )


def _ablation(args: argparse.Namespace) -> dict[str, Any]:
    from octavo_bench.ablation import AblationWork, measure
    from octavo_bench.report import keep

    config = with_folder(load_config(EngineConfig, args))
    given = {name: value for name in (*SIZES, "gap") if (value := getattr(args, name)) is not None}
    if config.scheduler.max_num_seqs is not None:
        given["max_num_seqs"] = config.scheduler.max_num_seqs
    return measure(
        config,
        AblationWork(**given),
        args.rounds,
        say,
        args.deadline,
        lambda so_far: keep("ablation", so_far, args.output),
    )


def _table(result: Mapping[str, Any]) -> str:
    from octavo_bench.report_tables import ablation

    return ablation(result)
