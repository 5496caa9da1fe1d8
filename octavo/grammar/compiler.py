"""The front process's side of structured output: no grammar reaches the engine that was not tried out before."""

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
from octavo.grammar.forms import MAX_WHOLE_BYTES
from octavo.grammar.vocabulary import PackedVocabulary

WORKER = "octavo.grammar.worker"
MAX_KEPT_BYTES = 4 << 20
MAX_SECONDS = 2.0
"""Of the processor and of the clock, for one grammar."""
MAX_MEMORY = 1 << 30
PAUSE = 4.0
"""A grammar that ran out of time is not tried again for this many times as long as it took."""


class Refused(Exception):
    """A grammar that cannot be used; the message goes on after the name of a field, as in "uses 'not'"."""


class Verdict(NamedTuple):
    """What came of a grammar."""

    form: str | None
    """The grammar as the engine gets it; ``None`` when it cannot be used."""
    reason: str = ""
    until: float = math.inf
    """The time of the clock from which it is to be tried again."""


class GrammarCompiler:
    """Tries grammars out in a child process with bounded time and memory, one at a time.

    A grammar that hangs or explodes costs its own request an error, and the next one gets a fresh process. Verdicts are
    kept, good and bad, so that a client that repeats itself costs nothing; but where time ran out or the process was
    lost only for a while, because on a machine with less to do the same grammar may pass.
    """

    def __init__(
        self,
        load: Callable[[], PackedVocabulary],
        max_seconds: float = MAX_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``load`` gives the vocabulary whenever a process is started; ``clock`` the seconds of a steady clock."""
        self._load = load
        self._clock = clock
        self._limits = {"max_seconds": max_seconds, "max_memory": MAX_MEMORY, "max_output": 4 * MAX_WHOLE_BYTES}
        self._process: ChildProcess | None = None
        self._turn = asyncio.Lock()
        self._closing = threading.Lock()
        self._kept: OrderedDict[str, Verdict] = OrderedDict()
        """By the text of a grammar."""

    @property
    def process_id(self) -> int | None:
        """Id of the child process; ``None`` while there is none."""
        return None if self._process is None else self._process.id

    async def compile(self, text: str) -> str:
        """The grammar as the engine gets it. Raises ``Refused``; when cancelled, the work ends at once."""
        if len(text) > MAX_WHOLE_BYTES:
            raise Refused(f"is larger than {MAX_WHOLE_BYTES} bytes, the most that is accepted")
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
        """The verdict, which is kept. Raises ``Refused``, which is not."""
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
        """The process, started if need be. Raises ``Refused``, which is not kept: no grammar is to blame."""
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
