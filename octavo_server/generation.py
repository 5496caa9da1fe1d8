"""The output of one HTTP request's choices, buffered between the engine and the HTTP response.

The engine client calls ``GeneratedChoice.on_output`` for every step, in one pass over all listeners. It detokenises,
checks stop strings and buffers the new output. The response task takes the buffered output after the pass, so a slow
reader gets fewer and longer pieces instead of a growing queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from starlette.requests import Request

from octavo.errors import CANCELLATIONS, RequestError, RequestFailed, Withdrawn
from octavo.text.reasoning import AnswerMarks, answer_start
from octavo.text.text_stream import TextStream
from octavo.text.tokenizer import Tokenizer
from octavo.types import FinishReason, ImageInput, KVTransfer, Output, TokenLogprobs
from octavo.types import Request as EngineRequest
from octavo_server.engines.engine_client import FIRST_WEIGHTS
from octavo_server.http.error_responses import UnexpectedError
from octavo_server.tenants.api_keys import Account

logger = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """A tokenised prompt; ``text`` is ``None`` when the client sent token ids, and ``ChatPrompt.seen`` of a chat."""

    tokens: list[int]
    text: str | None
    second_start: int | None = None
    """Token index at which the second text of a pair begins."""
    images: list[ImageInput] = []


class ChoiceUpdate(NamedTuple):
    """The output of a choice since the previous ``take``."""

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs]


def ignore_updates() -> None:
    """No-op listener."""


class EventWriter(Protocol):
    """Renders new output as frames; each API has its own."""

    def frames(self, choice: GeneratedChoice) -> bytes:
        """The frames of a choice's new output, including its end once finished."""
        ...

    def last_frames(self) -> bytes:
        """Frames after the end of all choices, before the stream's end marker."""
        ...


class ClientGone(Exception):
    """The client closed the connection."""


class Aborts(Protocol):
    """The part of an engine client that a generation needs."""

    def abort(self, request_id: int, reason: FinishReason = "abort") -> None: ...


IDEMPOTENCY_KEY = "idempotency-key"
"""Header that makes a request durable, if there is a journal."""


class OutputReader(Protocol):
    """Gives a generation the output of a durable request, on which connections do not depend."""

    @property
    def unique(self) -> str:
        """The random part of the response's id."""
        ...

    @property
    def created(self) -> int:
        """Unix time in the response."""
        ...

    def begin(self, writer: EventWriter | None, *, is_by_token: bool = False) -> None:
        """Let the output arrive; the events of a stream come from ``writer``.

        With ``is_by_token``, no more than one token is given to a choice at once, so that the output comes in the same
        parts each time.
        """
        ...

    def begin_stream(self, writer: EventWriter, request: Request) -> EventWriter:
        """Let the output arrive; returns ``writer`` with ids for its events, from the client's position on.

        Raises ``InvalidParameter`` for an invalid position.
        """
        ...


