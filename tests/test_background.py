"""Threads next to the steps, when the interpreter ends, or the engine for which they work."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from octavo.system.background_threads import (
    BackgroundPool,
    ThreadGroup,
    current_group,
    start_thread,
    stop_if_ending,
)

ENDING = """
import time
from octavo.system.background_threads import BackgroundPool, start_thread, stop_if_ending

def give():
    with BackgroundPool(1) as pool:
        for future in [pool.submit(time.sleep, 0.1) for _ in range(600)]:
            future.result()

def loop():
    while True:
        stop_if_ending()
        time.sleep(0.01)

def wait_for_a_sleeper():
    from types import SimpleNamespace
    from octavo.engine.runner.step_runner import StepRunner
    send = lambda message: SimpleNamespace(wait=lambda: None)
    runner = StepRunner(SimpleNamespace(send=send, runs_ahead=False), None)
    runner.sleep()
    runner.send(None)

thread = start_thread("work", {work})
time.sleep({pause})
assert thread.is_alive()
"""


@pytest.mark.parametrize("work", ["give", "loop", "wait_for_a_sleeper"])
def test_the_interpreter_ends_at_once_and_in_order(work: str) -> None:
    """It would wait a minute for all that the pool was given, and 30 seconds for a thread that does not end."""
    pause = 3.0 if work == "wait_for_a_sleeper" else 0.3  # which imports more
    script = ENDING.replace("{work}", work).replace("{pause}", str(pause))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (0, "")


class Pieces:
    """Work in pieces, of which the first begins when it is started."""

    def __init__(self) -> None:
        self.began, self.num_done = threading.Event(), 0

    def work(self) -> None:
        while True:
            stop_if_ending()
            self.piece()

    def piece(self) -> None:
        self.began.set()
        time.sleep(0.05)
        self.num_done += 1

    def give(self) -> None:
        with BackgroundPool(1) as pool:
            for future in [pool.submit(self.piece) for _ in range(600)]:
                future.result()

    def start_another(self) -> None:
        current_group().start("inner", self.work).join()


KINDS: list[Callable[[Pieces], None]] = [Pieces.work, Pieces.give, Pieces.start_another]


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_group_waits_for_a_piece_and_not_for_all(kind: Callable[[Pieces], None]) -> None:
    group, other, pieces, others = ThreadGroup(), ThreadGroup(), Pieces(), Pieces()
    thread, living = group.start("outer", kind, pieces), other.start("other", others.work)
    assert pieces.began.wait(30)
    assert others.began.wait(30)
    group.end()
    num_done = pieces.num_done
    assert not thread.is_alive()
    assert 1 <= num_done < 600
    assert living.is_alive(), "the threads of others go on"
    late = group.start("late", pieces.work)
    late.join(30)
    assert not late.is_alive()
    assert pieces.num_done == num_done, "nothing begins after the end"
    other.end()


def test_a_thread_of_the_process_outlives_the_group_that_started_it() -> None:
    group, let_go = ThreadGroup(), threading.Event()
    found = list[threading.Thread]()
    group.start("outer", lambda: found.append(start_thread("of the process", let_go.wait))).join()
    group.end()
    assert found[0].is_alive()
    let_go.set()


def test_a_thread_that_ends_its_own_group_does_not_wait_for_itself() -> None:
    group = ThreadGroup()
    thread = group.start("own", group.end)
    thread.join(30)
    assert not thread.is_alive()


def test_a_group_may_end_while_a_thread_of_it_is_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    group, pieces, is_starting = ThreadGroup(), Pieces(), threading.Event()

    class Slow(threading.Thread):
        def start(self) -> None:
            if self.name == "inner":
                is_starting.set()
                time.sleep(0.1)
            super().start()

    monkeypatch.setattr(threading, "Thread", Slow)
    other = threading.Thread(target=group.start, args=("inner", pieces.work))
    other.start()
    assert is_starting.wait(30)
    group.end()
    other.join(30)
    assert not pieces.num_done
