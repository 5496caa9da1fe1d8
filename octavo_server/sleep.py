"""POST /sleep and /wake_up, GET /is_sleeping: free the memory of a model that nobody uses. vLLM's routes, and the two
of SGLang for the same.

On a CPU an engine sleeps by ending its process: weights are mapped from files that stay in the page cache, so that
waking takes about a second. On a GPU, level 1 keeps the process with its weights in host memory; level 2 ends it. A
process that was kept wakes in parts, if asked to: its weights, over which a trainer loads others, and its cache.
"""

from __future__ import annotations

import typing

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidParameter
from octavo.types import MEMORY_PARTS, MemoryPart
from octavo_server.engines.engine_client import EngineClient, SleepMode
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import MissingParameter, UnsupportedParameter
from octavo_server.http.request_body import BodyDecoder
from octavo_server.http.response import json_response
from octavo_server.services import asked_services_of, server_of

LEVELS = ("1", "2")
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
    engine = _engine(request)
    await engine.wake_up(_parts(request, request.query_params.getlist("tags")))
    return json_response({"is_sleeping": engine.sleep_level > 0}, {})


async def release_memory_occupation(request: Request) -> Response:
    """Weights and cache are freed together, whatever the tags; the weights stay in host memory."""
    engine = _engine(request)
    _, body, headers = await server_of(request).read(request, memory_decoder)
    _parts(request, body.tags)
    await engine.sleep(1)
    return json_response({"is_sleeping": engine.sleep_level > 0}, headers)


async def resume_memory_occupation(request: Request) -> Response:
    engine = _engine(request)
    _, body, headers = await server_of(request).read(request, memory_decoder)
    await engine.wake_up(_parts(request, body.tags))
    return json_response({"is_sleeping": engine.sleep_level > 0}, headers)


async def is_sleeping(request: Request) -> Response:
    asked = [asked_services_of(request)] if "model" in request.query_params else server_of(request).models
    return json_response({"is_sleeping": all(each.engine.sleep_level > 0 for each in asked)}, {})


ENDPOINTS = [
    Endpoint(
        "POST", "/sleep", sleep, "Free the memory of the model until the next request; needs `--enable-sleep-mode`"
    ),
    Endpoint(
        "POST",
        "/wake_up",
        wake_up,
        "Load the model again, or with `tags` its weights or its cache; needs `--enable-sleep-mode`",
    ),
    Endpoint("GET", "/is_sleeping", is_sleeping, "Whether the model sleeps"),
    Endpoint("POST", "/release_memory_occupation", release_memory_occupation, "SGLang's `/sleep`", MemoryBody),
    Endpoint("POST", "/resume_memory_occupation", resume_memory_occupation, "SGLang's `/wake_up`", MemoryBody),
]


def _parts(request: Request, tags: list[str]) -> tuple[MemoryPart, ...]:
    """The parts of the memory that are named; all of them without tags, and with a budget for several models, which
    counts a model as a whole. Raises ``InvalidParameter``."""
    if any(tag not in MEMORY_PARTS for tag in tags):
        raise InvalidParameter("tags", f"'tags' must be of {', '.join(MEMORY_PARTS)}.")
    is_whole = not tags or server_of(request).models[0].config.server.models_memory_budget is not None
    return MEMORY_PARTS if is_whole else tuple(part for part in MEMORY_PARTS if part in tags)


def _engine(request: Request) -> EngineClient:
    services = asked_services_of(request)
    if not services.config.server.enable_sleep_mode:
        raise UnsupportedParameter("level", f"{request.url.path} is for a server started with --enable-sleep-mode.")
    if len(services.server.models) > 1 and "model" not in request.query_params:
        raise MissingParameter("model")
    return services.engine
