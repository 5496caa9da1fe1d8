"""Request timelines and KV-cache events as JSON."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidParameter
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import HTTPRefusal, UnsupportedParameter, printable
from octavo_server.http.response import json_response
from octavo_server.services import asked_services_of, server_of
from octavo_server.tenants.api_keys import caller_of


async def timeline(request: Request) -> Response:
    """The timeline of each choice of a response; readable by the response's own API key and by the admin."""
    name, caller = request.path_params["request_id"], caller_of(request)
    owner = None if caller.sees_all else caller.name
    reports = (each.engine.timelines.report(name, owner) for each in server_of(request).models)
    report = next((found for found in reports if found is not None), None)
    if report is None:
        raise HTTPRefusal(404, f"Nothing is known of a request with the id '{printable(name)}'.", "not_found")
    return json_response({"id": name, "choices": report}, {})


async def kv_events(request: Request) -> Response:
    """Prefix-cache insertions and evictions after event number ``after``."""
    services = asked_services_of(request)
    if not services.config.cache.enable_kv_events:
        raise UnsupportedParameter("kv_events", "Events of the KV cache need a server with --enable-kv-events.")
    after = request.query_params.get("after", "0")
    if not (after.isascii() and after.isdigit() and len(after) < 20):
        raise InvalidParameter("after", "'after' must be the number of an event, or 0.")
    return json_response(services.engine.kv_events.after(int(after)), {})


ENDPOINTS = [
    Endpoint("GET", "/v1/requests/{request_id}/timeline", timeline, "Timeline of a request"),
    Endpoint("GET", "/v1/kv_events", kv_events, "Prefix-cache insertions and evictions"),
]
