"""Chat with any server of the OpenAI API: ``POST /v1/chat/completions`` as server-sent events."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import httpx

from octavo.errors import RequestError, RequestFailed, Unavailable

TIMEOUT = httpx.Timeout(10.0, read=600.0)
"""Seconds; a busy server may take minutes to the first token."""


class RemoteChat:
    """A chat with a server at a URL."""

    def __init__(self, url: str, model: str | None, api_key: str | None, values: Mapping[str, Any]) -> None:
        """Connect; if ``model`` is ``None``, use the first that the server lists. Raises ``RequestError``."""
        base = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._base = base if base.endswith("/v1") else base + "/v1"
        self._client = httpx.Client(headers=headers, timeout=TIMEOUT)
        self._values = dict(values)
        self.model = model or self._first_model()

    @property
    def name(self) -> str:
        return f"{self.model} at {self._base}"

    def reply(self, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        """Stream the answer's text; closing the iterator disconnects, which aborts the request at the server."""
        body = {"model": self.model, "messages": messages, "stream": True, **self._values}
        with self._errors(), self._client.stream("POST", self._base + "/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise _refusal(response.status_code, response.read())
            for event in _events(response.iter_bytes()):
                if "error" in event:
                    raise RequestFailed(_message(event))
                for choice in event.get("choices") or ():
                    if content := (choice.get("delta") or {}).get("content"):
                        yield content

    def close(self) -> None:
        self._client.close()

    def _first_model(self) -> str:
        with self._errors():
            response = self._client.get(self._base + "/models")
            if response.status_code != 200:
                raise _refusal(response.status_code, response.content)
            try:
                return str(response.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise Unavailable(f"{self._base}/models lists no model; name one with --model.") from None

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unavailable(f"{self._base}: {error or type(error).__name__}") from None


def _events(chunks: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON events of a stream, which must end with ``[DONE]``.

    Lines are split at line feeds only: text inside an event may hold other characters that Unicode treats as line ends.
    """
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            try:
                yield json.loads(data)
            except ValueError:
                raise RequestFailed(f"the server sent an event that is not JSON: {data[:80]!r}") from None
    raise RequestFailed("the server ended the stream before the answer was complete.")


def _refusal(status: int, body: bytes) -> RequestError:
    try:
        message = _message(json.loads(body))
    except ValueError:
        message = body[:200].decode("utf-8", "replace").strip() or "no explanation"
    return RequestError(f"the server answered {status}: {message}")


def _message(body: Any) -> str:
    """The message of an OpenAI error object, or of a similar body that some servers send instead."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
