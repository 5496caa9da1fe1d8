"""Grammars that wait to be tried in a child process before the engine gets them, and the verdicts, which are kept."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from octavo.errors import CANCELLATIONS, QueueFull, Unavailable
from octavo.grammar.forms import MAX_GRAMMAR_BYTES, WEAKENS, Part, json_object, parts_of, text_of, weakened_in
from octavo.grammar.vocabulary import PackedVocabulary
from octavo.system.child_process import ChildLost, ChildProcess
from octavo.system.child_worker import LATE, RENDERED

WORKER = "octavo.grammar.trial_worker"
MAX_KEPT_BYTES = 4 << 20
MAX_SECONDS = 2.0
"""Limit of processor and of wall time for one grammar."""
MAX_MEMORY = 1 << 30
MAX_PROCESSES = 2
"""Grammars tested at the same time."""
SLOW_SECONDS = 0.2
"""The second process is started for a grammar that waits while another has been tested for so long: most grammars take
less time than the start of a process. It ends when there is nothing to do for it."""
MAX_WAITING = 128
"""Most grammars of one tenant that wait."""
RETRY_AFTER = 1
"""Seconds."""
PAUSE = 4.0
"""A grammar that timed out is not retried for this many times the time it took."""


class GrammarRefused(Exception):
    """A grammar that cannot be used; the message continues after a field's name, as in "uses 'not'"."""


class Verdict(NamedTuple):
    """Result of testing a grammar."""

    form: str | None
    """The normalised grammar for the engine; ``None`` when it cannot be used."""
    reason: str = ""
    until: float = math.inf
    """Time of the clock at which the verdict expires."""


class UsableGrammar(NamedTuple):
    """A grammar for the engine."""

    form: str
    """The normalised grammar."""
    weakened: tuple[str, ...]
    """Places of the client's request that it does not keep to."""


@dataclass(eq=False)
class _Job:
    """A grammar that is tested, or waits for it."""

    text: str
    verdict: asyncio.Future[Verdict]
    num_waiters: int = 0
    is_started: bool = False
    process: ChildProcess | None = None


