"""The client for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

import httpx

from octavo.client import protocol
from octavo.client.results import Completion, Piece, completion_of, pieces_of


class AsyncClient:
    """``Client`` for asyncio: its methods are coroutines, and its streams asynchronous generators."""

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
        self._http = httpx.AsyncClient(**protocol.client_options(base_url, api_key, timeout))

    async def health(self) -> bool:
        """Whether the server answers and its engine runs; never retried."""
        protocol.check_open(self._http)
        try:
            async with self._http.stream("GET", self.base_url + protocol.HEALTH) as response:
                return response.status_code == 200
        except httpx.HTTPError:
            return False

    async def models(self) -> list[str]:
        """Names of the models that the server lists."""
        async with self._response("GET", protocol.MODELS, None) as response:
            return protocol.model_names(await _json(response))

    async def generate(self, prompt: str | Sequence[int] | Sequence[str], **fields: Any) -> Completion:
        """Continue text, token ids or several texts; ``fields`` are those of ``/v1/completions``."""
        return await self._complete(protocol.COMPLETIONS, {"prompt": prompt, **fields})

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Completion:
        """Answer a conversation; ``fields`` are those of ``/v1/chat/completions``."""
        return await self._complete(protocol.CHAT, {"messages": messages, **fields})

    def stream(self, prompt: str | Sequence[int], **fields: Any) -> AsyncGenerator[Piece, None]:
        """Like ``generate``, piece by piece; closing the generator aborts the request."""
        return self._stream(protocol.COMPLETIONS, protocol.body_of({"prompt": prompt, **fields}, self.model, True))

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> AsyncGenerator[Piece, None]:
        """Like ``chat``, piece by piece; closing the generator aborts the request."""
        return self._stream(protocol.CHAT, protocol.body_of({"messages": messages, **fields}, self.model, True))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _complete(self, path: str, fields: dict[str, Any]) -> Completion:
        async with self._response("POST", path, protocol.body_of(fields, self.model, False)) as response:
            return completion_of(await _json(response))

    async def _stream(self, path: str, body: bytes) -> AsyncGenerator[Piece, None]:
        reader = protocol.EventReader()
        async with self._response("POST", path, body) as response:
            async for chunk in response.aiter_raw():
                for event in reader.feed(chunk):
                    protocol.raise_if_error(event)
                    for piece in pieces_of(event):
                        yield piece
                if reader.is_done:
                    return
        reader.end()

    @contextlib.asynccontextmanager
    async def _response(self, method: str, path: str, body: bytes | None) -> AsyncIterator[httpx.Response]:
        """A response with the status 200, whose body is not read yet. Raises ``RequestError``."""
        protocol.check_open(self._http)
        try:
            for attempt in range(self.max_retries + 1):
                async with contextlib.AsyncExitStack() as stack:
                    try:
                        stream = self._http.stream(method, self.base_url + path, content=body)
                        response = await stack.enter_async_context(stream)
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
                            said = await read(response, protocol.MAX_REFUSAL_BYTES)
                            raise protocol.refusal(response.status_code, said, response.headers)
                await asyncio.sleep(pause or 0.0)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise protocol.unreachable(self.base_url, error) from None


async def _json(response: httpx.Response) -> Any:
    return protocol.json_of(await read(response, protocol.MAX_BODY_BYTES))


async def read(response: httpx.Response, max_bytes: int) -> bytes:
    """The body; of a longer one, its beginning, with more than ``max_bytes``."""
    data = bytearray()
    async for chunk in response.aiter_raw():
        data += chunk
        if len(data) > max_bytes:
            break
    return bytes(data)
