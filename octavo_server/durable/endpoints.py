"""DELETE /v1/requests: end a durable request, which no closed connection does."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo_server.generation import IDEMPOTENCY_KEY
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import MissingParameter, NotFound, printable
from octavo_server.http.response import json_response
from octavo_server.services import server_of
from octavo_server.tenants.api_keys import caller_of


async def delete_request(request: Request) -> Response:
    """End the caller's request with the header's key, or forget its answer; the key can be used again."""
    key = request.headers.get(IDEMPOTENCY_KEY)
    if key is None:
        raise MissingParameter("Idempotency-Key")
    found = [await journal.cancel_of_client(caller_of(request), key) for journal in server_of(request).journals]
    if not any(found):
        raise NotFound(f"There is no request with the Idempotency-Key '{printable(key)}'.", param="Idempotency-Key")
    return json_response({"id": key, "object": "request", "deleted": True}, {})


ENDPOINTS = [Endpoint("DELETE", "/v1/requests", delete_request, "End a request with an `Idempotency-Key`")]
