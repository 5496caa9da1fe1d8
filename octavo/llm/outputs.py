"""Results of ``LLM``. Names and structure are vLLM's, so code written for it keeps working."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from octavo.text.embedding_vectors import Floats
from octavo.text.tokenizer import Tokenizer
from octavo.types import FinishReason, TokenLogprobs


@dataclass(frozen=True)
class RequestMetrics:
    """Times of a request and its continuations together, and the durations between them, in seconds.

    The fields that end in ``_ts`` are readings of ``time.monotonic()``; 0 means that it has not happened, and a
    duration that needs it is 0 too.
    """

    queued_ts: float
    """When the request was given to the engine."""
    scheduled_ts: float = 0.0
    """When it was first admitted to the running batch."""
    first_token_ts: float = 0.0
    """End of the step that gave the first output token."""
    last_token_ts: float = 0.0
    """End of the step that gave the last output token so far."""
    num_generation_tokens: int = 0

    @property
    def arrival_time(self) -> float:
        """``queued_ts`` as a reading of ``time.time()``."""
        return time.time() - time.monotonic() + self.queued_ts

    @property
    def queued_time(self) -> float:
        """From arrival until it was scheduled."""
        return _between(self.queued_ts, self.scheduled_ts)

    @property
    def prefill_time(self) -> float:
        """From being scheduled until the first token."""
        return _between(self.scheduled_ts, self.first_token_ts)

    @property
    def decode_time(self) -> float:
        """From the first token until the last one."""
        return _between(self.first_token_ts, self.last_token_ts)

    @property
    def inference_time(self) -> float:
        """From being scheduled until the last token."""
        return _between(self.scheduled_ts, self.last_token_ts)

    @property
    def first_token_latency(self) -> float:
        """From arrival until the first token (TTFT)."""
        return _between(self.queued_ts, self.first_token_ts)

    @property
    def e2e_latency(self) -> float:
        """From arrival until the last token."""
        return _between(self.queued_ts, self.last_token_ts)


def _between(start: float, end: float) -> float:
    return end - start if start and end else 0.0


@dataclass
class Logprob:
    """Natural-log probability of a token at a position; ``rank`` 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str | None
    """``None`` when the model has no tokenizer."""


@dataclass
class CompletionOutput:
    """One continuation of a prompt; from ``LLM.stream``, its next piece."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    """Sum over all tokens so far; ``None`` unless log-probabilities were requested."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Per token, the sampled and the most likely tokens by token id; ``None`` unless requested."""
    finish_reason: FinishReason | None = None
    """``"error"``: the engine could not finish it; ``error`` has the reason, and earlier output is kept."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the text; ``None`` for end-of-text and length."""
    error: str | None = None
    routed_experts: npt.NDArray[Any] | None = None
    """Experts of a mixture that each token used, but the last, which is not computed: [tokens, layers, experts of a
    token]; ``None`` unless requested."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A prompt with its ``n`` continuations."""

    request_id: str
    prompt: str | None
    """The text; ``None`` when the prompt was given as token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """One entry per prompt token, ``None`` for the first; ``None`` unless requested."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    """Prompt tokens that the first continuation found in the prefix cache."""
    metrics: RequestMetrics
    """When it arrived, was scheduled and got its tokens."""


@dataclass
class EmbeddingOutput:
    """The embedding of a text."""

    embedding: list[float]


@dataclass
class EmbeddingRequestOutput:
    """A text with its embedding."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass
class ClassificationOutput:
    """The score of each of a classifier's labels, in their order."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass
class ClassificationRequestOutput:
    """A text with the scores of its labels."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass
class PoolingOutput:
    """What a pooling task made of a text: numbers, or a row of them for each token."""

    data: Floats


@dataclass
class PoolingRequestOutput:
    """A text with the result of a pooling task."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass
class ScoringOutput:
    """Score of two texts: from a cross-encoder, or the cosine similarity of their embeddings."""

    score: float


@dataclass
class ScoringRequestOutput:
    """A pair of texts with its score."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    """The tokens that were computed: the encoded pair, or one text followed by the other."""
    finished: bool = True


def logprobs_by_token(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """One position's log-probabilities by token id, the sampled token's first."""
    found = {entry.token_id: (entry.logprob, entry.rank)}
    for rank, (token, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
        found.setdefault(token, (logprob, rank))
    return {
        token: Logprob(logprob, rank, None if tokenizer is None else tokenizer.token_text(token))
        for token, (logprob, rank) in found.items()
    }
