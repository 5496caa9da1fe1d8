"""The kernels' own threads: each item once, whoever takes it; and the folder that keeps compiled code."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.errors import RunnerError
from octavo.models.vision.tower import Pixels, VisionConfig
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.executors.embedding_pool import EmbeddingPool
from octavo.steps.messages import EncodeImages, ImageToEncode
from octavo_kernels.cpu import threads
from octavo_kernels.cpu.compiled import compiled, compiled_task
from octavo_kernels.cpu.memory import fields, read, view
from tests.ops.cpu_cases import needs_float_kernels
from tests.tiers import nightly_after

pytestmark = needs_float_kernels
COUNTS = fields("counts size")


def _count(arguments: int, begin: int, end: int) -> None:
    a = read(arguments, COUNTS)
    counts = view(a.counts, a.size, np.int64)
    for i in range(begin, end):
        counts[i] += 1


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    threads.set_num_threads(1)


@compiled
def _adapt(pool: int, computed_for: int, waited_for: int) -> None:
    threads._adapt(pool, computed_for, waited_for)


class Counter:
    """Items that count how often they were computed."""

    task = compiled_task(_count)

    def __init__(self, size: int) -> None:
        self.counts = np.zeros(size, np.int64)
        self.arguments = np.array([(self.counts.ctypes.data, size)], COUNTS)

    def run(self, pool: int, chunk: int) -> None:
        threads.run(pool, self.task, self.arguments.ctypes.data, len(self.counts), chunk)


@pytest.mark.parametrize("num_threads", [1, 2, 5, 32])
def test_every_item_is_computed_once(num_threads: int) -> None:
    threads.set_num_threads(num_threads)
    pool = threads.pool_address()
    assert (pool == 0) == (num_threads == 1)
    for size, chunk in ((1, 1), (7, 3), (100, 1), (1000, 64), (64, 1000)):
        counter = Counter(size)
        for turn in range(300):
            counter.run(pool, chunk)
            assert bool((counter.counts == turn + 1).all())


def test_a_share_of_a_job_that_is_over_is_left_alone() -> None:
    """A helper may read a job, lose its processor, and go on when that job is over and the next one half done."""
    counter = Counter(40)
    words = np.zeros((threads.SHARE + 3 * threads.LINE) // 8, np.int64)
    pool, share = words.ctypes.data, (threads.SHARE + threads.LINE) // 8
    job = (4, counter.task, counter.arguments.ctypes.data, len(counter.counts), 5, 2)
    words[share] = newer = (6 << threads.OFFSET_BITS) | 3
    threads._compute_share(pool, 1, 1, job)
    assert (words[share], counter.counts.sum()) == (newer, 0)
    words[share] = (4 << threads.OFFSET_BITS) | 15
    threads._compute_share(pool, 1, 1, job)
    assert counter.counts.tolist() == [0] * 35 + [1] * 5
    assert words[share + threads.COMPUTED // 8] == (4 << threads.OFFSET_BITS) | 5


def test_the_caller_computes_shares_that_no_helper_begins() -> None:
    counter = Counter(40)
    words = np.zeros((threads.SHARE + 9 * threads.LINE) // 8, np.int64)
    words[threads.COUNT // 8] = words[threads.ACTIVE // 8] = 8
    for turn in range(3):
        counter.run(words.ctypes.data, 3)
        assert bool((counter.counts == turn + 1).all())


class Observed:
    """The words of a pool of 16 threads, without the threads; its periods end when a test says so."""

    def __init__(self) -> None:
        self.words = np.zeros((threads.SHARE + 17 * threads.LINE) // 8, np.int64)
        self.words[threads.COUNT // 8] = self.words[threads.ACTIVE // 8] = 16
        self.words[threads.RETURN // 8] = threads.PERIOD
        self.period(0)

    def period(self, lost: float, computed_for: int = 1000) -> int:
        """The number of active threads after a period of which this share was lost."""
        pool, whole = self.words.ctypes.data, int(1.1 * threads.PERIOD)
        for _ in range(10):
            _adapt(pool, computed_for, int(lost * whole / 10))
        self.words[threads.WINDOW // 8] -= whole
        self.words[threads.CHANGED // 8] -= whole
        _adapt(pool, 0, 0)
        return int(self.words[threads.ACTIVE // 8])


def test_threads_without_a_processor_are_left_out_for_a_while() -> None:
    pool = Observed()
    assert [pool.period(0.1), pool.period(0.5, computed_for=threads.PERIOD), pool.period(0.5)] == [16, 16, 12]
    assert [pool.period(0.0) for _ in range(6)] == [12, 12, 12, 13, 13, 14]
    assert [pool.period(0.9) for _ in range(20)][-1] == 2
    assert pool.words[threads.RETURN // 8] == threads.LATEST_RETURN


def test_jobs_after_the_helpers_fell_asleep() -> None:
    threads.set_num_threads(3)
    counter = Counter(50)
    for turn in range(20):
        time.sleep(0.002)
        counter.run(threads.pool_address(), 1)
        assert bool((counter.counts == turn + 1).all())


def test_several_callers_at_once() -> None:
    threads.set_num_threads(2)
    pool = threads.pool_address()
    counters = [Counter(40) for _ in range(4)]

    def work(counter: Counter) -> None:
        for _ in range(500):
            counter.run(pool, 1)

    callers = [threading.Thread(target=work, args=(counter,)) for counter in counters]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(bool((counter.counts == 500).all()) for counter in counters)


@pytest.mark.timing
def test_idle_helpers_take_no_processor_time() -> None:
    threads.set_num_threads(4)
    Counter(40).run(threads.pool_address(), 1)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


def test_a_forked_child_works_without_helpers_or_with_new_ones() -> None:
    threads.set_num_threads(2)
    Counter(40).run(threads.pool_address(), 1)
    child = os.fork()
    if child == 0:
        counter = Counter(40)
        counter.run(threads.pool_address(), 1)
        os._exit(0 if bool((counter.counts == 1).all()) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_tower_for_images_computes_with_all_threads() -> None:
    form = WeightFormat(torch.float32, torch.device("cpu"))
    seen: list[int] = []

    def tower(image: Pixels) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        if len(seen) > 1:
            raise ValueError("no image")
        return torch.ones(2, 4)

    pool = EmbeddingPool(VisionConfig(hidden_size=4), tower, (3, 0), form, ([0.0] * 3, [1.0] * 3))
    image = ImageToEncode(np.array([0, 2]).tobytes(), (1, 2, 2), bytes(12))
    before = torch.get_num_threads()
    threads.set_num_threads(3)
    pool.execute(EncodeImages([image])).wait()
    assert pool.table[:, 0].tolist() == [1, 0, 1]
    with pytest.raises(RunnerError, match="no image"):
        pool.execute(EncodeImages([image])).wait()
    assert seen == [3, 3]
    assert torch.get_num_threads() == before


def test_no_thread_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        threads.set_num_threads(0)


ONE_KERNEL = """
import torch
from octavo import ops
ops.silu_and_mul(torch.zeros(1, 64))
"""
PROGRAM = (
    ONE_KERNEL
    + """
