"""Processes of an engine's ranks that are killed or stopped under streams: no token changes, and nothing is left.

Run as ``python -m tests.server.rank_attacks CASES``, with a list of cases in JSON: a folder of a model, settings, and
attacks, each the number of a rank and the name of a signal. All processes are forked from this one, which has imported
and compiled everything, and has no threads: that costs a tenth of starting them anew. Prints how long the streams of
each attack took.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import psutil
import torch

from octavo import rank_process
from octavo.build.build_engine import build_engine
from octavo.config import EngineConfig, ServeConfig
from octavo.engine.protocols import EngineLike
from octavo.runtime.ranks import rank_processes
from octavo.sampling_params import SamplingParams
from octavo.types import EngineInfo, Request
from octavo_kernels.cpu.collective import SharedCollective, region_bytes
from octavo_server.engines.async_engine import AsyncEngine
from tests.server.child_engine import Recorder, until
from tests.server.forked_engine import ForkedProcess, forked

NUM_STREAMS = 8
MAX_TOKENS = 40
SECONDS = 180.0
ENGINE_TIMEOUT = 8.0
RANK_NAME = "octavo-rank"
"""Of a forked rank, which has the command of the process that it was forked from."""
RECOVERY_SECONDS = 30.0
"""From an attack to the end of all streams, besides the time in which a process that does not answer is found out."""


def make_config(folder: Path, size: int = 2, **settings: Any) -> ServeConfig:
    """A tiny random model on ranks; one that hangs is found out in a few seconds."""
    sizes = {"num_kv_blocks": 400, "block_size": 16, "max_num_batched_tokens": 64, "engine_timeout": ENGINE_TIMEOUT}
    model = {"model": str(folder), "load_format": "dummy", "device": "cpu", "tensor_parallel_size": size}
    return ServeConfig.from_flat({**sizes, **model, **settings})


def be_rank() -> NoReturn:
    Path("/proc/self/comm").write_text(RANK_NAME)
    rank_process.main()


def build(config: EngineConfig) -> tuple[EngineLike, EngineInfo]:
    """The engine of a forked process, which forks its ranks."""

    def fork(command: Sequence[str], pass_fds: Sequence[int], **_: Any) -> ForkedProcess:
        return ForkedProcess(be_rank, command[3:], pass_fds)

    setattr(rank_processes, "subprocess", SimpleNamespace(Popen=fork, DEVNULL=subprocess.DEVNULL))  # noqa: B010
    return build_engine(config)


@asynccontextmanager
async def running(config: ServeConfig, argv: list[str] | None = None) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(config, argv)
    await engine.start()
    try:
        yield engine
    finally:
        pids = processes(engine)
        await engine.stop(5)
        assert await are_gone(pids)


def processes(engine: AsyncEngine) -> list[int]:
    """The engine process and all that it has started, such as ranks and what compiles kernels."""
    assert engine.pid is not None
    return [engine.pid, *(process.pid for process in descendants(engine.pid))]


def ranks(engine: AsyncEngine) -> list[int]:
    """The processes of the ranks, in their order, of which the engine process is the first."""
    assert engine.pid is not None
    return [engine.pid, *other_ranks(engine.pid)]


def other_ranks(engine_pid: int) -> list[int]:
    """The processes of the ranks but the first, among all that the engine process has started."""
    found = list[tuple[float, int]]()
    for process in descendants(engine_pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == RANK_NAME or "octavo.rank_process" in process.cmdline():
                found.append((process.create_time(), process.pid))
    return [pid for _, pid in sorted(found)]


def descendants(pid: int) -> list[psutil.Process]:
    """Those of a process, which may be gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def shared_memory() -> set[str]:
    """What has a name there, but for what other processes of this machine put there: folders, and the semaphores of
    multiprocessing."""
    return {entry.name for entry in os.scandir("/dev/shm") if entry.is_file() and not entry.name.startswith("sem.mp-")}


async def are_gone(pids: list[int]) -> bool:
    def runs(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    async with asyncio.timeout(30):
        while any(map(runs, pids)):
            await asyncio.sleep(0.02)
    return True


def send(engine: AsyncEngine, number: int, max_tokens: int = MAX_TOKENS) -> Recorder:
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.95}, {"frequency_penalty": 0.5}]
    params = SamplingParams(**kinds[number % 3], seed=number, ignore_eos=True)
    prompt = random.Random(number).choices(range(256), k=20)
    recorder = Recorder()
    engine.add(Request(engine.next_id(), prompt, params, max_tokens, number), recorder)
    return recorder


async def finish(recorders: list[Recorder], seconds: float = SECONDS) -> list[list[int]]:
    async with asyncio.timeout(seconds):
        for recorder in recorders:
            await recorder.done.wait()
            assert recorder.error is None, recorder.error
    return [recorder.tokens for recorder in recorders]


async def attack(config: ServeConfig, attacks: Sequence[tuple[int, signal.Signals]]) -> None:
    """Attack ranks one after the other, at random moments; rank 0 is the engine process."""
    rng, before, seen = random.Random(7), shared_memory(), set[int]()
    async with running(config, forked("rank_attacks")) as engine:
        expected = await finish([send(engine, number) for number in range(NUM_STREAMS)])
        assert all(len(tokens) == MAX_TOKENS for tokens in expected)
        began = time.monotonic()
        assert await finish([send(engine, number) for number in range(NUM_STREAMS)]) == expected
        undisturbed = time.monotonic() - began
        for rank, how in attacks:
            await until(lambda: engine.is_ready, SECONDS)
            recorders = [send(engine, number) for number in range(NUM_STREAMS)]
            await asyncio.sleep(rng.uniform(0, 0.8 * undisturbed))
            seen.update(everything := processes(engine))
            pids = ranks(engine)
            assert len(pids) == config.model.num_ranks
            began = time.monotonic()
            os.kill(pids[rank], how)
            assert await finish(recorders) == expected
            seconds = time.monotonic() - began
            print(f"rank {rank}, {how.name}: {seconds:.1f} s", flush=True)
            assert seconds < RECOVERY_SECONDS + (ENGINE_TIMEOUT if how == signal.SIGSTOP else 0.0)
            assert how == signal.SIGSTOP or await are_gone(
                everything
            )  # one that stops when all have ended is not missed
        assert engine.metrics.poison_requests == 0
        assert engine.num_restarts >= len(attacks) - 1  # a signal may come when all streams have just ended
        assert await are_gone(sorted(seen.difference(processes(engine))))
    assert shared_memory() <= before


def warm_up(config: ServeConfig) -> None:
    """Import and compile here what all processes run."""
    one, _ = build_engine(config)
    one.add(Request(0, list(range(20)), SamplingParams(temperature=0), 3, 0))
    while one.has_work:
        one.step()
    one.close()
    collective = SharedCollective(np.zeros(region_bytes(1), np.uint8), 0, 1)
    collective.all_reduce(torch.zeros(1))
    collective.all_gather(torch.zeros(1))
    collective.all_to_all(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), 1)
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"


def main() -> None:
    for folder, settings, attacks in json.loads(sys.argv[1]):
        print(settings, flush=True)
        warm_up(make_config(Path(folder), 1))
        given = [(rank, signal.Signals[name]) for rank, name in attacks]
        asyncio.run(attack(make_config(Path(folder), **settings), given))


if __name__ == "__main__":
    main()