class GeneratedChoice:
    """One continuation: turns the engine's tokens into text and counts for the client."""

    __slots__ = (
        *("finish_reason", "first_token_time", "index", "is_noted", "num_accepted_drafts", "num_cached_tokens"),
        *("num_drafts", "num_reasoning_tokens", "num_tokens", "output_tokens", "prompt", "prompt_logprobs", "request"),
        *("routes", "stop_reason", "transfer", "values", "weight_versions"),
        *("_generation", "_logprobs", "_text_stream", "_texts", "_tokens"),
    )

    def __init__(
        self,
        generation: Generation,
        index: int,
        prompt: Prompt,
        request: EngineRequest,
        text_stream: TextStream,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.request = request
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        """The stop string or stop token that ended the text; ``None`` for end-of-text and for length."""
        self.first_token_time = 0.0
        """Of ``time.monotonic``, in seconds; 0 before the first token."""
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.num_reasoning_tokens = 0
        self.num_drafts = self.num_accepted_drafts = 0
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        """One entry per prompt token; ``None`` for the first and for pending ones. Empty unless requested."""
        self.output_tokens: list[int] | None = None
        """All tokens, also those that were taken, for answers that show them at the end."""
        self.routes: bytes | None = None
        """See ``Output``."""
        self.values = b""
        """Result of a pooling task (little-endian float32); empty for generation."""
        self.weight_versions = [(generation.weight_version, 0)]
        """Versions of the weights, each with the number of tokens that earlier ones computed."""
        self.transfer: KVTransfer | None = None
        """Where its prompt's keys and values are kept for another server."""
        self.is_noted = False
        self._generation = generation
        self._text_stream = text_stream
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        if request.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(prompt.tokens)

    def on_output(self, output: Output) -> None:
        """Apply one step's output. Called on the event loop; does not block and does not raise."""
        if self.finish_reason is not None:
            return
        try:
            self._apply(output)
        except CANCELLATIONS:
            raise
        except BaseException:
            logger.exception("request %d: its output could not be turned into text", self.request.id)
            self.on_error(UnexpectedError())

    def _apply(self, output: Output) -> None:
        if output.num_cached_tokens:
            self.num_cached_tokens = output.num_cached_tokens
        self.num_drafts += output.num_drafts
        self.num_accepted_drafts += output.num_accepted_drafts
        if output.values is not None:
            self.values = output.values
        if output.transfer is not None:
            self.transfer = output.transfer
        if output.routes is not None:
            self.routes = output.routes
        if output.prompt_logprobs:
            start = output.prompt_logprobs_start
            self.prompt_logprobs[start : start + len(output.prompt_logprobs)] = output.prompt_logprobs
        tokens, reason = output.tokens, output.finish_reason
        if reason == "error" or reason == "abort":
            self.on_error(RequestFailed("The engine could not finish this request; other requests are not affected."))
        elif tokens or reason is not None:
            if not self.first_token_time:
                self.first_token_time = time.monotonic()
            delta = self._text_stream.push(tokens, reason)
            self._texts.append(delta.text)
            tokens = tokens if delta.stop is None else tokens[: delta.num_tokens]
            self._tokens += tokens
            if self.output_tokens is not None:
                self.output_tokens += tokens
            if output.logprobs:
                self._logprobs += output.logprobs[: delta.num_tokens]
            self.num_tokens += delta.num_tokens
            if delta.stop is not None:
                self._end("stop", delta.stop)
                self._generation.engine.abort(self.request.id, "stop")
            elif reason is not None:
                self._end(reason, output.stop_token_id)
            self._generation.note(self)

    def _end(self, reason: FinishReason, stop_reason: str | int | None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self._generation.num_unfinished -= 1

    def abort(self) -> None:
        """End with what there is, unless finished."""
        if self.finish_reason is None:
            self._texts.append(self._text_stream.push([], "abort").text)  # what was held back
            self._end("abort", None)
            self._generation.engine.abort(self.request.id)
            self._generation.note(self)

    def on_error(self, error: RequestError) -> None:
        """Fail the generation with all its choices, because the engine failed this request."""
        self._generation.fail(error)

    def on_weights(self, version: str) -> None:
        """Later tokens are computed with these weights."""
        if self.weight_versions[-1][1] == self.num_tokens:
            self.weight_versions.pop()
        self.weight_versions.append((version, self.num_tokens))

    @property
    def ids(self) -> dict[str, list[int]]:
        """The members with token ids of an answer that shows them; none if it does not."""
        if self.output_tokens is None:
            return {}
        return {"prompt_token_ids": self.prompt.tokens, "token_ids": self.output_tokens}

    def take_text(self) -> str:
        """The new text since the previous ``take``; discards new tokens and log-probabilities."""
        text = "".join(self._texts)
        self._texts.clear()
        self._tokens.clear()
        self.is_noted = False
        return text

    def take(self) -> ChoiceUpdate:
        """The new output since the previous ``take``."""
        update = ChoiceUpdate("".join(self._texts), self._tokens, self._logprobs)
        self._texts, self._tokens, self._logprobs = [], [], []
        self.is_noted = False
        return update


class Generation:
    """All choices of one HTTP request. ``close`` must always be called."""

    __slots__ = (
        *("account", "choices", "engine", "error", "keeps_aborted", "num_unfinished", "reader", "weight_version"),
        *("__weakref__", "_expiry", "_listener", "_noted", "_reports_updates"),
    )

    def __init__(self, engine: Aborts, account: Account | None = None, weight_version: str = FIRST_WEIGHTS) -> None:
        """``weight_version``: of the weights with which it begins; "" where that is not known."""
        self.engine = engine
        self.weight_version = weight_version
        self.reader: OutputReader | None = None
        """Of a durable request; its output arrives once the reader has begun."""
        self.account = account
        self.choices: list[GeneratedChoice] = []
        self.num_unfinished = 0
        self.error: Exception | None = None
        self.keeps_aborted = False
        """Whether a generation that the server ends early is finished with what it has, instead of failing."""
        self._noted: list[GeneratedChoice] = []
        self._listener: Callable[[], None] = ignore_updates
        self._reports_updates = True
        self._expiry: asyncio.TimerHandle | None = None

    def expire_at(self, time: float, error: RequestError) -> None:
        """Fail with ``error`` at loop time ``time`` unless finished by then."""
        self._expiry = asyncio.get_running_loop().call_at(time, self.fail, error)

    def add(
        self,
        prompt: Prompt,
        request: EngineRequest,
        tokenizer: Tokenizer | None = None,
        shown_ids: frozenset[int] = frozenset(),
        answer_marks: AnswerMarks | None = None,
    ) -> None:
        """Add a choice; see ``TextStream`` for what becomes its text."""
        stream = TextStream(tokenizer, request.params, shown_ids, answer_start(answer_marks, prompt.text))
        self.choices.append(GeneratedChoice(self, len(self.choices), prompt, request, stream))
        self.num_unfinished += 1

    async def result(self) -> list[GeneratedChoice]:
        """Wait until every choice is finished, and return them all. Raises the ``RequestError`` that ended the
        generation, or ``ClientGone``."""
        while self.num_unfinished:
            await self._wait(for_updates=False)
        self._noted = []
        if self.error is not None:
            raise self.error
        return self.choices

    async def updates(self) -> list[GeneratedChoice]:
        """Wait for new output, and return the choices that have some. Raises like ``result``."""
        if not self._noted and self.error is None:
            await self._wait(for_updates=True)
        noted = self.take_noted()
        if not noted and self.error is not None:
            raise self.error
        return noted

    async def _wait(self, for_updates: bool) -> None:
        updated = asyncio.Event()
        self.listen(updated.set, for_updates)
        await updated.wait()

    def listen(self, listener: Callable[[], None], for_updates: bool = True) -> None:
        """Call ``listener`` at the end and, with ``for_updates``, whenever there is new output; it must not block."""
        self._listener = listener
        self._reports_updates = for_updates

    def take_noted(self) -> list[GeneratedChoice]:
        """The choices with new output since the previous call."""
        noted, self._noted = self._noted, []
        return noted

    def note(self, choice: GeneratedChoice) -> None:
        """Record that a choice has new output, and notify the listener."""
        if not choice.is_noted:
            choice.is_noted = True
            self._noted.append(choice)
        if self._reports_updates or not self.num_unfinished:
            self._listener()

    def fail(self, error: Exception) -> None:
        """End with an error, and abort all choices in the engine."""
        if self.keeps_aborted and isinstance(error, Withdrawn):
            self.abort()
        elif self.error is None and self.num_unfinished:
            self.error = error
            self.close()
            self._listener()

    def abort(self) -> None:
        """Finish all choices with what they have."""
        for choice in self.choices:
            choice.abort()

    def close(self) -> None:
        """Abort unfinished choices, and charge the account for the output."""
        if self._expiry is not None:
            self._expiry.cancel()
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.finish_reason = "abort"
                self.engine.abort(choice.request.id)
        self.num_unfinished = 0
        if self.account is not None:
            self.account.charge(sum(choice.num_tokens for choice in self.choices))
        self.choices = []  # breaks the reference cycle, so that memory is freed without a garbage collection

    def end(self) -> None:
        """``close``, once nobody waits for it any more."""
        self.close()
        # These, too, break cycles: the error has a traceback, and that has frames that refer to this object.
        self.error, self._listener = None, ignore_updates
