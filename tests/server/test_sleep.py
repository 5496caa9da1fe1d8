"""Engines that end their process while nobody needs them, over child processes without a model."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.errors import InvalidParameter, RequestError, Unavailable
from octavo.sampling_params import SamplingParams
from octavo.types import MEMORY_PARTS, MemoryPart, Request
from octavo.weights.adapter_files import digest
from octavo_server.engines.async_engine import AsyncEngine
from tests.server.child_engine import SLOW, Recorder, assert_right, begin, finish, kill, running, send, until
from tests.server.in_process import InProcessEngine
from tests.tiers import one_in

ORDERS: list[tuple[MemoryPart, MemoryPart]] = [("weights", "kv_cache"), ("kv_cache", "weights")]


def process_of(engine: AsyncEngine) -> str:
    return f"/proc/{engine.pid}"


def test_a_sleeping_engine_has_no_process_and_a_request_wakes_it() -> None:
    async def main() -> None:
        async with running() as engine:
            before = [send(engine) for _ in range(3)]
            await finish(before)
            process = process_of(engine)
            await engine.sleep(2)
            assert not os.path.exists(process)
            assert (engine.pid, engine.sleep_level, engine.failure) == (None, 2, None)
            assert engine.is_ready  # a request would be served
            assert 'sleep_state="discard_all"} 1.0' in engine.metrics.render().decode()
            after = [send(engine) for _ in range(3)]
            await finish(after)
            assert_right(before + after)
            assert engine.sleep_level == engine.num_restarts == 0

    asyncio.run(main())


def test_running_requests_are_finished_and_later_ones_wait_and_wake_it() -> None:
    async def main() -> None:
        async with running(**SLOW) as engine:
            process = process_of(engine)
            first = send(engine, max_tokens=30)
            await until(lambda: len(first[1].tokens) > 3)
            falling_asleep = asyncio.create_task(engine.sleep())
            await asyncio.sleep(0)
            late = send(engine, max_tokens=5)
            await finish([first])
            assert not late[1].tokens
            await finish([late])
            await falling_asleep
            assert not os.path.exists(process)
            assert_right([first, late])

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_running_requests_can_be_kept_or_ended(mode: Any) -> None:
    async def main() -> None:
        async with running(**SLOW) as engine:
            (stream,) = await begin(engine, 1, 4, max_tokens=60)
            await engine.sleep(mode=mode)
            assert engine.sleep_level == 1
            assert len(stream[1].tokens) == 4
            await engine.wake_up()
            assert engine.is_ready
            await finish([stream])
            if mode == "abort":
                assert isinstance(stream[1].error, Unavailable)
            else:
                assert_right([stream])

    asyncio.run(main())


@pytest.mark.parametrize("ends", ["sleep", "stop"])
def test_choices_that_abort_each_other_end_once(ends: str) -> None:
    async def main() -> None:
        async with running(**SLOW) as engine:
            requests: list[Request] = []

            class Choice(Recorder):
                def on_error(self, error: RequestError) -> None:
                    super().on_error(error)
                    for request in requests:
                        engine.abort(request.id)

            choices = [Choice() for _ in range(3)]
            for choice in choices:
                requests.append(Request(engine.next_id(), [1], SamplingParams(), 1000))
                engine.add(requests[-1], choice)
            await (engine.sleep(mode="abort") if ends == "sleep" else engine.stop(0))
            assert [choice.error is not None for choice in choices] == [True, False, False]
            assert engine.num_live == 0

    asyncio.run(main())


def test_an_engine_that_dies_while_it_falls_asleep_loses_nothing() -> None:
    async def main() -> None:
        async with running(**SLOW) as engine:
            stream = send(engine, max_tokens=60)
            await until(lambda: len(stream[1].tokens) > 3)
            falling_asleep = asyncio.create_task(engine.sleep())
            await asyncio.sleep(0)
            kill(engine)
            await falling_asleep
            await finish([stream])
            assert_right([stream])

    asyncio.run(main())


def test_it_may_be_stopped_asleep_and_while_it_wakes() -> None:
    async def main() -> None:
        for wakes in (False, True):
            async with running() as engine:
                await engine.sleep()
                if wakes:
                    engine.start_waking()
                    await asyncio.sleep(0.01)
                await engine.stop(0)
                with pytest.raises(Unavailable):
                    send(engine)
                engine.start_waking()
                assert not os.path.exists(process_of(engine))

    asyncio.run(main())


def test_an_engine_that_keeps_its_weights_keeps_its_process_and_its_counters() -> None:
    async def main() -> None:
        async with running(sleeps=True, **SLOW) as engine:
            pid, streams = engine.pid, []
            for mode in ("wait", "keep"):
                streams.append(send(engine, max_tokens=40))
                await until(lambda: len(streams[-1][1].tokens) > 3)
                await engine.sleep(1, mode)  # type: ignore[arg-type]
                assert (engine.sleep_level, engine.pid, engine.is_ready) == (1, pid, True)
                num_steps = engine.stats.num_steps
                await engine.wake_up()
                await finish(streams)
                assert engine.stats.num_steps >= num_steps > 0
            assert engine.stats.num_steps < 120  # none is counted twice
            assert (engine.pid, engine.num_restarts) == (pid, 0)
            assert_right(streams)

    asyncio.run(main())


def test_at_level_2_the_process_ends_also_from_level_1() -> None:
    async def main() -> None:
        async with running(sleeps=True) as engine:
            process = process_of(engine)
            await engine.sleep(1)
            assert os.path.exists(process)
            await engine.sleep(2)
            assert not os.path.exists(process)
            stream = send(engine)
            await finish([stream])
            assert_right([stream])

    asyncio.run(main())


@one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("what", ["sleep_error", "wake_error", "death"])
def test_a_process_that_cannot_sleep_or_wake_is_replaced(what: str) -> None:
    async def main() -> None:
        async with running(sleeps=True, **{} if what == "death" else {what: "no memory"}) as engine:
            first = send(engine)
            await finish([first])
            await engine.sleep()
            assert (engine.pid is None) == (what == "sleep_error")
            if what == "death":
                kill(engine)
            second = send(engine)
            await finish([second])
            assert_right([first, second])
            assert engine.num_restarts == 0

    asyncio.run(main())


def test_an_engine_that_is_put_to_sleep_while_it_wakes_sleeps() -> None:
    async def main() -> None:
        async with running(sleeps=True) as engine:
            pid = engine.pid
            for _ in range(5):
                await engine.sleep()
                engine.start_waking()
                await asyncio.sleep(0)
                await engine.sleep()
                assert (engine.sleep_level, engine.is_waking, engine.pid) == (1, False, pid)
            stream = send(engine)
            await finish([stream])
            assert_right([stream])

    asyncio.run(main())


def test_weights_and_cache_wake_one_after_the_other() -> None:
    async def main(keeps_process: bool) -> None:
        async with running(sleeps=keeps_process, changes_weights=True) as engine:
            pid = engine.pid
            for first, second in ORDERS:
                await engine.sleep()
                await engine.wake_up([first])
                assert (engine.sleep_level, engine.asleep, engine.is_waking) == (1, {second}, False)
                assert 'sleep_state="weights_offloaded"} 1.0' in engine.metrics.render().decode()
                awake = engine.pid
                assert awake is not None
                assert (awake == pid) is keeps_process
                if first == "weights":
                    await engine.update_weights('{"weights": 0}', f"after {first}")
                    assert (engine.sleep_level, engine.pid) == (1, awake), "they are written over"
                await engine.wake_up([first])
                assert engine.sleep_level == 1
                await engine.wake_up([second])
                assert (engine.sleep_level, engine.asleep, engine.pid) == (0, set(), awake)
                stream = send(engine)
                await finish([stream])
                assert_right([stream])
            assert engine.num_restarts == 0

    for keeps_process in (True, False):
        asyncio.run(main(keeps_process))


@pytest.mark.parametrize("knobs", [{"sleeps": True}, {"sleeps": True, "wake_error": "no memory"}, {}])
@pytest.mark.parametrize("first", MEMORY_PARTS)
def test_a_request_wakes_all_of_an_engine_that_is_partly_awake(knobs: dict[str, Any], first: MemoryPart) -> None:
    async def main() -> None:
        async with running(**knobs) as engine:
            await engine.sleep()
            await engine.wake_up([first])
            stream = send(engine)
            await finish([stream])
            assert_right([stream])
            assert (engine.sleep_level, engine.asleep) == (0, set())
            await engine.sleep()
            waking = asyncio.create_task(engine.wake_up([first]))  # and one that comes while a part wakes
            await asyncio.sleep(0)
            stream = send(engine)
            await finish([stream])
            await waking
            assert_right([stream])
            assert (engine.sleep_level, engine.asleep) == (0, set())

    asyncio.run(main())


def test_adapters_take_no_memory_of_the_cache() -> None:
    async def main() -> None:
        async with running(sleeps=True) as engine:
            await engine.sleep()
            await engine.wake_up(["weights"])
            with pytest.raises(InvalidParameter, match="takes no adapters"):
                await engine.load_adapter("one", "/one", "1")
            engine.adapters.add("one", "/one", "1")
            await engine.unload_adapter("one")
            assert not engine.adapters.retired
            assert (engine.sleep_level, engine.asleep) == (1, {"kv_cache"})

    asyncio.run(main())


def test_an_adapter_is_unloaded_when_an_engine_that_falls_asleep_has_woken() -> None:
    async def main() -> None:
        async with running(sleeps=True, takes_adapters=True) as engine:
            pid = engine.pid
            await engine.load_adapter("one", "/one", "1")
            falling_asleep = asyncio.create_task(engine.sleep())
            while engine._supervisor._tasks:  # until it was told to
                await asyncio.sleep(0)
            unloading = asyncio.create_task(engine.unload_adapter("one"))
            await falling_asleep
            await unloading
            assert (engine.pid, engine.sleep_level, engine.num_restarts) == (pid, 0, 0)
            await engine.load_adapter("one", "/one", "1")

    asyncio.run(main())


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("is_asleep", [False, True])
def test_adapters_are_changed_before_a_sleep_that_is_asked_for_meanwhile_or_after_it(
    tmp_path: Path, level: int, is_asleep: bool
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(name)
        (tmp_path / name / "adapter_model.safetensors").touch()

    async def main() -> None:
        async with running(sleeps=True, takes_adapters=True) as engine:

            async def load(name: str, folder: str = "first") -> None:
                path = str(tmp_path / folder)
                await engine.load_adapter(name, path, digest(path), replaces=True)

            pid = engine.pid
            for name in ("one", "two", "three"):
                await load(name)
            if is_asleep:
                await engine.sleep(level)
            changes = [*map(engine.unload_adapter, ("one", "two")), load("four"), load("three", "second")]
            tasks = [asyncio.create_task(change) for change in changes]
            for _ in range(5):
                await asyncio.sleep(0.002)
                tasks.append(asyncio.create_task(engine.sleep(level)))
            async with asyncio.timeout(30):
                await asyncio.gather(*tasks)
                await engine.wake_up()
                await load("one")
            assert sorted(engine.adapters.paths) == ["four", "one", "three"]
            assert engine.num_restarts == 0
            assert level == 2 or engine.pid == pid

    asyncio.run(main())


@pytest.mark.parametrize("keeps_process", [True, False])
def test_an_engine_that_is_partly_awake_may_sleep_again_and_be_stopped(keeps_process: bool) -> None:
    async def main() -> None:
        async with running(sleeps=keeps_process) as engine:
            for level in (1, 2):
                await engine.sleep()
                await engine.wake_up(["weights"])
                await engine.sleep(level)
                assert (engine.sleep_level, engine.asleep) == (level, {*MEMORY_PARTS})
                assert (engine.pid is not None) is (keeps_process and level == 1)
            await engine.wake_up(["weights"])
            await engine.stop(0)
            with pytest.raises(Unavailable):
                await engine.wake_up()

    asyncio.run(main())


def test_an_engine_that_dies_partly_awake_is_replaced_once() -> None:
    async def main() -> None:
        async with running() as engine:
            await engine.sleep()
            await engine.wake_up(["weights"])
            processes = {*psutil.Process().children()}
            kill(engine)
            await until(lambda: not engine._has_engine)
            stream = send(engine)
            await finish([stream])
            assert_right([stream])
            await asyncio.sleep(0.2)  # in which a second supervisor would start one more
            assert [process.pid for process in {*psutil.Process().children()} - processes] == [engine.pid]
            assert engine.sleep_level == 0

    asyncio.run(main())


def test_a_process_that_cannot_wake_in_parts_is_replaced() -> None:
    async def main() -> None:
        async with running(sleeps=True, wake_error="no memory") as engine:
            pid = engine.pid
            await engine.sleep()
            await engine.wake_up(["weights"])
            assert (engine.sleep_level, engine.asleep) == (1, {"kv_cache"})
            assert engine.pid not in (None, pid)
            await engine.wake_up(["kv_cache"])
            assert engine.sleep_level == 0

    asyncio.run(main())


def test_the_routes(serve_app: Any) -> None:
    engine = InProcessEngine()
    client = serve_app(engine, enable_sleep_mode=True).client
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    assert client.post("/sleep").json() == {"is_sleeping": True}
    assert client.post("/sleep?level=2&mode=abort").json() == {"is_sleeping": True}
    assert (engine.sleep_level, engine.sleep_modes) == (2, ["wait", "abort"])
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert client.post("/wake_up?tags=weights&tags=kv_cache").json() == {"is_sleeping": False}
    client.post("/sleep")
    assert client.post("/wake_up?tags=weights").json() == {"is_sleeping": True}
    assert client.post("/resume_memory_occupation", json={"tags": ["kv_cache"]}).json() == {"is_sleeping": False}
    assert "'tags' must be of weights, kv_cache." in client.post("/wake_up?tags=graphs").json()["error"]["message"]
    for query, field in (("level=3", "level"), ("mode=now", "mode")):
        error = client.post(f"/sleep?{query}").json()["error"]
        assert error["param"] == field
        assert "must be one of" in error["message"]


def test_clients_cannot_put_it_to_sleep_unless_allowed(served: Any) -> None:
    for path in ("/sleep", "/wake_up"):
        response = served.client.post(path)
        assert response.status_code == 400
        assert "--enable-sleep-mode" in response.json()["error"]["message"]
