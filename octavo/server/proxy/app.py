"""The application of a proxy: the upstream's API under this server's keys and limits, and its own monitoring."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.config import ServeConfig
from octavo.errors import RequestError
from octavo.server import admin, probes
from octavo.server.app import outer_middleware
from octavo.server.body_receiver import BodyReceiver
from octavo.server.errors import on_http_exception, on_request_error
from octavo.server.keys import Keys, caller_of
from octavo.server.proxy.relay import Relay, outgoing
from octavo.server.proxy.upstream import Upstream

PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/models"),
    *("/v1/{path:path}", "/v2/{path:path}", "/tokenize", "/detokenize", "/tokenizer_info", "/pooling", "/classify"),
    *("/score", "/rerank", "/generate", "/infer", "/infer/{path:path}", "/openapi.json", "/docs"),
)
"""Paths that are forwarded. Others, such as those that control the upstream, are not."""
METHODS = ["GET", "POST", "DELETE"]


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
    keys = Keys(config.server)
    app = Starlette(
        routes=[
            *probes.COMMON_ENDPOINTS,
            *admin.ENDPOINTS,
            *(Route(path, _forward, methods=METHODS) for path in PATHS),
        ],
        middleware=outer_middleware(config.server, keys, upstream.metrics),
        exception_handlers={RequestError: on_request_error, HTTPException: on_http_exception},
    )
    # The redirect's target would contain the Host header, which the client controls.
    app.router.redirect_slashes = False
    receiver = BodyReceiver(config.server.max_request_bytes)
    app.state.services = ProxyServices(config=config, engine=upstream, keys=keys, body_receiver=receiver)
    return app


async def _forward(request: Request) -> Response:
    services: ProxyServices = request.app.state.services
    upstream, settings = services.engine, services.config.server
    upstream.check_room()  # before the body is read
    body = await services.body_receiver.read(request, bytes)
    sent = outgoing(request.scope, body, settings.upstream_api_key, keeps_key=not services.keys.are_asked_for)
    return Relay(upstream, sent, caller_of(request).account)
