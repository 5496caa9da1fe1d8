"""``gated_delta`` for CUDA devices in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.gated_delta import DeltaHeads, gated_delta
from octavo.ops.recurrence import StateRows
from octavo_kernels.triton.launch import declines_floats
from octavo_kernels.triton.recurrent.recurrence import recur
from octavo_kernels.triton.recurrent.rules import DELTA, DELTA_BY_CHANNEL, Inputs


@gated_delta.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def gated_delta_triton(
    qkv_TC: Tensor, dt: Tensor, beta_TN: Tensor, gate_TM: Tensor, heads: DeltaHeads, state: Tensor, rows: StateRows
) -> Tensor:
    """See ``ops.gated_delta``."""
    qkv, dt, beta, gate = (x if x.stride(1) == 1 else x.contiguous() for x in (qkv_TC, dt, beta_TN, gate_TM))
    q, k, v = qkv.split_with_sizes(heads.sizes, dim=-1)
    N, V = heads.num_heads, heads.value_dim
    out = torch.empty((len(qkv), N * V), dtype=qkv.dtype, device=qkv.device)
    inputs = Inputs(
        DELTA if heads.dt_bias.numel() == N else DELTA_BY_CHANNEL,
        (q, k, v),
        N // heads.num_key_heads,
        heads.norm_V,
        dt=dt,
        beta=beta,
        gate=gate,
        a_log=heads.a_log_N,
        bias=heads.dt_bias,
        gate_kind=heads.gate,
        eps=heads.norm_eps,
        beta_scale=heads.beta_scale,
        tile=N // heads.num_key_heads if heads.is_tiled else 1,
    )
    return recur(inputs, state, rows, out)
