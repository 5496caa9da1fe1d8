"""How much a step computes in which somebody decodes, who waits for all of it.

Up to some hundred rows prompts come nearly free with a step of decoding, which reads all weights anyway; from there on
its time grows with its rows. So shorter steps take as many prompt tokens a second, and let others wait less.
"""

from __future__ import annotations

from octavo.config import SchedulerSettings

LARGE_WEIGHTS = 8e9
"""Bytes of weights from which on this is so. With fewer, a step has fixed costs that longer ones share."""
MIXED_TOKENS = 768
"""On Qwen3-8B and one H200 as good as 2,048 for throughput, and better than 512."""


def mixed_tokens_on_gpu(
    settings: SchedulerSettings, weight_bytes: float, max_num_seqs: int, max_num_batched_tokens: int
) -> int | None:
    """Most tokens of such a step, given the limits of every step; ``None`` where it has none of its own."""
    if settings.max_num_mixed_tokens is not None or weight_bytes < LARGE_WEIGHTS:
        return settings.max_num_mixed_tokens
    return min(max(MIXED_TOKENS, 2 * max_num_seqs), max_num_batched_tokens)
