"""The access log, and logs as JSON."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.telemetry.logs import (
    DIM,
    PACKAGES,
    PLAIN,
    RED,
    TEXT,
    TIME,
    YELLOW,
    ColourFormatter,
    JSONFormatter,
    current_format,
    current_level,
    has_colours,
    log_to_stderr,
)
from octavo_server.http.middleware import access_logger


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """What is logged about requests, at any level."""
    found: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record)

    handler = Handler()
    access_logger.addHandler(handler)
    access_logger.setLevel(logging.DEBUG)
    yield found
    access_logger.removeHandler(handler)
    access_logger.setLevel(logging.NOTSET)


def noted(records: list[logging.LogRecord], count: int) -> list[logging.LogRecord]:
    """The lines, once there are so many: they are written behind the responses."""
    end = time.monotonic() + 30
    while len(records) < count and time.monotonic() < end:
        time.sleep(0.01)
    return records


def test_each_request_is_a_line(serve_app: Any, records: list[logging.LogRecord]) -> None:
    served = serve_app()
    served.complete(stream=True)
    served.client.get("/no%0Apage?key=secret", headers={"x-request-id": "mine"})
    served.client.get("/health")
    streamed, missing, probe = noted(records, 3)
    assert re.fullmatch(r"\S+ POST /v1/completions 200 0\.\d{3} s [0-9a-f]{32}", streamed.getMessage())
    assert re.fullmatch(r"\S+ GET /no\?page 404 0\.\d{3} s mine", missing.getMessage())
    assert [record.levelname for record in records] == ["INFO", "INFO", "DEBUG"]
    assert getattr(probe, "fields")["path"] == "/health"  # noqa: B009


def test_the_access_log_can_be_switched_off(serve_app: Any, records: list[logging.LogRecord]) -> None:
    serve_app(access_log=False).complete()
    assert records == []


def test_a_refused_key_is_logged_and_not_shown(serve_app: Any, records: list[logging.LogRecord]) -> None:
    served = serve_app(api_key="right")
    served.client.post("/v1/completions", json={"prompt": [1]}, headers={"authorization": "Bearer wrong"})
    (record,) = noted(records, 1)
    assert " 401 " in record.getMessage()
    assert "wrong" not in JSONFormatter().format(record)


def test_json_lines_have_the_fields_of_a_record(serve_app: Any, records: list[logging.LogRecord]) -> None:
    serve_app().client.get("/v1/models", headers={"x-request-id": "7"})
    entry = json.loads(JSONFormatter().format(noted(records, 1)[0]))
    assert entry["level"] == "info"
    assert entry["logger"] == "octavo.access"
    assert (entry["method"], entry["path"], entry["status"]) == ("GET", "/v1/models", 200)
    assert entry["request_id"] == "7"
    assert 0 <= entry["seconds"] < 10
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry["time"])


def test_an_exception_stays_on_one_json_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("octavo", logging.ERROR, "", 0, "%s failed", ("it",), sys.exc_info())
    line = JSONFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line)["message"] == "it failed"
    assert "ValueError: two\nlines" in json.loads(line)["exception"]


def test_child_processes_get_level_and_format(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    for logger in map(logging.getLogger, PACKAGES):
        monkeypatch.setattr(logger, "level", logger.level)
    for form in ("json", "text"):
        root.handlers.clear()
        log_to_stderr("error", form)
        assert (current_level(), current_format()) == ("ERROR", form)


@pytest.mark.parametrize(
    ("level", "status", "colour"),
    [
        (logging.DEBUG, 200, DIM),
        (logging.INFO, 200, PLAIN),
        (logging.INFO, 404, YELLOW),
        (logging.INFO, 500, RED),
        (logging.WARNING, None, YELLOW),
        (logging.ERROR, None, RED),
    ],
)
def test_colours_tell_what_went_wrong_and_change_no_text(level: int, status: int | None, colour: str) -> None:
    record = logging.LogRecord("octavo.access", level, "", 0, "a: %s", ("b",), None)
    if status is not None:
        record.fields = {"status": status}
    line = ColourFormatter().format(record)
    assert f"{colour}{logging.getLevelName(level)[0]} octavo.access:{PLAIN} a: b" in line
    assert re.sub(r"\x1b\[\d+m", "", line) == logging.Formatter(TEXT, TIME).format(record)


@pytest.mark.parametrize(
    ("is_terminal", "variables", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (True, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
    ],
)
def test_only_terminals_get_colours(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, variables: dict[str, str], expected: bool
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    assert has_colours() is expected
