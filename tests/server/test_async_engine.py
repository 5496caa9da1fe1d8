"""AsyncEngine over real child processes that have no model: see ``fake_engine.py``."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo import errors
from octavo.config import ModelSettings, ServeConfig, ServerSettings
from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.server import supervisor
from octavo.server.async_engine import AsyncEngine
from octavo.types import Output, Request
from tests.server.fake_engine import expected

SCRIPT = Path(__file__).parent / "fake_engine.py"
POISON = 666
SLOW = {"step_seconds": 0.003}


class Recorder:
    """A listener that keeps everything, and complains when something follows the end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.error: RequestError | None = None
        self.done = asyncio.Event()

    def on_output(self, output: Output) -> None:
        assert not self.done.is_set()
        self.tokens += output.tokens
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.done.set()

    def on_error(self, error: RequestError) -> None:
        assert not self.done.is_set()
        self.error = error
        self.done.set()


def make_config(timeout: float = 30.0, **knobs: Any) -> ServeConfig:
    server = ServerSettings(engine_timeout=timeout)
    return ServeConfig(model=ModelSettings(model=json.dumps(knobs)), server=server)


def make_engine(timeout: float = 30.0, **knobs: Any) -> AsyncEngine:
    # The repository's root must be found by the child, which runs a file from within the tests.
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parents[2])!r}); "
    code += "from tests.server import fake_engine as f; sys.exit(f.engine_process.main(build=f.build))"
    return AsyncEngine(make_config(timeout, **knobs), [sys.executable, "-c", code])


@asynccontextmanager
async def running(timeout: float = 30.0, **knobs: Any) -> AsyncIterator[AsyncEngine]:
    engine = make_engine(timeout, **knobs)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop(0)
        assert engine.num_live == 0
        assert engine.pid is not None
        assert not os.path.exists(f"/proc/{engine.pid}")


def send(engine: AsyncEngine, mark: int = 1, max_tokens: int = 40) -> tuple[Request, Recorder]:
    request_id = engine.next_id()
    request = Request(request_id, [mark, request_id], SamplingParams(), max_tokens)
    recorder = Recorder()
    engine.add(request, recorder)
    return request, recorder


