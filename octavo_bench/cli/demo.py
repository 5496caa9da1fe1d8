"""`octavo demo`: watch the engine decide, step by step, over a model without weights."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields

from octavo.cli.settings import positive
from octavo.config import POLICY_NAMES

NAME = "demo"
HELP = "show step by step how requests share the engine, without a model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes, by default so small that everything happens."""
    parser.add_argument("--max-num-seqs", "--max-batch-size", type=positive, default=3, help="most sequences in a step")
    parser.add_argument(
        "--prefill-budget",
        type=positive,
        default=6,
        help="prompt tokens in a step, besides one token of each decoding sequence",
    )
    parser.add_argument("--num-kv-blocks", "--cache-blocks", type=positive, default=10, help="blocks in the KV cache")
    parser.add_argument("--block-size", type=positive, default=4, help="tokens in a block")
    parser.add_argument("--scheduling-policy", choices=POLICY_NAMES, default="fcfs", help="who is served first")
    parser.add_argument("--json", action="store_true", help="print the figures of the run as JSON, and no steps")
    parser.add_argument("--words", action="store_true", help="a model that says words instead of numbers")


def run(args: argparse.Namespace) -> int:
    """Print a line for each step, then what each request got."""
    from octavo_bench.demo import Demo, DemoSizes

    sizes = {item.name: getattr(args, item.name) for item in fields(DemoSizes)}
    demo = Demo(DemoSizes(**sizes), args.words)
    lines = [demo.head(), *iter(lambda: demo.step() if demo.has_work else "", "")]
    metrics = demo.metrics()
    if args.json:
        print(json.dumps(metrics, indent=2))
        return 0
    print("\n".join([*lines, "", demo.results()]))
    shown = {name: f"{value:.4g}" for name, value in metrics.items() if name.startswith(("p99", "token", "peak"))}
    print("metrics: " + ", ".join(f"{name}={value}" for name, value in shown.items()))
    return 0
