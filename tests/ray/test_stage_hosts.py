"""An engine whose hosts Ray places, on several nodes of a cluster on this machine. Skipped where Ray is not installed.

pip install 'octavo[ray]' && pytest tests/ray
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")
serve = pytest.importorskip("ray.serve")

from octavo.config import EngineConfig, ServeConfig  # noqa: E402
from octavo.errors import ConfigError  # noqa: E402
from octavo.llm import LLM  # noqa: E402
from octavo.sampling_params import SamplingParams  # noqa: E402
from octavo.types import Request  # noqa: E402
from octavo_fleet.ray import build_app, stage_hosts  # noqa: E402
from octavo_fleet.ray.stage_hosts import placed_hosts  # noqa: E402
from octavo_server.engines.async_engine import AsyncEngine  # noqa: E402
from tests.llm.tiny import write_checkpoint  # noqa: E402
from tests.ops.cpu_cases import needs_float_kernels  # noqa: E402
from tests.server.child_engine import Recorder, until  # noqa: E402
from tests.server.rank_attacks import SECONDS, are_gone, finish, running  # noqa: E402
from tests.server.test_nodes import free_port  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs_float_kernels]

SIZES = {"load_format": "dummy", "dtype": "float32", "num_kv_blocks": 400, "block_size": 16}
PLACED = {"device": "cpu", "pipeline_parallel_size": 2, "nnodes": 2, "distributed_executor_backend": "ray"}
NUM_STREAMS = 12


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of two CPUs each, of which an engine takes one of each; this process is a driver of the first."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="octavo-ray-") as folder:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_TMPDIR", folder)  # short: Ray's sockets are in it
        (Path(folder) / "ray").mkdir()
        made = cluster_utils.Cluster()
        add_node(made)
        add_node(made)
        patch.setenv("RAY_ADDRESS", made.address)
        ray.init(made.address, log_to_driver=False)
        try:
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


def add_node(cluster: Any) -> None:
    cluster.add_node(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def of_cluster(name: str) -> list[psutil.Process]:
    """Processes of the cluster, which are this one's, in whose command ``name`` is."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [process] if name in " ".join(process.cmdline()) else []
    return found


def stage_host() -> psutil.Process:
    [host] = of_cluster("ray::StageHost")
    return host


def num_groups() -> int:
    return sum(group["state"] != "REMOVED" for group in ray.util.placement_group_table().values())


def wait_for(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def nothing_is_left() -> bool:
    return not of_cluster("ray::StageHost") and not of_cluster("octavo.rank_process") and num_groups() == 0


def send_all(engine: AsyncEngine) -> list[Recorder]:
    """Requests of mixed lengths."""
    rng, recorders = random.Random(3), []
    for number in range(NUM_STREAMS):
        recorders.append(recorder := Recorder())
        params = SamplingParams(temperature=0.9 * (number % 2), seed=number, ignore_eos=True)
        prompt = rng.choices(range(256), k=rng.choice([1, 7, 20, 150]))
        engine.add(Request(engine.next_id(), prompt, params, rng.choice([1, 30, 100]), number), recorder)
    return recorders


def kill_nodes() -> None:
    """End all nodes but the first, as if their machines were switched off."""
    for raylet in of_cluster("/raylet/raylet "):
        if "--head" not in raylet.cmdline():
            for process in (raylet, *raylet.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def attack(engine: AsyncEngine, whom: str) -> None:
    host = stage_host()
    if whom == "node":
        kill_nodes()
    elif whom == "engine":
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
    else:
        [rank] = host.children()
        (rank if whom == "rank" else host).kill()


def test_without_a_cluster(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where Ray notes which cluster is the last one of this machine
    named = "distributed_executor_backend: there is no cluster of Ray here"
    with pytest.raises(ConfigError, match=named), placed_hosts(EngineConfig.from_flat({**PLACED, "model": str(model)})):
        pass


def test_hosts_on_ray_give_the_tokens_of_one_process_whatever_is_killed(cluster: Any, model: Path) -> None:
    one = ServeConfig.from_flat({**SIZES, "device": "cpu", "model": str(model)})
    placed = ServeConfig.from_flat({**SIZES, **PLACED, "model": str(model)})

    async def main() -> None:
        async with running(one) as engine:
            expected = await finish(send_all(engine))
        async with running(placed) as engine:
            began = time.monotonic()
            assert await finish(send_all(engine)) == expected
            undisturbed = time.monotonic() - began
            assert num_groups() == 1
            for whom in ("host", "rank", "engine", "node"):
                recorders = send_all(engine)
                await until(lambda sent=recorders: sum(bool(each.tokens) for each in sent) > 3, SECONDS)
                began, before = time.monotonic(), engine.num_restarts
                attack(engine, whom)
                if whom == "node":
                    add_node(cluster)  # which takes its place
                assert await finish(recorders) == expected
                assert engine.num_restarts > before
                print(f"{whom}: {time.monotonic() - began:.1f} s instead of {undisturbed:.1f}")
                await until(lambda: engine.is_ready, SECONDS)
                assert num_groups() == 1
            assert engine.metrics.poison_requests == 0

    asyncio.run(main())
    wait_for(nothing_is_left)


def test_a_killed_server_leaves_nothing_behind(cluster: Any, model: Path) -> None:
    port = free_port()
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**SIZES, **PLACED, "port": port}.items()]
    server = psutil.Popen([sys.executable, "-m", "octavo", "serve", str(model), *flags])

    def is_ready() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False).is_success
        return False

    try:
        wait_for(is_ready)
        pids = [process.pid for process in (*server.children(recursive=True), stage_host(), *stage_host().children())]
    finally:
        server.kill()
        server.wait()
    assert asyncio.run(are_gone(pids))
    wait_for(nothing_is_left, 20)


