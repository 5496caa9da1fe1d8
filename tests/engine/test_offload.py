"""Blocks that come back from slower memory, read by an oracle that knows what each must hold."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from octavo.cache import offload as offload_module
from octavo.cache import offload_tiers
from octavo.cache.kv_cache import KVCache
from octavo.cache.offload import MAX_THREADS, Identity, Offload
from octavo.cache.offload_tiers import DiskTier, HostTier
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.sampling_params import SamplingParams
from octavo.steps.limits import RopeSets, StateSize
from octavo.telemetry.cache_view import SessionOrder
from octavo.types import Output, Request
from tests.engine.tiers import OracleStore, attach, damage_some
from tests.engine.workload import Features, Run
from tests.oracle import VOCAB_SIZE, OracleRunner, expected_output
from tests.tiers import one_in

VARIANTS = {
    "plain": Features(tight=True, depth=2),
    "aborts": Features(tight=True, aborts=True),
    "faults": Features(tight=True, fault_rate=0.1, poison=True, bad_rows=True, aborts=True),
    "drafts": Features(tight=True, drafts=True, grammar=True, depth=2),
    "fair": Features(tight=True, policy="fair", depth=2),
    "longest prefix": Features(tight=True, policy="longest-prefix"),
    "windows": Features(tight=True, windows=1, full_attention=False, depth=2),
    "states": Features(tight=True, states=True, depth=2),
    "states and trouble": Features(tight=True, states=True, fault_rate=0.05, poison=True, bad_rows=True, aborts=True),
    "states and drafts": Features(tight=True, states=True, drafts=True, grammar=True),
}


@pytest.mark.slow
@one_in(4)
@pytest.mark.parametrize("count", [5, pytest.param(25, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_random_workloads_with_tiers_and_damaged_files(variant: str, count: int, tmp_path: Path) -> None:
    num_restored = num_prefetched = 0
    for seed in range(count):
        rng = random.Random(seed)
        for _ in range(3):  # later on, the files of the first time are there
            run = Run(seed, VARIANTS[variant])
            offload = attach(run, rng, tmp_path / str(seed))
            run.serve()
            offload.close()
            num_restored += offload.stats.num_restored
            num_prefetched += offload.stats.num_prefetched
    assert num_restored >= 0.8 * count
    assert num_prefetched > 0


class Conversations:
    """Many conversations in turns, over a cache that holds a quarter of them."""

    block_size = 4

    def __init__(
        self,
        num_blocks: int,
        host_blocks: int | None,
        folder: Path | None = None,
        num_snapshots: int | None = None,
    ) -> None:
        self.runner = OracleRunner(self.block_size)
        states = None if num_snapshots is None else StateSize(num_snapshots + 2, 2, every=40, interval=8)
        self.cache = KVCache(num_blocks, self.block_size, states=states)
        if self.cache.states is not None:
            self.cache.states.copy = self.runner.copy_state
        self.engine = Engine(Scheduler(self.cache, max_num_seqs=2, max_num_batched_tokens=64), self.runner)
        self.offload: Offload | None = None
        store = OracleStore(self.runner)
        if host_blocks is not None:
            disk = None if folder is None else DiskTier(folder, 1 << 30)
            host = HostTier(host_blocks * store.num_bytes)
            self.offload = Offload(store, self.block_size, Identity("oracle", ""), host, disk)
            self.cache.use_offload(self.offload)
        self.ids = iter(range(1, 1_000_000))

    def answer(self, prompt: list[int], **fields: Any) -> list[int]:
        request = Request(next(self.ids), prompt, SamplingParams(max_tokens=6, ignore_eos=True), 6, **fields)
        self.engine.add(request)
        tokens: list[int] = []
        while self.engine.has_work:
            for output in self.engine.step():
                tokens += output.tokens
            self.engine.check()
        assert tokens == expected_output(request)[0]
        return tokens

    def talk(self, num_conversations: int, num_turns: int, seed: int = 0) -> float:
        """Share of the prompt tokens that were found."""
        rng = random.Random(seed)
        texts = [[rng.randrange(VOCAB_SIZE) for _ in range(24)] for _ in range(num_conversations)]
        for _ in range(num_turns):
            for text in texts:
                text += self.answer(text)
                text += [rng.randrange(VOCAB_SIZE) for _ in range(5)]
                self.settle()
        stats = self.engine.stats()
        return stats.prefix_hits / stats.prefix_queries

    def order(self, action: Literal["forget", "prefetch"], owner: str, name: str) -> bool:
        """Whether it was taken; what was to be read is there then."""
        self._end_hints(owner)
        is_taken = self.engine.order_sessions(SessionOrder(action, owner, name)).is_taken
        self._end_hints(owner)
        return is_taken

    def _end_hints(self, owner: str) -> None:
        if (offload := self.offload) is not None:
            wait_until(lambda: all(hint.done() for hint in offload._hints.get(owner, ())))
            offload._sessions.submit(int).result()

    def settle(self) -> None:
        """Wait until what was given up is where it belongs."""
        if (offload := self.offload) is not None:
            wait_until(lambda: not offload._pending)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


@pytest.mark.slow
def test_blocks_that_are_evicted_together_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    made, batches = Conversations(num_blocks=30, host_blocks=1000), list[list[int]]()
    assert made.offload is not None
    read = made.offload.store.read
    monkeypatch.setattr(made.offload.store, "read", lambda blocks: (batches.append(blocks), read(blocks))[1])
    assert made.talk(num_conversations=6, num_turns=3) > 0.5
    assert sum(map(len, batches)) == made.offload.stats.num_saved
    assert max(map(len, batches)) > 5
    assert all(len(set(blocks)) == len(blocks) for blocks in batches)


def test_tiers_keep_the_hit_rate_of_a_cache_four_times_as_large(tmp_path: Path) -> None:
    """20 conversations of up to 79 tokens are 400 blocks; the pool has 100."""
    roomy = Conversations(1000, None).talk(20, 5)
    poor = Conversations(100, None).talk(20, 5)
    with_host = Conversations(100, 1000).talk(20, 5)
    with_disk = Conversations(100, 20, tmp_path).talk(20, 5)
    assert roomy > 0.6
    assert poor < roomy / 4
    assert with_host == with_disk == roomy


@one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 3.0])
def test_states_that_were_given_up_come_back_with_their_blocks(
    tmp_path: Path, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From memory and from a disk, also one that a former engine left, with or without the time to write all."""
    monkeypatch.setattr(offload_module, "CLOSING_SECONDS", seconds)
    roomy = Conversations(1000, None, num_snapshots=200).talk(10, 4)
    poor = Conversations(1000, None, num_snapshots=3).talk(10, 4)
    with_host = Conversations(100, 1000, num_snapshots=3)
    assert with_host.talk(10, 4) >= roomy > 2 * poor
    assert with_host.offload is not None
    with_host.engine.close()
    for _ in range(2):
        with_disk = Conversations(100, 20, tmp_path, num_snapshots=3)
        share = with_disk.talk(10, 4)
        with_disk.engine.close()
    assert share > roomy  # its first turns are found, too


