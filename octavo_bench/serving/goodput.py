"""The highest rate of Poisson arrivals at which nearly all requests are answered in time, found by bisection."""

from __future__ import annotations

import asyncio
import math
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from octavo.errors import ConfigError
from octavo_bench.serving.http_client import HttpClient
from octavo_bench.serving.peer_process import Clients, PeerProcess
from octavo_bench.serving.probe import Probe, Probed, profile_of
from octavo_bench.serving.serve import about_server
from octavo_bench.serving.serve_figures import PERCENTILES, errors, figures
from octavo_bench.serving.serve_load import Load, ServeWork, Target

WORKLOAD = "assistant"
LIMITS = {"ttft": 300.0, "tpot": 25.0}
"""Milliseconds to the first token, and of a token after it, in the mean of a request."""
SHARE = 0.99
"""Of the requests that must be within the limits."""
PRECISION = 1.05
"""The search ends when the lowest rate that failed is less than this many times the highest that passed."""
WARM_UP_CLIENTS = 32
LEAD_SECONDS = 3.0
LEAST_GRACE = 1.0
TEXTS = 1_000_000
"""Numbers of texts that each client may use in a probe."""
START_AND_END_SECONDS = 2.0
"""What a probe may take besides its own time."""

Row = dict[str, Any]


@dataclass(frozen=True)
class GoodputSearch:
    """What is looked for, and for how long."""

    limits: dict[str, float]
    seconds: float = 60.0
    """No probe begins that would end later, but for the first."""
    probe_seconds: float = 5.0
    """How long requests of a probe arrive that are judged."""

    @property
    def grace(self) -> float:
        return max(LEAST_GRACE, 1.2e-3 * self.limits.get("ttft", 0.0))

    @property
    def whole_probe(self) -> float:
        return LEAD_SECONDS + self.probe_seconds + self.grace + START_AND_END_SECONDS


def start_clients(count: int, logs: Path | None = None) -> Clients:
    """Processes that share each probe: what one of them can read in time is limited. ``logs``: for their errors."""
    command = [sys.executable, "-m", "octavo_bench.serving.probe"]
    files = [None if logs is None else logs / f"probe_{number}.log" for number in range(count)]
    return Clients([partial(PeerProcess, command, None, file) for file in files])


def bisect(passes: Callable[[float], bool], first: float, may_go_on: Callable[[], bool]) -> None:
    """Try rates: doubled or halved until one passed and one failed, then their geometric mean, until both are close."""
    low, high = 0.0, math.inf
    rate = first
    while True:
        if passes(rate):
            low = rate
        else:
            high = rate
        if high < PRECISION * low or not may_go_on():
            return
        is_between = low > 0 and high < math.inf
        rate = math.sqrt(low * high) if is_between else 2 * low or high / 2


