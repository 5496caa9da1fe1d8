"""The engine client of a fleet, over replicas that die: without Ray."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from octavo.config import ServeConfig
from octavo.errors import ConfigError, ContextLengthExceeded, RequestFailed, Unavailable
from octavo.sampling_params import SamplingParams
from octavo.telemetry.cache_view import SessionOrder, SessionReport, SessionView
from octavo.types import EngineStats, KVTransfer, Output, Request
from octavo_fleet.ray.fleet_engine import MAX_MOVES, FleetEngine
from octavo_fleet.ray.messages import AnswerPart, decode_order, decode_request, encode, refusal_of
from octavo_fleet.ray.settings import parse
from tests.server.child_engine import Recorder, finish
from tests.server.fake_engine import INFO, FakeEngine, expected


class Death(Exception):
    """What a handle raises when its replica is gone."""


class Replicas:
    """A deployment's handle. Each answer ends early with a probability, at any place; ``refuse`` refuses instead."""

    def __init__(self, deadliness: float = 0.0, how: str = "die", seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.deadliness = deadliness
        self.how = how
        self.num_deaths = 0
        self.num_cancelled = 0
        self.info = self
        self.generate = self

    def options(self, stream: bool) -> Replicas:
        assert stream
        return self

    def remote(self, *arguments: bytes) -> Any:
        if not arguments:
            return asyncio.sleep(0, encode(INFO))
        return Stream(self, arguments[0])


class Stream:
    def __init__(self, replicas: Replicas, payload: bytes) -> None:
        self.replicas = replicas
        self.answers = self._answer(decode_request(payload))

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self.answers

    def cancel(self) -> None:
        self.replicas.num_cancelled += 1

    async def _answer(self, request: Request) -> AsyncIterator[bytes]:
        engine, replicas = FakeEngine(), self.replicas
        engine.add(request)
        outputs: list[Output] = []
        while engine.has_work:
            outputs += engine.step()
            await asyncio.sleep(0)
            if replicas.rng.random() < replicas.deadliness:
                replicas.num_deaths += 1
                if replicas.how == "end":
                    return
                if replicas.how == "die":
                    raise Death
                error = Unavailable("drained") if replicas.how == "drain" else ContextLengthExceeded("long")
                yield encode(AnswerPart("a", [], EngineStats(), refusal_of(1, error)))
                return
            if replicas.rng.random() < 0.5 or not engine.has_work:  # else several tokens come together
                yield encode(AnswerPart("a", outputs, EngineStats(num_steps=engine.num_steps)))
                outputs = []


def serve(replicas: Replicas, num_requests: int, max_tokens: int = 40) -> tuple[FleetEngine, list[Any]]:
    async def main() -> tuple[FleetEngine, list[Any]]:
        engine = FleetEngine(ServeConfig.from_flat({"model": "x"}), replicas, 3)  # type: ignore[arg-type]
        with pytest.raises(Unavailable):
            engine.add(Request(1, [1], SamplingParams(), 1), Recorder())
        await engine.start()
        assert engine.info.max_num_seqs == 3 * INFO.max_num_seqs
        streams = []
        for number in range(num_requests):
            request = Request(engine.next_id(), [1, number], SamplingParams(), max_tokens, tenant="t")
            streams.append((request, Recorder()))
            engine.add(*streams[-1])
        assert engine.num_live == engine.num_live_of["t"] == num_requests
        await finish(streams)
        assert not engine.num_live
        assert not engine.num_live_of
        return engine, streams

    return asyncio.run(main())


@pytest.mark.parametrize("how", ["die", "end", "drain"])
def test_nothing_is_lost_or_doubled_when_replicas_die(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo_fleet.ray.fleet_engine.PAUSE_SECONDS", 0.0)
    replicas = Replicas(0.05, how)
    engine, streams = serve(replicas, 32)
    for request, recorder in streams:
        assert recorder.error is None
        assert recorder.tokens == expected(request)
    assert replicas.num_deaths > 10
    assert engine.metrics.replays == replicas.num_deaths
    assert engine.stats.num_steps > 0


@pytest.mark.parametrize("trouble", ["none", "die", "end", "refuse", "hang"])
def test_a_long_prompt_goes_to_an_engine_of_its_own_first(trouble: str) -> None:
    """And to no other if that engine fails: the second one computes it."""
    sent: list[tuple[str, Request]] = []

    class Prefill(Replicas):
        def remote(self, *arguments: bytes) -> Any:
            sent.append(("prefill", decode_request(arguments[0])))
            return Prompts(self, arguments[0])

    class Prompts(Stream):
        async def _answer(self, request: Request) -> AsyncIterator[bytes]:
            if trouble == "hang":
                await asyncio.sleep(60)
            if trouble != "none":
                async for data in super()._answer(request):
                    yield data
            else:
                transfer = KVTransfer("127.0.0.1:1", "a ticket", 18)
                yield encode(AnswerPart("p", [Output(1, [5], "length", transfer=transfer)], EngineStats()))

    class Decode(Replicas):
        def remote(self, *arguments: bytes) -> Any:
            if arguments:
                sent.append(("decode", decode_request(arguments[0])))
            return super().remote(*arguments)

    async def main() -> None:
        config = ServeConfig.from_flat({"model": "x", "engine_timeout": 1})
        prefill = Prefill(1.0, trouble)
        engine = FleetEngine(config, Decode(), 3, prefill)  # type: ignore[arg-type]
        await engine.start()
        streams = []
        for length in (300, 10):
            request = Request(engine.next_id(), [length] * length, SamplingParams(), 5)
            streams.append((request, Recorder()))
            engine.add(*streams[-1])
        await finish(streams)
        for request, recorder in streams:
            assert recorder.tokens == expected(request)
        assert prefill.num_cancelled == 1

    asyncio.run(main())
    apart = [(where, request) for where, request in sent if len(request.prompt_tokens) == 300]
    assert [where for where, _ in apart] == ["prefill", "decode"]
    assert (apart[0][1].max_tokens, apart[0][1].transfer) == (1, KVTransfer())
    assert (apart[1][1].transfer is None) == (trouble != "none")
    assert [where for where, request in sent if len(request.prompt_tokens) == 10] == ["decode"]


def test_sessions_are_those_of_all_replicas_that_answer() -> None:
    reports = [SessionReport([SessionView(name, "", 1, 16, 16, 0, 0, 0.0, 0.0)]) for name in "ab"]

    class Broadcast:
        """What a handle gives for a broadcast; without replicas it raises."""

        def __init__(self, *answers: object) -> None:
            self.answers, self.orders = answers, list[SessionOrder]()

        def broadcast(self, method: str, payload: bytes) -> Broadcast:
            assert method == "order_sessions"
            self.orders.append(decode_order(payload))
            return self

        async def results_async(self, timeout_s: float, return_exceptions: bool) -> list[object]:
            assert timeout_s > 0
            assert return_exceptions
            if not self.answers:
                raise Death
            return list(self.answers)

    def ask(handle: Broadcast, prefill: Broadcast | None = None) -> SessionReport:
        engine = FleetEngine(ServeConfig.from_flat({"model": "x"}), handle, 2, prefill)  # type: ignore[arg-type]
        return asyncio.run(engine.order_sessions(order))

    order = SessionOrder("list", None)
    prefill = Broadcast(encode(reports[1]))
    report = ask(Broadcast(encode(reports[0]), Death(), encode(SessionReport(is_taken=True))), prefill)
    assert ([session.id for session in report.sessions], report.is_taken) == (["a", "b"], True)
    assert prefill.orders == [order]
    with pytest.raises(Unavailable):
        ask(Broadcast())


def test_a_refusal_is_final() -> None:
    _, streams = serve(Replicas(1.0, "refuse"), 2)
    assert all(isinstance(recorder.error, ContextLengthExceeded) for _, recorder in streams)


def test_a_request_that_no_replica_survives_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo_fleet.ray.fleet_engine.PAUSE_SECONDS", 0.0)
    replicas = Replicas(1.0)
    _, streams = serve(replicas, 1)
    assert isinstance(streams[0][1].error, RequestFailed)
    assert replicas.num_deaths == MAX_MOVES + 1


def test_an_aborted_request_is_cancelled() -> None:
    async def main() -> None:
        replicas = Replicas()
        engine = FleetEngine(ServeConfig.from_flat({"model": "x"}), replicas, 1)  # type: ignore[arg-type]
        await engine.start()
        recorder = Recorder()
        engine.add(Request(7, [1, 2], SamplingParams(), 100_000), recorder)
        while not recorder.tokens:
            await asyncio.sleep(0)
        engine.abort(7)
        count = len(recorder.tokens)
        await asyncio.sleep(0.01)
        assert (engine.num_live, len(recorder.tokens), replicas.num_cancelled) == (0, count, 1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"min_replicas": 0}, "min_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas"),
        ({"max_replicas": "two"}, "max_replicas"),
        ({"router": "best"}, "router"),
        ({"gpus_per_replica": -1}, "gpus_per_replica"),
        ({"target_ongoing_requests": 0}, "target_ongoing_requests"),
        ({"port": 8000}, "port: does not apply"),
        ({"data_parallel_size": 2}, "data_parallel_size: does not apply"),
        ({"kv_offload_dir": "/x", "kv_offload_memory": 1}, "kv_offload_dir: does not apply"),
        ({"role": "decode"}, "role: does not apply"),
        ({"prefill_replicas": -1}, "prefill_replicas"),
        ({"replicas": 2}, "unknown setting 'replicas'"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse({"model": "x", **arguments})


def test_arguments_are_the_fleets_or_settings() -> None:
    fleet, settings = parse({"model": "x", "max_replicas": 4, "max_num_seqs": 8})
    assert (fleet.max_replicas, fleet.min_replicas) == (4, 1)
    assert settings == {"host": "0.0.0.0", "model": "x", "max_num_seqs": 8}
