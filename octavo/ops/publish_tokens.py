"""The last act of a step: its tokens go where the next step and the host find them.

Shapes: S sequences, C cells for last tokens, Q steps whose results are kept.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.dispatch import op


@op
def publish_tokens(
    tokens_S: Tensor, cells_S: Tensor, last_tokens_C: Tensor, results_QS: Tensor, result_row: Tensor
) -> None:
    """Write the tokens (int32) to their cells (int64) and to the row of results that ``result_row`` (int32 [1]) names.

    Several sequences may have the cell of padding. ``results`` (int32) may lie in pinned memory of the host.
    """
    last_tokens_C[cells_S] = tokens_S
    results_QS[int(result_row), : len(tokens_S)] = tokens_S
