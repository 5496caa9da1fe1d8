"""Spans of requests, sent to an OpenTelemetry collector. Needs the extra ``otel``.

A request of the engine becomes one span, ``llm_request``, with vLLM's attributes. It is made when the request ends. A
thread of the SDK sends spans in batches, by OTLP over HTTP; spans that a slow collector has no time for are dropped.
Attributes: ``vllm/tracing.py`` of vLLM 0.28 and the GenAI conventions of OpenTelemetry.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from octavo.errors import ConfigError
from octavo.types import FinishReason
from octavo_server.engines.live_request import LiveRequest
from octavo_server.engines.lora_adapters import adapter_name
from octavo_server.observe.timelines import Timelines

EXPORT_SECONDS = 5.0
"""Time limit of an export."""
CLOSE_SECONDS = 3.0
"""Time limit of all exports that are left when the server stops."""
SPAN_EVENTS: dict[str, dict[str, str]] = {
    "admitted": {"cached_tokens": "tokens", "running_requests": "others"},
    "preempted": {"computed_tokens": "tokens", "preempted_by": "by"},
    "fault": {"recomputed_from": "start"},
}
"""The events of a request that its span has: their attributes, and the fields of ``Event`` with the values."""

logger = logging.getLogger("octavo.server")


class Spans:
    """Makes spans and sends them to ``endpoint``, a URL; without a path, ``/v1/traces`` is added."""

    def __init__(self, endpoint: str, model: str) -> None:
        """Raises ``ConfigError`` for another address."""
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            example = "http://127.0.0.1:4318/v1/traces"
            raise ConfigError(f"otlp_traces_endpoint: expected a URL such as {example}, got {endpoint!r}")
        url = endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        resource = Resource.create({} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "octavo"})
        sender = OTLPSpanExporter(url, timeout=EXPORT_SECONDS, session=HeadsOnly())
        exporter = ReportedExporter(sender, url)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(cast(SpanExporter, exporter)))
        self._tracer = self._provider.get_tracer("octavo")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def end(self, live: LiveRequest, reason: FinishReason, timelines: Timelines) -> None:
        """Record the span of a request that ends now."""
        now = time.monotonic()
        offset = time.time() - now
        span = self._tracer.start_span(
            "llm_request",
            self._propagator.extract(live.trace_headers),
            SpanKind.SERVER,
            start_time=_nanoseconds(live.timing.arrival + offset),
        )
        if span.is_recording():  # else the caller's trace is not sampled
            span.set_attribute("gen_ai.request.id", timelines.name_of(live.id) or str(live.id))
            span.set_attribute("gen_ai.response.model", adapter_name(live.request.adapter) or self._model)
            span.set_attribute("gen_ai.response.finish_reasons", (reason,))
            span.set_attributes(dict(attributes_of(live, now)))
            for event in timelines.events_of(live.id):
                if (fields := SPAN_EVENTS.get(event.kind)) is not None:
                    values = {name: getattr(event, field) for name, field in fields.items()}
                    span.add_event(event.kind, values, _nanoseconds(event.time + offset))
            if reason == "error":
                span.set_status(Status(StatusCode.ERROR))
        span.end(_nanoseconds(now + offset))

    def close(self) -> None:
        """Send the spans that are left, for ``CLOSE_SECONDS`` at most."""
        # The SDK exports one batch after another, each with a time limit of its own. A daemon: it may not end.
        closing = threading.Thread(target=self._provider.shutdown, name="spans-closing", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            logger.warning("traces that were not sent within %g s are dropped", CLOSE_SECONDS)


class HeadsOnly(requests.Session):
    """Leaves the bodies of answers unread, and follows no redirects: a collector may send anything without an end."""

    def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
        """Send a request; only the head of its answer is received."""
        response = super().send(request, **{**kwargs, "stream": True, "allow_redirects": False})
        response.close()
        response._content = b""  # else it would be read on first use
        return response


class ReportedExporter:
    """A ``SpanExporter`` that logs when exports begin to fail, and when they work again, instead of every failure."""

    def __init__(self, exporter: SpanExporter, url: str) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it logs every failure
        self._exporter = exporter
        self._url = url
        self._has_failed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        has_failed = result is not SpanExportResult.SUCCESS
        if has_failed and not self._has_failed:
            logger.warning("traces cannot be sent to %s; they are dropped until it answers", self._url)
        elif self._has_failed and not has_failed:
            logger.info("traces are sent to %s again", self._url)
        self._has_failed = has_failed
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))


def attributes_of(live: LiveRequest, now: float) -> Iterator[tuple[str, int | float]]:
    """vLLM's attributes of a request that ends ``now``: parameters, tokens, and times in seconds."""
    request, timing = live.request, live.timing
    yield "gen_ai.request.n", request.params.n
    yield "gen_ai.request.max_tokens", request.max_tokens
    yield "gen_ai.request.temperature", request.params.temperature
    yield "gen_ai.request.top_p", request.params.top_p
    yield "gen_ai.usage.prompt_tokens", len(request.prompt_tokens)
    yield "gen_ai.usage.completion_tokens", len(live.tokens)
    yield "gen_ai.latency.e2e", now - timing.arrival
    if timing.first_scheduled:
        yield "gen_ai.latency.time_in_queue", timing.first_scheduled - timing.arrival
    if timing.first_token:
        yield "gen_ai.latency.time_to_first_token", timing.first_token - timing.arrival
        yield "gen_ai.latency.time_in_model_decode", timing.last_token - timing.first_token
        if timing.first_scheduled:
            yield "gen_ai.latency.time_in_model_prefill", timing.first_token - timing.first_scheduled
            yield "gen_ai.latency.time_in_model_inference", timing.last_token - timing.first_scheduled


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
