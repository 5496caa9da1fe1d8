"""Whether the server makes OpenTelemetry traces, ``--otlp-traces-endpoint``; ``spans`` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Protocol

from octavo.errors import ConfigError
from octavo.server_settings import ServerSettings
from octavo.types import FinishReason
from octavo_server.engines.live_request import LiveRequest
from octavo_server.observe.timelines import Timelines

NO_HEADERS: Mapping[str, str] = {}
TRACE_HEADERS: ContextVar[Mapping[str, str]] = ContextVar("TRACE_HEADERS", default=NO_HEADERS)
"""The headers of W3C Trace Context of the HTTP request that is being served; set only with tracing."""


class Tracing(Protocol):
    """Makes a span of each request."""

    def end(self, live: LiveRequest, reason: FinishReason, timelines: Timelines) -> None:
        """Record the span of a request that ends now."""
        ...

    def close(self) -> None:
        """Send the spans that are left."""
        ...


def make_tracing(settings: ServerSettings, model: str) -> Tracing | None:
    """What makes the spans, if the settings ask for it. Raises ``ConfigError``."""
    if settings.otlp_traces_endpoint is None:
        return None
    try:
        from octavo_server.observe.spans import Spans
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint: the package {error.name} is missing; pip install 'octavo[otel]'"
        ) from None
    return Spans(settings.otlp_traces_endpoint, model)
