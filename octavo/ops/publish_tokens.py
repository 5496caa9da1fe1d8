"""Final kernel of a step: publishes its tokens to the next step and to the host.

Shapes: S sequences, C cells for last tokens, Q steps in the ring of results.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.dispatch import op


@op
def publish_tokens(
    tokens_S: Tensor, cells_S: Tensor, last_tokens_C: Tensor, results_QS: Tensor, counter: Tensor
) -> None:
    """Write the tokens (int32) to their cells (int64) and to row ``counter % Q`` of results; increment ``counter``.

    Several sequences may share the padding cell. ``results`` (int32) may be in pinned host memory; ``counter`` is
    int32 [1].
    """
    last_tokens_C[cells_S] = tokens_S
    results_QS[int(counter) % len(results_QS), : len(tokens_S)] = tokens_S
    counter += 1
