"""``--supervise``: a front process that dies or hangs is started again, and keyed streams go on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octavo_bench.chaos.careful_client import ChaosClient, Excuses, Followed
from octavo_bench.chaos.traffic import COMPLETIONS, RepeatableRequest
from octavo_server.front import front_supervisor
from octavo_server.front.front_supervisor import supervise
from octavo_server.front.service_manager import ALIVE, ServiceManager
from tests.conftest import Server

BOUND = 1.0
NUM_STREAMS = 24
"""So many that they are not at their ends after some tenths of a second."""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def front_of(server: Server, other_than: int = 0) -> int:
    """The front process, once there is another one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (found := children(server.process.pid)) and found[0] != other_than:
            return found[0]
        time.sleep(0.01)
    raise AssertionError("no front process was started")


async def follow(server: Server, name: str, meanwhile: Callable[[], None]) -> list[Followed]:
    """Keyed streams to their ends, over as many connections as it takes, while something is done."""
    excuses = Excuses()
    excuses.breaks = excuses.is_breaking = 1
    client = ChaosClient(server.url, excuses)
    body = {"max_tokens": 4000, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}

    async def one(number: int) -> Followed:
        asked = RepeatableRequest("stream", COMPLETIONS, {**body, "prompt": f"{number} words"})
        return await client.follow(asked, f"{name}{number}", random.Random(number))

    tasks = [asyncio.create_task(one(number)) for number in range(NUM_STREAMS)]
    await asyncio.sleep(0.3)
    await asyncio.to_thread(meanwhile)
    answers = await asyncio.gather(*tasks)
    client.close()
    return answers


@pytest.mark.slow
def test_keyed_streams_survive_fronts_that_die_and_hang(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve("--backend", "instant", "--supervise", str(BOUND), "--journal", str(tmp_path / "journal"))
    alone = [each.content for each in asyncio.run(follow(server, "alone", lambda: None))]
    for number in (signal.SIGKILL, signal.SIGSTOP):
        front = front_of(server)

        def end(number: signal.Signals = number, front: int = front) -> None:
            os.kill(front, number)
            front_of(server, front)
            assert server.get("/health").status_code == 200  # its connection waits

        followed = asyncio.run(follow(server, f"{number.name}{front}", end))
        assert [each.content for each in followed] == alone
        assert any(each.num_connections > 1 for each in followed)
        with pytest.raises(ProcessLookupError):
            os.kill(front, 0)
    front = front_of(server)
    assert server.stop() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(front, 0)
    said = "".join(server.lines)
    assert said.count("was ended by SIGKILL; it is started again") == 2
    assert said.count(f"no sign of life for {BOUND:g} s") == 1


@pytest.mark.slow
def test_a_supervisor_that_is_killed_takes_its_server_along(serve: Callable[..., Server]) -> None:
    server = serve("--backend", "instant", "--supervise", "5")
    front = front_of(server)
    server.process.kill()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{front}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{front}").exists()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No long waits; and the signals and messages of this process stay as they are."""
    monkeypatch.setattr(front_supervisor, "TICK", 0.01)
    monkeypatch.setattr(front_supervisor, "LEAST_PAUSE", 0.001)
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    before = {number: signal.getsignal(number) for number in front_supervisor.PASSED_ON}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run_children(act: Callable[[int], int], log: Path, seconds: float = 5.0) -> int:
    """Supervise children that write a letter to ``log``, call ``act`` with the number of their start, and end so."""
    code = supervise(seconds)
    if code is not None:
        return code
    try:
        with log.open("a") as file:
            file.write("x")
        os._exit(act(len(log.read_text())))
    finally:
        os._exit(99)


def ready_and(code: int) -> int:
    manager = ServiceManager()
    with contextlib.suppress(RuntimeError):  # there is no event loop that could give signs of life
        manager.ready()
    return code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "code", "starts"),
    [
        (lambda start: 2, 2, 1),  # a wrong setting
        (lambda start: ready_and(0), 0, 1),  # it ended as it should
        (lambda start: ready_and(1 if start < 4 else 0), 0, 4),
        (lambda start: os.kill(os.getpid(), signal.SIGKILL) or 0, 1, front_supervisor.MOST_FAILED_STARTS),
    ],
    ids=["wrong", "ended", "crashes", "killed"],
)
@pytest.mark.usefixtures("quick")
def test_when_it_is_started_again(tmp_path: Path, act: Callable[[int], int], code: int, starts: int) -> None:
    log = tmp_path / "log"
    assert run_children(act, log) == code
    assert len(log.read_text()) == starts


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("how", ["stopped", "waits"])
def test_a_start_that_stands_still_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(front_supervisor, "START_SECONDS", 0.5)
    monkeypatch.setattr(front_supervisor, "LOOK_SECONDS", 0.05)

    def act(start: int) -> int:
        if start == 1 and how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif start == 1:
            time.sleep(20)
        return 0

    begun = time.monotonic()
    assert run_children(act, tmp_path / "log", 0.3) == 0
    assert (tmp_path / "log").read_text() == "xx"
    assert 0.5 < time.monotonic() - begun < 15


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("how", ["computes", "speaks"])
def test_a_start_may_take_long_as_long_as_it_does_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(front_supervisor, "START_SECONDS", 0.5)
    monkeypatch.setattr(front_supervisor, "LOOK_SECONDS", 0.05)

    def act(start: int) -> int:
        until = time.monotonic() + 1
        while time.monotonic() < until:
            if how == "speaks":
                ServiceManager().tell(ALIVE)
                time.sleep(0.1)
        return 0

    assert run_children(act, tmp_path / "log", 0.3) == 0
    assert (tmp_path / "log").read_text() == "x"


@pytest.mark.usefixtures("quick")
def test_a_server_that_is_silent_is_killed(tmp_path: Path) -> None:
    def act(start: int) -> int:
        if start == 1:
            ready_and(0)
            time.sleep(60)
        return 0

    begun = time.monotonic()
    assert run_children(act, tmp_path / "log", 0.3) == 0
    assert 0.3 < time.monotonic() - begun < 30
