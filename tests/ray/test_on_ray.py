"""A fleet on a real local Ray cluster, with a tiny model. Skipped where Ray is not installed: it is too heavy for CI.

pip install 'octavo[ray]' && pytest tests/ray
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

from octavo_fleet.ray import build_app  # noqa: E402
from tests.models.families import make_checkpoint  # noqa: E402
from tests.ray.conversations import ConversationShape, converse  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = {"served_model_name": "tiny", "log_level": "warning", "max_num_seqs": 16, "num_kv_blocks": 512}


class Fleet:
    """An application on a running cluster."""

    def __init__(self, model: Path, port: int, folder: str) -> None:
        self.model, self.port, self.folder = model, port, folder
        self.url = f"http://127.0.0.1:{port}"

    def deploy(self, **arguments: Any) -> None:
        serve.run(build_app({"model": str(self.model), **SETTINGS, **arguments}), name="octavo", route_prefix="/")

    def num_replicas(self) -> int:
        states = serve.status().applications["octavo"].deployments["Engine"].replica_states
        return int(states.get("RUNNING", 0))

    def engine_pids(self) -> list[int]:
        """The replicas of this cluster, and of no other that may run on this machine."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if "ServeReplica:octavo:Engine" in " ".join(process.info["cmdline"] or []):
                parents = [" ".join(parent.cmdline()) for parent in process.parents()]
                if any(self.folder in line for line in parents):
                    found.append(process.pid)
        return found


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model = tmp_path_factory.mktemp("tiny")
    make_checkpoint(model, "llama/gqa", max_position_embeddings=4096)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="octavo-ray-") as folder:  # short: Ray's sockets are in it
        ray.init(
            num_cpus=6,
            object_store_memory=200 << 20,
            include_dashboard=False,
            logging_level="error",
            log_to_driver=False,
            _temp_dir=folder,
        )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield Fleet(model, port, folder)
        finally:
            serve.shutdown()
            ray.shutdown()


async def stream(client: httpx.AsyncClient, number: int, max_tokens: int, progress: list[int] | None = None) -> str:
    """The tokens of a sampled answer."""
    prompt = [3 + (number * 7 + index) % 90 for index in range(20)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "seed": number, "temperature": 0.9}
    body |= {"stream": True, "ignore_eos": True}
    text = ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                assert '"error"' not in line, line
                data = line[6:]
                start = data.find('"token_ids":')
                if start >= 0:
                    text += data[start + 13 : data.index("]", start)] + ","
                    if progress is not None:
                        progress[number] += 1
                elif data == "[DONE]":
                    return text
    raise AssertionError("no end")


def client(fleet: Fleet) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=200)
    return httpx.AsyncClient(base_url=fleet.url, timeout=300, trust_env=False, verify=False, limits=limits)


def test_a_replica_killed_under_32_streams_loses_nothing(fleet: Fleet) -> None:
    fleet.deploy(min_replicas=2, max_replicas=2)

    async def run(kill: bool) -> list[str]:
        progress = [0] * 32
        async with client(fleet) as http:
            tasks = [asyncio.create_task(stream(http, number, 400, progress)) for number in range(32)]
            if kill:
                while min(progress) < 5:
                    assert not any(task.done() for task in tasks)
                    await asyncio.sleep(0.005)
                pids = fleet.engine_pids()
                assert len(pids) == 2
                os.kill(pids[0], signal.SIGKILL)
            return await asyncio.gather(*tasks)

    plain = asyncio.run(run(kill=False))
    assert all(len(text.split(",")) == 401 for text in plain)
    killed = asyncio.run(run(kill=True))
    assert killed == plain
    stats = httpx.get(f"{fleet.url}/metrics", trust_env=False).text
    replays = [line for line in stats.splitlines() if line.startswith("octavo_requests_replayed_total{")]
    assert float(replays[0].split()[-1]) >= 8, "half of the streams were on the replica"
    deadline = time.monotonic() + 120
    while fleet.num_replicas() < 2:  # Ray replaces it
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_turns_of_a_conversation_go_where_their_prefix_is(fleet: Fleet) -> None:
    fleet.deploy(min_replicas=2, max_replicas=2, block_size=16)
    shape = ConversationShape(6, conversations_each=2, turns=4, first=200, more=20, answer=8, pause=0.3, vocab_size=97)
    answers, _ = asyncio.run(converse(fleet.url, "tiny", shape))
    assert [answer.error for answer in answers] == [None] * shape.num_clients * shape.conversations_each * shape.turns
    stats = httpx.get(f"{fleet.url}/stats", trust_env=False).json()
    lengths = [shape.first + turn * (shape.more + shape.answer) for turn in range(shape.turns)]
    most = sum(lengths[:-1]) / sum(lengths)  # all of the turn before
    assert stats["prefix_hits"] / stats["prefix_queries"] > 0.85 * most


def test_sessions_of_all_replicas_are_listed_and_forgotten(fleet: Fleet) -> None:
    fleet.deploy(min_replicas=2, max_replicas=2, block_size=16)
    with httpx.Client(base_url=fleet.url, timeout=300, trust_env=False, verify=False) as http:
        for number in range(6):
            body = {"model": "tiny", "prompt": [3 + number] * 40, "max_tokens": 4, "session_id": f"s{number}"}
            assert http.post("/v1/completions", json=body).status_code == 200

        def names() -> set[str]:
            return {session["id"] for session in http.get("/v1/sessions").json()["data"]}

        assert names() == {f"s{number}" for number in range(6)}
        for number in range(6):
            assert http.delete(f"/v1/sessions/s{number}").json()["deleted"]
        assert names() == set()


def test_scaling_up_and_down_under_load_fails_no_request(fleet: Fleet) -> None:
    fleet.deploy(min_replicas=1, max_replicas=3, target_ongoing_requests=4, upscale_delay_s=1, downscale_delay_s=2)
    seen = [fleet.num_replicas()]

    async def load(http: httpx.AsyncClient, number: int, is_over: asyncio.Event) -> int:
        count = 0
        while not is_over.is_set():
            await stream(http, number, 100)
            count += 1
        return count

    async def wait_for(count: int) -> None:
        deadline = time.monotonic() + 240
        while seen[-1] != count:
            assert time.monotonic() < deadline, seen
            await asyncio.sleep(0.5)
            now = await asyncio.to_thread(fleet.num_replicas)
            if now != seen[-1]:
                seen.append(now)

    async def main() -> list[int]:
        heavy, light = asyncio.Event(), asyncio.Event()
        async with client(fleet) as http:
            tasks = [asyncio.create_task(load(http, number, heavy)) for number in range(1, 17)]
            tasks.append(asyncio.create_task(load(http, 0, light)))
            await wait_for(3)
            heavy.set()
            await wait_for(1)
            light.set()
            return await asyncio.gather(*tasks)

    counts = asyncio.run(main())
    assert max(seen) == 3
    assert seen[-1] == 1
    assert min(counts) >= 1
