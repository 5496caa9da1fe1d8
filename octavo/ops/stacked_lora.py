"""LoRA with one adapter per row, where only the device knows which row uses which adapter.

The adapters of a map are in one stack at a fixed address, so that a captured graph serves any loaded adapters.

Shapes: T tokens, K inputs, N outputs of the full map, P parts of it, A places for adapters, R highest rank.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from octavo.ops.dispatch import op
from octavo.ops.linear import linear

NO_ADAPTER = -1
"""Place of a row without an adapter."""


class LowRankStack(NamedTuple):
    """The updates of one map by all adapters; parts without an update, and unused ranks, are 0."""

    down_APRK: Tensor
    up_ANR: Tensor
    """Scaled, and of the same dtype."""
    parts_P2: Tensor
    """int32: first output and number of outputs of each part. Parts do not overlap."""
    widest: int
    """Largest number of outputs of a part."""


@op
def stacked_lora(y_TN: Tensor, x_TK: Tensor, places_T: Tensor, stack: LowRankStack) -> Tensor:
    """Add ``x @ down.T @ up.T``, part by part, of the adapter at each row's place (int32); returns ``y``, overwritten.

    Rows with a negative place are unchanged, and a row's result does not depend on the other rows. All of one dtype;
    ``x @ down.T`` is rounded to it.
    """
    for place in sorted(set(places_T.tolist())):
        if place < 0:
            continue
        rows = (places_T == place).nonzero()[:, 0]
        for part, (start, size) in enumerate(stack.parts_P2.tolist()):
            low_TR = linear(x_TK[rows], stack.down_APRK[place, part])
            y_TN[rows, start : start + size] += linear(low_TR, stack.up_ANR[place, start : start + size])
    return y_TN
