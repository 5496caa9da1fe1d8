"""Streams through AsyncEngine over real child processes that have no model: see ``fake_engine.py``."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo import errors
from octavo.backend_settings import BACKENDS
from octavo.config import EngineConfig, ModelSettings, ServeConfig, settings
from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.server_settings import ServerSettings
from octavo.types import Output, Request
from octavo_server.engines import async_engine
from octavo_server.engines.async_engine import AsyncEngine
from octavo_server.engines.engine_link import EngineLink
from octavo_server.engines.supervisor import engine_settings
from tests.server.child_engine import (
    SLOW,
    Recorder,
    assert_right,
    begin,
    finish,
    kill,
    make_engine,
    running,
    send,
    until,
)
from tests.server.fake_engine import expected


def test_streams_end_with_their_tokens_and_leave_nothing() -> None:
    async def main() -> None:
        async with running() as engine:
            assert engine.is_ready
            assert engine.info.architecture == "digest"
            streams = [send(engine) for _ in range(16)]
            await finish(streams)
            assert_right(streams)
            assert engine.num_live == 0
            assert engine.stats.num_used_blocks == 0
            assert engine.num_restarts == 0

    asyncio.run(main())


def test_an_engine_process_gets_all_settings_of_an_engine_and_no_others() -> None:
    guesses = '{"method": "ngram", "num_speculative_tokens": 2}'
    told = AsyncEngine(ServeConfig.from_flat({"speculative_config": guesses}))._engine_settings
    assert told.keys() == {setting.name for setting in settings(EngineConfig)}
    assert told["speculative_config"] == guesses


@pytest.mark.parametrize("backend", BACKENDS[:-1])
def test_every_engine_takes_what_weight_updates_add_to_its_settings(tmp_path: Path, backend: str) -> None:
    own = {"grpc_worker": "127.0.0.1:1"} if backend == "grpc" else {}
    config = ServeConfig.from_flat({"model": str(tmp_path), "backend": backend, "weight_updates_dir": "/steps", **own})
    model = EngineConfig.from_flat(engine_settings(config)).model
    assert (model.hf_config_path == str(tmp_path)) == (backend == "octavo")


def test_weight_updates_leave_a_gguf_file_its_own_configuration(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    config = ServeConfig.from_flat({"model": str(tmp_path / "a.gguf"), "weight_updates_dir": "/steps"})
    assert engine_settings(config)["hf_config_path"] is None


def test_abort_ends_in_silence_and_frees_the_engine() -> None:
    async def main() -> None:
        async with running(**SLOW) as engine:
            request, recorder = send(engine, max_tokens=100_000)
            await until(lambda: len(recorder.tokens) > 3)
            assert engine.stats.num_running == 1
            engine.abort(request.id)
            engine.abort(request.id)
            engine.abort(12345)
            count = len(recorder.tokens)
            assert engine.num_live == 0
            await until(lambda: engine.stats.num_running == 0)
            assert len(recorder.tokens) == count
            assert not recorder.done.is_set()

    asyncio.run(main())


def test_a_refused_request_keeps_the_kind_of_its_error(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running(refuse=5, faulty=6) as engine:
            refused, faulty, good = send(engine, mark=5), send(engine, mark=6), send(engine)
            await finish([refused, faulty, good])
            assert isinstance(refused[1].error, errors.ContextLengthExceeded)
            assert refused[1].error.param == "prompt"
            assert isinstance(faulty[1].error, errors.RequestFailed)
            assert faulty[1].tokens == expected(faulty[0])[:3]
            assert_right([good])

    asyncio.run(main())
    assert "failed: its logits are not numbers" in caplog.text  # who looks at the server sees why it answers with 500


def test_a_listener_that_fails_ends_only_its_own_request() -> None:
    class Broken(Recorder):
        def on_output(self, output: Output) -> None:
            raise ZeroDivisionError

        def on_error(self, error: RequestError) -> None:
            super().on_error(error)
            raise ZeroDivisionError

    async def main() -> None:
        async with running(**SLOW) as engine:
            broken = Broken()
            engine.add(Request(engine.next_id(), [1], SamplingParams(), 1000), broken)
            good = [send(engine) for _ in range(3)]
            await finish(good)
            assert_right(good)
            assert isinstance(broken.error, errors.RequestFailed)
            await until(lambda: engine.stats.num_running == 0)

    asyncio.run(main())


def test_a_listener_may_abort_and_add_during_its_callback() -> None:
    async def main() -> None:
        async with running() as engine:
            second = Recorder()

            class Stopping(Recorder):
                def on_output(self, output: Output) -> None:
                    super().on_output(output)
                    if len(self.tokens) == 3:
                        engine.abort(output.request_id, "stop")
                        engine.add(Request(engine.next_id(), [1], SamplingParams(), 5), second)

            first = Stopping()
            engine.add(Request(engine.next_id(), [1], SamplingParams(), 1000), first)
            await asyncio.wait_for(second.done.wait(), 30)
            assert len(first.tokens) == 3
            assert engine.num_live == 0

    asyncio.run(main())


def test_draining_lets_the_live_ones_finish_and_takes_no_more() -> None:
    async def main() -> None:
        engine = make_engine(**SLOW)
        await engine.start()
        streams = await begin(engine, 8, 1, max_tokens=100)
        stopping = asyncio.create_task(engine.stop(30))
        await asyncio.sleep(0)
        assert not engine.is_ready
        with pytest.raises(errors.Unavailable) as caught:
            send(engine)
        assert caught.value.retry_after
        kill(engine)  # even now nothing is lost
        await stopping
        assert_right(streams)

    asyncio.run(main())


@pytest.mark.slow
def test_draining_ends_at_its_time_limit_even_with_a_hung_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "STOP_GRACE", 0.5)

    async def main() -> None:
        engine = make_engine(**SLOW)
        await engine.start()
        _, recorder = send(engine, max_tokens=100_000)
        await until(lambda: bool(recorder.tokens))
        kill(engine, signal.SIGSTOP)
        async with asyncio.timeout(30):
            await engine.stop(0.2)
        assert isinstance(recorder.error, errors.Unavailable)
        assert not os.path.exists(f"/proc/{engine.pid}")

    asyncio.run(main())


def test_a_request_with_nothing_left_to_generate_is_answered() -> None:
    async def main() -> None:
        async with running() as engine:
            recorder = Recorder()
            engine.add(Request(engine.next_id(), [1], SamplingParams(), 2, output_tokens=[4, 5]), recorder)
            await asyncio.wait_for(recorder.done.wait(), 30)
            assert isinstance(recorder.error, errors.InvalidParameter)

    asyncio.run(main())


def test_metrics_agree_with_what_happened() -> None:
    async def main() -> None:
        async with running(**SLOW) as engine:
            streams = await begin(engine, 4, 3, max_tokens=50)
            steps = engine.stats.num_steps
            kill(engine)
            await finish(streams)
            assert engine.stats.num_steps > steps, "counters go on over a restart"
            values = {
                (sample.name, sample.labels.get("finished_reason")): sample.value
                for family in text_string_to_metric_families(engine.metrics.render().decode())
                for sample in family.samples
                if sample.labels.get("le") is None
            }
            assert values["vllm:generation_tokens_total", None] == 200
            assert values["vllm:prompt_tokens_total", None] == 8
            assert values["vllm:request_success_total", "length"] == 4
            assert values["vllm:time_to_first_token_seconds_count", None] == 4
            assert values["vllm:inter_token_latency_seconds_count", None] == 196
            assert values["octavo_engine_restarts_total", None] == 1
            assert values["octavo_requests_replayed_total", None] == 4
            assert values["vllm:num_requests_running", None] == 0

    asyncio.run(main())


@pytest.mark.slow
def test_an_engine_process_is_told_to_prepare_for_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a request with one does not need a longer life of the process than another."""
    told: list[bool] = []
    connect = EngineLink.connect

    async def recorded(link: EngineLink, config: dict[str, object], expects_grammars: bool) -> None:
        told.append(expects_grammars)
        await connect(link, config, expects_grammars)

    monkeypatch.setattr(EngineLink, "connect", recorded)

    async def main() -> None:
        async with running(**SLOW) as engine:
            for grammar in (None, "{}"):
                request = Request(engine.next_id(), [1, 2], SamplingParams(grammar=grammar), 5)
                engine.add(request, Recorder())
                await until(lambda: engine.num_live == 0)
                restarts = engine.num_restarts
                kill(engine)
                await until(lambda count=restarts: engine.num_restarts > count)

    asyncio.run(main())
    assert told == [False, False, True]


@pytest.mark.parametrize("place", ["grammars", "a-model/grammars"])
def test_a_server_knows_from_its_journal_that_there_were_grammars(tmp_path: Path, place: str) -> None:
    config = ServeConfig(model=ModelSettings(model="{}"), server=ServerSettings(journal=str(tmp_path)))
    assert not AsyncEngine(config).expects_grammars
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).touch()
    assert AsyncEngine(config).expects_grammars
