"""An engine whose stages are on two hosts, here two process groups: either side killed or stopped, no stream changes.

``OCTAVO_NODE_KILLS=12`` makes it a long run, of about twenty seconds a kill on two free cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.config import ServeConfig
from tests.llm.tiny import write_checkpoint
from tests.ops.cpu_cases import needs_float_kernels
from tests.server.child_engine import until
from tests.server.rank_attacks import MAX_TOKENS, NUM_STREAMS, SECONDS, are_gone, finish, running, send
from tests.server.test_ranks import rewrite

NUM_KILLS = int(os.environ.get("OCTAVO_NODE_KILLS", "3"))
ATTACKS = [
    *(("rank", signal.SIGKILL), ("host", signal.SIGSTOP), ("engine", signal.SIGKILL)),
    *(("host", signal.SIGKILL), ("rank", signal.SIGSTOP), ("engine", signal.SIGSTOP)),
]
"""What is attacked: the process of the second host, one of its ranks, or the engine process of the first."""

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300 + 90 * NUM_KILLS), needs_float_kernels]


class SecondHost:
    """``octavo serve --headless``, started again when it has ended."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        own = [f"--{name.replace('_', '-')}={value}" for name, value in {**settings, "node_rank": 1}.items()]
        self._command = [sys.executable, "-m", "octavo", "serve", str(folder), "--headless", *own]
        self.process = psutil.Popen(self._command)

    def start_again(self) -> None:
        self.end()
        self.process = psutil.Popen(self._command)

    def ranks(self) -> list[int]:
        found = []
        for child in self.process.children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                found += [child.pid] if "octavo.rank_process" in child.cmdline() else []
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.mark.parametrize(("width", "num_stages"), [(1, 2), (2, 4)])
def test_either_host_killed_or_stopped_loses_and_changes_nothing(width: int, num_stages: int, tmp_path: Path) -> None:
    rng = random.Random(7)
    write_checkpoint(tmp_path)
    rewrite(tmp_path, {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64})
    shared = {
        "load_format": "dummy",
        "device": "cpu",
        "num_kv_blocks": 400,
        "block_size": 16,
        "tensor_parallel_size": width,
        "pipeline_parallel_size": num_stages,
        "nnodes": 2,
        "node_key": "a key",
        "master_port": free_port(),
        "max_num_batched_tokens": 64,
    }
    alone = {**shared, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "nnodes": 1, "master_port": 29501}
    config = ServeConfig.from_flat({**shared, "model": str(tmp_path), "engine_timeout": 8.0})
    one = ServeConfig.from_flat({**alone, "node_key": None, "model": str(tmp_path)})

    async def main() -> None:
        async with running(one) as engine:
            expected = await finish([send(engine, number) for number in range(NUM_STREAMS)])
            assert all(len(tokens) == MAX_TOKENS for tokens in expected)
        host = SecondHost(tmp_path, shared)
        try:
            async with running(config) as engine:
                await finish([send(engine, number) for number in range(NUM_STREAMS)])
                began = time.monotonic()
                assert await finish([send(engine, number) for number in range(NUM_STREAMS)]) == expected
                undisturbed = time.monotonic() - began
                for kill in range(NUM_KILLS):
                    await until(lambda: engine.is_ready, SECONDS)
                    recorders = [send(engine, number) for number in range(NUM_STREAMS)]
                    await asyncio.sleep(rng.uniform(0, 0.8 * undisturbed))
                    whom, how = ATTACKS[kill % len(ATTACKS)]
                    ranks = host.ranks()
                    assert len(ranks) == width * num_stages // 2
                    pid = {"rank": ranks[-1], "host": host.process.pid, "engine": engine.pid}[whom]
                    assert pid is not None
                    num_running = sum(not recorder.done.is_set() for recorder in recorders)
                    before = engine.pid
                    os.kill(pid, how)
                    if whom == "host" and how == signal.SIGSTOP:
                        await until(lambda before=before: engine.pid != before, SECONDS)
                        os.kill(pid, signal.SIGCONT)  # it comes back by itself
                    elif whom == "host":
                        host.start_again()
                    assert await finish(recorders) == expected
                    assert how == signal.SIGSTOP or await are_gone([pid])
                    assert await are_gone([rank for rank in ranks if engine.num_restarts and rank not in host.ranks()])
                    print(f"{kill}: {whom}, {how.name}: {num_running} streams, {engine.num_restarts} restarts")
                assert engine.metrics.poison_requests == 0
                assert engine.num_restarts >= NUM_KILLS - 1  # a signal may come when all streams have just ended
        finally:
            ranks = host.ranks()
            host.end()
        assert await are_gone(ranks)

    asyncio.run(main())
