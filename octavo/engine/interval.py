"""Prefill priority: decode only every n-th step while prompts are pending."""

from __future__ import annotations

from collections.abc import Callable


class DecodeInterval:
    """Decides which steps leave decodes out: with an interval of n, at most n - 1 in a row.

    Prefill-only steps are few and large, which lowers TTFT and raises ITL.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._num_without = 0
        """Steps since the last step with decodes."""

    def leaves_out(self, prompts_can_go: Callable[[], bool]) -> bool:
        """Whether the next step leaves decodes out; to be called exactly once per step."""
        leaves_out = self._num_without < self.interval - 1 and prompts_can_go()
        self._num_without = self._num_without + 1 if leaves_out else 0
        return leaves_out

    def end(self) -> None:
        """Decode in the next step: prompts wait for blocks, which decoding sequences may release."""
        self._num_without = self.interval
