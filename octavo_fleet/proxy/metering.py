"""Counts the tokens of relayed responses, for metrics and quotas.

``usage`` of a response is exact, if it can be: the upstream may say anything. In SGLang's form, which has none, the
counts of all choices are added up. A stream without ``usage`` counts one token for each event, and no prompt tokens.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import Counter

from octavo.telemetry.counts import Timing
from octavo.telemetry.metrics import Metrics
from octavo.types import FinishReason
from octavo_server.tenants.api_keys import Account

MAX_LINE = 64 << 10
"""Bytes of an unfinished line, or of the end of a body, in which ``usage`` is looked for."""
MAX_TOKENS = 100_000_000
"""Most tokens of one request that are believed."""
MAX_USAGES = 4
"""Objects with usage of one line that are read, the last ones: a response may repeat what the client sent."""
DONE = re.compile(rb"^data: ?\[DONE\]", re.MULTILINE)
USAGE = b'"usage'
_USAGE_OBJECT = re.compile(rb'"usage(?:Metadata)?"\s*:\s*(?=\{)')
_PROMPT = ("prompt_tokens", "input_tokens", "promptTokenCount")
_OUTPUT = ("completion_tokens", "output_tokens", "candidatesTokenCount")
"""Names of the fields: OpenAI's, those of Anthropic and of OpenAI's responses, and the Gemini API's."""
_THOUGHTS = ("thoughtsTokenCount",)
"""Of output that the Gemini API counts apart."""
_SGLANG = re.compile(rb'"meta_info"\s{0,8}:|"(prompt|completion)_tokens"\s{0,8}:\s{0,8}(\d{1,9})\s{0,8}[,}]')
"""What is read of SGLang's objects ``meta_info``, whose log-probabilities may be megabytes."""
_MAX_COUNT = 64
"""Bytes of a match of it, at most."""

logger = logging.getLogger("octavo.server")


class Meter:
    """The tokens of one response. ``close`` must be called at its end."""

    def __init__(self, metrics: Metrics, account: Account, arrival: float) -> None:
        self._metrics = metrics
        self._account = account
        self._timing = Timing(arrival, first_scheduled=time.monotonic())
        self._num_tokens = 0
        self._num_prompt = self._num_output = 0
        """As the upstream reports them."""
        self._reason: FinishReason = "abort"
        self._rest = b""
        self._unread = b""
        """The end of a body, with what may be the beginning of a count."""
        self._counts: Counter[bytes] = Counter()
        """Sums of SGLang's, and the number of its objects, as ``b""``."""
        self._has_warned = False
        self.event_bytes = 0
        """Bytes of the current line of a stream, which was not finished yet."""

    def part(self, data: bytes) -> None:
        """Read a part of a response that is no stream."""
        self._rest = (self._rest + data)[-MAX_LINE:]
        text, end = self._unread + data, 0
        for match in _SGLANG.finditer(text):
            self._counts[match[1] or b""] += int(match[2] or 1)
            end = match.end()
        self._unread = text[max(end, len(text) - _MAX_COUNT) :]

    def whole(self, status: int) -> None:
        """Count a response of which all parts were read."""
        self._reason = "stop" if status < 400 else "error"
        self._read(self._rest)
        if self._counts[b""] and not self._num_output:
            self._num_prompt, self._num_output = (
                min(self._counts[name], MAX_TOKENS) for name in (b"prompt", b"completion")
            )
        if self._num_output:
            self._count(self._num_output)

    def piece(self, data: bytes) -> None:
        """Count a piece of a stream."""
        if self._rest:
            data = self._rest + data
        whole, end, rest = (data, b"\n", b"") if data.endswith(b"\n") else data.rpartition(b"\n")
        self.event_bytes = len(rest) if end else self.event_bytes + len(data) - len(self._rest)
        self._rest = rest[-MAX_LINE:]
        count = whole.count(b"\ndata:") + whole.startswith(b"data:")
        if b"[DONE]" in whole and DONE.search(whole):
            count -= 1
        if count:
            self._count(count)
        if USAGE in whole:
            for line in whole.split(b"\n"):
                self._read(line[-MAX_LINE:])

    def end(self, reason: FinishReason) -> None:
        """The response ended; without this, it counts as aborted."""
        self._reason = reason

    def close(self) -> None:
        """Charge the account, and record the end of the request."""
        num_output = self._num_output or self._num_tokens
        self._metrics.prompt_tokens += self._num_prompt
        self._metrics.output_tokens += num_output - self._num_tokens
        self._account.charge(self._num_prompt + num_output)
        self._metrics.observe_end(self._timing, self._reason, self._num_prompt, num_output, num_output)

    def _count(self, count: int) -> None:
        now = time.monotonic()
        if self._num_tokens:
            self._metrics.observe_tokens(self._timing, count, now)
        else:
            self._metrics.observe_first_tokens(self._timing, count, now, 0, 0)
        self._num_tokens += count

    def _read(self, data: bytes) -> None:
        """Read the tokens in the objects named ``usage`` or ``usageMetadata``. A stream may repeat them, or name each
        in its own event."""
        for match in list(_USAGE_OBJECT.finditer(data))[-MAX_USAGES:]:
            try:
                usage, _ = json.JSONDecoder().raw_decode(data[match.end() :].decode("utf-8", "replace"))
                num_prompt = _tokens(usage, _PROMPT)
                num_output = _tokens(usage, _OUTPUT) + _tokens(usage, _THOUGHTS)
            except (ValueError, RecursionError) as error:
                if not self._has_warned:  # once for each response
                    self._has_warned = True
                    logger.warning("'usage' of an upstream's response is ignored: %s", str(error)[:100])
            else:
                self._num_prompt = max(self._num_prompt, num_prompt)
                self._num_output = max(self._num_output, num_output)


def _tokens(usage: dict[str, object], names: tuple[str, ...]) -> int:
    """The first number other than 0 of these fields. Raises ``ValueError`` for what is no number of tokens."""
    for name in names:
        value = usage.get(name)
        if value is None:
            continue
        if type(value) is not int or not 0 <= value <= MAX_TOKENS:
            raise ValueError(f"{name} must be an integer from 0 to {MAX_TOKENS:,}")
        if value:
            return value
    return 0
