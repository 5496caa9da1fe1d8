"""Sends the prompt of a request to a prefill server before a decode server gets the request.

The prefill server is asked for one token, and tells where it keeps the prompt's keys and values; the decode server is
told so, and goes on from there. Whatever goes wrong on the way costs time alone: the decode server gets the request as
it came, and computes the prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import msgspec

from octavo_fleet.proxy.connections import ConnectionFailed, Headers
from octavo_fleet.proxy.upstream_server import CHECK_SECONDS, PIECE_BYTES, UpstreamServer
from octavo_fleet.routing.prefixes import PromptQuery
from octavo_fleet.routing.routers import Router

PATHS = {"v1/completions": "prompt", "v1/chat/completions": "messages"}
"""Whose prompts are computed apart, with the field that has the prompt."""
LEAST_BYTES = 2048
"""Of a prompt's text that a decode server does not have: to compute less takes no longer than to fetch it."""
MOST_BYTES = 64 << 10
"""Of a prompt that are compared with those that were sent before."""
BODY_SECONDS = 10.0
"""For which an answer may come, once its head is there: it is small, and the prompt has been computed."""
PARAMS = "kv_transfer_params"
OF_SEVERAL = ("n", "best_of", "use_beam_search", "echo", "prompt_logprobs")
"""Fields of requests for more than one answer, or for logits of the prompt, which are not computed apart."""
NEUTRAL = (b"1", b"false", b"null")
"""Their values that ask for one answer, and for no logits of the prompt."""
OF_ANSWERS = (
    *("stream", "stream_options", "max_completion_tokens", "min_tokens", "logprobs", "top_logprobs"),
    *("response_format", "structured_outputs"),
)
"""Fields that no prompt depends on."""

UNREADABLE = msgspec.MsgspecError, UnicodeDecodeError, RecursionError
"""What reading JSON may raise."""
APART = ("model", "cache_salt")
"""Fields of which blocks depend: equal prompts with other values share nothing."""
IDEMPOTENCY_KEY = b"idempotency-key"
"""A request with this header must be the same each time it is sent, and where a prompt is held is not; and it goes to
one server, whose journal has its answer."""

logger = logging.getLogger("octavo.server")
_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def is_keyed(headers: Headers) -> bool:
    """Whether a request has an idempotency key."""
    return any(name.lower() == IDEMPOTENCY_KEY for name, _ in headers)


class PrefillPrompt:
    """The prompt of a request's body, as far as it is one that routers compare."""

    def __init__(self, target: str, body: bytes, owner: str) -> None:
        self.fields: dict[str, Any] = {}
        field = PATHS.get(target.partition("?")[0])
        if field is not None:
            with contextlib.suppress(*UNREADABLE):  # the server that gets it says what is wrong
                self.fields = _decoder.decode(body)
        text = bytes(self.fields.get(field, b"")) if field is not None else b""
        self.num_bytes = len(text)
        salt = "\0".join([owner, *(bytes(self.fields.get(name, b"")).decode("latin-1") for name in APART)])
        self.query = PromptQuery(text[:MOST_BYTES], salt)

    def is_apart(self, decode: UpstreamServer) -> bool:
        """Whether it is one to compute apart, for ``decode``."""
        if PARAMS in self.fields or any(bytes(self.fields.get(name, b"1")) not in NEUTRAL for name in OF_SEVERAL):
            return False
        compared = min(self.num_bytes, MOST_BYTES)  # where all of it is cached, so may be what follows
        return compared - PIECE_BYTES * decode.num_cached_blocks(self.query) >= LEAST_BYTES

    def to_compute(self) -> bytes:
        """The body for a prefill server."""
        fields = {name: value for name, value in self.fields.items() if name not in OF_ANSWERS}
        return msgspec.json.encode({**fields, "max_tokens": 1, PARAMS: {"do_remote_decode": True}})

    def to_answer(self, params: msgspec.Raw) -> bytes:
        """The body for a decode server."""
        return msgspec.json.encode({**self.fields, PARAMS: params})


class Prefill:
    """The prefill servers."""

    def __init__(self, urls: list[str], router: Router) -> None:
        """Raises ``ConfigError`` for an invalid URL."""
        self.servers = [UpstreamServer(url, "prefill_upstream", max_slow_checks=1) for url in urls]
        self._router = router

    async def body_for(
        self, decode: UpstreamServer, prompt: PrefillPrompt, target: str, headers: Headers, body: bytes
    ) -> bytes:
        """The body that a decode server gets in place of ``body``."""
        ready = [server for server in self.servers if server.is_up]
        if not ready or is_keyed(headers) or not prompt.is_apart(decode):
            return body
        server = self._router.choose(prompt.query, ready)
        server.note_sent(prompt.query)
        server.num_live += 1
        asking = asyncio.ensure_future(self._ask(server, target, headers, prompt.to_compute()))
        try:
            while not asking.done() and server.is_up:
                await asyncio.wait([asking], timeout=CHECK_SECONDS)
            if not asking.done():
                raise ConnectionFailed("it does not answer health checks any more")
            return prompt.to_answer(asking.result())
        except (ConnectionFailed, *UNREADABLE) as error:
            logger.warning("a prompt is left to the decode server, as %s failed: %s", server.url, error)
            return body
        finally:
            asking.cancel()
            server.num_live -= 1

    async def _ask(self, server: UpstreamServer, target: str, headers: Headers, body: bytes) -> msgspec.Raw:
        """The parameters that a prefill server gives for a prompt. Raises ``ConnectionFailed``."""
        async with server.connections.request("POST", target, headers, body) as connection:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    data = await connection.read_all()
            except TimeoutError:
                raise ConnectionFailed(f"its answer takes more than {BODY_SECONDS:g} s to come") from None
            if connection.status != 200:
                raise ConnectionFailed(f"it answered with status {connection.status}")
        answer = _decoder.decode(data)
        if PARAMS not in answer:
            raise ConnectionFailed(f"its answer has no {PARAMS}; is it started with --role prefill?")
        return answer[PARAMS]
