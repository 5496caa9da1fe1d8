"""Random batches of requests, covering every field, give the same output as a plain engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, RepetitionDetectionParams, SamplingParams
from octavo.grammar import forms
from octavo.llm.outputs import RequestOutput
from tests.llm.test_same_tokens import NGRAM, PLAIN
from tests.llm.tiny import SETTINGS
from tests.tiers import nightly_after

SCHEMA = {"type": "object", "properties": {"ab": {"type": "integer"}, "c": {"items": {"enum": [1, "x", None]}}}}
GRAMMARS = [
    forms.grammar_text(part)
    for part in (
        forms.regex("[a-c]{3}[0-9]{1,4}"),
        forms.regex("(ab){1,20}"),
        forms.choice(["abc", "abcdef", "ab ab ab ab"]),
        forms.json_schema(SCHEMA),
        forms.grammar('start: "[" start "]" | "a"'),
    )
]
OTHERS: dict[str, dict[str, Any]] = {
    "drafts": {"num_kv_blocks": 33, "block_size": 8, "speculative_config": NGRAM},
    "small blocks, drafts, turns": {
        "num_kv_blocks": 70,
        "block_size": 4,
        "speculative_config": NGRAM,
        "scheduling_policy": "decode-round-robin",
        "eviction_policy": "slru",
    },
    "small steps, memory below": {
        "num_kv_blocks": 70,
        "block_size": 4,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 16,
        "scheduling_policy": "shortest-first",
        "kv_offload_memory": 0.01,
    },
}

Fields = dict[str, tuple[float, Callable[[random.Random], Any]]]
FIELDS: Fields = {
    "grammar": (0.4, lambda rng: rng.choice(GRAMMARS)),
    "ignore_eos": (0.4, lambda rng: True),
    "logprobs": (0.3, lambda rng: rng.choice([0, 2, 5])),
    "prompt_logprobs": (0.15, lambda rng: rng.choice([0, 3])),
    "repetition_penalty": (0.2, lambda rng: rng.choice([1.1, 2.0])),
    "frequency_penalty": (0.2, lambda rng: 0.5),
    "presence_penalty": (0.2, lambda rng: -0.5),
    "top_k": (0.2, lambda rng: rng.choice([1, 3, 20])),
    "top_p": (0.2, lambda rng: rng.choice([0.3, 0.9])),
    "min_p": (0.2, lambda rng: 0.05),
    "min_tokens": (0.2, lambda rng: rng.randrange(10)),
    "stop": (0.2, lambda rng: (rng.choice(["a", "e ", "ab", "7"]),)),
    "stop_token_ids": (0.2, lambda rng: (rng.randrange(256), rng.randrange(256))),
    "logit_bias": (0.15, lambda rng: {rng.randrange(256): rng.choice([-100, 5, 100])}),
    "n": (0.2, lambda rng: rng.randrange(1, 4)),
    "repetition_detection": (0.2, lambda rng: RepetitionDetectionParams(rng.choice([1, 3]), 1, rng.choice([2, 4]))),
}
"""Per field: its probability, and a generator of values."""


def some_params(rng: random.Random) -> SamplingParams:
    given = {name: make(rng) for name, (chance, make) in FIELDS.items() if rng.random() < chance}
    max_tokens = rng.randrange(given.get("min_tokens", 1), 40)
    temperature = rng.choice([0, 0, 0.02, 0.7, 1.0])
    return SamplingParams(temperature=temperature, seed=rng.randrange(1000), max_tokens=max_tokens, **given)


def some_prompt(rng: random.Random) -> list[int]:
    """Prompts with repeated runs, for drafts, and common prefixes, for prefix cache hits."""
    run = [rng.randrange(97, 103) for _ in range(rng.randrange(1, 12))]
    return (run * 70)[: rng.randrange(1, 70)] + [rng.randrange(256) for _ in range(rng.randrange(3))]


def without_rounding(results: list[RequestOutput]) -> list[Any]:
    """The output without rounding differences."""

    def rounded(logprobs: Any) -> Any:
        if logprobs is None:
            return None
        return [entry and {token: round(one.logprob, 3) for token, one in entry.items()} for entry in logprobs]

    return [
        (
            rounded(result.prompt_logprobs),
            [(o.text, o.token_ids, o.finish_reason, o.stop_reason, rounded(o.logprobs)) for o in result.outputs],
        )
        for result in results
    ]


FIRST = list(reversed(OTHERS))[:2]


@pytest.mark.parametrize(
    ("name", "num_rounds"), nightly_after(2, [*((name, 12) for name in FIRST), *((name, 20) for name in OTHERS)])
)
def test_any_requests(tiny_checkpoint: Path, name: str, num_rounds: int) -> None:
    rng = random.Random(name)
    with LLM(tiny_checkpoint, **PLAIN) as plain, LLM(tiny_checkpoint, **{**SETTINGS, **OTHERS[name]}) as other:
        for _ in range(num_rounds):
            params = [some_params(rng) for _ in range(rng.randrange(1, 9))]
            prompts = [some_prompt(rng) for _ in params]
            want = plain.generate(prompts, params)
            assert all(output.error is None for result in want for output in result.outputs)
            assert without_rounding(other.generate(prompts, params)) == without_rounding(want)
            other.engine.check()
        stats = other.engine.stats()
        assert (stats.num_accepted_drafts > 100) is ("drafts" in name)
        assert stats.num_preemptions
