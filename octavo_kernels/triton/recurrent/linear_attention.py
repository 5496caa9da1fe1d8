"""``linear_attention`` for CUDA devices in one launch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from octavo.ops.linear_attention import linear_attention
from octavo.ops.recurrence import StateRows
from octavo_kernels.triton.launch import declines_floats
from octavo_kernels.triton.recurrent.recurrence import recur
from octavo_kernels.triton.recurrent.rules import LINEAR, Inputs


@linear_attention.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def linear_attention_triton(
    qkv_TC: Tensor, decay_N: Tensor, state: Tensor, rows: StateRows, activation: Literal["silu"] | None = None
) -> Tensor:
    """See ``ops.linear_attention``."""
    qkv = qkv_TC if qkv_TC.stride(1) == 1 else qkv_TC.contiguous()
    q, k, v = qkv.chunk(3, dim=-1)
    out = torch.empty((len(qkv), qkv.shape[1] // 3), dtype=qkv.dtype, device=qkv.device)
    return recur(Inputs(LINEAR, (q, k, v), 1, decay_N, activation=activation), state, rows, out)
