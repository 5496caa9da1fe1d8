"""What the server keeps of ended requests: no more than is counted, and no longer than the retention time."""

from __future__ import annotations

import gc
import time
import tracemalloc
from pathlib import Path

import pytest

from tests.server.conftest import Served
from tests.server.durable.test_durable import send, serving, until

NUM_REQUESTS = 100


def ask(served: Served, count: int, name: str) -> None:
    for number in range(count):
        answer = send(served, key=f"{name}{number}", stream=False, stream_options=None, max_tokens=1)
        assert answer.status_code == 200


def memory() -> int:
    """Bytes that the journal's code allocated and that are still in use."""
    gc.collect()
    found = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/octavo_server/durable/*")])
    return sum(each.size for each in found.statistics("filename"))


@pytest.mark.slow
def test_an_ended_request_takes_what_is_counted_for_it(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        journal = served.app.state.services.first.journal
        tracemalloc.start(1)
        try:
            ask(served, NUM_REQUESTS, "first")
            before, counted = memory(), journal._retained.total()
            ask(served, NUM_REQUESTS, "second")
            taken, counted = memory() - before, journal._retained.total() - counted
        finally:
            tracemalloc.stop()
        assert 0.5 * counted < taken < 1.05 * counted


def test_the_time_of_their_retention_goes_on_over_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a server that is started again and again does not hold more and more."""
    now, later = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: now() + later[0])
    with serving(tmp_path) as served:
        ask(served, 1, "old")
    num_kept = []
    for minutes in (5, 9, 14.9, 15.1):  # the second server finds the end in the journal, and begins to count
        later[0] = 60 * minutes
        with serving(tmp_path) as served:
            journal = served.app.state.services.first.journal
            until(lambda journal=journal: journal._is_complete.is_set())
            if minutes < 15:
                time.sleep(0.1)
                num_kept.append(len(journal._requests))
            else:
                until(lambda journal=journal: not journal._requests)
    assert num_kept == [1, 1, 1]


def test_requests_are_forgotten_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[tuple[int, float]] = []
    with serving(tmp_path, journal_retention=1.5) as served:
        journal = served.app.state.services.first.journal
        forget = journal._forget

        def note(number: int) -> None:
            forgotten.append((number, served.loop.time() - journal._requests[number].forget_at))
            forget(number)

        monkeypatch.setattr(journal, "_forget", note)
        ask(served, 2, "early")
        time.sleep(1)
        ask(served, 2, "late")
        until(lambda: len(forgotten) == 4)
        assert not journal._requests
        assert not journal._retained
    numbers, seconds_late = zip(*forgotten, strict=True)
    assert list(numbers) == sorted(numbers)
    assert min(seconds_late) >= 0
