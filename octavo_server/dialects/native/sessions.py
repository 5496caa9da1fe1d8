"""Sessions: a client that is done with a conversation lets go of what the prefix cache keeps for it."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from octavo_server.http.endpoint import Endpoint
from octavo_server.http.sse import json_response
from octavo_server.services import server_of
from octavo_server.tenants.api_keys import caller_of


async def delete_session(request: Request) -> Response:
    """Also of a session that is not known: there is nothing to keep then."""
    name, owner = request.path_params["session_id"], caller_of(request).name
    await asyncio.gather(*(each.engine.forget_session(owner, name) for each in server_of(request).models))
    return json_response({"id": name, "object": "session", "deleted": True}, {})


ENDPOINTS = [Endpoint("DELETE", "/v1/sessions/{session_id}", delete_session, "Free the cached prompts of a session")]
