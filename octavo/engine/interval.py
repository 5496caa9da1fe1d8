"""Prompts first: while prompts can be computed, those who decode have a token in one of several steps only."""

from __future__ import annotations

from collections.abc import Callable


class DecodeInterval:
    """Says which steps leave out those who decode: with an interval of n, at most n - 1 in a row.

    Steps of prompts alone are few and large, so first tokens come sooner and gaps between tokens grow.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._num_without = 0
        """Steps since those who decode had their last one."""

    def leaves_out(self, prompts_can_go: Callable[[], bool]) -> bool:
        """Whether the next step leaves out those who decode; to be asked once for each step."""
        leaves_out = self._num_without < self.interval - 1 and prompts_can_go()
        self._num_without = self._num_without + 1 if leaves_out else 0
        return leaves_out

    def end(self) -> None:
        """Prompts wait for blocks: let those who decode have the next step, since they may give some back."""
        self._num_without = self.interval
