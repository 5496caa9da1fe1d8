"""How far the reasoning in an output has come that has a bound, and which tokens are forced when it is reached."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from octavo.types import Mark, ThinkingBudget


class ThinkingProgress:
    """How far the reasoning in an output has come. Each token of the output is read once."""

    __slots__ = ("_budget", "_is_inside", "_num_forced", "_num_read", "_num_thought", "_start")

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._is_inside = budget.is_inside
        self._num_read = 0
        self._start = 0
        """Where the reasoning began, or what stands outside it."""
        self._num_thought = 0
        """Tokens of reasoning that has ended."""
        self._num_forced = len(budget.then)
        """Of the tokens behind ``closes``, how many have come; all of them if none is to be forced."""

    def at(self, output: Sequence[int | None]) -> ThinkingProgress:
        """Go on to the end of ``output``; returns a copy, for tokens behind it that may be rejected."""
        self._go_on(output)
        return copy.copy(self)

    def forced(self, output: Sequence[int | None]) -> int | None:
        """Go on to the end of ``output``; returns the only token that may follow it, if there is one."""
        self._go_on(output)
        if not self._is_inside:
            then = self._budget.then
            return then[self._num_forced] if self._num_forced < len(then) else None
        if not self._is_used_up(len(output) - self._start):
            return None
        closes = self._budget.closes[0]
        sizes = range(min(len(closes) - 1, len(output) - self._start), 0, -1)
        begun = (size for size in sizes if tuple(output[len(output) - size :]) == closes[:size])
        return closes[next(begun, 0)]

    def barred(self, output: Sequence[int | None]) -> list[int]:
        """Tokens that would open reasoning once more behind ``output``, to whose end it has gone on."""
        if self._is_inside or not self._start or not self._is_used_up(0):
            return []
        begun = ((mark, len(output) - len(mark) + 1) for mark in self._budget.opens)
        return [mark[-1] for mark, at in begun if self._opens_at(output, at) and tuple(output[at:]) == mark[:-1]]

    def _opens_at(self, output: Sequence[int | None], begin: int) -> bool:
        """Whether a mark that begins at ``begin``, outside reasoning, opens some."""
        gap = self._budget.gap
        return begin >= self._start and all(output[place] in gap for place in range(self._start, begin))

    def _is_used_up(self, num_more: int) -> bool:
        return self._num_thought + num_more >= self._budget.num_tokens

    def _go_on(self, output: Sequence[int | None]) -> None:
        for end in range(self._num_read + 1, len(output) + 1):
            self._read(output, end)
        self._num_read = len(output)

    def _read(self, output: Sequence[int | None], end: int) -> None:
        """Read the token that ends at ``end``."""
        budget = self._budget
        if self._num_forced < len(budget.then):
            is_kept = output[end - 1] == budget.then[self._num_forced]  # else a grammar has not allowed it
            self._num_forced = self._num_forced + 1 if is_kept else len(budget.then)
            self._start = end
        elif size := self._size_of(budget.closes, output, end):
            if self._is_inside:
                self._num_thought += end - size - self._start
                self._num_forced = 0 if self._is_used_up(0) else len(budget.then)
            self._is_inside, self._start = False, end
        elif not self._is_inside:
            size = self._size_of(budget.opens, output, end)
            if size and self._opens_at(output, end - size):
                self._is_inside, self._start = True, end

    def _size_of(self, mark: Mark, output: Sequence[int | None], end: int) -> int:
        """Tokens of ``mark`` where it ends at ``end``, else 0."""
        sizes = (len(tokens) for tokens in mark if output[end - 1] == tokens[-1] and end - len(tokens) >= self._start)
        return next((size for size in sizes if tuple(output[end - size : end]) in mark), 0)
