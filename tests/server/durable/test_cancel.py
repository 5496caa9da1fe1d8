"""Requests that go on without their clients: what they take from other API keys, and how they are ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo_server.durable import journal
from tests.server.conftest import Served
from tests.server.durable.test_durable import serving
from tests.server.test_keys import bearer, key_file, line

ROOM = 20
"""Sixteen sequences of the engine, and four that wait."""


@contextlib.contextmanager
def with_keys(folder: Path, **settings: Any) -> Iterator[Served]:
    keys = key_file(folder, line("alice", "a"), line("bob", "b"))
    with serving(folder / "journal", api_key_file=keys, max_num_queued_reqs=4, **settings) as served:
        yield served


def begin(served: Served, key: str, name: str) -> None:
    """Send a request and close the connection before it is answered."""
    headers, timeout = bearer(key) | {"Idempotency-Key": name}, httpx.Timeout(60, read=0.2)
    with contextlib.suppress(httpx.ReadTimeout):
        httpx.post(
            f"{served.url}/v1/completions", json={"prompt": "Hi", "max_tokens": 9}, headers=headers, timeout=timeout
        )


def status(served: Served, key: str, name: str) -> int:
    headers = bearer(key) | {"Idempotency-Key": name}
    return served.client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 9}, headers=headers).status_code


def wait_for(served: Served, owner: str, count: int) -> None:
    """Wait until this API key has so many unfinished requests."""
    until = time.monotonic() + 30
    while served.engine.live_owners[owner] < count and time.monotonic() < until:
        time.sleep(0.01)
    assert served.engine.live_owners[owner] == count


def delete(served: Served, key: str, name: str) -> int:
    headers = bearer(key) | {"Idempotency-Key": name}
    return served.client.delete("/v1/requests", headers=headers).status_code


def check_a_full_queue(served: Served) -> None:
    wait_for(served, "alice", ROOM)
    assert status(served, "a", "more") == 429
    num_others = served.engine.live_owners["bob"]
    begin(served, "b", f"bob's {num_others}")
    wait_for(served, "bob", num_others + 1)


@pytest.mark.slow
def test_keyed_requests_leave_places_to_other_keys_also_after_a_restart(tmp_path: Path) -> None:
    with with_keys(tmp_path, runs=False) as served:
        with ThreadPoolExecutor(ROOM) as pool:
            list(pool.map(lambda number: begin(served, "a", f"k{number}"), range(ROOM)))
        check_a_full_queue(served)
    with with_keys(tmp_path, runs=False) as served:
        check_a_full_queue(served)
        assert delete(served, "b", "k1") == 404, "another key's"
        assert delete(served, "a", "k1") == 200
        assert served.engine.live_owners["alice"] == ROOM - 1
        assert status(served, "a", "more") == 429, "what others have counts"
    with with_keys(tmp_path, runs=False) as served:
        wait_for(served, "alice", ROOM - 1)
        assert delete(served, "a", "k1") == 404


def test_a_request_is_ended_and_its_readers_are_told(tmp_path: Path) -> None:
    with serving(tmp_path, runs=False) as served, ThreadPoolExecutor(1) as pool:
        headers = {"Idempotency-Key": "a b/c"}
        body = {"prompt": "Hi", "max_tokens": 9}
        waiting = pool.submit(served.client.post, "/v1/completions", json=body, headers=headers)
        while not served.engine.num_live:
            time.sleep(0.005)
        answer = served.client.delete("/v1/requests", headers=headers)
        assert answer.json() == {"id": "a b/c", "object": "request", "deleted": True}
        assert served.engine.num_live == 0
        assert waiting.result().status_code == 500
        assert "cancelled" in waiting.result().text
        served.call(lambda: setattr(served.engine, "runs", True))
        assert served.client.post("/v1/completions", json=body, headers=headers).status_code == 200
        assert served.client.delete("/v1/requests", headers=headers).status_code == 200, "its answer is forgotten"
        assert served.client.delete("/v1/requests", headers=headers).status_code == 404
        assert served.client.delete("/v1/requests").json()["error"]["param"] == "Idempotency-Key"


def test_the_answers_of_one_key_do_not_drive_out_those_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_RETAINED_BYTES", 10 * journal.REQUEST_BYTES)
    with with_keys(tmp_path) as served:
        assert status(served, "b", "first") == 200
        for number in range(20):
            assert status(served, "a", f"k{number}") == 200
        num_requests = len(served.engine.requests)
        assert status(served, "b", "first") == 200
        assert status(served, "a", "k19") == 200
        assert len(served.engine.requests) == num_requests, "both are still known"
        assert status(served, "a", "k1") == 200
        assert len(served.engine.requests) == num_requests + 1
