"""``state_space`` for CUDA devices in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.recurrence import StateRows
from octavo.ops.state_space import StateSpaceHeads, state_space
from octavo_kernels.triton.launch import declines_floats
from octavo_kernels.triton.recurrent.recurrence import recur
from octavo_kernels.triton.recurrent.rules import STATE_SPACE, Inputs


@state_space.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def state_space_triton(xbc_TC: Tensor, dt_TN: Tensor, heads: StateSpaceHeads, state: Tensor, rows: StateRows) -> Tensor:
    """See ``ops.state_space``."""
    xbc, dt = (x if x.stride(1) == 1 else x.contiguous() for x in (xbc_TC, dt_TN))
    x, b, c = xbc.split_with_sizes(heads.sizes, dim=-1)
    out = torch.empty((len(xbc), heads.sizes[0]), dtype=xbc.dtype, device=xbc.device)
    inputs = Inputs(
        STATE_SPACE,
        (c, b, x),
        heads.num_heads // heads.num_groups,
        heads.d_N,
        dt=dt,
        a_log=heads.a_log_N,
        bias=heads.dt_bias_N,
        limits=heads.dt_limits,
    )
    return recur(inputs, state, rows, out)
