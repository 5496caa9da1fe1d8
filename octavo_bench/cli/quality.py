"""`octavo bench quality`: what each format of a model's weights costs and saves, in one table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.cli.settings import add_settings, at_least_0, load_config, positive, refuse_settings
from octavo.config import EngineConfig

TOKENS, WINDOW = 20480, 512
COLUMNS = ("format", "weights", "perplexity", "mean KL", "same top-1", "tokens/s")


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
    quality.add_argument("--output", type=Path, help="also write the raw JSON to this file")
    quality.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from octavo.weights.hub import resolve_model
    from octavo_bench.quality import measure
    from octavo_bench.quality_formats import read_text, variants, windows_of
    from octavo_bench.report import keep

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

    _print_table(measure(config, compared, windows, args.rounds, report, kept))
    return 0


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*COLUMNS)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        speed = row.get("decode_tok_s")
        table.add_row(
            row["format"],
            f"{row['weights_bytes'] / 2**20:,.1f} MiB",
            f"{row['perplexity']:.3f}",
            f"{row['mean_kl']:.5f}",
            f"{row['same_top_token']:.1%}",
            "-" if speed is None else f"{speed['max']:,.1f}",
        )
    Console().print(table)
