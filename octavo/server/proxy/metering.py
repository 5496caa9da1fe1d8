"""Counts the tokens of relayed responses, for metrics and quotas.

``usage`` of a response is exact. A stream without it counts one token for each event, and no prompt tokens.
"""

from __future__ import annotations

import contextlib
import time

import msgspec

from octavo.server.quotas import Account
from octavo.telemetry.counts import Timing
from octavo.telemetry.metrics import Metrics
from octavo.types import FinishReason

END_OF_EVENT = b"\n\n"
USAGE = b'"usage":'
DONE = b"[DONE]"


class _Usage(msgspec.Struct):
    """OpenAI's names, and those of Anthropic and of OpenAI's responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Body)


class Meter:
    """The tokens of one response. ``close`` must be called at its end."""

    def __init__(self, metrics: Metrics, account: Account, arrival: float) -> None:
        self._metrics = metrics
        self._account = account
        self._timing = Timing(arrival, first_scheduled=time.monotonic())
        self._num_tokens = 0
        self._usage: _Usage | None = None
        self._reason: FinishReason = "abort"

    def whole(self, status: int, body: bytes) -> None:
        """Count a complete response."""
        self._reason = "stop" if status < 400 else "error"
        if USAGE in body:
            self._read(body)
        if self._usage is not None and (count := _num_output(self._usage)):
            self._count(count)

    def piece(self, data: bytes) -> None:
        """Count a piece of a stream."""
        if (count := data.count(END_OF_EVENT) - (DONE in data)) > 0:
            self._count(count)
        if USAGE in data:
            for line in data.split(b"\n"):
                if USAGE in line:
                    self._read(line.removeprefix(b"data: "))

    def end(self, reason: FinishReason) -> None:
        """The response ended; without this, it counts as aborted."""
        self._reason = reason

    def close(self) -> None:
        """Charge the account, and record the end of the request."""
        usage = self._usage or _Usage()
        num_prompt = usage.prompt_tokens or usage.input_tokens
        num_output = _num_output(usage) or self._num_tokens
        self._metrics.prompt_tokens += num_prompt
        self._metrics.output_tokens += num_output - self._num_tokens
        self._account.charge(num_prompt + num_output)
        self._metrics.observe_end(self._timing, self._reason, num_prompt, num_output, num_output)

    def _count(self, count: int) -> None:
        now = time.monotonic()
        if self._num_tokens:
            self._metrics.observe_tokens(self._timing, count, now)
        else:
            self._metrics.observe_first_tokens(self._timing, count, now, 0, 0)
        self._num_tokens += count

    def _read(self, data: bytes) -> None:
        # Data that is cut between two pieces, or of another shape, was counted as events.
        with contextlib.suppress(msgspec.DecodeError):
            self._usage = _decoder.decode(data).usage or self._usage


def _num_output(usage: _Usage) -> int:
    return usage.completion_tokens or usage.output_tokens
