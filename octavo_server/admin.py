"""/admin: operator endpoints, protected by the admin key."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import ConfigError, InvalidParameter
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.response import json_response
from octavo_server.services import common_services_of


async def list_keys(request: Request) -> Response:
    return json_response({"object": "list", "data": common_services_of(request).keys.usage()}, {})


async def reload_keys(request: Request) -> Response:
    keys = common_services_of(request).keys
    try:
        await asyncio.to_thread(keys.load)
    except ConfigError as error:
        raise InvalidParameter("api_key_file", f"The keys stay as they were: {error}.") from None
    return json_response({"object": "list", "data": keys.usage()}, {})


ENDPOINTS = [
    Endpoint("GET", "/admin/keys", list_keys, "Usage of each API key since the start"),
    Endpoint("POST", "/admin/keys/reload", reload_keys, "Reload the API key file"),
]
