"""How much a step computes beside a few who decode.

Such a step reads all weights, whatever else it computes, and up to some hundred rows prompts come nearly free with it.
So a few hundred at a time are cheaper than a prompt as a whole, and nobody waits long for a token. Beside many, a
step takes long as it is; and where prompts queue up, long steps get them done sooner.
"""

from __future__ import annotations

import dataclasses

from octavo.config import SchedulerSettings

FEW_RUNNING = 32
FEW_WAITING = 4
LARGE_WEIGHTS = 8e9
"""Bytes of weights from which on this is so. With fewer, a step has fixed costs that longer ones share."""
MIXED_TOKENS = 384
"""Qwen3-8B on an H200 takes 4.6 ms for a step of 16 rows, 7.2 for one of 256, 9.7 for 384 and 22.7 for 1,024."""


class MixedSteps:
    """Bounds steps that have somebody's next token in them."""

    def __init__(self, most_mixed: int | None, most: int) -> None:
        self.most_mixed = most if most_mixed is None else min(most_mixed, most)
        self.most = most

    def budget(self, num_running: int, num_cut: int, num_waiting: int) -> int:
        """Tokens of the next step, so that somebody's prompt goes on; of ``num_cut`` it has not been computed whole."""
        if num_cut < num_running <= FEW_RUNNING and num_waiting <= FEW_WAITING:
            return min(max(self.most_mixed, num_running + 1), self.most)
        return self.most


def settle_mixed_steps(settings: SchedulerSettings, bytes_on_gpu: float) -> SchedulerSettings:
    """The settings for a model with so many bytes of weights on a GPU, where nothing else was asked for."""
    if settings.max_num_mixed_tokens is not None or bytes_on_gpu < LARGE_WEIGHTS:
        return settings
    return dataclasses.replace(settings, max_num_mixed_tokens=MIXED_TOKENS)