@one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("num_snapshots", [None, 3])
def test_files_that_are_damaged_or_gone_cost_time_and_nothing_else(tmp_path: Path, num_snapshots: int | None) -> None:
    talks = Conversations(100, 20, tmp_path, num_snapshots)
    assert talks.offload is not None
    disk = talks.offload.disk
    assert disk is not None
    rng = random.Random(1)
    texts = [[rng.randrange(VOCAB_SIZE) for _ in range(24)] for _ in range(20)]
    for _ in range(5):
        for text in texts:
            text += talks.answer(text)  # compares every token with what a plain loop gives
            talks.settle()
        damage_some(tmp_path, rng)
    assert disk.num_bad > 10
    assert talks.offload.stats.num_restored > 100
    told = talks.engine.stats()
    counts = talks.offload.stats
    assert (told.num_offload_saved, told.num_offload_dropped) == (counts.num_saved, counts.num_dropped)
    assert (told.num_offload_prefetched, told.num_offload_restored) == (counts.num_prefetched, counts.num_restored)
    assert told.num_offload_bad_files == disk.num_bad
    assert told.offload_disk_bytes == disk.num_bytes > 0 < told.offload_memory_bytes <= talks.offload.host.capacity


def test_a_disk_is_found_again_by_the_next_engine_and_by_no_other_model(tmp_path: Path) -> None:
    first = Conversations(100, 0, tmp_path)
    first.talk(20, 3)
    assert first.offload is not None
    first.engine.close()
    second = Conversations(100, 8, tmp_path)
    assert second.talk(10, 1) > 0.5
    assert second.offload is not None
    second.engine.close()
    other = Conversations(100, 8, tmp_path)
    other.offload = Offload(
        OracleStore(other.runner), 4, Identity("another", ""), HostTier(1000), DiskTier(tmp_path, 1 << 30)
    )
    other.cache.use_offload(other.offload)
    assert other.talk(10, 1) == 0


