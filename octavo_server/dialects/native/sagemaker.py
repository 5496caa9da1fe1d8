"""POST /invocations: what Amazon SageMaker sends to a model, a body of one of three endpoints; `/ping` is a probe.

https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html; which body it is, its fields say.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.dialects.openai import chat, chat_body, completions, embeddings
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import MissingParameter
from octavo_server.http.request_body import BodyDecoder
from octavo_server.services import server_of

KINDS: dict[str, tuple[BodyDecoder[Any], Callable[[Request], Awaitable[Response]]]] = {
    "messages": (chat_body.decoder, chat.CHAT.serve),
    "prompt": (completions.decoder, completions.COMPLETION.serve),
    "input": (embeddings.decoder, embeddings.create_embeddings),
}
"""By the field that tells the kind of a body, its decoder, and what answers it."""


class AnyBody(msgspec.Struct):
    """A body of any kind: all its fields are unknown ones."""


class AnyDecoder(BodyDecoder[Any]):
    """Reads a body as the first of ``KINDS`` whose field it has."""

    def read(self, body: bytes, max_model_len: int = 0) -> tuple[Any, list[str]]:
        names = super().read(body, max_model_len)[1]
        decoder = next((decoder for name, (decoder, _) in KINDS.items() if name in names), None)
        if decoder is None:
            raise MissingParameter("messages", "The body must have 'messages', 'prompt' or 'input'.")
        return decoder.read(body, max_model_len)


any_decoder = AnyDecoder(AnyBody)


async def invoke(request: Request) -> Response:
    """Answer as the endpoint does whose body this is. Raises ``RequestError``."""
    server = server_of(request)
    server.check_room(request)
    request.state.decoded = found = await server.decoded(request, any_decoder)
    answer = next(answer for decoder, answer in KINDS.values() if isinstance(found[1], decoder.kind))
    return await answer(request)


ENDPOINTS = [
    Endpoint(
        *("POST", "/invocations", invoke),
        "A body of `/v1/chat/completions`, `/v1/completions` or `/v1/embeddings`, by its fields, for SageMaker",
    )
]
