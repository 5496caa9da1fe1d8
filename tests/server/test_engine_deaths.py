"""What an engine process does to those it serves when it dies, hangs or never comes up: see ``fake_engine.py``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import pytest

from octavo import errors
from octavo.system import process_exit as endings
from octavo.weights.adapter_files import FILES, digest
from octavo_server.engines import supervisor
from tests.server.child_engine import (
    ROOT,
    SLOW,
    assert_right,
    begin,
    command,
    finish,
    kill,
    make_engine,
    running,
    send,
    until,
)
from tests.server.fake_engine import expected
from tests.tiers import nightly_after

pytestmark = pytest.mark.slow

POISON = 666


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_killed_engine_loses_and_doubles_nothing(how: int) -> None:
    async def main() -> None:
        async with running(**SLOW) as engine:
            streams = await begin(engine, 16, 5)
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


@pytest.mark.nightly
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
            assert engine.metrics.poison_requests == 0

    asyncio.run(main())


def test_a_hung_engine_is_replaced() -> None:
    async def main() -> None:
        async with running(timeout=1.0, **SLOW) as engine:
            streams = await begin(engine, 4, 1)
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


def test_an_engine_is_no_hang_because_nobody_listened() -> None:
    """As on a machine that stands still for a while."""

    async def main() -> None:
        async with running(timeout=1.0, **SLOW) as engine:
            streams = await begin(engine, 4, 1)
            kill(engine, signal.SIGSTOP)
            time.sleep(1.5)
            kill(engine, signal.SIGCONT)
            await asyncio.sleep(0.5)  # two looks
            engine.set_pace(None)
            await finish(streams)
            assert_right(streams)
            assert engine.num_restarts == 0

    asyncio.run(main())


def test_a_slow_step_is_no_hang() -> None:
    async def main() -> None:
        async with running(timeout=2.0, slow_step=9, slow_seconds=1.2) as engine:
            streams = [send(engine), send(engine, mark=9)]
            await finish(streams)
            assert_right(streams)
            assert engine.num_restarts == 0

    asyncio.run(main())


def test_an_engine_without_progress_is_a_hang_and_the_request_that_causes_it_is_failed() -> None:
    async def main() -> None:
        async with running(timeout=1.0, stuck=POISON, **SLOW) as engine:
            good = [send(engine) for _ in range(3)]
            bad = send(engine, mark=POISON)
            await finish([*good, bad])
            assert_right(good)
            assert isinstance(bad[1].error, errors.RequestFailed)
            assert engine.num_restarts <= 4

    asyncio.run(main())


@pytest.mark.parametrize(("poison_at", "how"), nightly_after(1, ((7, "SIGABRT"), (0, "SIGSEGV"), (0, "exception"))))
def test_a_poisonous_request_is_failed_and_the_others_finish(poison_at: int, how: str) -> None:
    async def main() -> None:
        async with running(poison=POISON, poison_at=poison_at, poison_how=how, **SLOW) as engine:
            streams = [send(engine) for _ in range(8)]
            bad = send(engine, mark=POISON)
            streams += [send(engine) for _ in range(7)]
            await finish([*streams, bad])
            assert_right(streams)
            request, recorder = bad
            assert recorder.tokens == expected(request)[:poison_at]
            assert isinstance(recorder.error, errors.RequestFailed)
            assert engine.num_restarts <= 4
            assert engine.metrics.poison_requests == 1
            later = [send(engine)]
            await finish(later)
            assert_right(later)

    asyncio.run(main())


def test_a_request_for_which_memory_runs_out_is_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 5\noom_kill 3\n")
    monkeypatch.setattr(endings, "VMSTAT", vmstat)

    async def main() -> None:
        async with running(poison=POISON, poison_how="SIGKILL", vmstat=str(vmstat), **SLOW) as engine:
            good = [send(engine) for _ in range(3)]
            bad = send(engine, mark=POISON)
            await finish([*good, bad])
            assert_right(good)
            assert isinstance(bad[1].error, errors.RequestFailed)
            assert engine.num_restarts <= 4

    asyncio.run(main())


@pytest.mark.parametrize("how", nightly_after(1, ("SIGKILL", "SIGTERM")))
def test_kills_before_the_first_token_fail_no_request(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is killed whenever it computes this request, seven times, and each time before there is a token."""
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE", 0.02)
    lives = tmp_path / "lives"
    lives.write_text("7")

    async def main() -> None:
        async with running(poison=POISON, poison_how=how, poison_lives=str(lives), **SLOW) as engine:
            streams = [send(engine, mark=POISON), *(send(engine) for _ in range(3))]
            await finish(streams)
            assert_right(streams)
            assert (engine.num_restarts, engine.metrics.poison_requests) == (7, 0)

    asyncio.run(main())


