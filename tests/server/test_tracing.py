"""OpenTelemetry traces, sent to a collector in the test's process."""

from __future__ import annotations

import contextlib
import gzip
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from octavo.errors import ConfigError, RequestFailed
from octavo.sampling_params import SamplingParams
from octavo.server_settings import ServerSettings
from octavo.telemetry.counts import Timing
from octavo.telemetry.metrics import Metrics
from octavo.telemetry.request_events import Event
from octavo.types import Output, Request
from octavo_server.engines.live_request import LiveRequest
from octavo_server.engines.request_table import RequestJournal
from octavo_server.observe.timelines import Timelines
from octavo_server.observe.tracing import TRACE_HEADERS, make_tracing
from tests.timing import undisturbed

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{'7' * 32}-{PARENT}-00"


class Collector:
    """An OTLP/HTTP server that keeps the spans it receives."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.spans: list[Any] = []
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                body = gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body
                if self.path == "/v1/traces":
                    collector.keep(ExportTraceServiceRequest.FromString(body))
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def keep(self, message: Any) -> None:
        for resource in message.resource_spans:
            self.services.add(attributes(resource.resource)["service.name"])
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]


def attributes(span: Any) -> dict[str, Any]:
    """The attributes of a span, of an event of it, or of a resource."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


class Journal(RequestJournal):
    """Live requests without an engine."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.metrics, self.timelines = Metrics("m"), Timelines()
        self.tracing = make_tracing(ServerSettings(otlp_traces_endpoint=url), "m")

    def _forget(self, live: LiveRequest) -> None:
        """There is no engine that computes it."""

    def run(self, output: Output | None) -> None:
        """Serve a request that gets this output, or fails."""
        arrival = time.monotonic() - 2
        live = LiveRequest(Request(self.next_id(), [1, 2, 3], SamplingParams(), 16), self, Timing(arrival))
        self._keep(live)
        self.timelines.add([Event(live.id, "arrived", arrival, 0, 0), Event(live.id, "admitted", arrival + 1, 0, 0, 2)])
        self.timelines.add([Event(live.id, "preempted", arrival + 1.5, 3, 3, 5, by=9)])
        if output is None:
            self._fail(live, RequestFailed("as a test"))
        else:
            self._deliver(live, output, time.monotonic())

    def on_output(self, output: Output) -> None:
        """The listener of every request."""

    def on_error(self, error: Exception) -> None:
        """The listener of every request."""


@contextlib.contextmanager
def server(*flags: str) -> Iterator[str]:
    """A server without a model; it drains when the block ends."""
    command = [sys.executable, "-m", "octavo", "serve", "--backend", "instant", "--port", "0", "--quiet", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
            process.terminate()
            assert process.wait(20) == 0
        finally:
            process.kill()


@pytest.mark.slow
def test_requests_over_http_become_spans_of_their_callers_trace(collector: Collector) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0.5, "top_p": 0.9}
    with server("--otlp-endpoint", collector.url) as address:
        url = f"{address}/v1/completions"
        answer = httpx.post(url, json={**body, "n": 2}, headers={"traceparent": SAMPLED}).json()
        httpx.post(url, json=body)
        httpx.post(url, json=body, headers={"traceparent": UNSAMPLED})
        httpx.post(url, json={**body, "stream": True}, headers={"traceparent": "not-one"})
    continued = [span for span in collector.spans if span.trace_id.hex() == TRACE]
    others = [span for span in collector.spans if span.trace_id.hex() != TRACE]
    assert collector.services == {"octavo"}
    assert [len(continued), len(others)] == [2, 2], "each choice is a span, and an unsampled request has none"
    assert {span.parent_span_id.hex() for span in continued} == {PARENT}
    assert not any(span.parent_span_id for span in others)
    assert len({span.trace_id for span in others}) == 2
    for span in collector.spans:
        found = attributes(span)
        assert span.name == "llm_request"
        assert span.kind == span.SPAN_KIND_SERVER
        assert found["gen_ai.usage.prompt_tokens"] == 3
        assert found["gen_ai.usage.completion_tokens"] == found["gen_ai.request.max_tokens"] == 5
        assert (found["gen_ai.request.temperature"], found["gen_ai.request.top_p"]) == (0.5, 0.9)
        assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
        assert found["gen_ai.response.model"] == answer["model"]
        took = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert took == pytest.approx(found["gen_ai.latency.e2e"], abs=0.001)
        assert abs(span.end_time_unix_nano / 1e9 - time.time()) < 60
    assert {attributes(span)["gen_ai.request.id"] for span in continued} == {answer["id"]}
    assert {attributes(span)["gen_ai.request.n"] for span in continued} == {2}


def test_a_span_has_the_times_of_each_phase_and_what_happened(collector: Collector) -> None:
    journal = Journal(collector.url + "/")
    TRACE_HEADERS.set({"traceparent": SAMPLED, "tracestate": "vendor=1"})
    try:
        journal.run(Output(1, [7, 8], "length", first_scheduled=time.monotonic() - 1.5))
    finally:
        TRACE_HEADERS.set({})
    journal.run(None)
    assert journal.tracing is not None
    journal.tracing.close()
    finished, failed = collector.spans
    found = attributes(finished)
    assert found["gen_ai.latency.time_in_queue"] == pytest.approx(0.5, abs=0.2)
    assert found["gen_ai.latency.time_in_model_prefill"] == pytest.approx(1.5, abs=0.2)
    assert found["gen_ai.latency.time_in_model_inference"] == pytest.approx(1.5, abs=0.2)
    assert found["gen_ai.latency.time_in_model_decode"] == 0
    assert (finished.trace_id.hex(), finished.trace_state) == (TRACE, "vendor=1")
    assert [event.name for event in finished.events] == ["admitted", "preempted"]
    assert attributes(finished.events[1]) == {"computed_tokens": 5, "preempted_by": 9}
    assert finished.events[0].time_unix_nano - finished.start_time_unix_nano == pytest.approx(1e9, abs=1e6)
    assert (finished.status.code, failed.status.code) == (0, 2)
    assert "gen_ai.latency.time_to_first_token" not in attributes(failed)


def test_a_collector_that_is_down_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from octavo_server.observe import spans

    monkeypatch.setattr(spans, "EXPORT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    journal = Journal(f"http://127.0.0.1:{port}")
    assert isinstance(journal.tracing, spans.Spans)
    began = time.monotonic()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            journal.run(Output(1, [7], "stop"))
            journal.tracing._provider.force_flush()
        journal.tracing.close()
    assert time.monotonic() - began < 5
    assert [record.getMessage() for record in caplog.records] == [
        f"traces cannot be sent to http://127.0.0.1:{port}/v1/traces; they are dropped until it answers"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_collector_that_never_answers_holds_up_no_end(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    """Not even with many batches, each of which has the time of an export; nor one that answers without an end."""
    from octavo_server.observe import spans

    monkeypatch.setattr(spans, "EXPORT_SECONDS", 0.4)
    monkeypatch.setattr(spans, "CLOSE_SECONDS", 0.6)
    received: list[int] = []

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=talk, args=(connection,), daemon=True).start()

    def talk(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                if b"POST" in data:
                    received.append(1)
                    connection.sendall(answer)
                while answer:
                    connection.sendall(b"x: y\r\n" if answer.count(b"\r\n") == 1 else b"x" * 65536)
                    time.sleep(0.01)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()

        def close() -> float:
            journal = Journal(f"http://127.0.0.1:{listener.getsockname()[1]}")
            assert journal.tracing is not None
            for _ in range(1500):
                journal.run(Output(1, [7], "stop"))
            began = time.monotonic()
            journal.tracing.close()
            return time.monotonic() - began

        assert undisturbed(close, 1) < 1
        assert received


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "localhost", "grpc://127.0.0.1:4317", "http://"])
def test_another_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint: expected a URL such as http://127\.0\.0\.1:4318"):
        Journal(url)


def test_without_the_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "octavo_server.observe.spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[otel\]'"):
        Journal("http://127.0.0.1:4318")
