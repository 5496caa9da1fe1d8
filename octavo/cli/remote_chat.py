"""Chat with any server of the OpenAI API."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Any

from octavo.client import Client
from octavo.errors import ConfigError, Unavailable


class RemoteChat:
    """A chat with a server at a URL."""

    def __init__(self, url: str, model: str | None, api_key: str | None, values: Mapping[str, Any]) -> None:
        """Connect; if ``model`` is ``None``, use the first that the server lists. Raises ``RequestError``."""
        self._client = Client(url, api_key=api_key, max_retries=0)
        self._values = dict(values)
        self.model = model or self._first_model()

    @property
    def name(self) -> str:
        return f"{self.model} at {self._client.base_url}/v1"

    def reply(self, messages: list[dict[str, Any]]) -> Generator[str, None, None]:
        """Stream the answer's text; closing the iterator disconnects, which aborts the request at the server."""
        stream = self._client.stream_chat(messages, model=self.model, **self._values)
        with contextlib.closing(stream) as pieces:
            for piece in pieces:
                if piece.text:
                    yield piece.text

    def models(self) -> list[str]:
        """The models that the server lists."""
        return self._client.models()

    def choose(self, model: str) -> None:
        """Let another model of the server answer. Raises ``ConfigError`` if the server lists no such model."""
        if model not in (names := self.models()):
            raise ConfigError(f"the server has no model {model!r}; there are {', '.join(names)}")
        self.model = model

    def close(self) -> None:
        self._client.close()

    def _first_model(self) -> str:
        if models := self._client.models():
            return models[0]
        raise Unavailable(f"{self._client.base_url}/v1/models lists no model; name one with --model.")
