"""Octavo's server beside vLLM's, one after the other on one machine, both driven by vLLM's own client.

A *visit* starts one server, warms each workload up, and runs rounds of all workloads. Several visits in turn, such as
Octavo, vLLM, Octavo, show whether the machine drifted. Round number n of either engine has the same prompts.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo_bench.records.figure_table import meaning
from octavo_bench.records.gpu_watch import GpuWatch
from octavo_bench.records.report import portable_command
from octavo_bench.serving.goodput import LIMITS, SHARE, GoodputSearch, print_probe, search_server
from octavo_bench.serving.goodput import WORKLOAD as GOODPUT_WORKLOAD
from octavo_bench.serving.peer_process import Clients, share
from octavo_bench.serving.serve_load import ServeWork, Target
from octavo_bench.serving.server_process import READY_SECONDS, Server
from octavo_fleet.sim.closed_loops import WORKLOADS, ClosedLoopSpec, warm_up
from octavo_fleet.sim.closed_loops import named_workloads as named_loops

FIGURES = {
    "output_tok_s": "output_throughput",
    "total_tok_s": "total_token_throughput",
    "ttft_p50_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "itl_p50_ms": "median_itl_ms",
    "itl_p99_ms": "p99_itl_ms",
    "tpot_p50_ms": "median_tpot_ms",
    "tpot_p99_ms": "p99_tpot_ms",
}
"""Our names to those of the client's result."""
GOODPUT = "goodput"
"""The workload whose figure is the highest request rate within limits; all others are closed loops."""
GOODPUT_FIGURE = "goodput_requests_s"
ENERGY = "mj_per_token"
PATHS = "model_id", "tokenizer_id"
"""What the client tells of folders of this machine, which is not kept."""
STEADY_SECONDS = 7.0
"""Shortest run whose energy is told: power is read once a second, and a run's edges are not what it takes."""

RESERVE_SECONDS = 20.0
"""Least time left in which a run whose length is not known yet is started."""
WARM_UP_SEED = 1000


def client_arguments(load: ClosedLoopSpec, url: str, model: Path, seed: int) -> list[str]:
    """The arguments of ``vllm bench serve`` for one run: greedy, every request to its full length."""
    given: dict[str, object] = {
        "backend": "openai",
        "base-url": url,
        "endpoint": "/v1/completions",
        "model": model,
        "tokenizer": model,
        "served-model-name": model.name,
        "dataset-name": "random",
        "random-input-len": load.input_len,
        "random-output-len": load.output_len,
        "random-range-ratio": load.spread,
        "num-prompts": load.prompts,
        "max-concurrency": load.concurrency,
        "request-rate": "inf",
        "temperature": 0,
        "seed": seed,
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "metric-percentiles": "50,90,95,99",
    }
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    return [*flags, "--ignore-eos", "--disable-tqdm"]


