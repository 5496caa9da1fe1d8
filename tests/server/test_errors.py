"""The table of errors in the documentation, row by row, and that nothing is missing from it."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from octavo.errors import RequestFailed, Withdrawn
from octavo_server.http import request_body
from tests.server.conftest import Served, execute, fill
from tests.server.in_process import InProcessEngine

ROOT = Path(__file__).parents[2]
FORM = {"content-type": "multipart/form-data; boundary=x"}


class Row(NamedTuple):
    status: int
    code: str
    type: str


def rows() -> list[Row]:
    found = re.findall(r"^\| (\d+) \| `(\w+)` \| `(\w+)` \|", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    return [Row(int(status), code, kind) for status, code, kind in found]


def slow(served: Served) -> httpx.Response:
    def trickle() -> Any:
        yield b"{"
        threading.Event().wait(0.5)

    headers = {"content-type": "application/json"}
    return served.client.post("/v1/completions", content=trickle(), headers=headers)


def boom(*args: Any) -> int:
    raise RuntimeError("secret")


Ask = Callable[[Served], httpx.Response]
ASKS: dict[str, tuple[dict[str, Any], Ask]] = {
    "invalid_value": ({}, lambda s: s.complete(temperature=-1)),
    "missing_required_parameter": ({}, lambda s: s.client.post("/v1/completions", json={})),
    "unsupported_parameter": ({}, lambda s: s.complete(suffix="x")),
    "unknown_parameter": ({"unknown_fields": "reject"}, lambda s: s.complete(colour="red")),
    "context_length_exceeded": ({}, lambda s: s.complete(max_tokens=9999)),
    "invalid_json": ({}, lambda s: s.client.post("/v1/completions", content=b"{", headers=JSON)),
    "unsupported_media_type": ({}, lambda s: s.client.post("/v1/completions", content=b"{}")),
    "invalid_encoding": ({}, lambda s: s.client.post("/v1/completions", content=b"x", headers=JSON | GZIP)),
    "malformed_request": ({}, lambda s: s.client.request("BREW", "/health")),
    "duplicate_header": ({}, lambda s: s.client.get("/health", headers=[("x-api-key", "a"), ("x-api-key", "b")])),
    "origin_not_allowed": ({}, lambda s: s.client.post("/v1/completions", headers={"origin": "null"})),
    "unsupported_content_encoding": (
        {},
        lambda s: s.client.post("/v1/completions", content=b"x", headers=JSON | {"content-encoding": "br"}),
    ),
    "invalid_form": ({}, lambda s: s.client.post("/v1/files", content=b"--y\r\n", headers=FORM)),
    "previous_response_not_found": (
        {},
        lambda s: s.client.post("/v1/responses", json={"input": "x", "previous_response_id": "resp_1"}),
    ),
    "invalid_api_key": ({"api_key": "k"}, lambda s: s.complete()),
    "permission_denied": ({}, lambda s: s.client.get("/admin/keys")),
    "model_not_found": ({}, lambda s: s.complete(model="other")),
    "not_found": ({}, lambda s: s.client.get("/v1/files/file-1")),
    "unknown_url": ({}, lambda s: s.client.get("/nope")),
    "method_not_allowed": ({}, lambda s: s.client.get("/v1/completions")),
    "request_timeout": ({}, slow),
    "request_too_large": ({"max_request_bytes": 2000}, lambda s: s.complete(prompt="x" * 3000)),
    "host_not_allowed": ({}, lambda s: s.client.get("/v1/models", headers={"host": "evil.example"})),
    "rate_limit_exceeded": ({}, lambda s: s.complete()),
    "headers_too_large": ({}, lambda s: s.client.get("/v1/models", headers={"x": "y" * 40_000})),
    "request_failed": ({}, lambda s: s.complete()),
    "internal_error": ({}, lambda s: s.complete()),
    "engine_unavailable": ({}, lambda s: s.complete()),
    "request_withdrawn": ({}, lambda s: s.complete()),
    "deadline_exceeded": ({}, lambda s: s.complete(timeout=0.01)),
    "storage_full": ({}, lambda s: s.client.post("/v1/responses", json={"input": "x"})),
    "storage_damaged": ({}, lambda s: s.client.get("/v1/files/bad")),
    "storage_unavailable": ({}, lambda s: s.client.get("/v1/files")),
}
JSON = {"content-type": "application/json"}
GZIP = {"content-encoding": "gzip"}


class FullEngine(InProcessEngine):
    num_live = 10_000
    live_owners = Counter({"": 10_000})


ENGINES: dict[str, Callable[[], InProcessEngine]] = {
    "rate_limit_exceeded": FullEngine,
    "request_failed": lambda: InProcessEngine(errors={0: RequestFailed("It fails.")}),
    "engine_unavailable": lambda: InProcessEngine(is_draining=True),
    "request_withdrawn": lambda: InProcessEngine(errors={0: Withdrawn("The generation was paused.")}),
    "deadline_exceeded": lambda: InProcessEngine(runs=False),
}
HEADERS = {
    "invalid_api_key": "www-authenticate",
    "method_not_allowed": "allow",
    "rate_limit_exceeded": "retry-after",
    "engine_unavailable": "retry-after",
    "request_withdrawn": "retry-after",
    "storage_full": "retry-after",
    "storage_unavailable": "retry-after",
    "deadline_exceeded": "x-should-retry",
}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.code)
def test_the_answer_is_what_the_table_says(row: Row, serve_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, ask = ASKS[row.code]
    served = serve_app(ENGINES.get(row.code, InProcessEngine)(), **settings)
    if row.code == "request_timeout":
        monkeypatch.setattr(request_body, "BODY_SECONDS", 0.1)
    if row.code == "internal_error":
        monkeypatch.setattr(served.engine, "next_id", boom)
    if row.code == "storage_full":
        fill(served)
    if row.code == "storage_damaged":
        execute(served, "INSERT INTO items VALUES ('file', 'bad', '', 1e12, x'ff')")
    if row.code == "storage_unavailable":
        execute(served, "DROP TABLE items")
    answer = ask(served)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == row
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith((".", "!", "?"))
    assert "x-request-id" in answer.headers
    assert HEADERS.get(row.code, "x-request-id") in answer.headers


CODE = re.compile(r'^    code = "(\w+)"$', re.MULTILINE)
ELSEWHERE = {"octavo_fleet/proxy": "docs/backends.md", "octavo_server/durable": "docs/deployment.md"}
"""Packages whose own errors are on the page of what they do."""


@pytest.mark.parametrize("package", ELSEWHERE)
def test_errors_of_a_package_are_on_its_page(package: str) -> None:
    text = "\n".join(path.read_text() for path in (ROOT / package).rglob("*.py"))
    codes = CODE.findall(text)
    page = (ROOT / ELSEWHERE[package]).read_text()
    assert codes
    assert [code for code in codes if f"`{code}`" not in page] == []


def test_every_code_is_in_the_table() -> None:
    elsewhere = {path for package in ELSEWHERE for path in (ROOT / package).rglob("*.py")}
    sources = [ROOT / "octavo/errors.py", *(set((ROOT / "octavo_server").rglob("*.py")) - elsewhere)]
    text = "\n".join(path.read_text() for path in sources)
    codes = set(CODE.findall(text))
    codes |= set(re.findall(r'HTTPRefusal\(.*"(\w+)"\)', text))
    table = {row.code for row in rows()}
    assert codes <= table
    assert len(table) == len(rows())
    assert set(ASKS) == table


class FieldRow(NamedTuple):
    """What is wrong with a request of a plain dialect, the dialect's path, and the status."""

    what: str
    path: str
    status: int


