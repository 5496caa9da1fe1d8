"""Find stop strings in streamed text, without ever emitting part of one.

The stop strings form one automaton (Aho and Corasick, "Efficient string matching", CACM 1975): its state is the
longest suffix of the text that is a prefix of a stop string. One transition per character, independent of the number
of stop strings and of how the text is chunked.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _State:
    """A prefix of a stop string; ``depth`` is its length."""

    depth: int = 0
    next: dict[str, _State] = field(default_factory=dict)
    fallback: _State | None = None
    """The longest proper suffix of this prefix that is a prefix too; ``None`` for the empty one."""
    stop: str | None = None
    """The longest stop string that this prefix ends with."""


class StopStrings:
    """Watches growing text for the first of several stop strings.

    The first to be *complete* wins; of several completed by the same character, the longest. So the result never
    depends on how the text was chunked, and no text waits for a longer match. The text before the match is emitted,
    followed by the match itself if ``include``.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self.found: str | None = None
        """The stop string that ended the text; no further text is emitted."""
        self._root = _build(tuple(stops))
        self._state = self._root
        self._include = include
        self._held = ""
        """Text held back: the prefix that ``_state`` stands for."""

    def push(self, text: str) -> str:
        """Append ``text``; returns the text that is safe to emit."""
        if self.found is not None:
            return ""
        for position, character in enumerate(text):
            self._state = _advance(self._state, character)
            if self._state.stop is not None:
                return self._end(text[: position + 1], self._state.stop)
        return self._let_out(text)

    def pass_over(self, text: str) -> str:
        """Like ``push``, for text in which a stop string may begin but not end."""
        for character in text:
            self._state = _advance(self._state, character)
        while not self._state.next and self._state.fallback is not None:
            self._state = self._state.fallback  # a complete stop string that does not count is not held back
        return self._let_out(text)

    def flush(self) -> str:
        """The text held back, at the end."""
        held, self._held, self._state = self._held, "", self._root
        return held

    def _end(self, text: str, stop: str) -> str:
        text = self._held + text
        self._held, self.found = "", stop
        return text if self._include else text[: len(text) - len(stop)]

    def _let_out(self, text: str) -> str:
        if self._include:
            return text  # a match would be emitted as well, so no text is held back
        text = self._held + text
        safe = len(text) - self._state.depth
        self._held = text[safe:]
        return text[:safe]


def _advance(state: _State, character: str) -> _State:
    """The state after one more character; amortised constant time."""
    while (following := state.next.get(character)) is None:
        if state.fallback is None:
            return state
        state = state.fallback
    return following


@functools.lru_cache(maxsize=16)
def _build(stops: tuple[str, ...]) -> _State:
    """The automaton's initial state. It is immutable, so the choices of a request share it."""
    root = _State()
    for stop in stops:
        state = root
        for character in stop:
            state = state.next.setdefault(character, _State(state.depth + 1))
        state.stop = stop
    # Shorter prefixes first: a fallback is always shorter, so it is set before it is needed.
    queue = deque([root])
    while queue:
        state = queue.popleft()
        for character, following in state.next.items():
            following.fallback = root if state.fallback is None else _advance(state.fallback, character)
            following.stop = following.stop or following.fallback.stop
            queue.append(following)
    return root
