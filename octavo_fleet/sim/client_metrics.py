"""Metrics of a simulation as seen by clients."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from octavo.types import Output
from octavo_fleet.sim.clock import START
from octavo_fleet.sim.jobs import Job

MAX_POINTS = 256


class RequestProgress:
    """Progress of one request as its client sees it."""

    __slots__ = ("arrival", "first", "job", "last", "request_id")

    def __init__(self, job: Job, arrival: float, request_id: int = 0) -> None:
        self.request_id = request_id
        self.job = job
        self.arrival = arrival
        self.first = 0.0
        self.last = 0.0


@dataclass(frozen=True)
class LatencyTargets:
    """Latency targets in seconds: TTFT, and mean time per token after the first."""

    ttft: float = float("inf")
    itl: float = float("inf")
    settled: float = 0.0
    """Seconds from the start; requests that arrive later are judged."""
    most_bad: float = float("inf")
    """A simulation with more requests outside of the targets than these ends."""


class Overloaded(Exception):
    """More requests are outside of the targets than ``LatencyTargets.most_bad``."""


ANY = LatencyTargets()


@dataclass
class Timeline:
    """Queue lengths at even intervals; at ``MAX_POINTS`` points every second one is dropped."""

    interval: float = 0.25
    next_at: float = START
    points: list[tuple[int, int]] = field(default_factory=list)
    """(requests waiting, requests running) from the start; zero after the last point."""

    def note(self, now: float, waiting: int, running: int) -> None:
        """Record the queue lengths up to ``now``, which must not be before ``next_at``."""
        while self.next_at <= now:
            self.points.append((waiting, running))
            if len(self.points) == MAX_POINTS:
                self.points = self._every(2 * self.interval)
                self.interval *= 2
            self.next_at = START + len(self.points) * self.interval

    def _every(self, interval: float) -> list[tuple[int, int]]:
        """The points at this interval."""
        return self.points[:: round(interval / self.interval)]

    def merge(self, other: Timeline) -> None:
        """Add the queue of another replica."""
        interval = max(self.interval, other.interval)
        pairs = zip_longest(self._every(interval), other._every(interval), fillvalue=(0, 0))
        self.points = [(own[0] + more[0], own[1] + more[1]) for own, more in pairs]
        self.interval = interval


class Ledger:
    """Accumulates the metrics of a replica's outputs in constant memory.

    Each replica has its own, and they are merged in the order of the replicas: so sums are bitwise the same however
    the replicas' steps were interleaved.
    """

    def __init__(self, targets: LatencyTargets = ANY) -> None:
        self.targets = targets
        self.ttft, self.itl, self.tpot, self.e2el = Sketch(), Sketch(), Sketch(), Sketch()
        self.num_finished = 0
        self.num_failed = 0
        self.num_refused = 0
        self.num_good = 0
        self.num_judged = 0
        self.num_bad = 0
        self.num_arrived = 0
        self.last_arrival = START
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.ended_at = START
        self.timeline = Timeline()

    def take(
        self, outputs: list[Output], live: dict[int, RequestProgress], previous: float, now: float
    ) -> list[RequestProgress]:
        """Record ``outputs`` at ``now``; its previous ones came at ``previous``. Returns finished requests."""
        num_even = len(outputs)  # nearly all of them: counted together below
        done = []
        for output in outputs:
            progress = live[output.request_id]
            if progress.last != previous or not output.tokens:
                num_even -= 1
                self._take_odd(progress, output, now)
            progress.last = now
            if output.finish_reason is not None:
                done.append(live.pop(output.request_id))
                self._finish(progress, output)
        if num_even:
            self.itl.add(now - previous, num_even)
        return done

    def _take_odd(self, progress: RequestProgress, output: Output, now: float) -> None:
        """Record a first token, a token after a pause, or an output without tokens."""
        if not output.tokens:
            return
        if progress.last:
            self.itl.add(now - progress.last)
        else:
            progress.first = now
            self.ttft.add(now - progress.arrival)
            if now - progress.arrival > self.targets.ttft and self._is_judged(progress):
                self._count_bad()

    def _finish(self, progress: RequestProgress, output: Output) -> None:
        self.ended_at = max(self.ended_at, progress.last)
        if output.finish_reason == "error":
            self.num_failed += 1
            return
        num_tokens = progress.job.output_len
        self.num_finished += 1
        self.num_output_tokens += num_tokens
        self.num_prompt_tokens += sum(count for _, count in progress.job.prompt)
        self.e2el.add(progress.last - progress.arrival)
        per_token = (progress.last - progress.first) / (num_tokens - 1) if num_tokens > 1 else 0.0
        if num_tokens > 1:
            self.tpot.add(per_token)
        if self._is_judged(progress):
            is_soon = progress.first - progress.arrival <= self.targets.ttft
            self.num_judged += 1
            self.num_good += is_soon and per_token <= self.targets.itl
            if is_soon and per_token > self.targets.itl:
                self._count_bad()

    def _is_judged(self, progress: RequestProgress) -> bool:
        return progress.arrival - START >= self.targets.settled

    def _count_bad(self) -> None:
        self.num_bad += 1
        if self.num_bad > self.targets.most_bad:
            raise Overloaded

    def note_arrival(self, now: float) -> None:
        self.num_arrived += 1
        self.last_arrival = max(self.last_arrival, now)

    def merge(self, other: Ledger) -> None:
        """Add the metrics of another replica."""
        for own, more in zip(self._sketches(), other._sketches(), strict=True):
            own.merge(more)
        self.num_finished += other.num_finished
        self.num_failed += other.num_failed
        self.num_refused += other.num_refused
        self.num_good += other.num_good
        self.num_judged += other.num_judged
        self.num_bad += other.num_bad
        self.num_arrived += other.num_arrived
        self.last_arrival = max(self.last_arrival, other.last_arrival)
        self.num_prompt_tokens += other.num_prompt_tokens
        self.num_output_tokens += other.num_output_tokens
        self.ended_at = max(self.ended_at, other.ended_at)
        self.timeline.merge(other.timeline)

    def _sketches(self) -> tuple[Sketch, ...]:
        return self.ttft, self.itl, self.tpot, self.e2el

    def figures(self) -> dict[str, Any]:
        """All metrics, in seconds and tokens, ready for JSON."""
        seconds = self.ended_at - START
        rate = 1 / seconds if seconds else 0.0
        return {
            "requests": self.num_finished,
            "failed": self.num_failed,
            "seconds": seconds,
            "arriving_seconds": self.last_arrival - START,
            "offered_per_second": self.num_arrived / max(1e-9, self.last_arrival - START),
            "requests_per_second": self.num_finished * rate,
            "output_tokens_per_second": self.num_output_tokens * rate,
            "total_tokens_per_second": (self.num_output_tokens + self.num_prompt_tokens) * rate,
            "goodput_per_second": self.num_good * rate,
            "good_share": self.num_good / max(1, self.num_judged + self.num_failed),
            "ttft": self.ttft.summary(),
            "itl": self.itl.summary(),
            "tpot": self.tpot.summary(),
            "e2el": self.e2el.summary(),
            "queue": [
                {"second": index * self.timeline.interval, "waiting": waiting, "running": running}
                for index, (waiting, running) in enumerate(self.timeline.points)
            ],
        }


GROWTH = 1.01
"""Each bucket's bounds are 1 % apart, so a percentile is wrong by at most half of that (DDSketch, arXiv 1908.10693)."""
SCALE = 1 / math.log(GROWTH)
LEAST = 1e-9