class Prober:
    """Probes of one server, shared by all clients."""

    def __init__(self, clients: Clients, target: Target, model: str, work: ServeWork, search: GoodputSearch) -> None:
        self.clients = clients
        self.target = target
        self.model = model
        self.work = work
        self.search = search
        self.rows: list[Row] = []
        self._profile = profile_of(work)
        self._salt = secrets.token_hex(8)
        self._num_sent = 0
        self._seconds_per_token = 0.0

    def warm_up(self) -> float:
        """Requests a second in a closed loop of some clients, which is where the search begins."""
        probed = self._send(0.0, WARM_UP_CLIENTS)
        self._learn(probed)
        rate = sum(part.num_tokens / part.seconds for part in probed) / self._profile.output.mean
        if not rate:
            said = errors([answer for part in probed for answer in part.answers])
            raise ConfigError(f"search: no request was answered: {next(iter(said), 'nothing came')}")
        return rate

    def probe(self, rate: float) -> bool:
        """Whether enough requests are within the limits at ``rate``."""
        in_flight = rate * self._profile.output.mean * self._seconds_per_token  # Little's law
        probed = self._send(rate, round(in_flight))
        self._learn(probed)
        answers = [answer for part in probed for answer in part.answers]
        seconds = max(part.seconds for part in probed)
        found = figures(answers, seconds or self.search.probe_seconds, PERCENTILES, self.search.limits)
        is_within = bool(answers) and found["goodput_share"] >= SHARE
        row = {
            "load": str(Load(rate=round(rate, 3))),
            "rate": round(rate, 3),
            "passed": is_within,
            "judged": len(answers),
            "failed": found["failed"],
            "goodput_share": found["goodput_share"],
            "backlog": round(in_flight),
            "output_tok_s": round(sum(part.num_tokens for part in probed) / seconds, 2) if seconds else 0.0,
            **{name: value for name, value in found.items() if name.startswith(("ttft", "itl", "tpot"))},
        }
        said = errors(answers)
        self.rows.append({**row, "errors": said} if said else row)
        return is_within

    def _send(self, rate: float, backlog: int) -> list[Probed]:
        count, search = len(self.clients), self.search
        seconds = search.whole_probe + self.target.timeout
        parts = []
        for number in range(count):
            share_of_backlog = backlog * (number + 1) // count - backlog * number // count
            probe = Probe(
                self.target,
                self.model,
                replace(self.work, seed=self.work.seed * count + number),
                share_of_backlog,
                rate / count,
                LEAD_SECONDS,
                search.probe_seconds,
                search.grace,
                search.limits,
                self._allowed(rate) if rate else sys.maxsize,
                self._salt,
                TEXTS * self._num_sent,
            )
            self._num_sent += 1
            parts.append(msgspec.to_builtins(probe))
        return [msgspec.convert(answer, Probed) for answer in self.clients.ask(parts, seconds)]

    def _allowed(self, rate: float) -> int:
        """Requests that may be outside the limits."""
        return math.floor((1 - SHARE) * rate * self.search.probe_seconds * 1.2)  # rather one too many than one too few

    def _learn(self, probed: Sequence[Probed]) -> None:
        """How long a token takes, for the next probe's backlog; at most the limit: beyond it is no steady state."""
        times = [tpot for part in probed for answer in part.answers if (tpot := answer.tpot) is not None]
        if times:
            self._seconds_per_token = min(sum(times) / len(times), 1e-3 * self.search.limits.get("tpot", float("inf")))


def find(prober: Prober, first: float | None = None, report: Callable[[Row], object] = lambda row: None) -> Row:
    """Search; ``first`` is the rate at which it begins, by default that of the warm-up. ``report`` gets each row."""
    search = prober.search
    end = time.monotonic() + search.seconds
    warm = prober.warm_up()

    def passes(rate: float) -> bool:
        is_within = prober.probe(rate)
        report(prober.rows[-1])
        return is_within

    bisect(passes, first or warm, lambda: time.monotonic() + search.whole_probe < end)
    best = max((row for row in prober.rows if row["passed"]), key=_rate, default={"rate": 0.0})
    failed = [_rate(row) for row in prober.rows if not row["passed"] and _rate(row) > _rate(best)]
    return {
        "highest": [{"workload": prober.work.workload, "goodput_requests_s": _rate(best)}],
        "first_failed_requests_s": min(failed, default=None),
        "rows": sorted(prober.rows, key=_rate),
    }


def _rate(row: Row) -> float:
    return float(row["rate"])


def search_server(
    target: Target, work: ServeWork, search: GoodputSearch, clients: Clients, report: Callable[[Row], object]
) -> Row:
    """``find`` for a server that runs already; the result is as that of ``serve.measure``. Raises ``ConfigError``."""
    about, max_model_len = asyncio.run(_about(target))
    work = replace(work, max_model_len=max_model_len)
    found = find(Prober(clients, target, about["model"], work, search), report=report)
    asked = {"workload": work.workload, "seed": work.seed, "clients": len(clients)}
    return {**about, **asked, "goodput": {**search.limits, "share": SHARE}, **found}


def print_probe(row: Row) -> None:
    """Tell a person who waits for the end of a search what came of one rate."""
    verdict = "passed" if row["passed"] else "failed"
    told = "".join(f", {name} {row[name]:.0f}" for name in ("ttft_p99_ms", "tpot_p99_ms") if name in row)
    share = f"{100 * row['goodput_share']:.1f} % of {row['judged']} in time"
    print(f"octavo: {row['load']}: {verdict}, {share}{told}", file=sys.stderr)


async def _about(target: Target) -> tuple[dict[str, Any], int]:
    client = HttpClient(target.url, target.endpoint, target.api_key, target.timeout)
    try:
        return await about_server(client, target)
    finally:
        client.close()
