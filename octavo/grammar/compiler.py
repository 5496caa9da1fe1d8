"""The front process's side of structured output: every grammar is tested before it reaches the engine."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from octavo.child_process import ChildLost, ChildProcess
from octavo.child_worker import LATE, RENDERED
from octavo.grammar.forms import MAX_GRAMMAR_BYTES
from octavo.grammar.vocabulary import PackedVocabulary

WORKER = "octavo.grammar.worker"
MAX_KEPT_BYTES = 4 << 20
MAX_SECONDS = 2.0
"""Limit of processor and of wall time for one grammar."""
MAX_MEMORY = 1 << 30
PAUSE = 4.0
"""A grammar that timed out is not retried for this many times the time it took."""


class Refused(Exception):
    """A grammar that cannot be used; the message continues after a field's name, as in "uses 'not'"."""


class Verdict(NamedTuple):
    """Result of testing a grammar."""

    form: str | None
    """The normalised grammar for the engine; ``None`` when it cannot be used."""
    reason: str = ""
    until: float = math.inf
    """Time of the clock at which the verdict expires."""


class GrammarCompiler:
    """Tests grammars in a child process with bounded time and memory, one at a time.

    If a grammar exceeds a limit, its request fails and the next one gets a fresh process. Verdicts, good and bad, are
    cached, so that repeated grammars cost nothing; those of a timeout or a lost process expire, because the same
    grammar may pass when the machine is less busy.
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
        self._process: ChildProcess | None = None
        self._turn = asyncio.Lock()
        self._closing = threading.Lock()
        self._kept: OrderedDict[str, Verdict] = OrderedDict()
        """Cached verdicts by grammar text."""

    @property
    def process_id(self) -> int | None:
        """Id of the child process; ``None`` while there is none."""
        return None if self._process is None else self._process.id

    async def compile(self, text: str) -> str:
        """The normalised grammar for the engine. Raises ``Refused``; cancellation stops the work at once."""
        if len(text) > MAX_GRAMMAR_BYTES:
            raise Refused(f"is larger than {MAX_GRAMMAR_BYTES} bytes, the most that is accepted")
        verdict = self._known(text)
        if verdict is None:
            async with self._turn:
                verdict = self._known(text) or await self._try_out(text)
        if verdict.form is None:
            raise Refused(verdict.reason)
        return verdict.form

    def _known(self, text: str) -> Verdict | None:
        verdict = self._kept.get(text)
        if verdict is None or self._clock() >= verdict.until:
            return None
        self._kept.move_to_end(text)
        return verdict

    async def _try_out(self, text: str) -> Verdict:
        """The verdict, which is cached. Raises ``Refused``, which is not cached."""
        try:
            verdict = await asyncio.to_thread(self._ask, text)
        except asyncio.CancelledError:
            self.close()  # ends the waiting thread, too
            raise
        self._kept[text] = verdict
        while sum(map(len, self._kept)) > MAX_KEPT_BYTES:
            self._kept.popitem(last=False)
        return verdict

    def _ask(self, text: str) -> Verdict:
        process = self._running()
        started = self._clock()
        try:
            kind, answer = process.ask(text)
        except ChildLost as error:
            kind, answer = LATE, f"cannot be used: {error}"
        if kind == LATE:
            now = self._clock()
            return Verdict(None, answer, until=now + PAUSE * (now - started))
        return Verdict(answer) if kind == RENDERED else Verdict(None, answer)

    def _running(self) -> ChildProcess:
        """The process, started if needed. Raises ``Refused`` or ``Unavailable``: the grammar is not the cause."""
        if self._process is None or not self._process.is_alive:
            tokens, special_ids, eos_ids = self._load()
            settings = {**self._limits, "special_ids": special_ids, "eos_ids": eos_ids}
            try:
                self._process = ChildProcess(WORKER, settings, tokens)
            except ChildLost as error:
                raise Refused(f"cannot be used: {error}") from None
        return self._process

    def close(self) -> None:
        """End the process. Compiling again starts a new one."""
        with self._closing:
            process, self._process = self._process, None
        if process is not None:
            process.close()
