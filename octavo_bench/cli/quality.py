"""`octavo bench quality`: what each format of a model's weights costs and saves, in one table."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.cli.settings import at_least_0, load_config, positive, refuse_settings
from octavo.config import EngineConfig
from octavo_bench.cli.results import add_kind, say

TOKENS, WINDOW = 20480, 512


def _names(text: str) -> list[str]:
    return text.split(",")


def add_kinds(kinds: Any) -> None:
    """Add the sub-command, which prints its table itself."""
    help = "formats of a model's weights: bytes, perplexity, KL from float32, decode tokens/s"
    quality = add_kind(kinds, "quality", help, _quality, has_engine=True, show=_table)
    quality.add_argument(
        "--formats",
        type=_names,
        default=["float32", "bf16", "fp8", "int8", "int4"],
        help="comma-separated: auto, float32, bf16, fp16, fp8, int8, int4; with +lm_head, as in int4+lm_head, the map "
        "to logits is quantised to int8; with +kv_fp8, as in bf16+kv_fp8, keys and values are cached so "
        "(default: float32,bf16,fp8,int8,int4)",
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
        "--needles",
        action="store_true",
        help="plant four sequences of random words in each window, repeat them at its end, and tell how much is known",
    )
    quality.add_argument(
        "--rounds",
        type=at_least_0,
        default=3,
        help="in which decoding is timed; the table has the fastest; 0 for none (default: 3)",
    )


def _quality(args: argparse.Namespace) -> dict[str, Any]:
    from octavo.weights.hub import resolve_model
    from octavo_bench.quality import measure, read_text, variants, windows_of, with_needles
    from octavo_bench.report import keep

    refuse_settings(args, {"dtype", "quantization", "quantize_lm_head"}, "name each format to compare in --formats")
    config = load_config(EngineConfig, args)
    compared = variants(config, args.formats, args.checkpoints)
    text = read_text(args.text)
    windows = windows_of(config.model, text, args.tokens, args.window)
    what = {"model": resolve_model(config.model).name, "text": text.name, "text_sha256": text.digest}
    what |= {"tokens": args.tokens, "window": args.window, "needles": args.needles}
    if args.needles:
        windows = with_needles(windows)

    def kept(rows: list[dict[str, Any]]) -> None:
        keep("quality", {**what, "rows": rows}, args.output)

    rows = measure(config, compared, windows, args.rounds, say, kept, args.needles)
    return {**what, "rows": rows}


def _table(result: Mapping[str, Any]) -> str:
    from octavo_bench.report_tables import formats

    return formats(result["rows"])
