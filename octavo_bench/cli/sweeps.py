"""`octavo bench sweep`, `recompute` and `limit`: figures by a setting or a length, and where memory ends."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from octavo.cli.settings import (
    above_zero,
    at_least_0,
    load_config,
    positive,
    refuse_settings,
    setting_flags,
)
from octavo.config import EngineConfig
from octavo_bench.cli.arguments import engine_config, numbers
from octavo_bench.cli.results import add_kind, say

TRIED = {"max_model_len", "max_num_batched_tokens", "block_size", "num_kv_blocks", "kv_cache_memory"}
"""Settings that follow from the length of a context that `limit` tries."""


def add_kinds(kinds: Any) -> None:
    """Add the sub-commands."""
    sweep = add_kind(
        kinds, "sweep", "throughput at several values of a setting, or of a length", _sweep, has_engine=True
    )
    sweep.add_argument("--vary", required=True, metavar="NAME", help="a setting, such as block_size, or input_len")
    sweep.add_argument("--values", required=True, metavar="V,...", help="its values")
    sweep.add_argument("--num-prompts", type=positive, default=32)
    sweep.add_argument("--input-len", type=positive, default=128, help="prompt tokens of each")
    sweep.add_argument("--output-len", type=positive, default=64, help="output tokens of each")
    sweep.add_argument(
        "--shared-len", type=at_least_0, default=0, help="tokens with which every prompt begins, of these"
    )
    sweep.add_argument("--gap", type=float, default=0.0, help="seconds between two requests; default: all at once")
    sweep.add_argument("--rounds", type=positive, default=3, help="visits to each value, in turns")

    recompute = add_kind(kinds, "recompute", "decoding with a KV cache, and without one", _recompute, has_engine=True)
    recompute.add_argument("--lengths", type=numbers, default=[64, 256, 1024], help="tokens of the context")
    recompute.add_argument("--tokens", type=positive, default=8, help="tokens that are timed at each length")
    recompute.add_argument("--rounds", type=positive, default=3)

    limit = add_kind(
        kinds,
        "limit",
        "the longest context before memory runs out, tried in processes of their own",
        _limit,
        has_engine=True,
    )
    limit.add_argument("--memory", type=above_zero, metavar="GIB", help="of data in host memory; default: all there is")
    limit.add_argument("--longest", type=positive, default=8192, help="longest context to try, or of a place")
    limit.add_argument(
        "--sequences", type=positive, metavar="N", help="find the largest batch, up to N, paged and contiguous, instead"
    )
    limit.add_argument("--context", type=positive, default=256, help="tokens of each sequence of --sequences")


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _sweep(args: argparse.Namespace) -> dict[str, Any]:
    from octavo_bench.sweep import SweepWork, sweep

    config = engine_config(args)
    work = SweepWork(args.num_prompts, args.input_len, args.output_len, args.shared_len, args.gap)
    vary, values = args.vary.replace("-", "_"), [_value(text) for text in args.values.split(",")]
    rows = list(sweep(config, work, vary, values, args.rounds, say))
    return {"model": Path(config.model.model).name, **work._asdict(), "rows": rows}


def _recompute(args: argparse.Namespace) -> dict[str, Any]:
    from octavo_bench.sweep import without_cache

    config = engine_config(args)
    rows = list(without_cache(config, args.lengths, args.tokens, args.rounds))
    return {"model": Path(config.model.model).name, "rows": rows}


def _limit(args: argparse.Namespace) -> dict[str, Any]:
    from octavo_bench.sweep import largest_batches, memory_limit

    refuse_settings(args, TRIED, "`bench limit` sets it for each try")
    config = load_config(EngineConfig, args)
    model = config.model.model
    flags = ["--model", model, *setting_flags(config)]
    if args.sequences is None:
        found = memory_limit(flags, args.memory, args.longest, say)
    else:
        found = largest_batches(flags, args.memory, args.sequences, args.context, args.longest, say)
    return {"model": Path(model).name, "memory": args.memory or "all", **found}
