"""The backend toy: the scheduler and the KV cache of the engine, over a public toy decoder without weights."""

from __future__ import annotations

import time

from octavo.cache.kv_cache import KVCache
from octavo.cache.kv_events import KVEvents
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.protocols import OnLost
from octavo.engine.scheduler import Scheduler
from octavo.types import EngineInfo, Output, Request, Sequence
from octavo_fleet.backends.modelless import make_info, refuse_what_needs_a_model
from octavo_fleet.backends.toy_models import WORDS, FakeRunner, next_word
from octavo_fleet.backends.vocabulary import FIRST_WORD, VOCAB_SIZE, prompt_text, word_tokenizer

__all__ = ["build", "word_tokenizer"]

MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 512
BLOCK_SIZE = 16
NUM_KV_BLOCKS = 4096


STEP_SECONDS = 0.002
"""A step takes at least so long, as one of a small model does: the front process reads each token before the next one
comes, so that streams have a chunk for each."""


class ToyEngine(Engine):
    """An engine that refuses what needs a model."""

    def step(self) -> list[Output]:
        time.sleep(STEP_SECONDS)
        return super().step()

    def add(self, request: Request) -> None:
        """Accept ``request``; raises ``RequestError`` if it could never be served."""
        refuse_what_needs_a_model(request)
        super().add(request)


def next_token(seq: Sequence, num_tokens: int) -> int:
    """The toy decoder's next word after the first ``num_tokens`` tokens."""
    first = seq.num_prompt_tokens
    said = [WORDS[token - FIRST_WORD] for token in seq.tokens[first:num_tokens] if token is not None]
    return FIRST_WORD + next_word(prompt_text(seq.request.prompt_tokens), said)


def build(config: EngineConfig, on_lost: OnLost | None = None) -> tuple[Engine, EngineInfo]:
    """See ``EngineBackend``; there is no other process to lose."""
    cache, given = config.cache, config.scheduler
    block_size, num_blocks = cache.block_size or BLOCK_SIZE, cache.num_kv_blocks or NUM_KV_BLOCKS
    max_num_seqs = given.max_num_seqs or min(MAX_NUM_SEQS, given.max_num_batched_tokens or MAX_NUM_SEQS)
    budget = given.max_num_batched_tokens or max(MAX_NUM_BATCHED_TOKENS, max_num_seqs)
    kv_cache = KVCache(
        num_blocks,
        block_size,
        cache.enable_prefix_caching,
        eviction=cache.eviction_policy,
        watermark=cache.kv_watermark,
        events=KVEvents() if cache.enable_kv_events else None,
    )
    scheduler = Scheduler(kv_cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, settings=given)
    info = make_info(
        "toy",
        vocab_size=VOCAB_SIZE,
        max_model_len=config.model.max_model_len or min(MAX_MODEL_LEN, num_blocks * block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        block_size=block_size,
        num_kv_blocks=num_blocks,
    )
    return ToyEngine(scheduler, FakeRunner(next_token)), info
