"""`octavo demo`: watch the engine decide, step by step, over a model without weights."""

from __future__ import annotations

import argparse
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
    parser.add_argument("--words", action="store_true", help="a model that says words instead of numbers")


def run(args: argparse.Namespace) -> int:
    """Print a line for each step, then what each request got."""
    from octavo_bench.demo import Demo, DemoSizes

    sizes = {item.name: getattr(args, item.name) for item in fields(DemoSizes)}
    demo = Demo(DemoSizes(**sizes), args.words)
    print(demo.head())
    while demo.has_work:
        print(demo.step())
    print("\n" + demo.results())
    return 0
