"""Speculative decoding beside decoding without it: speed by kind of prompt and batch size, and accepted drafts.

Both engines answer the same prompts. Where they compute alike for every batch, which is so on a CPU and with
``--batch-invariant``, the tokens must be the same, too. No prompt comes twice, as drafts may come from earlier answers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from octavo.config import EngineConfig, ModelSettings, SpeculativeSettings
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams
from octavo.text.chat_template import load_chat_template
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.types import EngineInfo, EngineStats, Request
from octavo.weights.hub import resolve_model
from octavo_bench.drafts.draft_prompts import prompts_of
from octavo_bench.offline import build_prepared


class SpeculationWork(NamedTuple):
    """What is measured."""

    kinds: Sequence[str]
    batches: Sequence[int]
    max_tokens: int
    temperature: float
    rounds: int


class SpeculationRun(NamedTuple):
    """The answers of one batch, and the decoding of them."""

    tokens: list[list[int]]
    num_decoded: int
    seconds: float
    stats: EngineStats
    """Differences of the counters of drafts."""


MARK = "<<<message>>>"


class ChatFormat:
    """The text around a user message in a model's chat format, if it has one. Raises ``ConfigError`` without a
    tokenizer."""

    def __init__(self, settings: ModelSettings) -> None:
        tokenizer = load_tokenizer(Path(settings.tokenizer or resolve_model(settings)))
        if tokenizer is None:
            raise ConfigError("model: it has no tokenizer; name another folder or file with --tokenizer")
        self.tokenizer: Tokenizer = tokenizer
        template = load_chat_template(settings, tokenizer)
        try:
            rendered = MARK if template.source is None else template.render([{"role": "user", "content": MARK}])
        finally:
            template.close()
        self.is_chat = template.source is not None
        self.before, _, self.after = rendered.partition(MARK)

    def prompt(self, message: str) -> list[int]:
        return self.tokenizer.encode(self.before + message + self.after, add_special_tokens=not self.is_chat)


class Side:
    """An engine with its own request ids."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine, self.info = build_prepared(config)
        self._next_id = 0

    def run(self, prompts: Sequence[list[int]], work: SpeculationWork, until: float = math.inf) -> SpeculationRun:
        """Answer all prompts at once; the time is that from when all have begun. Answers are cut off at ``until``, a
        time of ``time.perf_counter``."""
        engine, before = self.engine, self.engine.stats()
        params = SamplingParams(temperature=work.temperature)
        answers: dict[int, list[int]] = {}
        for seed, prompt in enumerate(prompts):
            if len(prompt) >= self.info.max_model_len:
                raise ConfigError(f"max_model_len: a prompt has {len(prompt)} tokens")
            most = min(work.max_tokens, self.info.max_model_len - len(prompt))
            engine.add(Request(self._next_id, prompt, params, most, seed, self.info.eos_token_ids))
            answers[self._next_id] = []
            self._next_id += 1
        started = 0.0
        num_begun = num_decoded = 0
        while engine.has_work:
            if time.perf_counter() > until:
                for request_id in answers:
                    engine.abort(request_id)
            if not started and num_begun == len(answers):
                started = time.perf_counter()
            for output in engine.step():
                if output.error is not None:
                    raise ConfigError(f"a request failed: {output.error}")
                num_begun += bool(output.tokens and not answers[output.request_id])
                answers[output.request_id] += output.tokens
                num_decoded += len(output.tokens) if started else 0
        seconds = time.perf_counter() - started
        return SpeculationRun(list(answers.values()), num_decoded, seconds, _since(engine.stats(), before))


