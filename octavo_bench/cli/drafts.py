"""`octavo bench speculate` and `train-drafter`: what drafts give, and a drafter of one's own."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from octavo.cli.settings import add_settings
from octavo.config import EngineConfig
from octavo_bench.cli.arguments import engine_config, numbers
from octavo_bench.draft_prompts import KINDS


def add_kinds(kinds: Any) -> None:
    """Add each sub-command."""
    speculate = kinds.add_parser("speculate", help="speculative decoding beside decoding without it")
    add_settings(speculate, EngineConfig)
    speculate.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of prompts")
    speculate.add_argument("--batches", type=numbers, default=[1, 4], help="sequences at a time")
    speculate.add_argument("--max-tokens", type=int, default=128, help="most tokens of an answer")
    speculate.add_argument("--temperature", type=float, default=0.0)
    speculate.add_argument("--rounds", type=int, default=3, help="in which the two engines take turns, after a first")
    speculate.add_argument("--output", type=Path, help="also write the raw JSON to this file")
    speculate.set_defaults(measure=_speculate)


def _speculate(args: argparse.Namespace) -> dict[str, Any]:
    from octavo_bench.speculate import Work, measure

    work = Work(args.kinds, args.batches, args.max_tokens, args.temperature, args.rounds)
    return measure(engine_config(args), work)
