"""Child processes that outlive what closed them, for the next server of the tests with the same settings.

Each server renders templates and tries grammars in processes of its own, which take a tenth of a second of processor
time to start: more than most tests.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from octavo.system.child_process import ChildProcess

MOST_IDLE = 8
Answer = TypeVar("Answer")
Key = tuple[str, str, bytes | None]
_idle: list[tuple[Key, ChildProcess]] = []
"""The last few that were kept, the newest at the end."""


class KeptProcess:
    """A ``ChildProcess`` that is kept when it is closed, unless it was asked something that it has not answered."""

    def __init__(self, module: str, settings: dict[str, Any], more: bytes | None = None) -> None:
        key = module, json.dumps(settings, sort_keys=True), more
        self._process = _taken(key) or ChildProcess(module, settings, more)
        self.id, self._settings = self._process.id, self._process._settings
        self._unanswered: list[Any] = []
        self.close = weakref.finalize(self, _keep, key, self._process, self._unanswered)

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


def _taken(key: Key) -> ChildProcess | None:
    """The newest process of these settings that lives, which is kept no longer."""
    for entry in reversed(_idle):
        if entry[0] == key and entry[1].is_alive:
            _idle.remove(entry)
            return entry[1]
    return None


def _keep(key: Key, process: ChildProcess, unanswered: list[Any]) -> None:
    if not process.is_alive or unanswered:
        process.close()
        return
    _idle.append((key, process))
    if len(_idle) > MOST_IDLE:
        _idle.pop(0)[1].close()
