"""Prompts in progress: the output of each continuation so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from octavo.engine.runner.route_reading import as_array
from octavo.llm.outputs import CompletionOutput, RequestMetrics, RequestOutput, logprobs_by_token
from octavo.model_info import RoutesInfo
from octavo.text.text_stream import TextStream
from octavo.text.tokenizer import Tokenizer
from octavo.types import FinishReason, Output, Request, TokenLogprobs


class Continuation:
    """One of a prompt's ``n`` continuations: collects the engine's outputs, detokenizes, and checks stop strings."""

    def __init__(
        self, index: int, request: Request, tokenizer: Tokenizer | None, routes: RoutesInfo | None = None
    ) -> None:
        self._routes = routes
        self._experts: npt.NDArray[Any] | None = None
        self.index = index
        self.request = request
        self.tokenizer = tokenizer
        self.num_cached_tokens = 0
        self.scheduled_ts = 0.0
        self.first_token_ts = 0.0
        self.last_token_ts = 0.0
        """Times by ``time.monotonic()``, for ``RequestMetrics``."""
        self.values: bytes | None = None
        """The result of an embedding or scoring request, as little-endian float32."""
        self.prompt_logprobs: list[TokenLogprobs | None] = [None] * len(request.prompt_tokens)
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._error: str | None = None
        self._text_stream = TextStream(tokenizer if request.params.detokenize else None, request.params)
        self._text = ""
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._num_shown = (0, 0)
        """Characters and tokens that ``next_piece`` has returned."""

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return len(self._tokens)

    def take(self, output: Output, now: float) -> None:
        """Add the output of a step that ended at ``now``. A stop string may finish the text before the engine does."""
        self.scheduled_ts = output.first_scheduled or self.scheduled_ts
        if output.tokens:
            self.first_token_ts = self.first_token_ts or now
            self.last_token_ts = now
        self.num_cached_tokens = output.num_cached_tokens or self.num_cached_tokens
        if output.prompt_logprobs:
            start = output.prompt_logprobs_start
            self.prompt_logprobs[start : start + len(output.prompt_logprobs)] = output.prompt_logprobs
        self.values = output.values
        if output.routes is not None and self._routes is not None:
            self._experts = as_array(output.routes, self._routes)
        delta = self._text_stream.push(output.tokens, output.finish_reason)
        self._text += delta.text
        self._tokens += output.tokens[: delta.num_tokens]
        self._logprobs += (output.logprobs or [])[: delta.num_tokens]
        if delta.stop is not None:
            self.finish_reason, self._stop_reason = "stop", delta.stop
        else:
            self.finish_reason, self._stop_reason = output.finish_reason, output.stop_token_id
            self._error = output.error

    def next_piece(self) -> CompletionOutput | None:
        """The output since the last call; ``None`` if there is none."""
        num_characters, num_tokens = self._num_shown
        self._num_shown = len(self._text), len(self._tokens)
        piece = self._output(num_characters, num_tokens)
        return piece if piece.text or piece.token_ids or piece.finished() else None

    def output(self) -> CompletionOutput:
        """The complete output so far."""
        return self._output(0, 0)

    def _output(self, num_characters: int, num_tokens: int) -> CompletionOutput:
        has_logprobs = self.request.params.logprobs is not None
        entries = self._logprobs[num_tokens:]
        return CompletionOutput(
            index=self.index,
            text=self._text[num_characters:],
            token_ids=self._tokens[num_tokens:],
            cumulative_logprob=sum(entry.logprob for entry in self._logprobs) if has_logprobs else None,
            logprobs=[logprobs_by_token(entry, self.tokenizer) for entry in entries] if has_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            error=self._error,
            routed_experts=self._experts,
        )


@dataclass(frozen=True)
class GenerationJob:
    """A prompt with its continuations."""

    id: str
    text: str | None
    continuations: list[Continuation]

    @property
    def is_finished(self) -> bool:
        return all(continuation.finish_reason is not None for continuation in self.continuations)

    def result(self) -> RequestOutput:
        first = self.continuations[0]
        prompt_logprobs = None
        if first.request.params.prompt_logprobs is not None:
            prompt_logprobs = [
                None if entry is None else logprobs_by_token(entry, first.tokenizer) for entry in first.prompt_logprobs
            ]
        return RequestOutput(
            request_id=self.id,
            prompt=self.text,
            prompt_token_ids=first.request.prompt_tokens,
            prompt_logprobs=prompt_logprobs,
            outputs=[continuation.output() for continuation in self.continuations],
            finished=self.is_finished,
            num_cached_tokens=first.num_cached_tokens,
            metrics=self.metrics(),
        )

    def metrics(self) -> RequestMetrics:
        """The times of all continuations together."""
        parts = self.continuations
        return RequestMetrics(
            queued_ts=parts[0].request.arrival,
            scheduled_ts=min((part.scheduled_ts for part in parts if part.scheduled_ts), default=0.0),
            first_token_ts=min((part.first_token_ts for part in parts if part.first_token_ts), default=0.0),
            last_token_ts=max(part.last_token_ts for part in parts),
            num_generation_tokens=sum(part.num_tokens for part in parts),
        )