@pytest.mark.nightly
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


@pytest.mark.parametrize("ending", ["crash", "killed too often"])
def test_a_first_start_that_ends_without_a_word_is_an_error(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE", 0.01)
    (tmp_path / "once").touch()

    async def main() -> None:
        if ending == "crash":
            engine = make_engine(start_crash_after=str(tmp_path / "once"))
        else:
            engine = make_engine(start_kill=True)
        with pytest.raises(errors.OctavoError, match="ended while it was starting"):
            await engine.start()
        assert engine._supervisor.generation == (1 if ending == "crash" else supervisor.MAX_FIRST_STARTS)
        await engine.stop(1)

    asyncio.run(main())


def test_a_start_that_stands_still_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """As one does whose disk does not answer any more."""

    async def main() -> None:
        engine = make_engine(1.0, **SLOW, start_seconds=0.5, is_start_busy=True)  # it is stopped before it is ready
        starting = asyncio.create_task(engine.start())
        await until(lambda: engine.pid is not None)
        stopped = engine.pid
        kill(engine, signal.SIGSTOP)
        try:
            await asyncio.wait_for(starting, 60)
            assert engine.pid != stopped
            streams = [send(engine)]
            await finish(streams)
            assert_right(streams)
        finally:
            await engine.stop(1)

    asyncio.run(main())
    assert "used no processor time for 1 s" in caplog.text


def test_a_start_may_take_long_as_long_as_it_does_something() -> None:
    async def main() -> None:
        async with running(1.0, start_seconds=3.0, is_start_busy=True) as engine:
            assert engine.pid is not None
            assert engine.num_restarts == 0
            assert engine._supervisor.generation == 1

    asyncio.run(main())


def test_a_kill_in_the_first_start_is_survived() -> None:
    async def main() -> None:
        engine = make_engine(start_seconds=0.5, **SLOW)
        starting = asyncio.create_task(engine.start())
        await until(lambda: engine.pid is not None)
        kill(engine)
        await starting
        streams = [send(engine)]
        await finish(streams)
        assert_right(streams)
        await engine.stop(1)

    asyncio.run(main())


def test_an_engine_that_does_not_start_for_a_while_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE", 0.05)
    once = tmp_path / "once"

    async def main() -> None:
        async with running(start_crash_after=str(once), **SLOW) as engine:
            streams = await begin(engine, 3, 1, max_tokens=200)
            kill(engine)
            await until(lambda: not engine.is_ready)
            streams.append(send(engine))
            await until(lambda: engine.failure is not None)
            assert not engine.is_ready
            with pytest.raises(errors.Unavailable):
                send(engine)
            once.unlink()
            await finish(streams)
            assert engine.failure is None
            streams.append(send(engine))
            await finish(streams)
            assert_right(streams)

    asyncio.run(main())


def test_an_idle_engine_that_is_killed_as_soon_as_it_is_ready_is_restarted_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE", 0.05)

    async def main() -> None:
        async with running(**SLOW) as engine:
            for death in range(8):
                kill(engine)
                await until(lambda death=death: engine.num_restarts == death + 1)  # type: ignore[misc]
            streams = [send(engine)]
            await finish(streams)
            assert_right(streams)

    asyncio.run(main())


def test_an_adapter_at_which_engine_processes_die_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine without a model takes no adapters: it ends with a traceback when it is told to load one."""
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE", 0.05)
    for name in FILES:
        (tmp_path / name).touch()

    async def main() -> None:
        async with running(**SLOW) as engine:
            engine.adapters.add("deadly", str(tmp_path), digest(str(tmp_path)))
            for death in range(2):
                streams = [send(engine, max_tokens=100)]
                kill(engine)
                await until(lambda death=death: engine.num_restarts == death + 1)  # type: ignore[misc]
                await finish(streams)
                assert_right(streams)
                assert "deadly" not in engine.adapters.paths
                with pytest.raises(errors.ModelNotFound, match="deadly"):
                    engine.adapters.check("deadly")

    asyncio.run(main())


def test_an_engine_is_restarted_while_all_other_descriptors_are_taken() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def main() -> None:
        async with running(argv=command(), **SLOW) as engine:  # a new process takes some descriptors
            taken: list[int] = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 4, before[1]))
            try:
                for death in range(2):
                    with contextlib.suppress(OSError):
                        while True:
                            taken.append(os.open(os.devnull, os.O_RDONLY))
                    assert taken
                    streams = [send(engine, max_tokens=200)]
                    kill(engine)
                    await until(lambda death=death: engine.num_restarts == death + 1)  # type: ignore[misc]
                    await finish(streams)
                    assert_right(streams)
            finally:
                for descriptor in taken:
                    os.close(descriptor)
                resource.setrlimit(resource.RLIMIT_NOFILE, before)

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
