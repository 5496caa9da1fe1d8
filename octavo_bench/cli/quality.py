"""`octavo bench quality`: what each format of a model's weights costs and saves, in one table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from octavo.cli.settings import add_settings, at_least_0, load_config, positive, refuse_settings
from octavo.config import EngineConfig
from octavo_bench.cli.results import add_results, begin, finish

TOKENS, WINDOW = 20480, 512


def _names(text: str) -> list[str]:
    return text.split(",")


def add_kinds(kinds: Any) -> None:
    """Add the sub-command, which prints its table itself."""
    quality = kinds.add_parser(
        "quality", help="formats of a model's weights: bytes, perplexity, KL from float32, decode tokens/s"
    )
    add_settings(quality, EngineConfig)
    quality.add_argument(
        "--formats",
        type=_names,
        default=["float32", "bf16", "fp8", "int8", "int4"],
        help="comma-separated: auto, float32, bf16, fp16, fp8, int8, int4; with +lm_head, as in int4+lm_head, the map "
        "to logits is quantised to int8 (default: float32,bf16,fp8,int8,int4)",
    )
    quality.add_argument(
        "--checkpoints",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help="other checkpoints of the same model, such as quantised ones; PATH+lm_head quantises the map to logits",
    )
    quality.add_argument("--text", type=Path, help="file of ordinary text (default: help topics of Python)")
    quality.add_argument("--tokens", type=positive, default=TOKENS, help=f"tokens of it that count (default: {TOKENS})")
    quality.add_argument("--window", type=positive, default=WINDOW, help=f"tokens of a context (default: {WINDOW})")
    quality.add_argument(
        "--rounds",
        type=at_least_0,
        default=3,
        help="in which decoding is timed; the table has the fastest; 0 for none (default: 3)",
    )
    add_results(quality)
    quality.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from octavo.weights.hub import resolve_model
    from octavo_bench.quality import measure, read_text, variants, windows_of
    from octavo_bench.report import keep
    from octavo_bench.report_tables import formats

    begin(args)
    refuse_settings(args, {"dtype", "quantization", "quantize_lm_head"}, "name each format to compare in --formats")
    config = load_config(EngineConfig, args)
    compared = variants(config, args.formats, args.checkpoints)
    text = read_text(args.text)
    windows = windows_of(config.model, text, args.tokens, args.window)
    what = {"model": resolve_model(config.model).name, "text": text.name, "text_sha256": text.digest}
    what |= {"tokens": args.tokens, "window": args.window}

    def report(line: str) -> None:
        print(f"octavo: {line}", file=sys.stderr)

    def kept(rows: list[dict[str, Any]]) -> None:
        keep("quality", {**what, "rows": rows}, args.output)

    rows = measure(config, compared, windows, args.rounds, report, kept)
    return finish(args, {**what, "rows": rows}, shown=formats(rows))
