"""The outermost layer: request ids, the key, headers, unknown paths, and unexpected errors."""

from __future__ import annotations

import re
import threading
from typing import Any

import httpx
import pytest

from octavo.errors import RequestFailed
from octavo.types import Output
from octavo_server.generation import GeneratedChoice
from tests.server.conftest import Served
from tests.server.in_process import InProcessEngine

PATHS = [
    "/v1/models",
    "/v1/models/test",
    "//v1/models/",
    "/metrics",
    "/stats",
    "/version",
    "/openapi.json",
    "/nope",
]
POSTS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]


def test_a_request_id_is_echoed_or_made(served: Served) -> None:
    made = [served.client.get("/health").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in made)
    assert served.client.get("/nope", headers={"X-Request-Id": "mine 1"}).headers["x-request-id"] == "mine 1"


@pytest.mark.parametrize("given", [b"x" * 129, b"caf\xc3\xa9", b"a\tb", b""])
def test_an_unfit_request_id_is_replaced(served: Served, given: bytes) -> None:
    response = served.client.get("/health", headers=[(b"x-request-id", given)])
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


def test_ids_are_on_every_kind_of_answer(served: Served) -> None:
    answers = [
        served.complete(),
        served.complete(stream=True),
        served.complete(n=0),
        served.client.get("/nope"),
        served.client.get("/v1/completions"),
    ]
    assert all(len(answer.headers["x-request-id"]) == 32 for answer in answers)


def test_without_the_key_only_the_probes_are_served(serve_app: Any) -> None:
    served = serve_app(api_key="s3crét")
    key = "s3crét".encode()
    bad = [None, b"Bearer", b"Bearer wrong", key, b"Basic " + key, b"Bearer \xff\xfe", b"Bearer " + b"x" * 20_000]
    for path, method in [(path, "GET") for path in PATHS] + [(path, "POST") for path in POSTS]:
        for value in bad:
            headers = [] if value is None else [(b"authorization", value)]
            response = served.client.request(method, path, headers=headers)
            assert response.status_code == 401, (path, value)
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/health", "/ready", "/ready/", "/health_generate"):
        assert served.client.get(path).status_code == 200
    assert served.client.get("/v1/models", headers=[(b"authorization", b"bearer " + key)]).status_code == 200


def test_every_route_but_the_probes_and_the_pages_asks_for_the_key(serve_app: Any) -> None:
    """Routes as the application has them, so that one that is added is closed too."""
    served = serve_app(api_key="key", admin_key="admin")
    routes = [(method, route.path) for route in served.app.routes for method in route.methods or ("GET",)]
    assert len(routes) > 40
    is_open = [
        (method, path)
        for method, path in routes
        if served.client.request(method, re.sub("{[^}]*}", "x", path)).status_code != 401
    ]
    probes = ("/health", "/ping", "/ready", "/health_generate", "/liveness")
    opened = (*probes, "/", "/docs", "/console/{name:path}")
    assert set(is_open) == {(method, path) for method in ("GET", "HEAD") for path in opened} | {("POST", "/ping")}
    assert served.engine.requests == []


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "unknown_url"),
        ("GET", "//v2/models", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/test", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
def test_what_is_not_there(served: Served, method: str, path: str, status: int, code: str) -> None:
    response = served.client.request(method, served.url + path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert ("allow" in response.headers) == (status == 405)


def test_allow_names_every_method_of_a_path(served: Served) -> None:
    """Those too of the path's other routes."""
    for path, methods in (("/v1/files", {"GET", "HEAD", "POST"}), ("/v1/files/x", {"GET", "HEAD", "DELETE"})):
        assert set(served.client.put(path).headers["allow"].split(", ")) == methods | {"OPTIONS"}


def test_options_lists_the_methods_of_a_path(served: Served) -> None:
    answer = served.client.options("/v1/files")
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["allow"] == "GET, HEAD, OPTIONS, POST"
    assert served.client.options("/nope").status_code == 404


@pytest.mark.parametrize("path", ["/v1/models/", "//v1/models", "/v1//models//"])
def test_a_slash_too_many_makes_no_difference(served: Served, path: str) -> None:
    assert served.client.get(served.url + path).json() == served.client.get("/v1/models").json()


@pytest.mark.parametrize("path", ["//admin/keys", "/admin//keys/", "//admin//keys/reload//"])
def test_a_slash_too_many_opens_nothing(serve_app: Any, path: str) -> None:
    served = serve_app(api_key="key", admin_key="admin")
    for method in ("GET", "POST"):
        answer = served.client.request(method, served.url + path, headers={"authorization": "Bearer key"})
        assert answer.status_code == 401


@pytest.mark.parametrize("name", ["host.docker.internal:8000", "host.containers.internal"])
def test_containers_may_use_the_name_of_the_machine(served: Served, name: str) -> None:
    assert served.client.get("/v1/models", headers={"host": name}).status_code == 200
    assert served.client.get("/v1/models", headers={"host": f"x.{name}"}).status_code == 421


def test_headers_are_bounded(served: Served) -> None:
    assert served.client.get("/health", headers={"X-Long": "x" * 40_000}).status_code == 431
    assert served.client.get("/health", headers={f"X-{i}": "1" for i in range(120)}).status_code == 431


def test_an_unexpected_error_is_a_plain_500(serve_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve_app()

    def boom(*args: Any) -> None:
        raise RuntimeError("secret /etc/path 0xdeadbeef")

    monkeypatch.setattr(served.engine, "next_id", boom)
    for response in (served.complete(), served.complete(stream=True), served.chat()):
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "secret" not in response.text
        assert "x-request-id" in response.headers


def test_a_listener_that_cannot_make_text_fails_its_own_request(
    serve_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve_app()
    take_in = GeneratedChoice._apply

    def fail(choice: GeneratedChoice, output: Output) -> None:
        if len(choice.prompt.tokens) == 5:
            raise RuntimeError("no text")
        take_in(choice, output)

    monkeypatch.setattr(GeneratedChoice, "_apply", fail)
    assert served.complete(prompt="12345").status_code == 500
    assert served.complete(prompt="1234").status_code == 200
    assert served.engine.num_live == 0


def test_an_engine_error_before_the_first_token_is_a_status(serve_app: Any) -> None:
    engine = InProcessEngine(errors={0: RequestFailed("The engine fails on this.")})
    served = serve_app(engine)
    for response in (served.complete(), served.complete(stream=True), served.chat(stream=True, n=2)):
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "The engine fails on this."
    assert engine.num_live == 0


def test_http_metrics_have_bounded_labels(serve_app: Any) -> None:
    served = serve_app()
    for number in range(200):
        served.client.get(f"/nope/{number}")
        served.client.get(f"/v1/models/{number}")
    served.complete()
    served.complete(n=0)
    text = served.client.get("/metrics").text
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 1.0' in text
    assert 'http_requests_total{handler="other",method="GET",status="4xx"} 200.0' in text
    assert 'handler="/nope' not in text
    assert "/v1/models/7" not in text
    assert served.engine.metrics.rejected["invalid"] >= 1


def test_a_request_that_outlasts_the_shutdown_is_told_so_in_a_line(
    serve_app: Any, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve_app(InProcessEngine(runs=False))
    found: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: found.append(served.complete()))
    thread.start()
    while not served.engine.live:
        threading.Event().wait(0.002)
    served.call(lambda: [task.cancel() for task in served._server.server_state.tasks])
    thread.join(30)
    assert found[0].status_code == 503
    assert "shut down" in found[0].json()["error"]["message"]
    assert "ended by the shutdown" in caplog.text
    assert "Traceback" not in caplog.text
    assert not served.engine.live
