"""POST /v1/completions in the dialect that the server or the request asks for: OpenAI's, or that of ``infer``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidParameter
from octavo.server_settings import DIALECTS
from octavo_server.dialects.native.infer import INFER
from octavo_server.dialects.openai.completions import COMPLETION, decoder
from octavo_server.http.endpoint import Endpoint
from octavo_server.services import server_of

HEADER = "x-octavo-dialect"


async def complete(request: Request) -> Response:
    """Answer in the dialect of the header ``x-octavo-dialect``, else of the setting ``completions_dialect``."""
    dialect = request.headers.get(HEADER) or server_of(request).config.server.completions_dialect
    if dialect not in DIALECTS:
        raise InvalidParameter(HEADER, f"The header '{HEADER}' must be one of {', '.join(DIALECTS)}.")
    return await (INFER if dialect == "infer" else COMPLETION).serve(request)


ENDPOINTS = [
    Endpoint("POST", "/v1/completions", complete, "Continue text or token ids", decoder.documented),
]
