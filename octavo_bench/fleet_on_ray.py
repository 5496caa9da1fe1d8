"""Compares routers on a local Ray cluster, and with what the simulator predicts.

Run ``python -m octavo_bench.fleet_on_ray`` where ``octavo[ray]`` is installed. Each router gets a fresh fleet. The
simulator gets the same conversations, and a cost model fitted to the steps of all engines (``--step-log``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import httpx

from octavo.config import CacheSettings, SchedulerSettings
from octavo_bench.conversations import Conversations, ConversationShape, ConversationTimes, converse
from octavo_fleet.sim.fitted import fit, read_log
from octavo_fleet.sim.replica import ReplicaSizes
from octavo_fleet.sim.report import LatencyTargets
from octavo_fleet.sim.simulate import Fleet, Simulation

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
    measured: ConversationTimes = asyncio.run(converse(url, MODEL, shape, seed))
    after = _prefix_counters(url)
    centiles = statistics.quantiles(measured.ttft, n=100)
    return {
        "hit_rate": round((after[1] - before[1]) / (after[0] - before[0]), 4),
        "ttft_p50": round(centiles[49], 4),
        "ttft_p90": round(centiles[89], 4),
        "ttft_mean": round(statistics.fmean(measured.ttft), 4),
        "seconds": round(measured.seconds, 2),
        "requests": len(measured.ttft),
        "failed": measured.num_failed,
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