def dialect_rows() -> list[FieldRow]:
    text = (ROOT / "docs/errors.md").read_text()
    header, _, *lines = text[text.index("| plain dialects |") :].split("\n\n")[0].splitlines()
    paths = re.findall(r"`([^`]+)`", header)
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [
        FieldRow(what, path, int(status))
        for what, *statuses in table
        for path, status in zip(paths, statuses, strict=True)
        if status != "-"
    ]


BROKEN: dict[str, dict[str, Any]] = {
    "the body is not a JSON object": {"": 7},
    "a required field is absent": {"prompt": None},
    "a value is of the wrong type": {"prompt": {}},
    "`timeout` is not from 0.001 to 86,400": {"timeout": 0},
    "the prompt is empty": {"prompt": ""},
    "less than one token is requested": {"tokens": 0},
    "prompt and tokens do not fit the context": {"prompt": "x" * 600},
    "`model` is not served": {"model": "other"},
    "a field is unknown": {"colour": "red"},
    "the queue is full": {},
    "`timeout` has passed": {"timeout": 0.05},
}
"""A body's fields that make it wrong."""
DIALECT_ENGINES: dict[str, Callable[[], InProcessEngine]] = {
    "the queue is full": FullEngine,
    "`timeout` has passed": lambda: InProcessEngine(runs=False),
}


def test_the_plain_dialects_answer_what_their_table_says(serve_app: Any) -> None:
    rows = dialect_rows()
    assert {row.what for row in rows} == set(BROKEN)
    engines: dict[Any, Served] = {None: serve_app()}
    for row in rows:
        engine = DIALECT_ENGINES.get(row.what)
        if engine not in engines:
            engines[engine] = serve_app(engine())
        body: dict[str, Any] = {"prompt": "Hi", "tokens": 2, "model": "test", **BROKEN[row.what]}
        body["max_new_tokens" if row.path == "/v1/generate" else "max_tokens"] = body.pop("tokens")
        answer = engines[engine].client.post(row.path, json=7 if "" in body else body)
        assert answer.status_code == row.status, (row, answer.text)
