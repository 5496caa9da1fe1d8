"""`octavo simulate --search` beside a fleet that runs: toy engines with the real scheduler, in real time, each in a
thread, whose steps take what a clock says."""

from __future__ import annotations

import heapq
import json
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.cache.kv_cache import KVCache
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo_bench.serving.paced_engine import PacedRunner
from octavo_fleet.routing.routers import make_router
from octavo_fleet.sim.client_metrics import LatencyTargets
from octavo_fleet.sim.jobs import Job
from octavo_fleet.sim.replica import Arrival
from octavo_fleet.sim.search import FoundConfig, cheapest
from octavo_fleet.sim.setup import SimulationSpec

STEP = 0.04
SETTINGS = {"max_num_seqs": 8, "max_num_batched_tokens": 4096, "num_kv_blocks": 4096, "block_size": 16}
TARGETS = LatencyTargets(ttft=0.4, itl=0.06)


class RealReplica(threading.Thread):
    """An engine that serves what it is given as it comes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        scheduler = Scheduler(
            KVCache(SETTINGS["num_kv_blocks"], SETTINGS["block_size"]),
            max_num_seqs=SETTINGS["max_num_seqs"],
            max_num_batched_tokens=SETTINGS["max_num_batched_tokens"],
        )
        self.engine = Engine(scheduler, PacedRunner(STEP), depth=1)
        self.coming: deque[tuple[int, Job]] = deque()
        self.live: dict[int, list[float]] = {}
        """Times of arrival, first and last token, of unfinished requests."""
        self.done: deque[tuple[int, list[float]]] = deque()
        self.is_over = False

    @property
    def num_live(self) -> int:
        return len(self.live)

    def send(self, number: int, job: Job) -> None:
        self.live[number] = [time.monotonic()]
        self.coming.append((number, job))

    def run(self) -> None:
        while not self.is_over:
            while self.coming:
                number, job = self.coming.popleft()
                self.engine.add(job.request(number, self.live[number][0], job.tokens()))
            if not self.engine.has_work:
                time.sleep(0.001)
                continue
            outputs = self.engine.step()
            now = time.monotonic()
            for output in outputs:
                times = self.live[output.request_id]
                times[1:] = [times[1] if len(times) > 1 else now, now]
                if output.finish_reason is not None:
                    self.done.append((output.request_id, self.live.pop(output.request_id)))


def serve(found: FoundConfig) -> dict[str, float]:
    """The figures of as many engines as were found, under the load of the search."""
    spec, router = found.spec, make_router(found.spec.router)
    replicas = [RealReplica() for _ in range(spec.replicas)]
    for replica in replicas:
        replica.start()
    workload, sent, due = spec.clients(), dict[int, Job](), list[tuple[float, int, Job]]()
    finished: dict[int, list[float]] = {}
    start, number, coming = time.monotonic(), 0, workload.next_job()
    while coming is not None or due or len(finished) < len(sent):
        now = time.monotonic() - start
        while coming is not None and coming.arrival <= now:
            heapq.heappush(due, (coming.arrival, -number, coming))
            number, coming = number + 1, workload.next_job()
        while due and due[0][0] <= now:
            job = heapq.heappop(due)[2]
            if job.is_past:
                _follow(workload, job, now, due)
                continue
            number += 1
            sent[number] = job
            router.choose(Arrival(job), replicas).send(number, job)
        for replica in replicas:
            while replica.done:
                request, times = replica.done.popleft()
                finished[request] = times
                _follow(workload, sent[request], times[-1] - start, due)
        time.sleep(0.001)
    for replica in replicas:
        replica.is_over = True
    assert spec.rate is not None
    settled = start + spec.num_requests / 4 / spec.rate
    own = [(times, sent[request].output_len) for request, times in finished.items() if times[0] >= settled]
    ttft = np.array([times[1] - times[0] for times, _ in own])
    tpot = np.array([(times[2] - times[1]) / max(1, count - 1) for times, count in own])
    return {
        "offered_per_second": len(sent) / (max(times[0] for times in finished.values()) - start),
        "ttft": float(ttft.mean()),
        "tpot": float(tpot.mean()),
        "good_share": float(np.mean((ttft <= TARGETS.ttft) & (tpot <= TARGETS.itl))),
    }


def _follow(workload: Any, job: Job, now: float, due: list[tuple[float, int, Job]]) -> None:
    following = workload.after(job, now)
    if following is not None:
        heapq.heappush(due, (following.arrival, following.session * 1000 + following.turns_left, following))


@pytest.mark.timing
@pytest.mark.parametrize(("workload", "rate"), [("single", 10.0), ("multi-turn", 20.0), ("multi-turn", 40.0)])
def test_a_fleet_that_was_found_does_what_was_predicted(workload: str, rate: float, tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    steps = [
        {"tokens": n, "rows": 1 + n % 8, "context": 50 * n, "pairs": 50 * n, "seconds": STEP} for n in range(1, 400)
    ]
    log.write_text("\n".join(map(json.dumps, steps)))
    spec = SimulationSpec(
        "llama-3.2-1b", "h200", workload, 100, rate, input_len=128, output_len=24, depth=1, cost_log=log
    )
    found, *_ = cheapest(spec, EngineConfig.from_flat(SETTINGS), TARGETS, 0.95, parallel=(1,), step_tokens=(4096,))
    real = serve(found)
    predicted = {**found.figures, **{name: found.figures[name]["mean"] for name in ("ttft", "tpot")}}
    print(f"{workload} {rate:g}/s: {found.spec.replicas} replicas")
    for name, value in real.items():
        print(f"  {name}: predicted {predicted[name]:.3f}, real {value:.3f}")
        assert value == pytest.approx(predicted[name], rel=0.1), name
