"""Child processes that outlive what closed them, for the next server of the tests with the same settings.

Each server renders templates and tries grammars in processes of its own, which take a tenth of a second of processor
time to start: more than most tests.
"""

from __future__ import annotations

import json
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from octavo.system.child_process import ChildProcess

Answer = TypeVar("Answer")
_idle: defaultdict[tuple[str, str, bytes | None], list[ChildProcess]] = defaultdict(list)


class KeptProcess:
    """A ``ChildProcess`` that is kept when it is closed, unless it was asked something that it has not answered."""

    def __init__(self, module: str, settings: dict[str, Any], more: bytes | None = None) -> None:
        idle = _idle[module, json.dumps(settings, sort_keys=True), more]
        self._process = next((process for process in _popped(idle) if process.is_alive), None) or ChildProcess(
            module, settings, more
        )
        self.id, self._settings = self._process.id, self._process._settings
        self._unanswered: list[Any] = []
        self.close = weakref.finalize(self, _keep, self._process, idle, self._unanswered)

    @property
    def is_alive(self) -> bool:
        return self.close.alive and self._process.is_alive

    def ask(self, question: Any) -> tuple[bytes, str]:
        return self._answer(self._process.ask, question)

    def ask_bytes(self, question: bytes) -> tuple[bytes, bytes]:
        return self._answer(self._process.ask_bytes, question)

    def _answer(self, ask: Callable[[Any], Answer], question: Any) -> Answer:
        self._unanswered.append(question)
        answer = ask(question)
        self._unanswered.clear()
        return answer


def _popped(processes: list[ChildProcess]) -> Iterator[ChildProcess]:
    while processes:
        yield processes.pop()


def _keep(process: ChildProcess, idle: list[ChildProcess], unanswered: list[Any]) -> None:
    if process.is_alive and not unanswered:
        idle.append(process)
    else:
        process.close()
