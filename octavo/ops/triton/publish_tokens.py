"""``publish_tokens``: one kernel, which writes straight to the memory of the host."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.publish_tokens import publish_tokens
from octavo.ops.triton.launch import after_predecessor, launch

FEWEST = 256
"""One kernel serves all steps of up to this many sequences."""


@publish_tokens.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def publish_tokens_triton(
    tokens_S: Tensor, cells_S: Tensor, last_tokens_C: Tensor, results_QS: Tensor, counter: Tensor
) -> None:
    """See ``ops.publish_tokens``."""
    S = len(tokens_S)
    launch(
        _publish_kernel,
        (1,),
        tokens_S,
        cells_S,
        last_tokens_C,
        results_QS,
        counter,
        S,
        results_QS.stride(0),
        Q=len(results_QS),
        BLOCK=max(FEWEST, triton.next_power_of_2(S)),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["S"])
def _publish_kernel(
    tokens: tl.tensor,
    cells: tl.tensor,
    last_tokens: tl.tensor,
    results: tl.tensor,
    counter: tl.tensor,
    S: tl.tensor,
    stride: tl.tensor,
    Q: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    i = tl.arange(0, BLOCK)
    after_predecessor(PDL)
    cell = tl.load(cells + i, mask=i < S, other=0)
    token = tl.load(tokens + i, mask=i < S)
    step = tl.load(counter)
    tl.store(last_tokens + cell, token, mask=i < S)
    tl.store(results + (step % Q).to(tl.int64) * stride + i, token, mask=i < S)
    tl.debug_barrier()  # all have read the count
    tl.store(counter, step + 1)
