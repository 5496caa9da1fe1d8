"""The backend instant: every step gives each request its next token, without a model, a cache or a scheduler.

It is the fastest engine that there can be, so what a client measures is the server in front of it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from octavo.cache.kv_events import KVEvent
from octavo.config import EngineConfig
from octavo.engine.engine import NoAdapters
from octavo.engine.protocols import Adapters, OnLost
from octavo.errors import CheckpointError, InvalidParameter
from octavo.telemetry.cache_view import CacheView, SessionOrder, SessionReport
from octavo.telemetry.request_events import Event
from octavo.types import EngineInfo, EngineStats, MemoryPart, Output, Request, TokenLogprobs, WeightOrder
from octavo_fleet.backends.modelless import certain, make_info, refuse_what_needs_a_model
from octavo_fleet.backends.toy_models import WORDS
from octavo_fleet.backends.vocabulary import FIRST_WORD, VOCAB_SIZE, word_tokenizer

__all__ = ["build", "word_tokenizer"]

MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 1024
STRIDE = 7
"""Coprime to the number of words, so that a text has all of them."""

NextToken = Callable[[Request, int], int]
"""The token that follows a request's first ``n`` output tokens."""


def next_word(request: Request, num_tokens: int) -> int:
    """A word that depends on the prompt's length and last token, and on the position; the cost is constant."""
    start = len(request.prompt_tokens) + request.prompt_tokens[-1]
    return FIRST_WORD + (start + STRIDE * num_tokens) % len(WORDS)


@dataclass(slots=True)
class Running:
    """A request, and how many output tokens it has."""

    request: Request
    num_tokens: int


class InstantEngine:
    """Offers what the engine process needs of an ``Engine``. Requests beyond ``max_num_seqs`` wait."""

    def __init__(self, next_token: NextToken = next_word, max_num_seqs: int = MAX_NUM_SEQS) -> None:
        self.next_token = next_token
        self.max_num_seqs = max_num_seqs
        self.adapters: Adapters = NoAdapters()
        self.requests: dict[int, Running] = {}
        self.num_steps = 0
        self.num_output_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        """Accept ``request``; raises ``InvalidParameter`` if it needs a model, or has all its tokens."""
        refuse_what_needs_a_model(request)
        if request.output_tokens and len(request.output_tokens) >= request.max_tokens:
            raise InvalidParameter("output_tokens", "nothing is left to generate")
        self.requests[request.id] = Running(request, len(request.output_tokens))

    def abort(self, request_id: int) -> None:
        self.requests.pop(request_id, None)

    def spare_seconds(self) -> float:
        return 0.0

    def step(self) -> list[Output]:
        """Give each running request its next token."""
        self.num_steps += 1
        outputs = [self.advance(item) for item in itertools.islice(self.requests.values(), self.max_num_seqs)]
        for output in outputs:
            if output.finish_reason is not None:
                del self.requests[output.request_id]
        self.num_output_tokens += len(outputs)
        return outputs

    def advance(self, item: Running) -> Output:
        """The next output of a request."""
        request, params, position = item.request, item.request.params, item.num_tokens
        output = Output(request.id, [], first_scheduled=0.0 if position else time.monotonic())
        if position < request.max_tokens:
            token = self.next_token(request, position)
            output.tokens = [token]
            item.num_tokens += 1
            if params.logprobs is not None:
                output.logprobs = [self.logprobs(token, params.logprobs)]
            if token in request.eos_token_ids or token in params.stop_token_ids:
                output.finish_reason = "stop"
                output.stop_token_id = token if token in params.stop_token_ids else None
        if output.finish_reason is None and item.num_tokens == request.max_tokens:
            output.finish_reason = "length"
        return output

    def logprobs(self, token: int, num_top: int) -> TokenLogprobs:
        """Log-probabilities of an output token."""
        return certain(token, num_top)

    def take_events(self) -> list[Event]:
        return []

    def take_kv_events(self) -> list[KVEvent]:
        return []

    def stats(self) -> EngineStats:
        running = min(len(self.requests), self.max_num_seqs)
        return EngineStats(
            num_running=running,
            num_waiting=len(self.requests) - running,
            num_steps=self.num_steps,
            num_output_tokens=self.num_output_tokens,
            step_tokens=running,
        )

    def cache_view(self) -> CacheView | None:
        """There is no cache."""
        return None

    def order_weights(self, order: WeightOrder) -> bool:
        """Raises ``CheckpointError``."""
        raise CheckpointError("there are no weights")

    def checksums(self) -> dict[str, str]:
        """Raises ``CheckpointError``."""
        raise CheckpointError("there are no weights")

    def clear_cache(self) -> None:
        """There is no cache."""

    def order_sessions(self, order: SessionOrder) -> SessionReport:
        """There is no cache."""
        return SessionReport()

    def save_idle(self) -> bool:
        """There is nothing to save."""
        return False

    def sleep(self) -> None:
        """There is no memory to free."""

    def wake(self, parts: Collection[MemoryPart]) -> None:
        """There is no memory to restore."""

    def close(self) -> None:
        """Nothing is left open."""


def build(config: EngineConfig, on_lost: OnLost | None = None) -> tuple[InstantEngine, EngineInfo]:
    """See ``EngineBackend``; there is no other process to lose."""
    max_num_seqs = config.scheduler.max_num_seqs or MAX_NUM_SEQS
    max_model_len = config.model.max_model_len or MAX_MODEL_LEN
    info = make_info("instant", vocab_size=VOCAB_SIZE, max_model_len=max_model_len, max_num_seqs=max_num_seqs)
    return InstantEngine(max_num_seqs=max_num_seqs), info
