"""Collectives of ranks over shared memory: each rank is a thread or a forked process, with a view of its own."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from octavo.errors import RanksLost
from octavo.ops.collective import SINGLE_RANK, gathered_rows
from octavo_kernels.cpu.collective import SharedCollective, region_bytes

ROUNDS = int(os.environ.get("OCTAVO_COLLECTIVE_ROUNDS", "1500"))
"""Rounds of the test with delays; 1,000,000 take minutes."""


def together(size: int, work: Callable[[SharedCollective], Any], slot_bytes: int = 1 << 20) -> list[Any]:
    """What ``work`` returns on each rank; an exception counts as a result."""
    region = np.zeros(region_bytes(size, slot_bytes), np.uint8)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(SharedCollective(region, rank, size, slot_bytes))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 64, 4096])
def test_sums_are_those_of_float64_and_equal_on_all_ranks(size: int, num_rows: int) -> None:
    torch.manual_seed(num_rows)
    parts, residual = torch.randn(size, num_rows, 72), torch.randn(num_rows, 72)
    sums = together(
        size, lambda c: (c.all_reduce(parts[c.rank].clone()), c.all_reduce(parts[c.rank].clone(), residual.clone()))
    )
    expected = parts.double().sum(0)
    for plain, with_residual in sums:
        assert torch.equal(plain, sums[0][0])
        assert torch.equal(with_residual, sums[0][1])
        torch.testing.assert_close(plain.double(), expected, atol=2e-6, rtol=1e-6)
        torch.testing.assert_close(with_residual.double(), expected + residual, atol=2e-6, rtol=1e-6)


def test_sums_are_added_in_the_order_of_ranks() -> None:
    parts = torch.tensor([[1e8], [1.0], [-1e8]])
    [first, *_] = together(3, lambda c: c.all_reduce(parts[c.rank].clone()))
    assert first.item() == ((parts[0] + parts[1]) + parts[2]).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_16_bits_are_rounded_once(dtype: torch.dtype) -> None:
    parts, residual = torch.randn(2, 5, 8).to(dtype), torch.randn(5, 8).to(dtype)
    for found in together(2, lambda c: c.all_reduce(parts[c.rank].clone(), residual.clone())):
        assert torch.equal(found, (parts.float().sum(0) + residual.float()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float64])
def test_gathered_are_the_tensors_of_all_ranks(dtype: torch.dtype) -> None:
    parts = torch.randint(0, 2, (3, 4, 5)).to(dtype)
    for found in together(3, lambda c: c.all_gather(parts[c.rank])):
        assert found.dtype == dtype
        assert torch.equal(found, parts)


@pytest.mark.parametrize("size", [2, 3])
def test_rounds_are_not_mixed_under_random_delays(size: int) -> None:
    """In processes, with slots so small that most tensors take several rounds."""
    slot_bytes = 64
    together(size, lambda c: (c.all_reduce(torch.zeros(1)), c.all_gather(torch.zeros(1))))  # compiles
    memory = mmap.mmap(-1, region_bytes(size, slot_bytes))
    pids = []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                _exchange_for_long(SharedCollective(np.frombuffer(memory, np.uint8), rank, size, slot_bytes))
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * size


def _exchange_for_long(collective: SharedCollective) -> None:
    torch.set_num_threads(1)
    rng, delays, num_rounds, size = random.Random(5), random.Random(collective.rank), 0, collective.size
    while num_rounds < ROUNDS:
        count, base = rng.randrange(1, 40), num_rounds % 1000
        num_rounds += -(-count // 16)
        own = torch.full((count,), float(base + collective.rank))
        if rng.random() < 0.5:
            found = collective.all_reduce(own).tolist()
            assert found == [float(size * base + sum(range(size)))] * count
        else:
            found = collective.all_gather(own).tolist()
            assert found == [[float(base + rank)] * count for rank in range(size)]
        if delays.random() < 0.002:
            time.sleep(delays.random() * 1e-3)


def test_ranks_out_of_step_fail_instead_of_mixing() -> None:
    sizes = together(2, lambda c: c.all_reduce(torch.zeros(3 + c.rank)))
    kinds = together(2, lambda c: c.all_gather(torch.zeros(3)) if c.rank else c.all_reduce(torch.zeros(3)))
    for error in [*sizes, *kinds]:
        assert isinstance(error, RanksLost)
        assert "out of step" in str(error)


def test_an_abort_ends_the_wait_for_a_rank_that_does_not_come() -> None:
    def work(collective: SharedCollective) -> None:
        if collective.rank:
            time.sleep(0.2)
            collective.abort()
        else:
            collective.all_reduce(torch.zeros(4))

    waiting, _ = together(2, work)
    assert isinstance(waiting, RanksLost)


def test_an_abort_is_seen_while_other_work_has_the_processor() -> None:
    """There a rank that yields does not run again for milliseconds."""
    [cpu, *_] = os.sched_getaffinity(0)
    together(2, lambda c: c.all_gather(torch.ones(3)))  # compiled before

    def work(c: SharedCollective) -> float:
        if c.rank:
            time.sleep(0.2)
            c.abort()
            return time.monotonic()
        os.sched_setaffinity(0, {cpu})
        with pytest.raises(RanksLost):
            c.all_gather(torch.ones(3))
        return time.monotonic()

    busy = subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"])
    try:
        seen, aborted = together(2, work)
    finally:
        busy.kill()
        busy.wait()
    assert seen - aborted < 10


def test_one_rank_adds_nothing() -> None:
    x, residual = torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(SINGLE_RANK.all_reduce(x.clone()), x)
    assert torch.equal(SINGLE_RANK.all_reduce(x.clone(), residual.clone()), x + residual)
    assert torch.equal(SINGLE_RANK.all_gather(x), x.unsqueeze(0))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_rows_go_to_their_places(size: int, dtype: torch.dtype) -> None:
    """Over several slots, with ranks that have no row, and places that get none."""
    torch.manual_seed(size)
    table = torch.randint(0, 200, (size * 50, 24)).to(dtype)
    places = torch.randperm(len(table))
    first = len(places) - len(places) // 7
    expected = table.clone()
    expected[places[first:]] = 0
    cuts = [0, *sorted(random.Random(size).choices(range(first), k=max(0, size - 2))), *[first] * min(2, size)]

    def send(c: SharedCollective) -> Any:
        own = places[cuts[c.rank] : cuts[c.rank + 1]]
        return c.all_to_all(table[own], own, len(table)), gathered_rows(c, table[own], own, len(table))

    rows = together(size, send, slot_bytes=1 << 12)
    for kind in range(2):
        assert torch.equal(torch.cat([found[kind] for found in rows]), expected)
