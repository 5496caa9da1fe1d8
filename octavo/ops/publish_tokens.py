"""The last act of a step: its tokens go where the next step and the host find them.

Shapes: S sequences, C cells for last tokens, Q steps whose results are kept.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.dispatch import op


@op
def publish_tokens(
    tokens_S: Tensor, cells_S: Tensor, last_tokens_C: Tensor, results_QS: Tensor, counter: Tensor
) -> None:
    """Write the tokens (int32) to their cells (int64) and to the row ``counter % Q`` of results, and count the step.

    Several sequences may have the cell of padding. ``results`` (int32) may lie in pinned memory of the host;
    ``counter`` is int32 [1].
    """
    last_tokens_C[cells_S] = tokens_S
    results_QS[int(counter) % len(results_QS), : len(tokens_S)] = tokens_S
    counter += 1
