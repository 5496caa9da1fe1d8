"""Low-rank changes of a linear map, another one for each row, where only the device knows which.

The adapters of a map lie in one stack that is never moved, so that a captured graph serves whichever are loaded.

Shapes: T tokens, K inputs, N outputs of the whole map, P parts of it, A places for adapters, R highest rank.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from octavo.ops.dispatch import op
from octavo.ops.linear import linear

NOBODY = -1
"""Instead of a place: the row wants no adapter."""


class LowRankStack(NamedTuple):
    """The changes of one map by all adapters; what an adapter does not change, or a lower rank leaves over, is 0."""

    down_APRK: Tensor
    up_ANR: Tensor
    """Scaled, and of the same dtype."""
    parts_P2: Tensor
    """int32: the first of a part's outputs and their number. Parts do not overlap."""
    widest: int
    """The largest of these numbers."""


@op
def stacked_lora(y_TN: Tensor, x_TK: Tensor, places_T: Tensor, stack: LowRankStack) -> Tensor:
    """Add ``x @ down.T @ up.T``, part by part, of the adapter at each row's place (int32); ``y``, overwritten.

    Rows whose place is negative are left alone, and a row's numbers do not depend on the other rows. All of one dtype;
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
