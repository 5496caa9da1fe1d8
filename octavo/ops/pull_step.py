"""First kernel of a step: fetches its inputs from the host.

A copy by the copy engine before a graph delays the graph by some 20 microseconds; a kernel in the graph does not.

Shapes: Q steps in the ring of inputs, B bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.dispatch import op


@op
def pull_step(inputs_B: Tensor, uploads_QB: Tensor, counter: Tensor) -> None:
    """Copy row ``counter % Q`` of ``uploads`` (uint8, in pinned host memory) to ``inputs`` (uint8).

    ``counter`` is int32 [1]. A row begins with an int64: its number of eight-byte words, this one included.
    """
    row_B = uploads_QB[int(counter) % len(uploads_QB)]
    end = 8 * int(row_B[:8].view(torch.int64))
    inputs_B[:end] = row_B[:end]
