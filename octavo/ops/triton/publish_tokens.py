"""``publish_tokens``: one kernel, which writes straight to the memory of the host."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.publish_tokens import publish_tokens
from octavo.ops.triton.launch import after_predecessor, launch

BLOCK = 128


@publish_tokens.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def publish_tokens_triton(
    tokens_S: Tensor, cells_S: Tensor, last_tokens_C: Tensor, results_QS: Tensor, result_row: Tensor
) -> None:
    """See ``ops.publish_tokens``."""
    S = len(tokens_S)
    launch(
        _publish_kernel,
        (triton.cdiv(S, BLOCK),),
        tokens_S,
        cells_S,
        last_tokens_C,
        results_QS,
        result_row,
        S,
        results_QS.stride(0),
        BLOCK=BLOCK,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["S"])
def _publish_kernel(
    tokens: tl.tensor,
    cells: tl.tensor,
    last_tokens: tl.tensor,
    results: tl.tensor,
    result_row: tl.tensor,
    S: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    after_predecessor(PDL)
    cell = tl.load(cells + i, mask=i < S, other=0)
    token = tl.load(tokens + i, mask=i < S)
    tl.store(last_tokens + cell, token, mask=i < S)
    tl.store(results + tl.load(result_row).to(tl.int64) * stride + i, token, mask=i < S)
