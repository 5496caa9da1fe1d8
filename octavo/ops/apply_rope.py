"""Rotary position embedding (Su et al., arXiv 2104.09864), in the half-split layout of Hugging Face checkpoints.

Shapes: T tokens, N heads, K kv heads, H head dim, R rotated pairs (at most H / 2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.dispatch import op


@op
def apply_rope(q_TNH: Tensor, k_TKH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys; new tensors of their own dtypes. ``cos`` and ``sin`` are float32.

    Elements i and R + i of a head are a pair, rotated by the token's angle i; elements from 2R on are unchanged.
    """
    cos, sin = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    return _rotate(q_TNH, cos, sin), _rotate(k_TKH, cos, sin)


def _rotate(x_TNH: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    R = cos_T1R.shape[-1]
    first, second, rest = x_TNH[..., :R], x_TNH[..., R : 2 * R], x_TNH[..., 2 * R :]
    turned = first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R
    return torch.cat((*turned, rest), dim=-1).to(x_TNH.dtype)
