"""Final kernel of a step: publishes its tokens to the next step and to the host.

Shapes: S sequences, R sampled rows, C cells of the state, Q steps in the ring of results, N numbers of a result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.dispatch import op


@op
def publish_tokens(
    tokens_R: Tensor,
    positions_R: Tensor,
    cells_S: Tensor,
    last_tokens_C: Tensor,
    last_positions_C: Tensor,
    results_QN: Tensor,
    counter: Tensor,
    num_accepted_S: Tensor | None = None,
    cu_samples: Tensor | None = None,
) -> None:
    """Write the tokens (int32), then ``num_accepted`` (int32), to row ``counter % Q`` of results, and each sequence's
    last token with its position (int32) to its cell (int64); increment ``counter``.

    The last token of a sequence is that of its first sampled row ``cu_samples[s]`` plus the number of its accepted
    drafts; ``None``: row s. Several sequences may share the padding cell. ``results`` (int32) may be in pinned host
    memory; ``counter`` is int32 [1].
    """
    R, row_N = len(tokens_R), results_QN[int(counter) % len(results_QN)]
    row_N[:R] = tokens_R
    last_S = torch.arange(len(cells_S), device=tokens_R.device)
    if num_accepted_S is not None and cu_samples is not None:
        row_N[R : R + len(num_accepted_S)] = num_accepted_S
        last_S = (cu_samples[:-1] + num_accepted_S).long().clamp(max=R - 1)
    last_tokens_C[cells_S] = tokens_R[last_S]
    last_positions_C[cells_S] = positions_R[last_S]
    counter += 1
