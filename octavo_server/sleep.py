"""POST /sleep and /wake_up, GET /is_sleeping: free the memory of a model that nobody uses. vLLM's routes.

On a CPU an engine sleeps by ending its process: weights are mapped from files that stay in the page cache, so that
waking takes about a second. On a GPU, level 1 keeps the process with its weights in host memory; level 2 ends it.
"""

from __future__ import annotations

import typing

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidParameter
from octavo_server.engines.engine_client import EngineClient, SleepMode
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import MissingParameter, UnsupportedParameter
from octavo_server.http.response import json_response
from octavo_server.services import asked_services_of, server_of

LEVELS = ("1", "2")
TAGS = ("weights", "kv_cache")
MODES: tuple[SleepMode, ...] = typing.get_args(SleepMode)


async def sleep(request: Request) -> Response:
    engine = _engine(request)
    level, mode = request.query_params.get("level", "1"), request.query_params.get("mode", "wait")
    if level not in LEVELS:
        raise InvalidParameter("level", f"'level' must be one of {', '.join(LEVELS)}.")
    if mode not in MODES:
        raise InvalidParameter("mode", f"'mode' must be one of {', '.join(MODES)}.")
    await engine.sleep(int(level), mode)
    return json_response({"is_sleeping": engine.sleep_level > 0}, {})


async def wake_up(request: Request) -> Response:
    """An engine has weights and cache, or neither: the first tag that is named wakes both."""
    engine = _engine(request)
    for tag in request.query_params.getlist("tags"):
        if tag not in TAGS:
            raise InvalidParameter("tags", f"'tags' must be of {', '.join(TAGS)}.")
    await engine.wake_up()
    return json_response({"is_sleeping": engine.sleep_level > 0}, {})


async def is_sleeping(request: Request) -> Response:
    asked = [asked_services_of(request)] if "model" in request.query_params else server_of(request).models
    return json_response({"is_sleeping": all(each.engine.sleep_level > 0 for each in asked)}, {})


ENDPOINTS = [
    Endpoint(
        "POST", "/sleep", sleep, "Free the memory of the model until the next request; needs `--enable-sleep-mode`"
    ),
    Endpoint("POST", "/wake_up", wake_up, "Load the model again; needs `--enable-sleep-mode`"),
    Endpoint("GET", "/is_sleeping", is_sleeping, "Whether the model sleeps"),
]


def _engine(request: Request) -> EngineClient:
    services = asked_services_of(request)
    if not services.config.server.enable_sleep_mode:
        raise UnsupportedParameter("level", f"{request.url.path} is for a server started with --enable-sleep-mode.")
    if len(services.server.models) > 1 and "model" not in request.query_params:
        raise MissingParameter("model")
    return services.engine
