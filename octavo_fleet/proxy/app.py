"""The application of a proxy: the upstream's API under this server's keys and limits, and its own monitoring."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.config import ServeConfig
from octavo.errors import DeadlineExceeded, InvalidParameter, RequestError
from octavo_fleet.proxy.relay import Outgoing, Relay, outgoing
from octavo_fleet.proxy.upstream import Upstream, UpstreamFailed
from octavo_server import admin
from octavo_server.app import all_endpoints, forms_of, outer_middleware
from octavo_server.dialects.gemini import endpoints as gemini
from octavo_server.http.error_responses import on_http_exception, on_request_error
from octavo_server.http.request_body import BodyReceiver
from octavo_server.http.response import json_response
from octavo_server.observe import probes
from octavo_server.tenants.api_keys import SESSIONS_PATH, Caller, Keys, caller_of

POST = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/moderations", "/v1/generate", "/v1/conversations"),
    *("/v1/responses/{id}/cancel", "/v1/responses/input_tokens", "/v1/conversations/{id}/items"),
    *("/v1/conversations/{id}", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech"),
    *("/v1/images/generations", "/v1/images/edits", "/v2/rerank", "/v2/embed"),
    *("/v2/models/{id}/infer", "/v2/models/{id}/generate", "/v2/models/{id}/generate_stream"),
    *("/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/rerank", "/generate", "/generate_stream"),
    *("/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity", "/infer", "/infer/v1/completions"),
    *("/v1/files", "/v1/batches", "/v1/batches/{id}/cancel", "/invocations"),
    *("/v1/messages/batches", "/v1/messages/batches/{id}/cancel"),
    *(each.path for each in gemini.ENDPOINTS),
)
GET = (
    *("/v1/models", "/v1/models/{name:path}", "/v1beta/models", "/v1beta/models/{name:path}"),
    *("/v1/responses/{id}", "/v1/responses/{id}/input_items"),
    *("/v1/conversations/{id}", "/v1/conversations/{id}/items", "/v1/conversations/{id}/items/{item}"),
    *("/v1/files", "/v1/files/{id}", "/v1/files/{id}/content", "/v1/batches", "/v1/batches/{id}"),
    *("/v1/messages/batches", "/v1/messages/batches/{id}", "/v1/messages/batches/{id}/results"),
    *("/tokenizer_info", "/openapi.json", "/docs", "/model_info", "/get_model_info"),
)
DELETE = (
    *("/v1/responses/{id}", "/v1/conversations/{id}", "/v1/conversations/{id}/items/{item}"),
    *("/v1/files/{id}", "/v1/messages/batches/{id}"),
)
"""What is forwarded: use of a model. Nothing else, such as what controls the upstream."""
OF_EACH = (
    *(("GET", SESSIONS_PATH), ("DELETE", SESSIONS_PATH + "/{id:path}")),
    ("POST", SESSIONS_PATH + "/{id:path}/prefetch"),
)
"""What is forwarded to each server: turns of a conversation may have gone to several."""
UNCLEAR = re.compile(rb"%(2e|2f|5c|25|3b|3f|23)", re.IGNORECASE)
"""Encoded characters that an upstream may decode, after which the path is another one."""
NAMED = ("/v1/models/", "/v1beta/models/", SESSIONS_PATH + "/")
"""Paths with a name, which may contain a slash."""


class SessionAnswer(msgspec.Struct, omit_defaults=True):
    """What a server answers about sessions."""

    object: str
    id: str | None = None
    deleted: bool | None = None
    accepted: bool | None = None
    data: list[dict[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class ProxyServices:
    """The shared services of a proxy; ``engine`` is what the monitoring endpoints report on."""

    config: ServeConfig
    engine: Upstream
    keys: Keys
    body_receiver: BodyReceiver

    @property
    def monitored(self) -> Upstream:
        """What the monitoring endpoints read."""
        return self.engine

    def close(self) -> None:
        """Nothing is left open."""


def create_proxy_app(config: ServeConfig, upstream: Upstream) -> Starlette:
    """The application in front of ``upstream``, which may be started later. Raises ``ConfigError`` for a key file that
    cannot be read."""
    keys, error_forms = Keys(config.server), forms_of(all_endpoints())
    app = Starlette(
        routes=[
            *probes.COMMON_ENDPOINTS,
            *admin.ENDPOINTS,
            *(
                Route(path, _forward, methods=[method])
                for method, paths in (("POST", POST), ("GET", GET), ("DELETE", DELETE))
                for path in paths
            ),
            *(Route(path, _forward_to_each, methods=[method]) for method, path in OF_EACH),
        ],
        middleware=outer_middleware(config.server, keys, upstream.metrics, error_forms),
        exception_handlers={RequestError: on_request_error, HTTPException: on_http_exception},
    )
    # The redirect's target would contain the Host header, which the client controls.
    app.router.redirect_slashes = False
    receiver = BodyReceiver(config.server.max_request_bytes)
    app.state.error_forms = error_forms
    app.state.services = ProxyServices(config=config, engine=upstream, keys=keys, body_receiver=receiver)
    return app


async def _forward(request: Request) -> Response:
    services: ProxyServices = request.app.state.services
    sent, caller = await _outgoing(request, services)
    return Relay(services.engine, sent, caller, services.config.server.request_timeout)


async def _forward_to_each(request: Request) -> Response:
    """The answer of one server, with the sessions of all; or that of one that refuses."""
    services: ProxyServices = request.app.state.services
    sent, caller = await _outgoing(request, services)
    upstream, limit = services.engine, services.config.server.request_timeout
    try:
        async with asyncio.timeout(limit), upstream.place(caller.name, len(sent.body)):
            answers = await upstream.ask_each(sent.method, sent.target, sent.headers)
    except TimeoutError:
        assert limit is not None
        raise DeadlineExceeded(limit) from None
    for status, body in answers:
        if status != 200:
            return Response(body, status, media_type="application/json")
    try:
        found = [msgspec.json.decode(body, type=SessionAnswer) for _, body in answers]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise UpstreamFailed("The upstream server sent a response that is not valid.") from None
    merged = found[0]
    if merged.data is not None:
        merged.data = sorted((session for each in found for session in each.data or ()), key=_idle_seconds)
    if merged.accepted is not None:
        merged.accepted = any(each.accepted for each in found)
    return json_response(merged, {})


def _idle_seconds(session: dict[str, Any]) -> float:
    seconds = session.get("idle_seconds")
    return seconds if isinstance(seconds, int | float) else 0.0


async def _outgoing(request: Request, services: ProxyServices) -> tuple[Outgoing, Caller]:
    """``request`` as it is sent upstream, and who sent it. Raises ``RequestError``."""
    _check_path(request.scope["path"], request.scope["raw_path"])
    upstream, settings = services.engine, services.config.server
    caller = caller_of(request)
    upstream.check_room(caller.name)  # before the body is read
    body = await services.body_receiver.read(request, bytes)
    keeps_key = not services.keys.are_asked_for
    return outgoing(request.scope, body, settings.upstream_api_key, keeps_key=keeps_key), caller


def _check_path(path: str, raw_path: bytes) -> None:
    """Raise ``InvalidParameter`` for a path that another server could read otherwise than this one has."""
    if path.startswith(NAMED) and raw_path.startswith(tuple(start.encode() for start in NAMED)):
        raw_path = raw_path.replace(b"%2F", b"/").replace(b"%2f", b"/")  # as it is sent
    is_clear = path.isprintable() and not any(sign in path for sign in "\\%;?#") and not UNCLEAR.search(raw_path)
    if not is_clear or not {".", ".."}.isdisjoint(path.split("/")):
        allowed = "no segments '.' and '..', no backslash, and no '/', '.', '%', ';', '?' and '#' in percent-encoding"
        raise InvalidParameter("path", f"The path must have {allowed}.")