async def finish(streams: list[tuple[Request, Recorder]], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        for _, recorder in streams:
            await recorder.done.wait()


def assert_right(streams: list[tuple[Request, Recorder]]) -> None:
    for request, recorder in streams:
        assert recorder.error is None
        assert recorder.tokens == expected(request)
        assert recorder.finish_reason == "length"


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def kill(engine: AsyncEngine, how: int = signal.SIGKILL) -> None:
    assert engine.pid is not None
    os.kill(engine.pid, how)


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


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_killed_engine_loses_and_doubles_nothing(how: int) -> None:
    async def main() -> None:
        async with running(**SLOW) as engine:
            streams = [send(engine) for _ in range(16)]
            await until(lambda: all(len(recorder.tokens) >= 5 for _, recorder in streams))
            kill(engine, how)
            await finish(streams)
            assert_right(streams)
            assert engine.num_restarts == 1
            assert engine.metrics.replays == 16

    asyncio.run(main())


def test_ctrl_c_does_not_reach_the_engine() -> None:
    async def main() -> None:
        async with running(**SLOW) as engine:
            assert engine.pid is not None
            assert os.getpgid(engine.pid) != os.getpgid(0)
            streams = [send(engine)]
            kill(engine, signal.SIGINT)
            await finish(streams)
            assert engine.num_restarts == 0

    asyncio.run(main())


def test_twenty_kills_in_a_row() -> None:
    rng = random.Random(5)

    async def main() -> None:
        async with running(**SLOW) as engine:
            streams = [send(engine, max_tokens=400) for _ in range(16)]
            for death in range(20):
                await until(lambda: engine.is_ready)
                await asyncio.sleep(0.01 + rng.random() * 0.04)
                kill(engine)
                await until(lambda death=death: engine.num_restarts == death + 1)  # type: ignore[misc]
            await finish(streams)
            assert_right(streams)
            assert engine.metrics.convictions == 0

    asyncio.run(main())


def test_a_hung_engine_is_replaced() -> None:
    async def main() -> None:
        async with running(timeout=1.0, **SLOW) as engine:
            streams = [send(engine) for _ in range(4)]
            await until(lambda: all(recorder.tokens for _, recorder in streams))
            kill(engine, signal.SIGSTOP)
            await finish(streams)
            assert_right(streams)
            assert engine.num_restarts == 1
            assert engine.metrics.hangs == 1

    asyncio.run(main())


def test_an_engine_that_hangs_while_idle_is_replaced() -> None:
    async def main() -> None:
        async with running(timeout=1.0) as engine:
            await asyncio.sleep(1.5)
            assert engine.num_restarts == 0
            assert engine.is_ready
            kill(engine, signal.SIGSTOP)
            await until(lambda: engine.num_restarts == 1)
            streams = [send(engine)]
            await finish(streams)
            assert_right(streams)

    asyncio.run(main())


def test_a_slow_step_is_no_hang() -> None:
    async def main() -> None:
        async with running(timeout=2.0, slow_step=9, slow_seconds=1.2) as engine:
            streams = [send(engine), send(engine, mark=9)]
            await finish(streams)
            assert_right(streams)
            assert engine.num_restarts == 0

    asyncio.run(main())


def test_an_engine_that_never_gets_anywhere_is_a_hang_and_the_reason_is_convicted() -> None:
    async def main() -> None:
        async with running(timeout=1.0, stuck=POISON, **SLOW) as engine:
            good = [send(engine) for _ in range(3)]
            bad = send(engine, mark=POISON)
            await finish([*good, bad])
            assert_right(good)
            assert isinstance(bad[1].error, errors.RequestFailed)
            assert engine.num_restarts <= 4

    asyncio.run(main())


@pytest.mark.parametrize("poison_at", [0, 7])
def test_a_poison_request_is_convicted_and_its_neighbours_finish(poison_at: int) -> None:
    async def main() -> None:
        async with running(poison=POISON, poison_at=poison_at, **SLOW) as engine:
            streams = [send(engine) for _ in range(8)]
            bad = send(engine, mark=POISON)
            streams += [send(engine) for _ in range(7)]
            await finish([*streams, bad])
            assert_right(streams)
            request, recorder = bad
            assert recorder.tokens == expected(request)[:poison_at]
            assert isinstance(recorder.error, errors.RequestFailed)
            assert engine.num_restarts <= 4
            assert engine.metrics.convictions == 1
            later = [send(engine)]
            await finish(later)
            assert_right(later)

    asyncio.run(main())


def test_poisons_one_after_the_other_are_served_past() -> None:
    async def main() -> None:
        async with running(poison=POISON, **SLOW) as engine:
            good = send(engine, max_tokens=1000)
            for _ in range(4):
                bad = send(engine, mark=POISON)
                await finish([bad])
                assert isinstance(bad[1].error, errors.RequestFailed)
            assert good[1].error is None
            await finish([good])
            assert_right([good])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("raised", "kind"),
    [("CheckpointError", errors.CheckpointError), ("ConfigError", errors.ConfigError), ("Other", errors.OctavoError)],
)
def test_a_start_that_cannot_work_says_why(raised: str, kind: type[Exception]) -> None:
    async def main() -> None:
        engine = make_engine(start_error=raised)
        with pytest.raises(errors.OctavoError, match="layer 3 is missing") as caught:
            await engine.start()
        assert type(caught.value) is kind
        assert not engine.is_ready
        with pytest.raises(errors.Unavailable):
            send(engine)
        await engine.stop(1)

    asyncio.run(main())


def test_an_engine_that_cannot_be_restarted_ends_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(supervisor, "MAX_FAILED_STARTS", 2)

    async def main() -> None:
        async with running(start_crash_after=str(tmp_path / "once"), **SLOW) as engine:
            streams = [send(engine, max_tokens=1000) for _ in range(3)]
            await until(lambda: all(recorder.tokens for _, recorder in streams))
            kill(engine)
            await until(lambda: not engine.is_ready)
            streams.append(send(engine))
            await finish(streams)
            for _, recorder in streams:
                assert isinstance(recorder.error, errors.RequestFailed)
            assert engine.failure
            assert not engine.is_ready
            with pytest.raises(errors.Unavailable):
                send(engine)

    asyncio.run(main())


