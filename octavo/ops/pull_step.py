"""Fetching a step's inputs from the host, as the first act of the step itself.

A copy by the copy engine in front of a graph makes the graph wait some 20 microseconds; a kernel in the graph does not.

Shapes: Q steps whose inputs are kept, B bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.dispatch import op


@op
def pull_step(inputs_B: Tensor, uploads_QB: Tensor, counter: Tensor) -> None:
    """Copy the row ``counter % Q`` of ``uploads`` (uint8, in pinned memory of the host) to ``inputs`` (uint8).

    ``counter`` is int32 [1]. A row begins with an int64: how many words of eight bytes it has, that one included.
    """
    row_B = uploads_QB[int(counter) % len(uploads_QB)]
    end = 8 * int(row_B[:8].view(torch.int64))
    inputs_B[:end] = row_B[:end]
