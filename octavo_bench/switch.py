"""Several models on one port under a bound of memory: whether the answers are right, and what a switch costs.

Each model is first served alone, and its answers are kept. Then one server has all models, and the same requests in
random order, so that models sleep and wake. Answers are greedy, and on a CPU independent of the batch, so they must be
equal. At last, with nothing else to do, every model is asked once while it sleeps and once more while it is awake.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from octavo_bench.chaos.tiny_model import write_tiny_model
from octavo_bench.dummy_models import write_weights
from octavo_bench.front import text_of
from octavo_bench.report import spread
from octavo_bench.server_process import ServerProcess, serve_octavo

TIMEOUT = 300.0
SAMPLE_SECONDS = 0.05


class SwitchRequest(NamedTuple):
    """One request: to embed a text, or to continue it by so many tokens."""

    text: str
    num_tokens: int


def run(
    models: Sequence[str],
    kv_cache_memory: float,
    models_memory_budget: float,
    requests: int,
    concurrency: int,
    rounds: int,
) -> dict[str, Any]:
    """``measure`` for models as for ``octavo serve``, of which "tiny" is a random one."""
    with tempfile.TemporaryDirectory() as folder:
        tiny = write_tiny_model(Path(folder) / "tiny")
        write_weights(tiny)
        named = [str(tiny) if model == "tiny" else model for model in models]
        flags = ["--kv-cache-memory", str(kv_cache_memory), "--enable-sleep-mode", "--quiet"]
        return measure(named, flags, models_memory_budget, requests, concurrency, rounds)


def measure(
    models: Sequence[str], flags: Sequence[str], budget: float, count: int, at_once: int, rounds: int
) -> dict[str, Any]:
    """Send ``count`` requests, ``at_once`` at a time, to ``models`` under a bound of ``budget`` GiB; see above."""
    names, alone = [], dict[str, list[Any]]()
    draw = random.Random(5)
    asked = [
        SwitchRequest(text_of(draw.randint(10, 200), draw), draw.randint(4, 24))
        for _ in range(-(-count // len(models)))
    ]
    for model in models:
        with serve_octavo(model, *flags) as server, _Client(server) as client:
            (name,) = client.generates
            names.append(name)
            alone[name] = _all(client, [(name, each) for each in asked], at_once)[0]
    with serve_octavo(*models, *flags, "--models-memory-budget", str(budget)) as server, _Client(server) as client:
        mixed = [(name, number) for name in names for number in range(len(asked))]
        draw.shuffle(mixed)
        mixed = mixed[:count]
        with _Watch(client, names) as watch:
            began = time.perf_counter()
            answers, seconds = _all(client, [(name, asked[number]) for name, number in mixed], at_once)
            took = time.perf_counter() - began
        right = sum(answer == alone[name][number] for answer, (name, number) in zip(answers, mixed, strict=True))
        rows = [_switch_times(client, names, name, watch.sizes[name], asked[0], rounds) for name in names]
    return {
        "requests": len(mixed),
        "right": right,
        "at_once": at_once,
        "seconds": round(took, 1),
        "slowest_answer_s": round(max(seconds), 2),
        "budget_gib": budget,
        "most_reserved_gib": round(watch.most_reserved / 2**30, 3),
        "most_resident_gib": round(watch.most_resident / 2**30, 3),
        "all_models_gib": round(sum(watch.sizes.values()) / 2**30, 3),
        "switches": watch.num_switches,
        "rows": rows,
    }


class _Client:
    """Asks a server, once it is ready; models that cannot generate are asked for vectors."""

    def __init__(self, server: ServerProcess) -> None:
        server.wait_ready()
        self.http = httpx.Client(base_url=server.url, timeout=TIMEOUT)
        listed = self.http.get("/v1/models").raise_for_status().json()["data"]
        self.generates = {each["id"]: self._can_generate(each["id"]) for each in listed}
        """Whether each model can generate."""

    def _can_generate(self, name: str) -> bool:
        shown = self.http.post("/api/show", json={"model": name}).raise_for_status().json()
        return "completion" in shown["capabilities"]

    def ask(self, name: str, asked: SwitchRequest) -> Any:
        if self.generates[name]:
            body = {"model": name, "prompt": asked.text, "max_tokens": asked.num_tokens, "temperature": 0}
            found = self.http.post("/v1/completions", json={**body, "return_token_ids": True})
            return found.raise_for_status().json()["choices"][0]["token_ids"]
        found = self.http.post("/v1/embeddings", json={"model": name, "input": asked.text})
        return found.raise_for_status().json()["data"][0]["embedding"]

    def stats(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/stats", params={"model": name}).raise_for_status().json()
        return found

    def __enter__(self) -> _Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()


def _all(client: _Client, requests: Sequence[tuple[str, SwitchRequest]], at_once: int) -> tuple[list[Any], list[float]]:
    """The answers, and the seconds that each took."""

    def ask(request: tuple[str, SwitchRequest]) -> tuple[Any, float]:
        began = time.perf_counter()
        answer = client.ask(*request)
        return answer, time.perf_counter() - began

    with ThreadPoolExecutor(at_once) as pool:
        answers, seconds = zip(*pool.map(ask, requests), strict=True)
    return list(answers), list(seconds)


class _Watch:
    """Notes which engine processes run, and what they reserve and hold."""

    def __init__(self, client: _Client, names: Sequence[str]) -> None:
        self.sizes = {name: sum(client.stats(name)["memory"].values()) for name in names}
        self.most_reserved = self.most_resident = self.num_switches = 0
        self._client, self._names = client, names
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        seen: set[int] = set()
        while not self._ends.wait(SAMPLE_SECONDS):
            pids = {name: self._client.stats(name)["engine_pid"] for name in self._names}
            running = {name: resident_bytes(pid) for name, pid in pids.items() if pid is not None}
            running = {name: size for name, size in running.items() if size}
            self.most_reserved = max(self.most_reserved, sum(self.sizes[name] for name in running))
            self.most_resident = max(self.most_resident, sum(running.values()))
            new = {pid for pid in pids.values() if pid is not None} - seen
            self.num_switches += len(new) if seen else 0
            seen |= new

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()


def resident_bytes(pid: int) -> int:
    """Memory of a process, with its share of what several processes map; 0 if there is none."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def _switch_times(
    client: _Client, names: Sequence[str], name: str, size: int, asked: SwitchRequest, rounds: int
) -> dict[str, Any]:
    """Seconds to an answer of one token while the model sleeps and another must make room, and while it is awake."""
    one, others = SwitchRequest(asked.text, 1), [other for other in names if other != name]
    sleep, asleep, awake = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        client.ask(name, one)
        began = time.perf_counter()
        client.http.post("/sleep", params={"model": name}).raise_for_status()
        sleep.append(time.perf_counter() - began)
        for other in others:
            client.ask(other, one)
        for times in (asleep, awake):
            began = time.perf_counter()
            client.ask(name, one)
            times.append(time.perf_counter() - began)
    figures = {"answer_asleep": spread(asleep), "answer_awake": spread(awake), "fall_asleep": spread(sleep)}
    return {"model": name, "gib": round(size / 2**30, 3), **figures}
