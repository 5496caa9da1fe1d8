"""``publish_tokens``: one kernel, which writes straight to the memory of the host."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.stepping import publish_tokens
from octavo_kernels.triton.launch import after_predecessor, launch

FEWEST = 256
"""One kernel serves all steps of up to this many sampled rows."""


@publish_tokens.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def publish_tokens_triton(
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
    """See ``ops.publish_tokens``."""
    R = len(tokens_R)
    launch(
        _publish_kernel,
        (1,),
        tokens_R,
        positions_R,
        cells_S,
        last_tokens_C,
        last_positions_C,
        results_QN,
        counter,
        num_accepted_S,
        cu_samples,
        R,
        len(cells_S),
        results_QN.stride(0),
        Q=len(results_QN),
        BLOCK=max(FEWEST, triton.next_power_of_2(R)),
        HAS_DRAFTS=num_accepted_S is not None,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["R", "S"])
def _publish_kernel(
    tokens: tl.tensor, positions: tl.tensor, cells: tl.tensor, last_tokens: tl.tensor, last_positions: tl.tensor,
    results: tl.tensor, counter: tl.tensor, num_accepted: tl.tensor, cu_samples: tl.tensor, R: tl.tensor, S: tl.tensor,
    stride: tl.tensor, Q: tl.constexpr, BLOCK: tl.constexpr, HAS_DRAFTS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    i = tl.arange(0, BLOCK)
    after_predecessor(PDL)
    step = tl.load(counter)
    row = results + (step % Q).to(tl.int64) * stride
    tl.store(row + i, tl.load(tokens + i, mask=i < R), mask=i < R)
    last = i
    if HAS_DRAFTS:
        accepted = tl.load(num_accepted + i, mask=i < S, other=0)
        tl.store(row + R + i, accepted, mask=i < S)
        last = tl.minimum(tl.load(cu_samples + i, mask=i < S, other=0) + accepted, R - 1)
    cell = tl.load(cells + i, mask=i < S, other=0)
    tl.store(last_tokens + cell, tl.load(tokens + last, mask=i < S), mask=i < S)
    tl.store(last_positions + cell, tl.load(positions + last, mask=i < S), mask=i < S)
    tl.debug_barrier()  # all have read the count
    tl.store(counter, step + 1)
