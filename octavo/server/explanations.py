"""Why a request took its time, and what the cache holds: the engine's decisions as JSON."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidParameter
from octavo.server.caller import caller_of
from octavo.server.errors import HTTPRefusal, UnsupportedParameter, printable
from octavo.server.openai.rendering import json_response
from octavo.server.openai.schema import Endpoint
from octavo.server.services import services_of


async def timeline(request: Request) -> Response:
    """What was decided about the answer of this id, for each of its choices; only its own key may know."""
    name, caller = request.path_params["request_id"], caller_of(request)
    report = services_of(request).engine.timelines.report(name, None if caller.sees_all else caller.name)
    if report is None:
        raise HTTPRefusal(404, f"Nothing is known of a request with the id '{printable(name)}'.", "not_found")
    return json_response({"id": name, "choices": report}, {})


async def kv_events(request: Request) -> Response:
    """What was cached and given up after event number ``after``."""
    services = services_of(request)
    if not services.config.cache.enable_kv_events:
        raise UnsupportedParameter("kv_events", "Events of the KV cache need a server with --enable-kv-events.")
    after = request.query_params.get("after", "0")
    if not (after.isascii() and after.isdigit() and len(after) < 20):
        raise InvalidParameter("after", "'after' must be the number of an event, or 0.")
    return json_response(services.engine.kv_events.after(int(after)), {})


ENDPOINTS = [
    Endpoint("GET", "/v1/requests/{request_id}/timeline", timeline, "Where the time of a request went"),
    Endpoint("GET", "/v1/kv_events", kv_events, "What the prefix cache took in and gave up"),
]
