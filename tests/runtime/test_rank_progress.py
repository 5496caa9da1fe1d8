"""Which rank is found to be stuck: one that others wait for and that does nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from octavo.ops.device_backend import IDLE, WAITS, WORKS
from octavo.runtime.ranks import rank_group
from octavo.runtime.ranks.rank_group import StalledRankFinder
from octavo_kernels.cpu.message_ring import RingReader, RingWriter
from octavo_kernels.cpu.rank_memory import MappedRankMemory, make_memory
from tests.ops.cpu_cases import needs_float_kernels

pytestmark = needs_float_kernels

SLEEPS, BUSY = "import time; time.sleep(60)", "while True: pass"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[MappedRankMemory]:
    """That of two ranks; a rank is stuck after half a second."""
    for name in ("STALL_SECONDS", "STOPPED_SECONDS"):
        monkeypatch.setattr(rank_group, name, 0.5)
    monkeypatch.setattr(rank_group, "LOOK_SECONDS", 0.05)
    descriptor = make_memory(2)
    yield MappedRankMemory(descriptor, 0, 2)
    os.close(descriptor)


def never() -> None:
    pass


def found(memory: MappedRankMemory, code: str, seconds: float, stops: bool = False) -> tuple[int, bool] | None:
    """What is found in so many seconds."""
    process = subprocess.Popen([sys.executable, "-S", "-c", f"print(flush=True)\n{code}"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        if stops:
            process.send_signal(signal.SIGSTOP)
        progress, deadline = StalledRankFinder(memory, {1: process.pid}), time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (stuck := progress.stuck()) is not None:
                return stuck
            time.sleep(0.05)
        return None
    finally:
        process.kill()
        process.wait()


def test_a_rank_with_a_message_to_read_that_sleeps_or_is_stopped_is_stuck(memory: MappedRankMemory) -> None:
    RingWriter(memory.ring, never).write(b"step")
    assert found(memory, SLEEPS, 60) == (1, False)
    assert found(memory, BUSY, 60, stops=True) == (1, True)


def test_a_rank_is_not_stuck_because_nobody_looked(memory: MappedRankMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that stands still for a while."""
    RingWriter(memory.ring, never).write(b"step")
    now = 0.0
    monkeypatch.setattr(rank_group, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(rank_group, "time_of_process", lambda pid: (7, False))
    progress, looks = StalledRankFinder(memory, {1: 1}), list[object]()
    for seconds in (0.05, 1000.0, *[0.05] * 20):
        now += seconds
        looks.append(progress.stuck())
    assert looks[:5] == [None] * 5
    assert looks[-1] == (1, False)


def test_a_rank_that_computes_is_not_stuck(memory: MappedRankMemory) -> None:
    RingWriter(memory.ring, never).write(b"step")
    assert found(memory, BUSY, 1.5) is None


def test_a_rank_that_nobody_waits_for_is_not_stuck(memory: MappedRankMemory) -> None:
    RingWriter(memory.ring, never).write(b"step")
    RingReader(memory.ring, 0, never).next()
    assert found(memory, SLEEPS, 1.5) is None
    assert found(memory, BUSY, 1.5, stops=True) is None


def test_a_rank_of_a_stage_is_waited_for_while_it_works_and_not_while_it_waits_itself() -> None:
    """Four ranks of two stages; those of a stage wait for each other in its collective."""
    descriptor = make_memory(4, num_stages=2)
    memories = [MappedRankMemory(descriptor, rank, 4, num_stages=2) for rank in range(4)]
    os.close(descriptor)

    def waited_for() -> list[int]:
        return [rank for rank in (1, 2, 3) if memories[0].progress(rank)[1]]

    assert waited_for() == []
    for memory in memories[2:]:
        memory.note(WORKS)
    assert waited_for() == [2, 3]
    memories[3].note(WAITS)
    assert waited_for() == [2]
    memories[1].to_stages(lambda: None)[0].write(b"output")
    assert waited_for() == [2, 3], "what rank 3 waits for is there"
    memories[3].from_stage(0, lambda: None).next()
    assert waited_for() == [2]
    memories[1].note(WAITS + 1)
    memories[2].to_stages(lambda: None)[0].write(b"output of another place")
    assert waited_for() == [2]
    memories[3].note(WORKS)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(memories[2].within.all_gather, torch.zeros(1))
        while memories[0].progress(2) == memories[0].progress(3):
            time.sleep(0.001)
        assert waited_for() == [3]
        memories[3].within.all_gather(torch.zeros(1))
        first.result()
    assert waited_for() == [2, 3]
    for memory in memories[2:]:
        memory.note(IDLE)
    assert waited_for() == []
