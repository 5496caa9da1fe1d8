"""`octavo bench train-draft`: a draft head of one's own, and what it gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.cli.settings import positive
from octavo_bench.cli.results import add_kind
from octavo_bench.drafts.draft_prompts import KINDS


def add_kinds(kinds: Any) -> None:
    """Add the sub-command."""
    help = "train an EAGLE-3 head on a model's own answers, and measure it"
    train = add_kind(kinds, "train-draft", help, "drafts.train_draft.run", has_engine=True)
    train.add_argument("--folder", type=Path, required=True, help="where the head is written")
    train.add_argument("--num-answers", type=positive, default=20_000, help="answers that are generated for training")
    train.add_argument("--answer-tokens", type=positive, default=192, help="most tokens of an answer")
    train.add_argument("--temperature", type=float, default=0.7, help="at which they are generated")
    train.add_argument(
        "--max-generation-seconds", type=float, default=300.0, help="of messages and answers; the rest is cut off"
    )
    train.add_argument(
        "--draft-vocab-size", type=positive, default=8192, help="most frequent tokens, which can be drafted"
    )
    train.add_argument(
        "--rounds", dest="num_rounds", type=positive, default=4, help="tokens that are drafted in training"
    )
    train.add_argument("--ffn-size", type=positive, help="width of the feed-forward layer; default: the model's")
    train.add_argument("--text-length", type=positive, default=256, help="tokens of a text; the rest is cut off")
    train.add_argument("--batch-size", type=positive, default=32, help="texts of a training step")
    train.add_argument("--learning-rate", type=float, default=1e-3)
    train.add_argument("--max-steps", type=positive, default=10_000)
    train.add_argument("--max-seconds", type=float, default=300.0, help="of training alone")
    train.add_argument("--measured-rounds", type=positive, default=3, help="of the measurement")
    train.add_argument("--num-drafts", type=positive, default=4, help="num_speculative_tokens of the measurement")
    train.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=["chat", "code", "repeat"], help="of the measurement"
    )
    train.add_argument("--max-tokens", type=positive, default=128, help="most tokens of an answer in the measurement")
