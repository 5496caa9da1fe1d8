"""What ``LLM`` gives back. Names and shapes are vLLM's, so that code written for it goes on working."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.text.tokenizer import Tokenizer
from octavo.types import FinishReason, TokenLogprobs


@dataclass
class Logprob:
    """Natural-log probability of one token at one position; ``rank`` counts from 1, the most likely."""

    logprob: float
    rank: int
    decoded_token: str | None
    """``None`` when the model has no tokenizer."""


@dataclass
class CompletionOutput:
    """One continuation of a prompt; from ``LLM.stream``, the next piece of it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    """Sum over all tokens so far; ``None`` unless log-probabilities were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token, itself and the most likely ones by token id; ``None`` unless asked for."""
    finish_reason: FinishReason | None = None
    """``"error"``: the engine could not finish it. ``error`` says why; what came before is kept."""
    stop_reason: int | str | None = None
    """The stop string or the stop token id that ended the text; ``None`` for end-of-text and for length."""
    error: str | None = None

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
    """For each prompt token, ``None`` for the first; ``None`` altogether unless asked for."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    """Prompt tokens that the first continuation found in the prefix cache."""


@dataclass
class EmbeddingOutput:
    """A text's vector."""

    embedding: list[float]


@dataclass
class EmbeddingRequestOutput:
    """A text with its vector."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass
class ScoringOutput:
    """How well two texts go together: what a judge says, or the cosine of the angle between their vectors."""

    score: float


@dataclass
class ScoringRequestOutput:
    """A pair of texts with its score."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    """What was read: the pair, or one text after the other."""
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
