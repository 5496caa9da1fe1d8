"""Several engine processes behind one server."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from octavo.config import ServeConfig
from octavo.errors import ConfigError, InvalidParameter, RequestFailed
from octavo.sampling_params import SamplingParams
from octavo.telemetry.cache_view import SessionOrder
from octavo.types import JoinGroup, ReceiveTensors, Request
from octavo_fleet import data_parallel
from octavo_fleet.data_parallel import DataParallelEngine, environments_of
from octavo_server.engines.async_engine import AsyncEngine
from octavo_server.engines.engine_client import SleepMode
from tests.oracle import expected_output
from tests.server.child_engine import SLOW, Recorder, finish, kill, until
from tests.server.fake_engine import VOCAB, expected
from tests.server.forked_engine import forked
from tests.server.oracle_engine import BLOCK_SIZE

SIZE = 3


@asynccontextmanager
async def running(**settings: object) -> AsyncIterator[DataParallelEngine]:
    config = ServeConfig.from_flat({"model": "x", "seed": 1, "data_parallel_size": SIZE, **settings})
    engine = DataParallelEngine(config, forked("oracle_engine"))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop(0)


def send(
    engine: DataParallelEngine, prompt: list[int], max_tokens: int = 20, session: str = ""
) -> tuple[Request, Recorder]:
    request = Request(engine.next_id(), prompt, SamplingParams(), max_tokens, session=session)
    recorder = Recorder()
    engine.add(request, recorder)
    return request, recorder


def check(streams: list[tuple[Request, Recorder]]) -> None:
    for request, recorder in streams:
        assert recorder.error is None
        assert recorder.tokens == expected_output(request)[0]


@pytest.mark.slow
def test_turns_of_a_conversation_meet_their_prefix_and_requests_are_spread() -> None:
    async def main() -> None:
        async with running() as engine:
            conversations = [[number] * 40 for number in range(2, 8)]
            for turn in range(4):
                streams = [send(engine, prompt, session=str(prompt[0])) for prompt in conversations]
                assert engine.num_live == len(streams)
                if turn == 0:
                    assert [each.num_live for each in engine.engines] == [2, 2, 2]
                await finish(streams)
                check(streams)
                conversations = [[*request.prompt_tokens, *recorder.tokens] for request, recorder in streams]
            stats = engine.stats
            # Of each later turn, all blocks of the turn before are found, and those of its answer but the last token.
            computed_before = sum(6 * (40 + 20 * turn - 1) // BLOCK_SIZE * BLOCK_SIZE for turn in range(1, 4))
            assert stats.prefix_hits >= 0.9 * computed_before
            text = engine.metrics.render().decode()
            for rank in range(SIZE):
                assert f'vllm:num_requests_running{{engine="{rank}",model_name="x"}} 0.0' in text
            assert text.count("# TYPE vllm:num_requests_running gauge") == 1
            assert text.count("octavo_front_cpu_seconds_total{") == 1
            assert stats.num_output_tokens == 6 * 4 * 20
            assert not engine.engines[0].num_live_of
            sessions = (await engine.order_sessions(SessionOrder("list", None))).sessions
            assert {each.id: (each.requests, each.tokens) for each in sessions} == dict.fromkeys("234567", (4, 116))
            assert stats.num_sessions == 6
            assert stats.session_hits == stats.session_queries == 6 * (56 + 76 + 96)
            assert not (await engine.order_sessions(SessionOrder("forget", "", "4"))).sessions
            sessions = (await engine.order_sessions(SessionOrder("list", ""))).sessions
            assert {each.id for each in sessions} == set("23567")
            await engine.sleep()
            assert not (await engine.order_sessions(SessionOrder("list", None))).sessions

    asyncio.run(main())


@pytest.mark.slow
def test_a_killed_engine_loses_nothing_and_the_others_serve_on() -> None:
    async def main() -> None:
        async with running() as engine:
            streams = [send(engine, [number, 7], 200) for number in range(2, 20)]
            await until(lambda: all(len(recorder.tokens) >= 5 for _, recorder in streams))
            kill(engine.engines[1])
            await until(lambda: not engine.engines[1].is_ready)
            assert engine.is_ready
            streams += [send(engine, [number, 8]) for number in range(2, 6)]
            await finish(streams)
            check(streams)
            await until(lambda: engine.engines[1].is_ready)
            assert engine.num_restarts == 1

    asyncio.run(main())


def test_cores_and_gpus_are_shared_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(data_parallel, "GPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert environments_of("auto", 3, 1) == [{"OMP_NUM_THREADS": "2"}] * 3
    for name in ("0", "1"):
        (tmp_path / name).touch()
    assert environments_of("auto", 2, 1) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    assert environments_of("cpu", 9, 2) == [{"OMP_NUM_THREADS": "1"}] * 9
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7")
    assert environments_of("cuda", 2, 1) == [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "GPU-7"}]
    with pytest.raises(ConfigError, match="3 engines need 3 GPUs, and 2 are visible"):
        environments_of("auto", 3, 1)
    with pytest.raises(ConfigError, match=r"2 engines of 2 ranks .* need 4 GPUs, and 2 are visible"):
        environments_of("auto", 2, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2,GPU-7,GPU-1,0")
    shares = [{"CUDA_VISIBLE_DEVICES": "3,2"}, {"CUDA_VISIBLE_DEVICES": "GPU-7,GPU-1"}]
    assert environments_of("auto", 2, 2) == shares


IN_PLACE = {**SLOW, "changes_weights": True}
BAD = json.dumps({**IN_PLACE, "start_error": "CheckpointError"})


@asynccontextmanager
async def two_engines() -> AsyncIterator[DataParallelEngine]:
    config = ServeConfig.from_flat({"model": json.dumps(IN_PLACE), "data_parallel_size": 2})
    engine = DataParallelEngine(config, forked())
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop(0)


async def weights_of(engine: DataParallelEngine) -> list[tuple[str, str]]:
    """The version of each engine's weights, and the weights."""
    sums = await engine.weight_checksums()
    return [(each.weight_version, sums[f"dp={i}/tp=0:knobs"]) for i, each in enumerate(engine.engines)]


