"""A prefill server, a decode server and a proxy as processes, of which some are killed or stopped under streams.

Also with a model that each server divides among two ranks.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo_bench.chaos.processes import children, engine_of, session
from octavo_bench.chaos.tiny_model import write_tiny_model
from octavo_bench.serving.server_process import ServerProcess, free_port
from tests.ops.cpu_cases import needs_float_kernels

NUM_EACH = 8
SIZES = ["--load-format", "dummy", "--max-model-len", "2048", "--num-kv-blocks", "2000", "--engine-timeout", "4"]
KEY = {"OCTAVO_KV_TRANSFER_KEY": "a key"}
SECONDS = 120.0


class Servers:
    def __init__(self, folder: Path, stack: ExitStack, connector: str, num_ranks: int) -> None:
        self.folder, self.stack, self.num_ranks = folder, stack, num_ranks
        self.model = str(write_tiny_model(folder / "model"))
        both = [self.model, *SIZES, "--kv-connector", connector, "--tensor-parallel-size", str(num_ranks)]
        self.prefill = self.start("prefill", *both, "--role", "prefill", "--kv-transfer-ttl", "3")
        self.decode = self.start("decode", *both, "--role", "decode", "--kv-transfer-timeout", "1")
        ways = ["--upstream", self.decode.url, "--prefill-upstream", self.prefill.url]
        self.proxy = self.start("proxy", "--backend", "openai", *ways)
        self.one = self.start("one", self.model, *SIZES)

    def start(self, name: str, *arguments: str) -> ServerProcess:
        port = free_port()
        command = [sys.executable, "-m", "octavo", "serve", *arguments, "--port", str(port), "--no-access-log"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **(KEY if "--role" in arguments else {})}
        log = self.folder / f"{name}.log"
        server = self.stack.enter_context(ServerProcess(command, f"http://127.0.0.1:{port}", log=log, env=env))
        server.wait_ready(SECONDS)
        return server

    def metric(self, server: ServerProcess, name: str) -> float:
        lines = httpx.get(server.url + "/metrics", timeout=10).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.fixture(scope="module", params=[("tcp", 1), ("tcp", 2), ("nixl", 1)], ids=str)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    connector, num_ranks = request.param
    if connector == "nixl" and find_spec("nixl") is None:
        pytest.skip("pip install 'octavo[nixl]'")
    with ExitStack() as stack:
        yield Servers(tmp_path_factory.mktemp("servers"), stack, connector, num_ranks)


def body(number: int) -> dict[str, Any]:
    rng = random.Random(number)
    prompt = [rng.randrange(1000) for _ in range(rng.randrange(600, 1500))]
    sampling = {"temperature": number % 2, "seed": number, "ignore_eos": True, "max_tokens": 40}
    return {"prompt": prompt, "stream": True, "return_token_ids": True, **sampling}


async def answers(url: str, numbers: range, act: Callable[[], None] = lambda: None) -> list[list[int]]:
    """The tokens of streams, while ``act`` happens."""
    places = asyncio.Semaphore(4)

    async def stream(client: httpx.AsyncClient, number: int) -> list[int]:
        tokens: list[int] = []
        async with places, client.stream("POST", url + "/v1/completions", json=body(number)) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    tokens += [token for choice in event["choices"] for token in choice.get("token_ids") or []]
        return tokens

    async with httpx.AsyncClient(timeout=SECONDS) as client:
        streams = [asyncio.create_task(stream(client, number)) for number in numbers]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(act)
        return await asyncio.gather(*streams)


def kill_engine(server: ServerProcess) -> None:
    pid = engine_of(server.process.pid)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def stop_engine(server: ServerProcess) -> None:
    pid = engine_of(server.process.pid)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # until the supervisor kills it


def attack_rank(how: signal.Signals) -> Callable[[ServerProcess], None]:
    """The last one; of an engine of one process that process."""

    def act(server: ServerProcess) -> None:
        pid = engine_of(server.process.pid)
        assert pid is not None
        os.kill(max([pid, *children(pid)]), how)

    return act


def stop_all(server: ServerProcess) -> None:
    """Everything of a server, for a while."""
    pids = session(server.process.pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


TROUBLES: dict[str, tuple[str, Callable[[ServerProcess], None]]] = {
    "none": ("prefill", lambda server: None),
    "the prefill engine is killed": ("prefill", kill_engine),
    "the decode engine is killed": ("decode", kill_engine),
    "the prefill engine is stopped": ("prefill", stop_engine),
    "the decode engine is stopped": ("decode", stop_engine),
    "a prefill rank is killed": ("prefill", attack_rank(signal.SIGKILL)),
    "a decode rank is killed": ("decode", attack_rank(signal.SIGKILL)),
    "a prefill rank is stopped": ("prefill", attack_rank(signal.SIGSTOP)),
    "a decode rank is stopped": ("decode", attack_rank(signal.SIGSTOP)),
    "the prefill server is stopped": ("prefill", stop_all),
    "the decode server is stopped": ("decode", stop_all),
}


@pytest.mark.slow
@needs_float_kernels
def test_engines_that_are_killed_change_no_stream(tmp_path: Path) -> None:
    """Two of the troubles of the test after this one, in processes that are forked."""
    command = [sys.executable, "-m", "tests.server.prefill_attacks", str(tmp_path)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.nightly
@pytest.mark.parametrize("trouble", TROUBLES)
def test_streams_have_the_tokens_of_one_server_and_nothing_is_held_later(trouble: str, servers: Servers) -> None:
    first = list(TROUBLES).index(trouble) * NUM_EACH
    numbers = range(first, first + NUM_EACH)
    expected = asyncio.run(answers(servers.one.url, numbers))
    name, act = TROUBLES[trouble]
    if "rank" in trouble and servers.num_ranks == 1:
        pytest.skip("an engine of one process has no ranks")
    received = servers.metric(servers.decode, "octavo_kv_transfer_received_blocks_total")
    found = asyncio.run(answers(servers.proxy.url, numbers, lambda: act(getattr(servers, name))))
    assert found == expected
    assert all(len(tokens) == 40 for tokens in found)
    if trouble == "none":
        num_blocks = sum((len(body(number)["prompt"]) - 1) // 32 for number in numbers)
        assert servers.metric(servers.decode, "octavo_kv_transfer_received_blocks_total") - received == num_blocks
        assert servers.metric(servers.decode, "octavo_kv_transfer_failures_total") == 0
    for server in (servers.prefill, servers.decode):
        server.wait_ready(SECONDS)
        deadline = time.monotonic() + SECONDS
        while any(servers.metric(server, name) for name in ("octavo_kv_transfer_held", "inferengine_kv_used_pages")):
            assert time.monotonic() < deadline, "blocks are held though no one waits for them"
            time.sleep(0.1)
