"""One optimisation after another: the same requests, served by engines of which each has one more than the one before.

The first engine is what serving was before paged caches: batches that stay as they are, a place for a whole context
each, prompts computed in one go. All engines have the same memory for keys and values, and are built anew for every
visit, in turns, so that nothing is left of an earlier one and a noisy moment hits them alike.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import octavo
from octavo.build.build_engine import build_engine
from octavo.build.device_settings import resolve_device
from octavo.config import EngineConfig, to_flat
from octavo.text.tokenizer import load_tokenizer
from octavo.types import Request
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.hub import resolve_model
from octavo_bench.offline import GREEDY
from octavo_bench.records.report import Say, spreads
from octavo_bench.throughput import serve

TEXTS = ("engine/scheduler.py", "types.py")
"""Files of this package whose text the prompts are made of: text that anybody has."""
CHUNK = 256
"""Tokens of a step from the stage on that computes prompts in chunks."""

COUNTS = (
    *("num_steps", "num_preemptions", "prefix_hits"),
    *("num_copied_tokens", "num_drafts", "num_accepted_drafts"),
)
"""Counters of an engine that a row holds."""

Settings = dict[str, Any]


@dataclass(frozen=True)
class AblationWork:
    """The requests: one comes every ``gap`` seconds, and all begin with the same tokens."""

    num_prompts: int = 12
    shared_len: int = 100
    input_len: int = 100
    output_len: int = 32
    gap: float = 0.1
    contexts: int = 8
    """Contexts that the KV cache has room for."""
    max_num_seqs: int = 8

    @property
    def context(self) -> int:
        """Tokens of the longest context: a power of two."""
        return 1 << (self.shared_len + self.input_len + self.output_len - 1).bit_length()


@dataclass(frozen=True)
class Stage:
    """What one row of the table adds to the row above it."""

    name: str
    settings: Settings


def stages(work: AblationWork, device: str, has_blocks: bool) -> tuple[list[Stage], dict[str, str]]:
    """The rows in order, each with all settings of its engine, and what this engine and model have no row for."""
    chunk = max(CHUNK, work.max_num_seqs)
    steps = [
        Stage("static batches", {"scheduling_policy": "static"}),
        Stage("continuous batching", {"scheduling_policy": "fcfs"}),
        Stage("paged cache", {"block_size": None}),
        Stage("chunked prompts", {"max_num_batched_tokens": chunk}),
        Stage("prefix cache", {"enable_prefix_caching": True}),
        Stage("parts of blocks", {"enable_partial_reuse": True}),
        Stage("recorded steps" if device == "cpu" else "CUDA graphs", {"enforce_eager": False}),
        Stage("prompt lookup", {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}'}),
    ]
    missing = {}
    if device == "cpu" and has_blocks:
        steps.append(Stage("quantised weights", {"dtype": "auto"}))
    else:
        missing["quantised weights"] = "the checkpoint has no block weights" if not has_blocks else "these are for CPUs"
    settings: Settings = {
        "block_size": work.context,
        "max_num_batched_tokens": work.num_prompts * work.context,
        "enable_prefix_caching": False,
        "enable_partial_reuse": False,
        "enforce_eager": True,
        "dtype": "float32" if device == "cpu" else "bfloat16",
    }
    rows = []
    for step in steps:
        settings = {**settings, **step.settings}
        rows.append(Stage(step.name, settings))
    return rows, missing


def configured(config: EngineConfig, work: AblationWork, stage: Stage, default_block: int) -> EngineConfig:
    """The settings of a stage's engine, with as much memory for keys and values as every other's."""
    block_size = stage.settings["block_size"] or default_block
    sizes = {
        "max_model_len": work.context,
        "max_num_seqs": work.max_num_seqs,
        "num_kv_blocks": work.contexts * work.context // block_size,
        "kv_cache_memory": None,
    }
    return EngineConfig.from_flat({**to_flat(config), **sizes, **stage.settings, "block_size": block_size})


def make_requests(work: AblationWork, path: Path, vocab_size: int, first_id: int, seed: int = 0) -> list[Request]:
    """The requests of a visit: text where the model has a tokenizer, else random ids."""
    total = work.shared_len + work.num_prompts * work.input_len
    tokenizer = load_tokenizer(path)
    if tokenizer is None:
        ids = [random.Random(seed).randrange(vocab_size) for _ in range(total)]
    else:
        folder = Path(octavo.__file__).parent
        text = "".join((folder / name).read_text() for name in TEXTS)
        ids = list(itertools.islice(itertools.cycle(tokenizer.encode(text)), total))
    shared, rest = ids[: work.shared_len], ids[work.shared_len :]
    parts = [rest[start : start + work.input_len] for start in range(0, len(rest), work.input_len)]
    return [Request(first_id + i, [*shared, *part], GREEDY, work.output_len) for i, part in enumerate(parts)]


def measure(
    config: EngineConfig,
    work: AblationWork,
    rounds: int,
    say: Say,
    deadline: float,
    keep: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """Visit every stage's engine in turn, ``rounds`` times; ``say`` is called with a line about each visit.

    No round but the first begins when one as long as the longest so far would end later than ``deadline`` seconds
    after the start. ``keep`` is given the result after each round.
    """
    if config.scheduler.max_num_seqs is not None:
        work = dataclasses.replace(work, max_num_seqs=config.scheduler.max_num_seqs)
    table = Table(config, work, say)
    start, longest = time.perf_counter(), 0.0
    for number in range(rounds):
        began = time.perf_counter()
        if number and began - start + longest > deadline:
            say(f"{number} of {rounds} rounds: another would not end within {deadline:.0f} s")
            break
        for stage in table.stages:
            table.visit(stage)
        longest = max(longest, time.perf_counter() - began)
        say(f"round {number + 1} of {rounds} took {time.perf_counter() - began:.0f} s")
        keep(table.result())
    return table.result()


class Table:
    """The engines of one model, one for each row, and what each made of the requests in every round."""

    def __init__(self, config: EngineConfig, work: AblationWork, say: Say) -> None:
        self.config, self.work, self.say = config, work, say
        self.device = resolve_device(config.model.device).type
        self.path = resolve_model(config.model)
        has_blocks = open_checkpoint(self.path, config.model.load_format, config.model.seed, self.device).has_blocks
        self.stages, self.missing = stages(work, self.device, has_blocks)
        self.figures: dict[str, list[dict[str, float]]] = {stage.name: [] for stage in self.stages}
        self.counts: dict[str, dict[str, int]] = {}
        self.tokens: dict[str, dict[int, list[int]]] = {}

    def visit(self, stage: Stage) -> None:
        """Build the engine of a stage, warm it up, and let it serve the requests."""
        from octavo.runtime.memory_budget import DEFAULTS

        work = self.work
        engine, info = build_engine(configured(self.config, work, stage, DEFAULTS[self.device].block_size))
        requests = make_requests(work, self.path, info.vocab_size, 1)
        serve(engine, [Request(1 << 20, requests[0].prompt_tokens[::-1], GREEDY, 4)], 0)
        visit, found = serve(engine, requests, work.gap)
        self.figures[stage.name].append(found)
        self.tokens[stage.name] = visit.tokens
        stats = engine.stats()
        self.counts[stage.name] = {name: getattr(stats, name) for name in COUNTS}
        self.say(f"{stage.name}: {found['output_tok_s']:.1f} tok/s")
        del engine
        gc.collect()

    def result(self) -> dict[str, Any]:
        """The table after whole rounds, with medians over them."""
        first = {stage.settings["dtype"]: stage.name for stage in reversed(self.stages)}
        return {
            "model": Path(self.config.model.model).name,
            "device": self.device,
            "work": {**vars(self.work), "context": self.work.context},
            "missing": self.missing,
            "rows": [
                {
                    "stage": stage.name,
                    "settings": stage.settings,
                    "same_tokens": self.tokens[stage.name] == self.tokens[first[stage.settings["dtype"]]],
                    **spreads(runs),
                    **self.counts[stage.name],
                }
                for stage, runs in zip(self.stages, self.figures.values(), strict=True)
            ],
        }