def fail_update(engine: AsyncEngine, patch: pytest.MonkeyPatch, number: int) -> None:
    """Give an engine a checkpoint that cannot be loaded in its update of this number."""
    update, numbers = engine.update_weights, itertools.count()

    async def update_or_fail(model: str, version: str, mode: SleepMode = "keep") -> None:
        await update(BAD if next(numbers) == number else model, version, mode)

    patch.setattr(engine, "update_weights", update_or_fail)


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_an_update_that_one_engine_refuses_is_no_engines(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with two_engines() as engine:
            await engine.update_weights(json.dumps({**IN_PLACE, "weights": 5}), "5")
            fail_update(engine.engines[failing], monkeypatch, 0)
            stream = send(engine, [7], max_tokens=5)
            with pytest.raises(InvalidParameter, match="layer 3 is missing"):
                await engine.update_weights(json.dumps({**IN_PLACE, "weights": 6}), "6")
            assert await weights_of(engine) == [("5", "5")] * 2
            await finish([stream])
            await engine.update_weights(json.dumps({**IN_PLACE, "weights": 7}), "7")
            assert await weights_of(engine) == [("7", "7")] * 2

    asyncio.run(main())


@pytest.mark.slow
def test_an_update_whose_caller_leaves_is_that_of_all_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with two_engines() as engine:
            first, second = engine.engines
            may_end, update = asyncio.Event(), second.update_weights

            async def update_late(model: str, version: str, mode: SleepMode = "keep") -> None:
                await may_end.wait()
                await update(BAD if version == "6" else model, version, mode)

            monkeypatch.setattr(second, "update_weights", update_late)
            for version, later in (("5", "5"), ("6", "5")):
                may_end.clear()
                asked = engine.update_weights(json.dumps({**IN_PLACE, "weights": int(version)}), version)
                caller = asyncio.create_task(asked)
                await until(lambda version=version: first.weight_version == version)
                caller.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await caller
                may_end.set()
                await until(lambda later=later: {each.weight_version for each in engine.engines} == {later})
            assert await weights_of(engine) == [("5", "5")] * 2

    asyncio.run(main())


@pytest.mark.slow
def test_an_engine_that_cannot_go_back_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with two_engines() as engine:
            fail_update(engine.engines[0], monkeypatch, 1)
            fail_update(engine.engines[1], monkeypatch, 0)
            with pytest.raises(RequestFailed, match=r"layer 3 is missing.* in order: 6, default\."):
                await engine.update_weights(json.dumps({**IN_PLACE, "weights": 6}), "6")
            assert await weights_of(engine) == [("6", "6"), ("default", "0")]

    asyncio.run(main())


@pytest.mark.slow
def test_a_broadcast_that_one_engine_does_not_take_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """All have those of the folder then, as the earlier broadcast cannot be written again."""

    async def refuse(version: str | None, mode: SleepMode = "keep") -> str:
        raise InvalidParameter("update_info", "a tensor is missing")

    async def main() -> None:
        async with two_engines() as engine:
            assert await engine.take_weights(None) == "1"
            assert await weights_of(engine) == [("1", "1")] * 2
            with monkeypatch.context() as patch:
                patch.setattr(engine.engines[1], "take_weights", refuse)
                with pytest.raises(InvalidParameter, match="a tensor is missing"):
                    await engine.take_weights(None)
            assert await weights_of(engine) == [("default", "0")] * 2
            assert await engine.take_weights(None) == "3"
            assert await weights_of(engine) == [("3", "1")] * 2

    asyncio.run(main())


@pytest.mark.slow
def test_answers_name_the_weights_of_the_engine_that_computes_them() -> None:
    """An engine that dies loses what was broadcast, and the others do not."""

    async def main() -> None:
        async with two_engines() as engine:
            await engine.order_weights(JoinGroup("127.0.0.1", 1, 1, 3, "gloo"))
            await engine.order_weights(ReceiveTensors(["a"], ["float32"], [(1,)]))
            assert await engine.take_weights("1") == "1"
            second = engine.engines[1]
            kill(second)
            await until(lambda: second.num_restarts == 1 and second.is_ready)
            assert [each.weight_version for each in engine.engines] == ["1", "default"]
            streams = [send(engine, [number], max_tokens=5) for number in range(6)]
            await finish(streams)
            for request, recorder in streams:
                version = dict([(engine.weight_version, 0), *recorder.weights])
                by = 0 if "default" in version else 1
                assert recorder.tokens == [(token + by) % VOCAB for token in expected(request)]
            assert sum(recorder.weights == [("default", 0)] for _, recorder in streams) == 3

    asyncio.run(main())


def test_an_adapter_that_one_engine_cannot_replace_is_the_earlier_one_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str]] = []

    async def load(
        engine: AsyncEngine, name: str, path: str, content: str, replaces: bool = False, alias: str = ""
    ) -> None:
        asked.append((every.engines.index(engine), path))
        if path == "bad" and engine is every.engines[0]:
            raise InvalidParameter("lora_path", "It is of another model.")
        engine.adapters.add(name, path, content, alias)

    monkeypatch.setattr(AsyncEngine, "load_adapter", load)
    config = ServeConfig.from_flat({"model": "x", "data_parallel_size": SIZE, "enable_lora": True})
    every = DataParallelEngine(config, forked("oracle_engine"))
    asyncio.run(every.load_adapter("step", "good", "1" * 64))
    assert asked == [(2, "good"), (1, "good"), (0, "good")], "requests name what the first has"
    with pytest.raises(InvalidParameter):
        asyncio.run(every.load_adapter("step", "bad", "2" * 64, replaces=True))
    assert [each.adapters.alias("step") for each in every.engines] == [f"step,{'1' * 16}"] * SIZE
    assert [each.adapters.paths for each in every.engines] == [{"step": "good"}] * SIZE