@pytest.mark.parametrize("num_snapshots", [None, 4])
def test_of_a_prefix_too_long_for_memory_the_beginning_comes_back(tmp_path: Path, num_snapshots: int | None) -> None:
    """Reading the end must not displace the beginning, neither what was read before nor what was there."""
    prompt = list(range(60))
    first = Conversations(40, 1000, tmp_path, num_snapshots)
    first.answer(prompt)
    first.engine.close()
    second = Conversations(40, 8, tmp_path, num_snapshots)
    assert second.offload is not None
    second.answer(prompt[:21])  # 5 blocks, which stay in memory
    second.answer([7] * 21)
    second.engine.clear_cache()
    second.settle()
    before = second.engine.stats().prefix_hits
    second.answer(prompt)
    found = second.engine.stats().prefix_hits - before
    assert found == (32 if num_snapshots is None else 16), "8 blocks; with states, up to the last one in those"
    second.engine.close()


@pytest.mark.parametrize("num_snapshots", [None, 4])
def test_a_prefix_is_computed_if_that_was_faster(
    tmp_path: Path, num_snapshots: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else is computed: then the device's time is worth more."""
    monkeypatch.setattr(offload_tiers, "LEAST_TELLING_BYTES", 100)
    prompt = list(range(60))
    first = Conversations(40, 1000, tmp_path, num_snapshots)
    first.answer(prompt)
    first.engine.close()
    second = Conversations(40, 1000, tmp_path, num_snapshots)
    assert second.offload is not None
    asked = []

    def seconds_alone(start: int, num_tokens: int) -> float:
        asked.append((start, num_tokens))
        return 1.0

    monkeypatch.setattr(second.engine.scheduler.step_budget, "seconds_alone", seconds_alone)
    host = second.offload.host
    for number, rate in enumerate((second.offload.reading, second.offload.restoring)):
        rate.learn(1000, 1e9)
        second.answer(prompt)
        assert second.engine.stats().prefix_hits == 0
        rate.learn(1000, 1e-9)
        second.engine.clear_cache()
        second.settle()
        host.capacity = 0
        host.put(bytes([number]), b"")  # gives up all
        host.capacity = 10_000
    second.answer(prompt)
    assert second.engine.stats().prefix_hits == 56
    assert asked == [(0, 56)] * 3
    other = Request(next(second.ids), [7] * 21, SamplingParams(max_tokens=6), 6)
    second.engine.add(other)
    second.engine.add(Request(next(second.ids), prompt, SamplingParams(max_tokens=1), 1))
    list(outputs_of(second.engine))
    assert len(asked) == 3
    second.engine.close()


def test_what_is_pending_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    talks = Conversations(100, 1000, tmp_path)
    offload = talks.offload
    assert offload is not None
    may_write = threading.Event()
    for _ in range(MAX_THREADS):
        offload._writers.submit(may_write.wait, 60)
    monkeypatch.setattr(offload_module, "IDLE_BYTES", 3 * offload.store.num_bytes)
    monkeypatch.setattr(offload_module, "PENDING_BYTES", 5 * offload.store.num_bytes)
    talks.answer(list(range(60)))
    assert talks.engine.save_idle()
    assert len(offload._pending) == 3
    for filler in range(8):
        talks.answer([filler + 1] * 60)
    assert len(offload._pending) == 5
    assert offload.stats.num_saved == 2 < offload.stats.num_dropped
    may_write.set()
    talks.settle()
    while talks.engine.save_idle():
        talks.settle()
    offload.close()


def test_salts_are_apart_in_all_tiers() -> None:
    talks = Conversations(12, 1000)
    prompt = list(range(20))

    def cached(salt: str) -> int:
        request = Request(next(talks.ids), prompt, SamplingParams(max_tokens=1), 1, cache_salt=salt)
        talks.engine.add(request)
        return [output.num_cached_tokens for output in outputs_of(talks.engine)][-1]

    assert cached("a") == 0
    for filler in range(6):
        talks.answer([filler + 1] * 30)
    assert cached("b") == 0
    for filler in range(6):
        talks.answer([filler + 1] * 31)
    assert cached("a") == 16


def test_a_disk_has_texts_of_all_sets_of_rotary_frequencies(tmp_path: Path) -> None:
    """A text that outgrew the first set is found by the next engine under the set that it ended with."""
    prompt = list(range(20))
    for num_found in (0, 16):
        talks = Conversations(12, 1000, tmp_path)
        assert talks.offload is not None
        talks.engine.scheduler.rope_sets = RopeSets(original=16)
        talks.answer(prompt)
        assert talks.engine.stats().prefix_hits == num_found
        talks.offload.close()


@pytest.mark.parametrize("num_snapshots", [None, 4])
def test_a_hint_brings_a_session_back_to_memory(tmp_path: Path, num_snapshots: int | None) -> None:
    """Of the next process, which knows the session from the disk alone; and none but its own key has it."""
    prompt = list(range(40))
    first = Conversations(40, 1000, tmp_path, num_snapshots)
    prompt += [*first.answer(prompt, session="s", owner="a"), 1, 2, 3]
    first.answer([7] * 30, session="s", owner="b")
    first.answer([9] * 21, session="s", owner="a")  # of a helper
    first.engine.close()
    second = Conversations(40, 1000, tmp_path, num_snapshots)
    assert second.offload is not None
    for owner, name in (("b", "t"), ("", "s"), ("c", "s")):
        assert second.order("prefetch", owner, name)
        assert second.offload.stats.num_prefetched == 0
    assert second.order("prefetch", "a", "s")
    num_read = second.offload.stats.num_prefetched
    assert num_read == (11 + 6 if num_snapshots is None else 11 + 7)  # with states up to the last one, and that
    second.answer(prompt, session="s", owner="a")
    assert second.engine.stats().prefix_hits == (44 if num_snapshots is None else 40)
    assert second.offload.stats.num_prefetched == num_read, "the request reads nothing"
    assert second.order("prefetch", "a", "s")
    assert second.offload.stats.num_prefetched == num_read, "all of it is there"
    second.order("forget", "a", "s")
    second.order("prefetch", "a", "s")
    assert second.offload.stats.num_prefetched == num_read, "it is not known any more"
    second.engine.close()


def test_hints_take_half_of_the_memory_and_eight_of_a_key_at_a_time(tmp_path: Path) -> None:
    first = Conversations(40, 1000, tmp_path)
    first.answer(list(range(80)), session="s")
    first.engine.close()
    second = Conversations(40, 12, tmp_path)
    assert second.offload is not None
    may_read = threading.Event()
    second.offload._hint_loader.submit(may_read.wait, 60)
    accepted = [second.offload.prefetch_session(owner, "s", [(0, 0)]) for owner in [""] * 10 + ["b"]]
    assert accepted == [True] * 8 + [False] * 2 + [True]
    may_read.set()
    assert second.order("prefetch", "", "s")
    assert second.offload.host.num_bytes == 6 * second.offload.store.num_bytes
    second.engine.close()
    assert not Conversations(40, 12).order("prefetch", "", "s"), "without a disk there is nothing to read"


def outputs_of(engine: Engine) -> Iterator[Output]:
    while engine.has_work:
        yield from engine.step()


def test_prompt_logprobs_compute_the_entire_prompt() -> None:
    talks = Conversations(12, 1000)
    prompt = list(range(20))
    talks.answer(prompt)
    for filler in range(6):
        talks.answer([filler + 1] * 30)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    talks.engine.add(Request(next(talks.ids), prompt, params, 1))
    before = talks.runner.num_computed
    list(outputs_of(talks.engine))
    assert talks.runner.num_computed == before + 20


def test_a_block_that_is_still_on_its_way_is_found() -> None:
    talks = Conversations(12, 1000)
    assert talks.offload is not None
    may_write = threading.Event()
    for _ in range(MAX_THREADS):
        talks.offload._writers.submit(may_write.wait, 60)
    prompt = list(range(20))
    talks.answer(prompt)
    for filler in range(6):
        talks.answer([filler + 1] * 30)
    assert not talks.offload.host.num_bytes
    talks.answer(prompt)
    assert talks.offload.stats.num_restored == 4
    may_write.set()
    talks.offload.close()