def measure(config: EngineConfig, work: SpeculationWork) -> dict[str, Any]:
    """Rows by kind and batch size. Raises ``ConfigError`` without a speculative configuration, or for tokens that
    differ where they may not."""
    if config.speculative.speculative_config is None:
        raise ConfigError("bench speculate: give --speculative-config")
    half = dataclasses.replace(config.cache, gpu_memory_utilization=config.cache.gpu_memory_utilization / 2)
    plain = dataclasses.replace(config, speculative=SpeculativeSettings(), cache=half)  # both are on one GPU
    num_rounds = work.rounds + 1
    chat, count = ChatFormat(config.model), num_rounds * sum(work.batches)
    prompts = {kind: [chat.prompt(text) for text in prompts_of(kind, 0, count)] for kind in work.kinds}
    sides = [Side(plain), Side(config)]
    info = sides[0].info
    is_exact = info.device == "cpu" or config.model.batch_invariant
    rows = []
    for kind in work.kinds:
        for batch in work.batches:
            parts = [[prompts[kind].pop() for _ in range(batch)] for _ in range(num_rounds)]
            runs = [[side.run(part, work) for side in sides] for part in parts][1:]
            row = _row(kind, batch, runs)
            if is_exact and not row["same_tokens"] and '"synthetic"' not in (config.speculative.speculative_config):
                raise ConfigError(f"bench speculate: drafts changed the tokens of {kind}, batch {batch}")
            rows.append(row)
    return {"speculative_config": _portable(config.speculative.speculative_config), **_setup(info, work), "rows": rows}


def _portable(text: str) -> dict[str, Any]:
    """The configuration with the last part of a drafter's path alone."""
    values: dict[str, Any] = json.loads(text)
    return values | ({"model": Path(values["model"]).name} if "model" in values else {})


def _setup(info: EngineInfo, work: SpeculationWork) -> dict[str, Any]:
    return {"architecture": info.architecture, "dtype": info.dtype, "device": info.device, **work._asdict()}


def _row(kind: str, batch: int, runs: Sequence[Sequence[SpeculationRun]]) -> dict[str, Any]:
    """The figures of one kind and batch size; ``runs`` holds the two engines' runs of each round."""
    ratios = [plain.seconds / drafts.seconds for plain, drafts in runs]
    stats = _sum([drafts.stats for _, drafts in runs])
    per_step = 1 + stats.num_accepted_drafts / stats.num_speculations if stats.num_speculations else 1.0
    return {
        "kind": kind,
        "batch": batch,
        "plain_tok_s": round(statistics.median(plain.num_decoded / plain.seconds for plain, _ in runs), 2),
        "drafts_tok_s": round(statistics.median(drafts.num_decoded / drafts.seconds for _, drafts in runs), 2),
        "speedup": round(statistics.median(ratios), 3),
        "speedups": [round(ratio, 3) for ratio in ratios],
        "same_tokens": all(plain.tokens == drafts.tokens for plain, drafts in runs),
        "num_tokens": sum(len(answer) for _, drafts in runs for answer in drafts.tokens),
        "num_speculations": stats.num_speculations,
        "num_drafts": stats.num_drafts,
        "num_accepted_drafts": stats.num_accepted_drafts,
        "tokens_per_speculation": round(per_step, 3),
        "accepted_by_position": [
            round(count / stats.num_speculations, 3) for count in stats.accepted_by_position if stats.num_speculations
        ],
    }


def _sum(several: Sequence[EngineStats]) -> EngineStats:
    places = zip_longest(*(stats.accepted_by_position for stats in several), fillvalue=0)
    return EngineStats(
        num_speculations=sum(stats.num_speculations for stats in several),
        num_drafts=sum(stats.num_drafts for stats in several),
        num_accepted_drafts=sum(stats.num_accepted_drafts for stats in several),
        accepted_by_position=[sum(counts) for counts in places],
    )


def _since(now: EngineStats, before: EngineStats) -> EngineStats:
    places = zip_longest(now.accepted_by_position, before.accepted_by_position, fillvalue=0)
    return EngineStats(
        num_speculations=now.num_speculations - before.num_speculations,
        num_drafts=now.num_drafts - before.num_drafts,
        num_accepted_drafts=now.num_accepted_drafts - before.num_accepted_drafts,
        accepted_by_position=[count - earlier for count, earlier in places],
    )