class Sketch:
    """Histogram of non-negative values with logarithmic buckets."""

    def __init__(self) -> None:
        self._counts: defaultdict[int, int] = defaultdict(int)
        self.count = 0
        self.total = 0.0
        self.most = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count ``value`` ``times`` times."""
        self._counts[int(math.log(max(value, LEAST)) * SCALE // 1)] += times
        self.count += times
        self.total += value * times
        if value > self.most:
            self.most = value

    def merge(self, other: Sketch) -> None:
        """Add the counts of ``other``."""
        for bucket, count in other._counts.items():
            self._counts[bucket] += count
        self.count += other.count
        self.total += other.total
        self.most = max(self.most, other.most)

    def percentile(self, percent: float) -> float:
        """The value that ``percent`` percent of the values do not exceed; NaN without values."""
        if not self.count:
            return math.nan
        rank = percent / 100 * (self.count - 1)
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen > rank:
                return min(self.most, math.exp((bucket + 0.5) / SCALE))
        return self.most

    def summary(self) -> dict[str, float]:
        """Mean, percentiles and maximum."""
        mean = self.total / self.count if self.count else math.nan
        percentiles = {f"p{percent}": self.percentile(percent) for percent in (50, 90, 95, 99)}
        return {"mean": mean, **percentiles, "max": self.most}
