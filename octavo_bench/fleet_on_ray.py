"""Compares routers on a local Ray cluster, and with what the simulator predicts.

Run ``python -m octavo_bench.fleet_on_ray`` where ``octavo[ray]`` is installed. Each router gets a fresh fleet. The
simulator gets the same conversations, and a cost model fitted to the steps of all engines (``--step-log``).

The conversations are of known token ids. Each client holds one at a time: a prompt of its own, then turns that repeat
all before them and add a few tokens. It waits for the answer, and a pause, before the next turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from octavo.config import CacheSettings, SchedulerSettings
from octavo_bench.http_client import HttpClient, TimedAnswer
from octavo_bench.serve_load import Load, Prompts, apply
from octavo_fleet.sim.fitted import fit, read_log
from octavo_fleet.sim.jobs import Awaits, Job
from octavo_fleet.sim.replica import ReplicaSizes
from octavo_fleet.sim.report import LatencyTargets
from octavo_fleet.sim.simulate import Fleet, Simulation


@dataclass(frozen=True)
class ConversationShape:
    """Lengths in tokens, the pause in seconds."""

    num_clients: int = 18
    conversations_each: int = 2
    turns: int = 5
    first: int = 400
    more: int = 48
    answer: int = 24
    pause: float = 4.0
    vocab_size: int = 20_000
    """Prompts are drawn from the tokens below this, without the first few, which are special in many models."""


async def converse(url: str, model: str, shape: ConversationShape, seed: int = 0) -> tuple[list[TimedAnswer], float]:
    """Hold all conversations over HTTP; returns the answers, and the seconds that they took."""
    prompts = Prompts("completions", model, shape.vocab_size, {}, salt=str(seed))
    client = HttpClient(url, "completions", None, timeout=600)

    async def asked(job: Job, told: dict[int, TimedAnswer]) -> TimedAnswer:
        answer = await client.ask(prompts.body(job, told))
        if answer.error is None and answer.num_output != job.output_len:
            answer.error = f"{answer.num_output} of {job.output_len} tokens"
        return answer

    try:
        starts = Load(rate=math.inf)  # the conversations have their own
        return await apply(starts, Conversations(shape, seed), asked)
    finally:
        client.close()


class Conversations:
    """The conversations as a workload, of the simulator and over HTTP."""

    awaits: Awaits = "session"

    def __init__(self, shape: ConversationShape, seed: int = 0) -> None:
        self.shape = shape
        self._rng = random.Random(seed)
        self._next_text = 1
        self._starts = sorted((self._rng.random() * shape.pause for _ in range(shape.num_clients)), reverse=True)
        self._turns_left: dict[int, int] = {}
        """Turns to come of each client, over all its conversations."""

    def _text(self, length: int) -> tuple[int, int]:
        self._next_text += 1
        return self._next_text, length

    def next_job(self) -> Job | None:
        """The first turn of the next client."""
        if not self._starts:
            return None
        client = len(self._turns_left) + 1
        self._turns_left[client] = self.shape.turns * self.shape.conversations_each - 1
        return self._job(self._starts.pop(), client, ())

    def after(self, job: Job, now: float) -> Job | None:
        """The client's next turn, which after the last one of a conversation begins another."""
        left = self._turns_left[job.session]
        if not left:
            return None
        self._turns_left[job.session] -= 1
        is_new = left % self.shape.turns == 0
        before = () if is_new else (*job.prompt, (job.output_token, job.output_len), self._text(self.shape.more))
        return self._job(now + self.shape.pause, job.session, before)

    def _job(self, arrival: float, client: int, prompt: tuple[tuple[int, int], ...]) -> Job:
        made, left = prompt or (self._text(self.shape.first),), self._turns_left[client]
        return Job(arrival, made, self.shape.answer, self._text(0)[0], session=client, turns_left=left)


ROUTERS = ("prefix-aware", "round-robin", "random")
MODEL = "smollm2-135m"
SIZES = {"block_size": 16, "num_kv_blocks": 4096, "max_num_seqs": 16, "max_num_batched_tokens": 256}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=1, help="fleets per router; routers take turns")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--ray-dir", default=None, help="folder of Ray's sockets and logs")
    args = parser.parse_args()
    shape = ConversationShape()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps.jsonl"
        rows = measure_all(args, shape, log)
        cost = fit(*read_log(log))
    sizes = ReplicaSizes(
        SIZES["num_kv_blocks"], SIZES["block_size"], SIZES["max_num_seqs"], SIZES["max_num_batched_tokens"], 1
    )
    for router in ROUTERS:
        fleet = Fleet(cost, sizes, args.replicas, 1, router, CacheSettings(), SchedulerSettings())
        rows[router]["simulated"] = _simulated(fleet, shape)
    text = json.dumps({"shape": shape.__dict__, "replicas": args.replicas, "routers": rows}, indent=1)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n")


def measure_all(args: argparse.Namespace, shape: ConversationShape, log: Path) -> dict[str, dict[str, Any]]:
    """The figures of each router, measured."""
    import ray
    from ray import serve

    from octavo_fleet.ray import build_app

    ray.init(
        num_cpus=args.replicas + 2,
        object_store_memory=300 << 20,
        include_dashboard=False,
        logging_level="warning",
        log_to_driver=False,
        _temp_dir=args.ray_dir,
    )
    rows: dict[str, dict[str, Any]] = {router: {"runs": []} for router in ROUTERS}
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": args.port})
        for number in range(args.rounds):
            for router in ROUTERS:
                sizes = {"min_replicas": args.replicas, "max_replicas": args.replicas, "router": router, **SIZES}
                app = build_app({"model": MODEL, "step_log": str(log), "log_level": "warning", **sizes})
                serve.run(app, name="octavo", route_prefix="/")
                rows[router]["runs"].append(_measure(f"http://127.0.0.1:{args.port}", shape, number))
                print(router, rows[router]["runs"][-1], flush=True)
                serve.delete("octavo")
    finally:
        serve.shutdown()
        ray.shutdown()
    return rows


def _measure(url: str, shape: ConversationShape, seed: int) -> dict[str, float]:
    asyncio.run(converse(url, MODEL, ConversationShape(num_clients=6, conversations_each=1, turns=2), 99))  # warms up
    before = _prefix_counters(url)
    answers, seconds = asyncio.run(converse(url, MODEL, shape, seed))
    after = _prefix_counters(url)
    ttft = [answer.ttft for answer in answers if answer.times]
    centiles = statistics.quantiles(ttft, n=100)
    return {
        "hit_rate": round((after[1] - before[1]) / (after[0] - before[0]), 4),
        "ttft_p50": round(centiles[49], 4),
        "ttft_p90": round(centiles[89], 4),
        "ttft_mean": round(statistics.fmean(ttft), 4),
        "seconds": round(seconds, 2),
        "requests": len(ttft),
        "failed": sum(answer.error is not None for answer in answers),
    }


def _prefix_counters(url: str) -> tuple[int, int]:
    stats = httpx.get(f"{url}/stats", trust_env=False).json()
    return stats["prefix_queries"], stats["prefix_hits"]


def _simulated(fleet: Fleet, shape: ConversationShape) -> dict[str, float]:
    figures = Simulation(fleet, Conversations(shape), LatencyTargets()).run()
    ttft = figures["ttft"]
    return {
        "hit_rate": round(figures["prefix_hit_rate"], 4),
        "ttft_p50": round(ttft["p50"], 4),
        "ttft_p90": round(ttft["p90"], 4),
        "ttft_mean": round(ttft["mean"], 4),
        "seconds": round(figures["seconds"], 2),
    }


if __name__ == "__main__":
    main()