@dataclass
class ServedComparison:
    """Visits of servers until ``deadline`` (``time.monotonic()``); ``keep`` is given the result after each run."""

    servers: Mapping[str, Server]
    clients: Clients | None
    """``vllm bench serve``, for closed loops."""
    model: Path
    workloads: Sequence[str]
    logs: Path
    deadline: float
    keep: Callable[[dict[str, Any]], object]
    probers: Clients | None = None
    """Clients of the search for goodput."""
    search: GoodputSearch = field(default_factory=lambda: GoodputSearch(LIMITS))
    visits: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    watch: GpuWatch = field(default_factory=GpuWatch)

    def visit(self, engine: str, rounds: int) -> None:
        """Start a server, warm up, measure, stop. What goes wrong is noted in the result; the next visit may go on."""
        self.alternate([engine], rounds)

    def alternate(self, engines: Sequence[str], rounds: int) -> None:
        """Visit several servers at once: all are started, one after the other, and then take turns in every round."""
        with contextlib.ExitStack() as running:
            engine = engines[0]
            try:
                urls = {}
                for engine in engines:
                    urls[engine] = self._start(engine, running)
                for engine in engines:
                    for name in self.workloads:
                        if name != GOODPUT:
                            self._run(warm_up(WORKLOADS[name]), urls[engine], WARM_UP_SEED)
                for _ in range(rounds):
                    for engine in engines:
                        self._round(engine, urls[engine])
            except ConfigError as error:
                next(note for note in reversed(self.visits) if note["engine"] == engine)["error"] = str(error)
                print(f"{engine}: {error}", file=sys.stderr)
        self.keep(self.result())

    def _start(self, engine: str, running: contextlib.ExitStack) -> str:
        """Start a server, which ends with ``running``; returns its URL when it is ready. Raises ``ConfigError``."""
        note: dict[str, Any] = {"engine": engine}
        self.visits.append(note)
        log = self.logs / f"server_{len(self.visits)}_{engine}.log"
        if self._left() < RESERVE_SECONDS:
            raise ConfigError("no time was left")
        process = self.servers[engine].start("--served-model-name", self.model.name, log=log)
        note["command"] = portable_command(running.enter_context(process).command)
        note["ready_s"] = round(process.wait_ready(min(READY_SECONDS, self._left())), 2)
        print(f"{engine}: ready after {note['ready_s']} s", file=sys.stderr)
        return process.url

    def _round(self, engine: str, url: str) -> None:
        number = 1 + max((run["round"] for run in self.runs if run["engine"] == engine), default=-1)
        for name in self.workloads:
            self._check_time(name, engine)
            start = time.monotonic()
            is_goodput = name == GOODPUT
            found = self._search(url, number) if is_goodput else self._run(WORKLOADS[name], url, number)
            place = {"engine": engine, "visit": len(self.visits), "workload": name, "round": number}
            self.runs.append({**place, "client": found, "gpu": self.watch.since(start)})
            told = {GOODPUT_FIGURE: GOODPUT_FIGURE} if is_goodput else FIGURES
            figures = " ".join(f"{ours}={found[theirs]:.2f}" for ours, theirs in told.items())
            print(f"{engine} {name} round {number}: {figures}", file=sys.stderr)
            self.keep(self.result())

    def _search(self, url: str, seed: int) -> dict[str, Any]:
        """The highest rate, and the rows of all rates that were tried."""
        assert self.probers is not None
        search = replace(self.search, seconds=min(self.search.seconds, self._left()))
        target = Target(url, model=self.model.name)
        found = search_server(target, ServeWork(GOODPUT_WORKLOAD, 0, seed=seed), search, self.probers, print_probe)
        return {**found, GOODPUT_FIGURE: found["highest"][0][GOODPUT_FIGURE], "duration": search.seconds}

    def _run(self, load: ClosedLoopSpec, url: str, seed: int) -> dict[str, Any]:
        assert self.clients is not None
        part, count = share(load, len(self.clients)), len(self.clients)
        arguments = [client_arguments(part, url, self.model, seed * count + number) for number in range(count)]
        found = self.clients.run(arguments, seconds=max(self._left(), 1.0))
        if found["completed"] != load.prompts:
            raise ConfigError(f"{found['completed']} of {load.prompts} requests were served: {found['first_errors']}")
        return {name: value for name, value in found.items() if name not in PATHS}

    def _check_time(self, workload: str, engine: str) -> None:
        mine = [run for run in self.runs if (run["workload"], run["engine"]) == (workload, engine)]
        least = 2 * self.search.whole_probe if workload == GOODPUT else RESERVE_SECONDS
        needed = max((run["client"]["duration"] for run in mine if workload != GOODPUT), default=least) * 1.2
        if self._left() < needed:
            raise ConfigError(f"no time was left for {workload}")

    def _left(self) -> float:
        return self.deadline - time.monotonic()

    def result(self) -> dict[str, Any]:
        """All that was measured so far, and the comparison of it."""
        asked = self.clients or self.probers
        assert asked is not None
        return {
            "model": self.model.name,
            "workloads": {name: self._described(name) for name in self.workloads},
            "client": asked.about,
            "clients": len(asked),
            "rows": compare(self.runs, self.workloads),
            "visits": self.visits,
            "runs": self.runs,
            "not_measured": sorted({v["engine"] for v in self.visits} - {run["engine"] for run in self.runs}),
        }

    def _described(self, name: str) -> dict[str, Any]:
        if name != GOODPUT:
            return WORKLOADS[name]._asdict()
        return {"workload": GOODPUT_WORKLOAD, "limits_ms": self.search.limits, "share": SHARE}


def compare(runs: Sequence[Mapping[str, Any]], workloads: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each workload and figure that is told: each engine's median, and how many times better Octavo is.

    ``times_better`` is above 1 where Octavo is ahead: the quotient of throughputs, and the inverse one of all else. It
    is missing while one of the two has no run.
    """
    rows = []
    for workload in workloads:
        for figure in (*FIGURES, GOODPUT_FIGURE, ENERGY):
            row: dict[str, Any] = {"workload": workload, "figure": figure}
            for engine in ("octavo", "vllm"):
                mine = [_figure(r, figure) for r in runs if (r["workload"], r["engine"]) == (workload, engine)]
                if values := [value for value in mine if value is not None]:
                    row[engine] = {"median": round(statistics.median(values), 3), "all": [round(v, 3) for v in values]}
            if "octavo" in row and "vllm" in row and row["octavo"]["median"] and row["vllm"]["median"]:
                ratio = row["octavo"]["median"] / row["vllm"]["median"]
                row["times_better"] = round(ratio if meaning(figure).better == "more" else 1 / ratio, 3)
            if "octavo" in row or "vllm" in row:
                rows.append(row)
    return rows


def _figure(run: Mapping[str, Any], figure: str) -> float | None:
    """A figure of one run; its energy is that of the first GPU, for each output token, where it can be told."""
    client, gpu = run["client"], run.get("gpu") or {}
    if figure != ENERGY:
        value = client.get(FIGURES.get(figure, figure))
        return None if value is None else float(value)
    if "total_output_tokens" not in client:
        return None
    if not gpu or client["duration"] < STEADY_SECONDS:
        return None
    return float(1e3 * gpu["power_w_median"] * client["duration"] / client["total_output_tokens"])


def named_workloads(names: str) -> list[str]:
    """The names in a comma-separated list, checked. Raises ``ConfigError``."""
    found = names.split(",")
    return [name if name == GOODPUT else named_loops(name)[0] for name in found]


def parse_visits(text: str) -> list[tuple[str, int]]:
    """``"octavo:2,vllm:3"`` as engines with their rounds; raise ``ConfigError`` for anything else."""
    visits = []
    for part in text.split(","):
        engine, _, rounds = part.partition(":")
        if engine not in ("octavo", "vllm") or not rounds.isdecimal() or int(rounds) == 0:
            raise ConfigError(f"visits: {part!r} is not octavo:ROUNDS or vllm:ROUNDS")
        visits.append((engine, int(rounds)))
    return visits