def test_an_engine_that_speaks_nonsense_is_replaced() -> None:
    async def main() -> None:
        async with running(garbage=POISON, **SLOW) as engine:
            good = [send(engine) for _ in range(3)]
            bad = send(engine, mark=POISON)
            await finish([*good, bad])
            assert_right(good)
            assert isinstance(bad[1].error, errors.RequestFailed)

    asyncio.run(main())


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


def test_a_refused_request_keeps_the_kind_of_its_error() -> None:
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


def test_a_listener_may_abort_and_add_while_it_is_told() -> None:
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
            await asyncio.wait_for(second.done.wait(), 10)
            assert len(first.tokens) == 3
            assert engine.num_live == 0

    asyncio.run(main())


def test_draining_lets_the_live_ones_finish_and_takes_no_more() -> None:
    async def main() -> None:
        engine = make_engine(**SLOW)
        await engine.start()
        streams = [send(engine, max_tokens=100) for _ in range(8)]
        await until(lambda: bool(streams[0][1].tokens))
        stopping = asyncio.create_task(engine.stop(30))
        await asyncio.sleep(0.05)
        assert not engine.is_ready
        with pytest.raises(errors.Unavailable) as caught:
            send(engine)
        assert caught.value.retry_after
        kill(engine)  # even now nothing is lost
        await stopping
        assert_right(streams)

    asyncio.run(main())


def test_draining_ends_at_its_time_limit_even_with_a_hung_engine() -> None:
    async def main() -> None:
        engine = make_engine(**SLOW)
        await engine.start()
        _, recorder = send(engine, max_tokens=100_000)
        await until(lambda: bool(recorder.tokens))
        kill(engine, signal.SIGSTOP)
        async with asyncio.timeout(8):
            await engine.stop(0.2)
        assert isinstance(recorder.error, errors.Unavailable)
        assert not os.path.exists(f"/proc/{engine.pid}")

    asyncio.run(main())


def test_requests_that_come_while_the_engine_restarts_are_served() -> None:
    async def main() -> None:
        async with running(**SLOW) as engine:
            kill(engine)
            await until(lambda: not engine.is_ready)
            streams = [send(engine) for _ in range(4)]
            await finish(streams)
            assert_right(streams)
            assert engine.metrics.replays == 0

    asyncio.run(main())


def test_a_request_with_nothing_left_to_generate_is_answered() -> None:
    async def main() -> None:
        async with running() as engine:
            recorder = Recorder()
            engine.add(Request(engine.next_id(), [1], SamplingParams(), 2, output_tokens=[4, 5]), recorder)
            await asyncio.wait_for(recorder.done.wait(), 10)
            assert isinstance(recorder.error, errors.InvalidParameter)

    asyncio.run(main())


def test_metrics_agree_with_what_happened() -> None:
    async def main() -> None:
        async with running(**SLOW) as engine:
            streams = [send(engine, max_tokens=50) for _ in range(4)]
            await until(lambda: all(recorder.tokens for _, recorder in streams))
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


def test_a_front_process_that_dies_takes_the_engine_with_it() -> None:
    async def main() -> None:
        code = (
            "import asyncio, os, sys\n"
            f"sys.path.insert(0, {str(SCRIPT.parents[2])!r})\n"
            "from tests.server.test_async_engine import make_engine, send\n"
            "async def main():\n"
            "    engine = make_engine(step_seconds=30)\n"
            "    await engine.start()\n"
            "    send(engine)\n"
            "    await asyncio.sleep(0.3)\n"
            "    print(engine.pid, flush=True)\n"
            "    await asyncio.sleep(60)\n"
            "asyncio.run(main())\n"
        )
        front = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
        assert front.stdout is not None
        child = int(await front.stdout.readline())
        assert os.path.exists(f"/proc/{child}")
        front.kill()
        await front.wait()
        await until(lambda: not _is_running(child))

    asyncio.run(main())


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
