"""A client of one OpenAI-compatible server for measurements: streamed completions, and when each piece arrived.

The connections are those of the proxy, whose parser is httptools: a general client spends so much time on each piece
that it, and not a fast server, would be what is measured.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from octavo.errors import ConfigError
from octavo_fleet.proxy.connections import ConnectionFailed, Connections, Headers

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "v1/completions", "chat": "v1/chat/completions"}
MAX_ERROR = 300
"""Characters of a server's error message that are kept."""


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class TimedAnswer(msgspec.Struct, gc=False):
    """What came of one request. Times are those of ``time.perf_counter``."""

    sent: float = msgspec.field(default_factory=time.perf_counter)
    ended: float = 0.0
    """When its stream was over; 0 until then."""
    times: list[float] = []
    """When each event with text arrived."""
    pieces: list[str] = []
    token_ids: list[int] = []
    """The tokens, if the server names them."""
    num_prompt: int = 0
    num_output: int = 0
    """Tokens, as the server counts them; of a server that does not, events with text."""
    error: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def e2el(self) -> float:
        """Seconds from sending to the last text."""
        return self.times[-1] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Mean seconds of a token after the first; ``None`` for an answer that came in one piece."""
        return (self.times[-1] - self.times[0]) / (self.num_output - 1) if len(self.times) > 1 else None


class HttpClient:
    """Requests to one model of the server at ``url``, with or without ``/v1`` at its end."""

    def __init__(self, url: str, endpoint: Endpoint, api_key: str | None, timeout: float) -> None:
        """``timeout``: seconds that a request may take. Raises ``ConfigError``."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url: {url!r} must begin with http:// or https://")
        self.endpoint = endpoint
        self._connections = Connections(url.rstrip("/").removesuffix("/v1") + "/")
        self._headers: Headers = [(b"content-type", b"application/json")]
        if api_key:
            self._headers.append((b"authorization", b"Bearer " + api_key.encode()))
        self._timeout = timeout
        self._decoder = msgspec.json.Decoder(_Event)

    async def get(self, path: str) -> Any:
        """The JSON at ``path``; ``None`` for any answer but 200. Raises ``ConfigError`` if there is no server."""
        try:
            async with self._connections.request("GET", path, self._headers) as connection:
                body = await connection.read_all()
                return json.loads(body) if connection.status == 200 else None
        except ConnectionFailed as error:
            raise ConfigError(f"url: the server cannot be reached: {error}") from None
        except ValueError:
            return None

    async def ask(self, body: Mapping[str, Any], started: list[TimedAnswer] | None = None) -> TimedAnswer:
        """Send ``body`` and read the stream to its end. A failure is the answer's ``error``.

        The answer is appended to ``started`` when the request is sent, for callers that do not wait for its end.
        """
        data = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
        answer = TimedAnswer()
        if started is not None:
            started.append(answer)
        try:
            async with asyncio.timeout(self._timeout):
                await self._stream(data, answer)
        except TimeoutError:
            answer.error = f"no end after {self._timeout:g} s"
        except ConnectionFailed as error:
            answer.error = str(error)
        answer.ended = time.perf_counter()
        answer.num_output = answer.num_output or len(answer.times)
        if not answer.times and answer.error is None:
            answer.error = "the stream had no text"
        return answer

    async def _stream(self, data: bytes, answer: TimedAnswer) -> None:
        async with self._connections.request("POST", PATHS[self.endpoint], self._headers, data) as connection:
            if connection.status != 200:
                said = (await connection.read_all()).decode(errors="replace")
                answer.error = f"status {connection.status}: {said[:MAX_ERROR]}"
                return
            async for line in connection.divided(b"\n"):
                if not line.startswith(b"data:") or line.rstrip().endswith(b"[DONE]"):
                    continue
                now = time.perf_counter()
                try:
                    event = self._decoder.decode(line[5:])
                except msgspec.MsgspecError as error:
                    answer.error = f"an event is not as expected: {error}"
                    return
                if event.error is not None:
                    answer.error = str(event.error)[:MAX_ERROR]
                    return
                _take(event, now, answer)

    def close(self) -> None:
        """Close the idle connections."""
        self._connections.close()


def _take(event: _Event, now: float, answer: TimedAnswer) -> None:
    has_text = False
    for choice in event.choices:
        delta = choice.delta
        text = choice.text or (delta is not None and (delta.content or delta.reasoning_content)) or ""
        answer.token_ids += choice.token_ids or ()
        if text:
            has_text = True
            answer.pieces.append(text)
    if has_text:
        answer.times.append(now)
    if event.usage is not None:
        answer.num_prompt, answer.num_output = event.usage.prompt_tokens, event.usage.completion_tokens