from octavo.ops.linear.block_linear import PackedBlocks
from tests.ops.cpu_cases import random_blocks
ops.block_linear(torch.zeros(1, 32), PackedBlocks.pack(random_blocks("Q4_1", 32, 32)))
"""
)


@pytest.mark.parametrize("program", nightly_after(1, (ONE_KERNEL, PROGRAM)), ids=len)
def test_a_second_process_does_not_compile(program: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OCTAVO_CACHE_DIR": str(tmp_path)}

    def start() -> set[Path]:
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True)
        return set(tmp_path.rglob("*.nb*"))

    first = start()
    assert first, "nothing was kept"
    stamps = {path: path.stat().st_mtime_ns for path in first}
    assert start() == first
    assert {path: path.stat().st_mtime_ns for path in first} == stamps


WITHOUT_NUMBA = """
import sys, torch
sys.modules["numba"] = None
from octavo import ops
from octavo.ops import dispatch
ops.silu_and_mul(torch.zeros(1, 64))
reasons = [choice.reason for choice in dispatch.choices() if choice.kernel == "numba"]
assert reasons and all(reason.startswith("numba cannot be imported") for reason in reasons), reasons
"""


def test_without_numba_the_references_run_and_the_reason_is_reported() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_NUMBA], check=True, capture_output=True)
