"""Sleep of the executor for GPUs, on the CPU: memory is freed and restored, and tokens stay the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch

from octavo.engine.runner import graph_dispatcher
from octavo.engine.runner.graph_dispatcher import GraphDispatcher
from octavo.errors import CheckpointError, RunnerError, Unavailable
from octavo.ops import dispatch
from octavo.ops.dispatch import REFERENCE
from octavo.runtime import sleeping_memory
from octavo.runtime.sleeping_memory import SleepingMemory, device_tensors
from octavo.steps.graph_shapes import GraphLimits, StepShape, first_shapes, graph_shapes
from octavo.steps.messages import Compile, LoadAdapter, LoadWeights, ReadChecksums, Step, UnloadAdapter
from octavo.system.background_threads import stop_if_ending
from octavo.types import MEMORY_PARTS, MemoryPart
from octavo_bench.offline import wait_until_prepared
from tests.runtime.making import CPU
from tests.runtime.test_model_runner import Loaded, requests, run, tokens_of
from tests.runtime.test_stream_runner import stream_engine


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def reference_operations() -> Iterator[None]:
    with dispatch.only(REFERENCE):
        yield


class Owner:
    """Refers to tensors in every way that an executor does."""

    __slots__ = ("deep", "function", "view", "weight")

    def __init__(self) -> None:
        self.weight = torch.arange(1000.0)
        self.view = self.weight[10:20]
        inner = torch.ones(7, dtype=torch.int32)
        self.function = partial(lambda: inner)
        self.deep = {"one": [torch.full((3, 3), 2.5), (torch.zeros(0),)]}


def test_every_tensor_that_an_object_refers_to_is_freed_and_restored() -> None:
    owner, memory = Owner(), SleepingMemory(CPU)
    pool = torch.empty(512)
    everything = [owner.weight, owner.view, owner.function(), owner.deep["one"][0], pool]
    expected = [tensor.clone() for tensor in everything[:-1]]
    assert {id(tensor) for tensor in device_tensors(owner, "cpu")} >= {id(tensor) for tensor in everything[:-1]}
    for _ in range(2):
        memory.free((owner, pool), [pool])
        assert not any(tensor.untyped_storage().nbytes() for tensor in everything)
        memory.restore()
        assert all(torch.equal(tensor, old) for tensor, old in zip(everything, expected, strict=False))
        assert pool.untyped_storage().nbytes() == 2048
        owner.view += 1  # what changes between two sleeps is kept, too
        expected[0][10:20] += 1
        expected[1] += 1


def test_weights_and_cache_are_restored_one_after_the_other() -> None:
    owner, memory, pool = Owner(), SleepingMemory(CPU), torch.empty(512)
    expected = owner.weight.clone()
    orders: list[tuple[MemoryPart, MemoryPart]] = [("weights", "kv_cache"), ("kv_cache", "weights")]
    for first, second in orders:
        memory.free((owner, pool), [pool])
        memory.restore([first])
        sizes = {"weights": owner.weight.untyped_storage().nbytes(), "kv_cache": pool.untyped_storage().nbytes()}
        assert (sizes[first] > 0, sizes[second]) == (True, 0)
        memory.restore([second])
        assert torch.equal(owner.weight, expected)
        assert pool.untyped_storage().nbytes() == 2048


@pytest.mark.parametrize("first", MEMORY_PARTS)
def test_what_is_partly_restored_is_freed_again(first: MemoryPart) -> None:
    owner, memory, pool = Owner(), SleepingMemory(CPU), torch.empty(512)
    expected = owner.weight + 1
    for _ in range(2):
        memory.free((owner, pool), [pool])
        memory.restore(["weights"])
        owner.weight[:] = expected  # as an update does
        memory.free((owner, pool), [pool])
        assert not pool.untyped_storage().nbytes(), "the memory is another program's"
        memory.restore([first])
        memory.free((owner, pool), [pool])
        memory.free((owner, pool), [pool])
        assert not owner.weight.untyped_storage().nbytes() + pool.untyped_storage().nbytes()
        memory.restore()
        assert torch.equal(owner.weight, expected)
        assert pool.untyped_storage().nbytes() == 2048


def test_nothing_is_freed_if_the_host_has_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleeping_memory, "free_memory", lambda *_: 1000)
    owner = Owner()
    with pytest.raises(RunnerError, match="GiB of host memory"):
        SleepingMemory(CPU).free(owner)
    assert owner.weight.sum() == 499500


def test_an_engine_that_slept_gives_the_same_tokens(loaded: Loaded) -> None:
    engine = stream_engine(loaded)
    engine.sleeper = engine.runner  # type: ignore[assignment]
    expected = tokens_of(run(engine, requests(6)))
    executor: Any = engine.runner.executor  # type: ignore[attr-defined]
    engine.sleep()
    engine.check()
    assert not engine.scheduler.cache.groups[0].num_cached
    kept = [tensor.untyped_storage() for tensor in device_tensors(executor, "cpu")]
    assert not any(storage.nbytes() for storage in kept if storage.resizable() and not _is_host_copy(executor, storage))
    engine.wake()
    assert tokens_of(run(engine, requests(6))) == expected
    engine.check()


def test_weights_can_be_loaded_before_there_is_a_cache(loaded: Loaded) -> None:
    engine: Any = stream_engine(loaded)
    engine.sleeper = runner = engine.runner
    expected, checksums = tokens_of(run(engine, requests(6))), runner.send(ReadChecksums()).wait()
    for _ in range(2):
        engine.sleep()
        engine.wake(["weights"])
        assert runner.send(ReadChecksums()).wait() == checksums  # as messages that change them are executed
        assert not any(pool.untyped_storage().nbytes() for pool in runner.executor._pool)
        with pytest.raises(Unavailable, match="sleeps"):
            engine.add(requests(1)[0])
    engine.wake(["weights"])  # it is awake
    engine.wake(["kv_cache"])
    engine.wake()
    assert tokens_of(run(engine, requests(6))) == expected
    engine.check()


def test_weights_sleep_again_without_the_cache_taking_memory(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = stream_engine(loaded)
    engine.sleeper = runner = engine.runner
    expected, checksums = tokens_of(run(engine, requests(6))), runner.send(ReadChecksums()).wait()
    engine.sleep()
    engine.wake(["weights"])
    with monkeypatch.context() as patch:
        patch.setattr(runner.executor._memory, "restore", _out_of_memory)
        patch.setattr(sleeping_memory, "free_memory", lambda *_: 0)
        runner.executor._memory._host = None
        with pytest.raises(RunnerError, match="GiB of host memory"):
            engine.sleep()
        assert runner.send(ReadChecksums()).wait() == checksums
        patch.undo()
        patch.setattr(runner.executor._memory, "restore", _out_of_memory)
        engine.sleep()
    engine.wake()
    assert tokens_of(run(engine, requests(6))) == expected
    engine.check()


def _out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError


def test_sleeping_weights_are_neither_read_nor_written_over(loaded: Loaded) -> None:
    engine: Any = stream_engine(loaded)
    engine.sleeper = runner = engine.runner
    engine.sleep()
    for parts in ([], ["kv_cache"]):
        engine.wake(parts)
        for message in (LoadWeights(""), ReadChecksums(), LoadAdapter(0, ""), UnloadAdapter(0)):
            with pytest.raises(CheckpointError, match="weights sleep"):
                runner.send(message)
    engine.wake()


def _is_host_copy(executor: Any, storage: torch.UntypedStorage) -> bool:
    return storage.data_ptr() == executor._memory._host.data_ptr()


def test_an_engine_without_a_sleeper_refuses(loaded: Loaded) -> None:
    with pytest.raises(RunnerError, match="cannot free its memory"):
        stream_engine(loaded).sleep()


def test_graphs_are_captured_again_the_first_ones_at_once_and_the_others_when_it_is_idle(loaded: Loaded) -> None:
    engine = stream_engine(loaded)
    runner: Any = engine.runner
    graphs: Any = GraphDispatcher(GraphLimits(8, 32))
    first, every = first_shapes(GraphLimits(8, 32)), graph_shapes(GraphLimits(8, 32))
    graphs._captured = {*first, *every[:4]}
    runner.on_wake = graphs.capture_again
    send, captured = runner.executor.send, list[StepShape]()

    def record(message: Any) -> Any:
        if isinstance(message, Step):
            captured.append(message.shape)
        return send(message)

    runner.executor.send = record
    runner.sleep()
    waiting = threading.Thread(target=runner.send, args=(Compile([]),))
    waiting.start()  # as the thread does that prepares graphs after startup
    waiting.join(0.05)
    assert waiting.is_alive(), "a message was sent while the executor slept"
    runner.wake(MEMORY_PARTS)
    waiting.join()
    assert captured[: len(first)] == first
    wait_until_prepared()
    assert {*captured} == graphs._captured == {*first, *every[:4]}


def test_an_engine_that_is_closed_asleep_waits_for_no_waking(loaded: Loaded) -> None:
    engine: Any = stream_engine(loaded)
    graphs: Any = GraphDispatcher(GraphLimits(8, 32))
    engine.runner.sleep()
    graphs._start_thread(graph_dispatcher._prepare_the_rest, engine.runner)
    engine.close()
    wait_until_prepared()
    assert not graphs._captured


@pytest.mark.parametrize("frees", [True, False])
def test_sleep_waits_for_one_kernel_and_not_for_all(
    frees: bool, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was left is compiled when the executor is awake, or if it could not sleep."""
    engine = stream_engine(loaded)
    runner, executor = engine.runner, cast(Any, engine.runner.executor)
    is_asleep, may_end, began, begun_asleep = False, threading.Event(), threading.Event(), list[bool]()

    def compile_all(message: Compile) -> None:
        for _ in range(100):
            stop_if_ending()
            begun_asleep.append(is_asleep)
            began.set()
            may_end.wait(0.05)

    monkeypatch.setattr(executor, "_compile", compile_all)
    replies = [runner.send(Compile([], in_background=True)) for _ in range(2)]
    assert began.wait(10)
    if frees:
        runner.sleep()
        is_asleep = True
        assert 1 <= len(begun_asleep) <= 100
        runner.wake(["weights"])
        is_asleep = False
        runner.wake(["kv_cache"])
    else:
        monkeypatch.setattr(sleeping_memory, "free_memory", lambda *given: 0)
        with pytest.raises(RunnerError, match="sleeping takes"):
            runner.sleep()
    may_end.set()
    for reply in replies:
        reply.wait()
    assert len(begun_asleep) > 200
    assert not any(begun_asleep)
    engine.close()


def test_what_is_left_to_compile_is_not_waited_for_by_an_engine_that_is_closed_asleep(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = stream_engine(loaded)
    group = cast(Any, engine)._threads
    monkeypatch.setattr(engine.runner.executor, "_compile", lambda message: [stop_if_ending() for _ in iter(int, 1)])
    with group.starting():
        reply = engine.runner.send(Compile([], in_background=True))
    engine.runner.sleep()
    waiting = group.start("waiting", reply.wait)
    engine.close()
    waiting.join(10)
    assert not waiting.is_alive()
