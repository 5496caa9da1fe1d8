"""A client that blocks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import httpx

from octavo.client import protocol
from octavo.client.results import Completion, Piece, completion_of, pieces_of


class Client:
    """A client of a server at ``base_url``: Octavo's, or another with the API of OpenAI.

    A refused request (429, 503, or no connection) is sent again up to ``max_retries`` times, after the seconds of its
    ``Retry-After`` header if it has one. A stream is not sent again once it has begun. Failures raise the
    ``RequestError`` of their kind. ``model`` is for requests that name none; ``timeout`` is the most seconds without a
    byte from the server, ``None`` for no limit. Threads may share a client. Close it, or use it in a ``with``
    statement.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float | None = 600.0,
        max_retries: int = 3,
    ) -> None:
        protocol.check_options(base_url, api_key, timeout, max_retries)
        self.base_url = protocol.base_of(base_url)
        self.model = model
        self.max_retries = max_retries
        self._http = httpx.Client(**protocol.client_options(base_url, api_key, timeout))

    def health(self) -> bool:
        """Whether the server answers and its engine runs; never retried."""
        protocol.check_open(self._http)
        try:
            with self._http.stream("GET", self.base_url + protocol.HEALTH) as response:
                return response.status_code == 200
        except httpx.HTTPError:
            return False

    def models(self) -> list[str]:
        """Names of the models that the server lists."""
        with self._response("GET", protocol.MODELS, None) as response:
            return protocol.model_names(_json(response))

    def generate(self, prompt: str | Sequence[int] | Sequence[str], **fields: Any) -> Completion:
        """Continue text, token ids or several texts; ``fields`` are those of ``/v1/completions``."""
        return self._complete(protocol.COMPLETIONS, {"prompt": prompt, **fields})

    def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Completion:
        """Answer a conversation; ``fields`` are those of ``/v1/chat/completions``."""
        return self._complete(protocol.CHAT, {"messages": messages, **fields})

    def stream(self, prompt: str | Sequence[int], **fields: Any) -> Generator[Piece, None, None]:
        """Like ``generate``, piece by piece; closing the generator aborts the request."""
        return self._stream(protocol.COMPLETIONS, protocol.body_of({"prompt": prompt, **fields}, self.model, True))

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Generator[Piece, None, None]:
        """Like ``chat``, piece by piece; closing the generator aborts the request."""
        return self._stream(protocol.CHAT, protocol.body_of({"messages": messages, **fields}, self.model, True))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _complete(self, path: str, fields: dict[str, Any]) -> Completion:
        with self._response("POST", path, protocol.body_of(fields, self.model, False)) as response:
            return completion_of(_json(response))

    def _stream(self, path: str, body: bytes) -> Generator[Piece, None, None]:
        reader = protocol.EventReader()
        with self._response("POST", path, body) as response:
            for chunk in response.iter_raw():
                for event in reader.feed(chunk):
                    protocol.raise_if_error(event)
                    yield from pieces_of(event)
                if reader.is_done:
                    return
        reader.end()

    @contextlib.contextmanager
    def _response(self, method: str, path: str, body: bytes | None) -> Iterator[httpx.Response]:
        """A response with the status 200, whose body is not read yet. Raises ``RequestError``."""
        protocol.check_open(self._http)
        try:
            for attempt in range(self.max_retries + 1):
                with contextlib.ExitStack() as stack:
                    try:
                        stream = self._http.stream(method, self.base_url + path, content=body)
                        response = stack.enter_context(stream)
                    except httpx.ConnectError:
                        if attempt == self.max_retries:
                            raise
                        pause = protocol.pause_before_retry(attempt, None, {})
                    else:
                        if response.status_code == 200:
                            yield response
                            return
                        pause = protocol.pause_before_retry(attempt, response.status_code, response.headers)
                        if pause is None or attempt == self.max_retries:
                            said = read(response, protocol.MAX_REFUSAL_BYTES)
                            raise protocol.refusal(response.status_code, said, response.headers)
                time.sleep(pause or 0.0)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise protocol.unreachable(self.base_url, error) from None


def _json(response: httpx.Response) -> Any:
    return protocol.json_of(read(response, protocol.MAX_BODY_BYTES))


def read(response: httpx.Response, max_bytes: int) -> bytes:
    """The body; of a longer one, its beginning, with more than ``max_bytes``."""
    data = bytearray()
    for chunk in response.iter_raw():
        data += chunk
        if len(data) > max_bytes:
            break
    return bytes(data)