class TrialQueue:
    """Tests grammars in a few child processes with bounded time and memory.

    If a grammar exceeds a limit, its request fails and the next one gets a fresh process. Verdicts, good and bad, are
    cached, so that repeated grammars cost nothing; those of a timeout or a lost process expire, because the same
    grammar may pass when the machine is less busy. Waiting grammars are tested in turn, one of each tenant.
    """

    def __init__(
        self,
        load: Callable[[], PackedVocabulary],
        max_seconds: float = MAX_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``load`` returns the vocabulary for each process started; ``clock`` returns seconds of a monotonic clock."""
        self._load = load
        self._clock = clock
        self._limits = {"max_seconds": max_seconds, "max_memory": MAX_MEMORY, "max_output": 4 * MAX_GRAMMAR_BYTES}
        self._processes: list[ChildProcess] = []
        self._idle: list[ChildProcess] = []
        self._lock = threading.Lock()
        """Guards both lists, which threads of running tests change."""
        self._num_running = 0
        self._last_start = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._jobs: dict[str, _Job] = {}
        """By text."""
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        """By tenant; the first tenant is the next."""
        self._kept: OrderedDict[str, Verdict] = OrderedDict()
        """Cached verdicts by grammar text."""

    @property
    def process_id(self) -> int | None:
        """Id of the child process that is used first; ``None`` while there is none."""
        return self._processes[0].id if self._processes else None

    def start_process(self) -> None:
        """Start a process in a thread, so that the first grammar finds one that is ready."""

        def start() -> None:
            with contextlib.suppress(GrammarRefused, Unavailable):
                self._give_back(self._taken())

        threading.Thread(target=start, name="grammar process", daemon=True).start()

    async def try_grammar(self, text: str, tenant: str = "") -> UsableGrammar:
        """The normalised grammar for the engine.

        Raises ``GrammarRefused``, or ``QueueFull`` when too many grammars of the tenant wait. Cancellation stops the
        work.
        """
        if len(text) > MAX_GRAMMAR_BYTES:
            raise GrammarRefused(f"is larger than {MAX_GRAMMAR_BYTES} bytes, the most that is accepted")
        verdict = await self._verdict(text, tenant)
        if verdict.form is None and f'"{WEAKENS}":' in text and len(parts_of(text)) > 1:
            verdict = await self._weakened(text, tenant, verdict)
        if verdict.form is None:
            raise GrammarRefused(verdict.reason)
        return UsableGrammar(verdict.form, weakened_in(verdict.form))

    async def _weakened(self, text: str, tenant: str, verdict: Verdict) -> Verdict:
        """The verdict on ``text`` with weaker parts in place of those that cannot be kept to.

        Parts that may be weakened are tested one by one, so that each costs the others nothing.
        """
        kept: list[Part] = []
        found: list[Part] = []
        weakened: list[str] = []
        for part in parts_of(text):
            if WEAKENS not in part:
                kept.append(part)
                continue
            own = await self._verdict(text_of([part]), tenant)
            form = own.form or text_of([{"name": part["name"], **json_object()}], [part[WEAKENS]])
            found += parts_of(form)
            weakened += weakened_in(form)
        if not weakened:
            return verdict
        changed = await self._verdict(text_of([*kept, *found], weakened), tenant)
        self._keep(text, changed)
        return changed

    async def _verdict(self, text: str, tenant: str) -> Verdict:
        """The verdict on ``text``, known or new. Raises ``GrammarRefused`` without one."""
        verdict = self._known(text)
        if verdict is not None:
            return verdict
        job = self._jobs.get(text)
        if job is None:
            job = self._jobs[text] = _Job(text, asyncio.get_running_loop().create_future())
        queue = self._waiting.get(tenant, deque())
        if not job.is_started and job not in queue:
            if len(queue) >= MAX_WAITING:
                if not job.num_waiters:
                    self._forget(job)
                raise QueueFull(
                    "Too many new grammars wait to be compiled. Try again shortly.", retry_after=RETRY_AFTER
                )
            queue.append(job)
            self._waiting[tenant] = queue
        job.num_waiters += 1
        self._start_waiting()
        try:
            return await asyncio.shield(job.verdict)
        finally:
            job.num_waiters -= 1
            if not job.num_waiters:
                self._drop(job)

    def _known(self, text: str) -> Verdict | None:
        verdict = self._kept.get(text)
        if verdict is None or self._clock() >= verdict.until:
            return None
        self._kept.move_to_end(text)
        return verdict

    def _keep(self, text: str, verdict: Verdict) -> None:
        self._kept[text] = verdict
        while sum(map(len, self._kept)) > MAX_KEPT_BYTES:
            self._kept.popitem(last=False)

    # --- the queue

    def _start_waiting(self) -> None:
        """Start tests while processes are free: the next grammar of each tenant in turn."""
        loop = asyncio.get_running_loop()
        while self._num_running < MAX_PROCESSES and self._waiting:
            # A test that was just started takes its process in a thread, perhaps later than here.
            is_any_free = self._num_running < max(1, len(self._processes))
            if not is_any_free and loop.time() < self._last_start + SLOW_SECONDS:
                if self._timer is None:
                    self._timer = loop.call_at(self._last_start + SLOW_SECONDS, self._start_late)
                return
            tenant, queue = self._waiting.popitem(last=False)
            job = queue.popleft() if queue else None
            if queue:
                self._waiting[tenant] = queue
            if job is not None and not job.is_started:  # it may have been in the queue of another tenant, too
                job.is_started = True
                self._num_running += 1
                self._last_start = loop.time()
                self._tasks.add(task := loop.create_task(self._run(job)))
                task.add_done_callback(self._tasks.discard)

    def _start_late(self) -> None:
        self._timer = None
        self._start_waiting()

    async def _run(self, job: _Job) -> None:
        try:
            verdict = await asyncio.to_thread(self._ask, job)
        except CANCELLATIONS:
            raise
        except BaseException as error:
            if not job.verdict.done():
                job.verdict.set_exception(error)
                job.verdict.exception()
        else:
            if not job.verdict.done():
                self._keep(job.text, verdict)
                job.verdict.set_result(verdict)
        finally:
            self._num_running -= 1
            self._forget(job)
            self._start_waiting()

    def _drop(self, job: _Job) -> None:
        """Give up a job for which no request waits any more."""
        if job.verdict.done():
            return
        job.verdict.cancel()
        self._forget(job)
        for queue in self._waiting.values():
            if job in queue:
                queue.remove(job)
        if job.process is not None:
            job.process.close()  # ends the waiting thread, too

    def _forget(self, job: _Job) -> None:
        if self._jobs.get(job.text) is job:
            del self._jobs[job.text]

    # --- in a thread

    def _ask(self, job: _Job) -> Verdict:
        job.process = process = self._taken()
        started = self._clock()
        try:
            if job.verdict.done():
                return Verdict(None)
            kind, answer = process.ask(job.text)
        except ChildLost as error:
            kind, answer = LATE, f"cannot be used: {error}"
        finally:
            self._give_back(process)
        if kind == LATE:
            now = self._clock()
            return Verdict(None, answer, until=now + PAUSE * (now - started))
        return Verdict(answer) if kind == RENDERED else Verdict(None, answer)

    def _taken(self) -> ChildProcess:
        """An idle process, or a new one. Raises ``GrammarRefused`` or ``Unavailable``: the grammar is not the cause."""
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                self._processes.remove(process)
        tokens, special_ids, eos_ids = self._load()
        settings = {**self._limits, "special_ids": special_ids, "eos_ids": eos_ids}
        try:
            process = ChildProcess(WORKER, settings, tokens)
        except ChildLost as error:
            raise GrammarRefused(f"cannot be used: {error}") from None
        with self._lock:
            self._processes.append(process)
        return process

    def _give_back(self, process: ChildProcess) -> None:
        with self._lock:
            if process not in self._processes:
                return
            if process.is_alive and not self._idle:
                self._idle.append(process)
                return
            self._processes.remove(process)
        process.close()

    def close(self) -> None:
        """End the processes. The next grammar starts new ones."""
        with self._lock:
            processes, self._processes, self._idle = self._processes, [], []
        for process in processes:
            process.close()
