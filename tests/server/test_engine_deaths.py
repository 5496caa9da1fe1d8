"""What an engine process does to those it serves when it dies, hangs or never comes up: see ``fake_engine.py``."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from octavo import errors
from octavo.server import supervisor
from tests.server.child_engine import ROOT, SLOW, assert_right, finish, kill, make_engine, running, send, until
from tests.server.fake_engine import expected

POISON = 666


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


def test_a_front_process_that_dies_takes_the_engine_with_it() -> None:
    async def main() -> None:
        code = (
            "import asyncio, os, sys\n"
            f"sys.path.insert(0, {str(ROOT)!r})\n"
            "from tests.server.child_engine import make_engine, send\n"
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
