"""POST /sleep and /wake_up, GET /is_sleeping: free the memory of a model that nobody uses. vLLM's routes, and the two
of SGLang for the same.

On a CPU an engine sleeps by ending its process: weights are mapped from files that stay in the page cache, so that
waking takes about a second. On a GPU, level 1 keeps the process with its weights in host memory; level 2 ends it.
"""

from __future__ import annotations

import typing

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidParameter
from octavo_server.engines.engine_client import EngineClient, SleepMode
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import MissingParameter, UnsupportedParameter
from octavo_server.http.request_body import BodyDecoder
from octavo_server.http.response import json_response
from octavo_server.services import asked_services_of, server_of

LEVELS = ("1", "2")
TAGS = ("weights", "kv_cache")
MODES: tuple[SleepMode, ...] = typing.get_args(SleepMode)


class MemoryBody(msgspec.Struct, kw_only=True):
    """The body of SGLang's requests to free memory, and to take it again."""

    tags: list[str] = []


memory_decoder = BodyDecoder(MemoryBody)


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
    _check(request.query_params.getlist("tags"))
    await engine.wake_up()
    return json_response({"is_sleeping": engine.sleep_level > 0}, {})


async def release_memory_occupation(request: Request) -> Response:
    """Weights and cache are freed together, whatever the tags; the weights stay in host memory."""
    engine = _engine(request)
    _, body, headers = await server_of(request).read(request, memory_decoder)
    _check(body.tags)
    await engine.sleep(1)
    return json_response({"is_sleeping": engine.sleep_level > 0}, headers)


async def resume_memory_occupation(request: Request) -> Response:
    engine = _engine(request)
    _, body, headers = await server_of(request).read(request, memory_decoder)
    _check(body.tags)
    await engine.wake_up()
    return json_response({"is_sleeping": engine.sleep_level > 0}, headers)


async def is_sleeping(request: Request) -> Response:
    asked = [asked_services_of(request)] if "model" in request.query_params else server_of(request).models
    return json_response({"is_sleeping": all(each.engine.sleep_level > 0 for each in asked)}, {})


ENDPOINTS = [
    Endpoint(
        "POST", "/sleep", sleep, "Free the memory of the model until the next request; needs `--enable-sleep-mode`"
    ),
    Endpoint("POST", "/wake_up", wake_up, "Load the model again; needs `--enable-sleep-mode`"),
    Endpoint("GET", "/is_sleeping", is_sleeping, "Whether the model sleeps"),
    Endpoint("POST", "/release_memory_occupation", release_memory_occupation, "SGLang's `/sleep`", MemoryBody),
    Endpoint("POST", "/resume_memory_occupation", resume_memory_occupation, "SGLang's `/wake_up`", MemoryBody),
]


def _check(tags: list[str]) -> None:
    if any(tag not in TAGS for tag in tags):
        raise InvalidParameter("tags", f"'tags' must be of {', '.join(TAGS)}.")


def _engine(request: Request) -> EngineClient:
    services = asked_services_of(request)
    if not services.config.server.enable_sleep_mode:
        raise UnsupportedParameter("level", f"{request.url.path} is for a server started with --enable-sleep-mode.")
    if len(services.server.models) > 1 and "model" not in request.query_params:
        raise MissingParameter("model")
    return services.engine
