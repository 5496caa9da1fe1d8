"""Embedding lookup in a table of quantised blocks.

Shapes: T tokens, D model, V vocabulary, P panels, G groups of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.block_linear import PANEL, PackedBlocks
from octavo.ops.dispatch import op_of_ids


@op_of_ids
def block_embedding(token_ids_T: Tensor, packed: PackedBlocks) -> Tensor:
    """Row ``token_ids[t]`` (int64) of the table [V, D] for each t, dequantised exactly; a new float32 tensor [T, D].

    Columns are those of the panels, whatever ``packed.order``.
    Raises ``IndexError`` for an id that is not in the table.
    """
    T, (V, D) = len(token_ids_T), packed.shape
    if T and not 0 <= int(token_ids_T.min()) <= int(token_ids_T.max()) < V:
        raise IndexError(f"block_embedding: token ids must be from 0 to {V - 1}")
    panels_T, rows_T = token_ids_T // PANEL, token_ids_T % PANEL
    each_T = torch.arange(T, device=token_ids_T.device)
    numbers = packed.numbers(panels_T)[each_T, :, :, rows_T].flatten(2)  # [T, G, group]
    scales = packed.float_scales(panels_T)[each_T, :, :, rows_T]  # [T, G, 1 or 2]
    x = (numbers.float() - packed.zero_point) * scales[..., :1]
    return (x + scales[..., 1:] if packed.has_minima else x).view(T, D)
