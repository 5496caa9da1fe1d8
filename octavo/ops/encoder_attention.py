"""Bidirectional attention within each text, without a cache.

Shapes: T tokens of several texts, N heads, H head dim, L tokens of one text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.dispatch import op


@op
def encoder_attention(qkv_TW: Tensor, num_heads: int, ends: Sequence[int]) -> Tensor:
    """Softmax attention within each text, scores scaled by ``H ** -0.5``; a new tensor [T, N * H].

    A row of ``qkv`` holds N query heads, then N key heads, then N value heads. Text i has the rows from
    ``ends[i - 1]`` to ``ends[i]``, the first from 0. Sums are computed in float32 at least; the result has qkv's dtype,
    and a text's rows do not depend on the other texts.
    """
    T, W = qkv_TW.shape
    wide = torch.promote_types(qkv_TW.dtype, torch.float32)
    out_TD = qkv_TW.new_empty(T, W // 3)
    start = 0
    for end in ends:
        q_NLH, k_NLH, v_NLH = qkv_TW[start:end].to(wide).view(end - start, 3, num_heads, -1).permute(1, 2, 0, 3)
        attended_NLH = functional.scaled_dot_product_attention(q_NLH, k_NLH, v_NLH)
        out_TD[start:end] = attended_NLH.transpose(0, 1).flatten(1)
        start = end
    return out_TD
