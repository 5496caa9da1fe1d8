"""A run: requests without a pause, one fault after the other, and a look at what the server holds in between."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.errors import ConfigError
from octavo_bench.chaos import processes
from octavo_bench.chaos.answers import Repeated
from octavo_bench.chaos.careful_client import MANNERS, ChaosClient, Followed, RequestUnanswered
from octavo_bench.chaos.faults import FAULTS, OF_SUPERVISED, Fault, Wrong, kill_front
from octavo_bench.chaos.target import ServerUnderTest
from octavo_bench.chaos.traffic import RepeatableRequest
from octavo_fleet.proxy.connections import ConnectionFailed

REQUEST_SECONDS = 180.0
"""A request without an answer for so long is lost."""
PAUSES = (0.1, 2.0)
"""Least and most seconds between the recovery from a fault and the next fault."""
LEAST_REQUESTS = 6
"""Each client sends so many between two looks at the server, also where the faults are done before it could."""
QUIET_SECONDS = 20.0
"""What a server may take to let go of everything, after the last answer."""
MORE_DESCRIPTORS = 8
"""So many more open files than in the beginning are not a leak: libraries open some at their first use."""
FINISH_SECONDS = 60.0
"""With faults at an interval: what every request may take to its answer, from the last fault on."""
MAX_FINDINGS = 50
Verdict = Literal["lost", "changed", "twice", "broken", "wrong", "held"]


@dataclass
class ChaosPlan:
    """What is done."""

    seed: int = 0
    num_faults: int | None = None
    seconds: float | None = None
    num_clients: int = 6
    faults_between_looks: int = 8
    faults: Sequence[str] = tuple(FAULTS)
    interval: float | None = None
    """Seconds from one fault to the next, whether the server has recovered or not; ``None``: after each recovery."""


@dataclass
class Findings:
    """What came of it."""

    counts: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    """Right answers by kind of request."""
    details: list[dict[str, Any]] = field(default_factory=list)
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    """Seconds from a fault to the next answer, by name."""
    looks: list[dict[str, Any]] = field(default_factory=list)
    finish_seconds: float | None = None
    """With faults at an interval: from the last one to the last answer."""

    def add(self, verdict: Verdict, **details: Any) -> None:
        self.counts[verdict] += 1
        if len(self.details) < MAX_FINDINGS:
            self.details.append({"verdict": verdict, **details})


class Chaos:
    """One run over one server."""

    def __init__(
        self,
        target: ServerUnderTest,
        requests: Sequence[RepeatableRequest],
        plan: ChaosPlan,
        say: Callable[[str], None],
    ) -> None:
        self.findings = Findings()
        self._target = target
        self._requests = requests
        self._plan = plan
        self._say = say
        self._rng = random.Random(plan.seed)
        self._alone: list[Any] = []
        self._recent: deque[str] = deque(maxlen=4)
        self._num_asked = 0
        self._num_faults = 0
        self._begun = 0.0

    async def run(self) -> Findings:
        """Raises ``ConfigError`` if the server does not start, or fails a request without any fault."""
        try:
            self._target.launch()
            await self._target.wait_ready()
            await self._ask_alone()
            await self._look("before the first fault")
            self._begun = time.perf_counter()
            while self._goes_on():
                await (self._episode() if self._plan.interval is None else self._steady_episode(self._plan.interval))
                await self._look(f"after {self._num_faults} faults")
        finally:
            self._target.close()
        return self.findings

    def _goes_on(self) -> bool:
        plan = self._plan
        is_over = plan.seconds is not None and time.perf_counter() - self._begun > plan.seconds
        return not is_over and (plan.num_faults is None or self._num_faults < plan.num_faults)

    async def _ask_alone(self) -> None:
        client = ChaosClient(self._target.url, self._target.excuses)
        rng = random.Random(0)
        for number, asked in enumerate(self._requests):
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    followed = await client.follow(asked, f"alone-{number}", rng)
            except (RequestUnanswered, Repeated, TimeoutError) as error:
                raise ConfigError(f"chaos: a request fails without faults: {asked.kind}: {error!r}") from None
            self._alone.append(followed.content)
        client.close()
        self._say(f"{len(self._alone)} requests answered without faults")

    # --- requests ---

    async def _ask_until(self, is_over: asyncio.Event, worker: int) -> None:
        client = ChaosClient(self._target.url, self._target.excuses)
        rng = random.Random(f"{self._plan.seed}:{worker}:{self._num_faults}")
        num_asked = 0
        is_steady = self._plan.interval is not None
        while not is_over.is_set() or (num_asked < LEAST_REQUESTS and not is_steady):
            num_asked += 1
            index = rng.randrange(len(self._requests))
            asked = self._requests[index]
            manner = rng.choice(MANNERS) if asked.is_streamed else "plain"
            self._num_asked += 1
            key = f"{self._plan.seed}-{self._num_asked}"
            about = {"kind": asked.kind, "manner": manner, "key": key}
            try:
                async with asyncio.timeout(None if is_steady else REQUEST_SECONDS):
                    followed = await client.follow(asked, key, rng, manner)
            except RequestUnanswered as error:
                self._found("lost", **about, detail=str(error))
            except TimeoutError:
                self._found("lost", **about, detail=f"no answer after {REQUEST_SECONDS:g} s")
            except Repeated as error:
                self._found("twice", **about, detail=str(error))
            else:
                self._judge(asked, index, followed, about)
        client.close()

    def _judge(self, asked: RepeatableRequest, index: int, followed: Followed, about: dict[str, Any]) -> None:
        counts = self.findings.counts
        counts["reconnections"] += followed.num_connections - 1
        counts["begun_again"] += followed.num_begun_again
        if followed.num_unexplained:
            self._found("broken", **about, detail=f"{followed.num_unexplained} connections without a reason")
        if followed.content != self._alone[index]:
            self._found("changed", **about, detail={"alone": self._alone[index], "now": followed.content})
        else:
            self.findings.answers[asked.kind] += 1

    def _found(self, verdict: Verdict, **details: Any) -> None:
        self.findings.add(verdict, **details, faults=list(self._recent))
        self._say(f"{verdict}: {str(details)[:600]} (faults: {', '.join(self._recent)})")

    # --- faults ---

    async def _episode(self) -> None:
        is_over = asyncio.Event()
        workers = [asyncio.create_task(self._ask_until(is_over, worker)) for worker in range(self._plan.num_clients)]
        try:
            for _ in range(self._plan.faults_between_looks):
                if not self._goes_on():
                    break
                await asyncio.sleep(self._rng.uniform(*PAUSES))
                await self._do_one()
        finally:
            is_over.set()
        await asyncio.gather(*workers)

    async def _steady_episode(self, interval: float) -> None:
        """Faults at an interval, under which no request has to be answered; then all of them."""
        is_over = asyncio.Event()
        clock = time.perf_counter
        with self._excused(Fault(kill_front, 1, breaks=True)):
            workers = [
                asyncio.create_task(self._ask_until(is_over, worker)) for worker in range(self._plan.num_clients)
            ]
            while self._goes_on():
                begun = clock()
                name, fault, rng = self._next_fault()
                try:
                    async with asyncio.timeout(interval):
                        await fault.run(self._target, rng)
                except TimeoutError:
                    pass
                except ChildProcessError:  # it ends where its first engine processes are killed again and again
                    self._target.launch()
                self.findings.recoveries.setdefault(name, []).append(clock() - begun)
                await asyncio.sleep(max(0.0, begun + interval - clock()))
            is_over.set()
            last = clock()
            if self._target.ended_by_itself() is not None:
                self._target.launch()
            self._say(f"{self._num_faults} faults, {sum(self.findings.answers.values())} right answers so far")
            done, waiting = await asyncio.wait(workers, timeout=FINISH_SECONDS)
            self.findings.finish_seconds = clock() - last
            for worker in waiting:
                worker.cancel()
                self._found("lost", detail=f"no answer {FINISH_SECONDS:g} s after the last fault")
            for worker in done:
                worker.result()
            self._say(f"all answers {self.findings.finish_seconds:.1f} s after the last fault")

    def _next_fault(self) -> tuple[str, Fault, random.Random]:
        """The next fault by its weight, and the numbers it draws."""
        names, known = self._plan.faults, FAULTS | OF_SUPERVISED
        (name,) = self._rng.choices(names, [known[name].weight for name in names])
        self._num_faults += 1
        self._recent.append(name)
        return name, known[name], random.Random(self._rng.random())

    async def _do_one(self) -> None:
        name, fault, rng = self._next_fault()
        begun = time.perf_counter()
        try:
            with self._excused(fault):
                await fault.run(self._target, rng)
                seconds = await self._target.seconds_until_answer(begun)
        except Wrong as error:
            self._found("wrong", fault=name, detail=str(error))
            return
        if (code := self._target.ended_by_itself()) is not None:
            raise ConfigError(f"chaos: the server ended by itself with {code} after {name}")
        self.findings.recoveries.setdefault(name, []).append(seconds)
        total = sum(self.findings.answers.values())
        self._say(f"fault {self._num_faults}: {name}, next answer after {seconds:.2f} s; {total} right answers")

    @contextlib.contextmanager
    def _excused(self, fault: Fault) -> Any:
        excuses = self._target.excuses
        excuses.breaks, excuses.is_breaking = excuses.breaks + fault.breaks, excuses.is_breaking + fault.breaks
        excuses.losses, excuses.is_losing = excuses.losses + fault.loses, excuses.is_losing + fault.loses
        try:
            yield
        finally:
            excuses.is_breaking -= fault.breaks
            excuses.is_losing -= fault.loses

    # --- what is held ---

    async def _look(self, when: str) -> None:
        """Once everything is answered: what the server still holds."""
        deadline = time.perf_counter() + QUIET_SECONDS
        while (look := await self._held()) is None or look["live"] or look["blocks"] or look["left_over"]:
            if time.perf_counter() > deadline:
                self._found("held", when=when, detail=look)
                return
            await asyncio.sleep(0.1)
        first = self.findings.looks[0] if self.findings.looks else look
        self.findings.looks.append({"when": when, **look})
        for name in ("front_descriptors", "engine_descriptors"):
            if look[name] > first[name] + MORE_DESCRIPTORS:
                self._found("held", when=when, detail={name: look[name], "before the first fault": first[name]})
        if look["processes"] > first["processes"]:
            self._found("held", when=when, detail={"processes": look["processes"], "before": first["processes"]})
        memory = ", ".join(f"{name} {look[f'{name}_mib']:.0f} MiB" for name in ("front", "engine"))
        self._say(f"{when}: {memory}, {look['front_descriptors']}+{look['engine_descriptors']} files")

    async def _held(self) -> dict[str, Any] | None:
        target = self._target
        try:
            stats = await target.get("stats")
            front, engine = processes.held(target.front), processes.held(await target.next_engine())
        except (ConnectionFailed, OSError):
            return None
        return {
            "live": stats["num_live"],
            "blocks": stats["cache"]["used_pages"],
            "left_over": len(target.left_over()),
            "processes": len(processes.session(target.front)),
            "front_mib": round(front.memory / 2**20, 2),
            "engine_mib": round(engine.memory / 2**20, 2),
            "front_descriptors": front.descriptors,
            "engine_descriptors": engine.descriptors,
            "front_sockets": front.sockets,
            "engine_sockets": engine.sockets,
            "front_threads": front.threads,
            "engine_threads": engine.threads,
        }
