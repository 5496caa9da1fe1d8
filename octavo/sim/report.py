"""What clients saw in a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octavo.sim.clock import START
from octavo.sim.jobs import Job
from octavo.sim.sketch import Sketch
from octavo.types import Output

MAX_POINTS = 256


class Told:
    """What one client has seen so far."""

    __slots__ = ("arrival", "first", "job", "last")

    def __init__(self, job: Job, arrival: float) -> None:
        self.job = job
        self.arrival = arrival
        self.first = 0.0
        self.last = 0.0


@dataclass(frozen=True)
class Targets:
    """Seconds that a good answer keeps to: to its first token, and per token after that on average."""

    ttft: float = float("inf")
    itl: float = float("inf")


@dataclass
class Timeline:
    """The queue over time: at most ``MAX_POINTS`` points; when full, every second one is dropped."""

    interval: float = 0.25
    next_at: float = START
    points: list[tuple[float, int, int]] = field(default_factory=list)
    """Seconds from the beginning, requests waiting, requests running."""

    def note(self, now: float, waiting: int, running: int) -> None:
        self.points.append((now - START, waiting, running))
        if len(self.points) == MAX_POINTS:
            self.points = self.points[::2]
            self.interval *= 2
        self.next_at = now + self.interval


class Ledger:
    """Takes the outputs of all replicas in; its size does not depend on how many there were."""

    def __init__(self, targets: Targets) -> None:
        self.targets = targets
        self.ttft, self.itl, self.tpot, self.e2el = Sketch(), Sketch(), Sketch(), Sketch()
        self.num_finished = 0
        self.num_failed = 0
        self.num_good = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.ended_at = START
        self.timeline = Timeline()

    def take(self, outputs: list[Output], live: dict[int, Told], previous: float, now: float) -> list[Told]:
        """``outputs`` came at ``now``; the ones before, of the same replica, at ``previous``. Returns who is done."""
        num_even = len(outputs)  # nearly all of them: counted together below
        done = []
        for output in outputs:
            told = live[output.request_id]
            if told.last != previous or not output.tokens:
                num_even -= 1
                self._take_odd(told, output, now)
            told.last = now
            if output.finish_reason is not None:
                done.append(live.pop(output.request_id))
                self._finish(told, output)
        if num_even:
            self.itl.add(now - previous, num_even)
        return done

    def _take_odd(self, told: Told, output: Output, now: float) -> None:
        """A first token, one after a pause, or none."""
        if not output.tokens:
            return
        if told.last:
            self.itl.add(now - told.last)
        else:
            told.first = now
            self.ttft.add(now - told.arrival)

    def _finish(self, told: Told, output: Output) -> None:
        self.ended_at = max(self.ended_at, told.last)
        if output.finish_reason == "error":
            self.num_failed += 1
            return
        num_tokens = told.job.output_len
        self.num_finished += 1
        self.num_output_tokens += num_tokens
        self.num_prompt_tokens += sum(count for _, count in told.job.prompt)
        self.e2el.add(told.last - told.arrival)
        per_token = (told.last - told.first) / (num_tokens - 1) if num_tokens > 1 else 0.0
        if num_tokens > 1:
            self.tpot.add(per_token)
        self.num_good += told.first - told.arrival <= self.targets.ttft and per_token <= self.targets.itl

    def figures(self) -> dict[str, Any]:
        """All of it, in seconds and tokens, ready for JSON."""
        seconds = self.ended_at - START
        rate = 1 / seconds if seconds else 0.0
        return {
            "requests": self.num_finished,
            "failed": self.num_failed,
            "seconds": seconds,
            "requests_per_second": self.num_finished * rate,
            "output_tokens_per_second": self.num_output_tokens * rate,
            "total_tokens_per_second": (self.num_output_tokens + self.num_prompt_tokens) * rate,
            "goodput_per_second": self.num_good * rate,
            "good_share": self.num_good / max(1, self.num_finished + self.num_failed),
            "ttft": self.ttft.summary(),
            "itl": self.itl.summary(),
            "tpot": self.tpot.summary(),
            "e2el": self.e2el.summary(),
            "queue": [{"second": point[0], "waiting": point[1], "running": point[2]} for point in self.timeline.points],
        }
