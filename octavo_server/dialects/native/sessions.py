"""Sessions: what the prefix cache has of conversations, and hints of their clients about them."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.telemetry.cache_view import SessionOrder, SessionReport
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import MissingParameter
from octavo_server.http.response import json_response
from octavo_server.services import server_of
from octavo_server.tenants.api_keys import SESSIONS_PATH, caller_of


async def _order(
    request: Request, action: Literal["list", "forget", "prefetch"], name: str = ""
) -> dict[str, SessionReport]:
    """What the engines of all models answer."""
    caller, models = caller_of(request), server_of(request).models
    owner = None if caller.sees_all and action == "list" else caller.name
    order = SessionOrder(action, owner, name)
    reports = await asyncio.gather(*(each.engine.order_sessions(order) for each in models))
    return {each.model_name: report for each, report in zip(models, reports, strict=True)}


async def list_sessions(request: Request) -> Response:
    """Those of the caller's key used last, or with the admin key of all."""
    reports = await _order(request, "list")
    found = [(session, model) for model, report in reports.items() for session in report.sessions]
    found.sort(key=lambda entry: entry[0].idle_seconds)
    data = [{"object": "session", "model": model, **msgspec.structs.asdict(session)} for session, model in found]
    return json_response({"object": "list", "data": data}, {})


async def delete_session(request: Request) -> Response:
    """Also of a session that is not known: there is nothing to keep then. Trainers name it in the query."""
    name = request.path_params.get("session_id") or request.query_params.get("session_id", "")
    if not name:
        raise MissingParameter("session_id")
    await _order(request, "forget", name)
    return json_response({"id": name, "object": "session", "deleted": True}, {})


async def prefetch_session(request: Request) -> Response:
    """A hint: of a session that is not known, nothing is read."""
    name = request.path_params["session_id"]
    reports = await _order(request, "prefetch", name)
    is_taken = any(report.is_taken for report in reports.values())
    return json_response({"id": name, "object": "session", "accepted": is_taken}, {})


ENDPOINTS = [
    Endpoint("GET", SESSIONS_PATH, list_sessions, "The sessions, and what is cached of them"),
    Endpoint(
        "POST",
        SESSIONS_PATH + "/{session_id:path}/prefetch",
        prefetch_session,
        "Bring what is on disk of a session to memory, for its next request",
    ),
    Endpoint("DELETE", SESSIONS_PATH + "/{session_id:path}", delete_session, "Free the cached prompts of a session"),
    Endpoint("POST", "/finish_session", delete_session, "The same, for SkyRL's trainers", name="finish_session"),
]
