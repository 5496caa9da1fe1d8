"""Deterministic models without weights, as runners: for demonstrations, tests and measuring what deciding costs.

Both are public toys whose tokens others know, so that whoever has theirs can compare:

- ``NextByFormula``: ``(token * 1103515245 + position * 12345 + 17) mod 32000``, where ``position`` is the number of
  tokens so far and ``token`` the last of them; optionally an end of text at every position divisible by 17
  (the fake backend of github.com/ad-github1/LLM-INFERENCE-ENGINE).
- ``NextByHash``: 24 words, each a wave whose frequency comes from SHA-256 of the text so far
  (the toy decoder of github.com/souvikDevloper/InferEngine).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

from octavo.types import Masks, Plan, Sampled, Scheduled, Sequence
from octavo_fleet.backends.modelless import certain

VOCAB_SIZE = 32_000
WORDS = (
    *("scalable", "batch", "cache", "token", "latency", "throughput", "queue", "kernel"),
    *("prefill", "decode", "memory", "scheduler", "engine", "request", "tensor", "page"),
    *("attention", "serve", "model", "stream", "profile", "optimize", "system", "fast"),
)

NextToken = Callable[[Sequence, int], int]
"""The token that follows the first ``n`` tokens of a sequence, all of which are known."""


class NextByFormula:
    """A linear congruence of the last token and the number of tokens."""

    def __init__(self, eos_token_id: int | None = None) -> None:
        self.eos_token_id = eos_token_id

    def __call__(self, seq: Sequence, num_tokens: int) -> int:
        if self.eos_token_id is not None and num_tokens % 17 == 0:
            return self.eos_token_id
        last = seq.tokens[num_tokens - 1]
        assert last is not None
        return (last * 1103515245 + num_tokens * 12345 + 17) % VOCAB_SIZE


class NextByHash:
    """The word of ``WORDS`` whose wave is highest, by its index. ``texts`` holds the prompt of each sequence by id."""

    def __init__(self, texts: dict[int, str]) -> None:
        self.texts = texts

    def __call__(self, seq: Sequence, num_tokens: int) -> int:
        words = [WORDS[token] for token in seq.tokens[seq.num_prompt_tokens : num_tokens] if token is not None]
        return next_word(self.texts[seq.id], words)


def next_word(text: str, said: list[str]) -> int:
    """The index of the word after ``said``, the answer to ``text`` so far."""
    step = len(said)
    digest = hashlib.sha256(f"{text}|{' '.join(said)}|{step}".encode()).digest()
    return highest_wave(int.from_bytes(digest[:4], "big") % 997 + 1, step)


def highest_wave(frequency: int, step: int) -> int:
    """Where ``sin(n * frequency) + cos(n + step)`` is largest among n = 1 .. 24, counted from 0."""
    heights = [math.sin(n * frequency) + math.cos(n + step) for n in range(1, len(WORDS) + 1)]
    return heights.index(max(heights))


class FakeRunner:
    """Computes plans by asking ``next_token``; takes no time of its own."""

    def __init__(self, next_token: NextToken) -> None:
        self.next_token = next_token

    def submit(self, plan: Plan) -> FakeStep:
        return FakeStep(plan, self.next_token)


class FakeStep:
    """A step that is computed when its tokens are asked for, after those before it are known."""

    is_started = False

    def __init__(self, plan: Plan, next_token: NextToken) -> None:
        self.plan = plan
        self.next_token = next_token

    def sample(self, masks: Masks) -> list[Sampled]:
        return [self._sampled(item) if item.samples and not item.is_stale else Sampled([]) for item in self.plan]

    def _sampled(self, item: Scheduled) -> Sampled:
        token = self.next_token(item.seq, item.start + len(item.tokens))
        num_top = item.seq.request.params.logprobs
        return Sampled([token], logprobs=None if num_top is None else [certain(token, num_top)])
