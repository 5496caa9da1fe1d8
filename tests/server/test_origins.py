"""Pages of other origins change nothing: every route, by the headers that a browser sends with what a page asks for."""

from __future__ import annotations

import re
import socket
from typing import Any

import pytest

from octavo_server.http.middleware import CHANGED_BY_READING, WITHOUT_EFFECT
from tests.server.conftest import Served

PAGES: tuple[dict[str, str], ...] = (
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": ""},
    {"Origin": "http://localhost:1"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"},
)
"""Of other origins; the last is no browser's."""
FORM = {"content-type": "multipart/form-data; boundary=x"}
FILE = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n' + (
    b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n--x--\r\n'
)
READING = {
    *("/v1beta/models", "/v1beta/models/{name:path}"),
    *("/v1/models", "/v1/models/{name:path}", "/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content"),
    *(
        "/v1/batches",
        "/v1/batches/{batch_id}",
        "/v1/messages/batches",
        "/v1/messages/batches/{batch_id}",
        "/v1/messages/batches/{batch_id}/results",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/input_items",
    ),
    *("/v1/conversations/{conversation_id}", "/v1/conversations/{conversation_id}/items"),
    *("/v1/conversations/{conversation_id}/items/{item_id}", "/v1/requests/{request_id}/timeline", "/v1/kv_events"),
    "/v1/sessions",
    *(
        "/tokenizer_info",
        "/get_weight_version",
        "/health",
        "/ping",
        "/ready",
        "/health_generate",
        "/metrics",
        "/liveness",
        "/load",
        "/v1/loads",
        "/version",
        "/stats",
        "/stats/live",
    ),
    *(
        "/is_paused",
        "/weight_info",
        "/get_world_size",
        "/server_info",
        "/get_server_info",
        "/model_info",
        "/get_model_info",
    ),
    *("/is_sleeping", "/admin/keys", "/info", "/api/version", "/api/tags", "/api/ps"),
    *("/", "/docs", "/console/{name:path}", "/openapi.json"),
}
"""Paths whose GET was looked at: it changes nothing. A page may send it, and cannot read the answer."""


def routes(served: Served) -> list[tuple[str, str]]:
    return [(method, route.path) for route in served.app.routes for method in route.methods]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_no_page_of_another_origin_changes_anything(serve_app: Any) -> None:
    served = serve_app(enable_sleep_mode=True)
    changing = [route for route in routes(served) if route[0] not in WITHOUT_EFFECT or route[1] in CHANGED_BY_READING]
    assert len(changing) > 30
    changing.remove(("POST", "/ping"))  # a probe, which SageMaker may post
    contents = ((FORM, FILE), ({"content-type": "application/json"}, b"{}"), ({}, b""))
    for number, (method, path) in enumerate(changing):
        url = re.sub("{[^}]*}", "x", path)
        for place, page in enumerate(PAGES):  # each page with each content at one in three of the paths
            headers, body = contents[(number + place) % 3]
            answer = served.client.request(method, url, headers={**headers, **page}, content=body)
            assert answer.status_code == 403, (method, path, page)
            assert method == "HEAD" or "--allowed-origins" in answer.text
    assert not served.engine.sleep_modes
    assert served.client.get("/v1/files").json()["data"] == []


def test_reading_changes_nothing_so_any_page_may_ask(served: Served) -> None:
    """A path that is new has to be looked at, and added."""
    assert {path for method, path in routes(served) if method in WITHOUT_EFFECT} == READING | CHANGED_BY_READING
    assert served.client.get("/v1/models", headers=PAGES[0]).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "http://localhost:8000", "Host": "localhost:8000", "Sec-Fetch-Site": "same-origin"},
        {"Origin": "https://llm.example", "Host": "llm.example"},
        {"Origin": "https://llm.example", "Host": "LLM.example:443"},
        {"Origin": "http://[::1]:8000", "Host": "[::1]:8000"},
        {"Origin": "https://chat.example", "Sec-Fetch-Site": "cross-site"},
    ],
)
def test_its_own_page_programs_and_allowed_origins_are_served(serve_app: Any, headers: dict[str, str]) -> None:
    """A proxy that terminates TLS passes the name on, and speaks plain HTTP."""
    served = serve_app(allowed_hosts="llm.example", allowed_origins="https://a.example, https://chat.example")
    assert served.client.post("/v1/files", headers={**FORM, **headers}, content=FILE).status_code == 200
    assert served.client.post("/v1/completions", json={"prompt": "Hi"}, headers=headers).status_code == 200


def test_any_origin_if_it_is_said_so(serve_app: Any) -> None:
    served = serve_app(allowed_origins="*")
    for page in PAGES:
        assert served.client.post("/v1/files", headers={**FORM, **page}, content=FILE).status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        *("Host", "Authorization", "Idempotency-Key", "Content-Length", "Content-Type", "Origin", "x-api-key"),
        "x-goog-api-key",
    ],
)
def test_a_header_that_counts_may_come_once(served: Served, name: str) -> None:
    """Whether the first or the last counts is not the same for every proxy."""
    given = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": "2"}
    value = given.get(name, f"http://127.0.0.1:{served.port}")
    lines = [f"{key}: {each}" for key, each in {**given, name: value}.items()]
    head = "\r\n".join(["POST /v1/completions HTTP/1.1", *lines, f"{name.lower()}: {value}", "", "{}"])
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