def test_what_is_missing_is_named(cluster: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_hosts, "PLACE_SECONDS", 0.5)
    config = EngineConfig.from_flat({**PLACED, "model": str(model), "pipeline_parallel_size": 4, "nnodes": 4})
    named = r"nnodes: within 0.5 s, Ray has not found 4 nodes with 1 free CPUs each.*\(2 CPUs\).* CPUs are free"
    with pytest.raises(ConfigError, match=named), placed_hosts(config):
        pass
    wait_for(nothing_is_left, 20)


def test_a_host_that_cannot_compute_says_why(cluster: Any) -> None:
    config = EngineConfig.from_flat({**PLACED, "model": "/not/here"})
    with placed_hosts(config) as (_, check), pytest.raises(ConfigError, match="host 1: model: '/not/here'"):
        wait_for(lambda: bool(check()), 60)
    wait_for(nothing_is_left, 20)


def test_hosts_of_an_llm_end_with_it(cluster: Any, model: Path) -> None:
    prompts = ["a", "hosts " * 20]

    def texts(settings: dict[str, Any]) -> list[str]:
        with LLM(model, **{**SIZES, "device": "cpu", **settings}) as llm:
            return [answer.outputs[0].text for answer in llm.generate(prompts, SamplingParams(temperature=0))]

    assert texts(PLACED) == texts({})
    gc.collect()
    wait_for(nothing_is_left, 20)


def test_replicas_of_ray_serve_have_hosts_of_their_own(cluster: Any, model: Path) -> None:
    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    kill_nodes()  # so that the HTTP server is on the first one, as nothing outlives its end
    settings = {**SIZES, "model": str(model), "served_model_name": "tiny", "device": "cpu"}
    body = {"model": "tiny", "prompt": "hosts", "max_tokens": 200, "seed": 5, "ignore_eos": True, "stream": True}

    def answer(meanwhile: Callable[[], object] = lambda: None) -> str:
        """The text of a stream, in which something is done after the first token."""
        text, url = "", f"http://127.0.0.1:{port}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=SECONDS, trust_env=False) as response:
            for line in (line for line in response.iter_lines() if line.startswith("data: ")):
                if line == "data: [DONE]":
                    return text
                if not text:
                    meanwhile()
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        raise AssertionError(f"the stream ended after {text!r}")

    try:
        serve.run(build_app(settings), name="octavo", route_prefix="/")
        expected = answer()
        serve.delete("octavo")
        with ThreadPoolExecutor(1) as threads:
            app = build_app({**settings, "pipeline_parallel_size": "2", "nnodes": "2"})
            deployed = threads.submit(serve.run, app, name="octavo", route_prefix="/")
            wait_for(lambda: bool(of_cluster("ServeReplica:octavo:Ingress")))
            add_node(cluster)
            deployed.result()
        assert answer() == expected
        for kill in (
            lambda: stage_host().kill(),
            lambda: of_cluster("ServeReplica:octavo:Engine")[0].kill(),
            lambda: (kill_nodes(), add_node(cluster)),
        ):
            began = time.monotonic()
            assert answer(kill) == expected
            print(f"{time.monotonic() - began:.1f} s")
        assert num_groups() == 1
    finally:
        serve.shutdown()
    wait_for(nothing_is_left, 60)
