"""``pull_step``: some programs that read the host's memory over the bus."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.stepping import pull_step
from octavo_kernels.triton.launch import after_predecessor, launch

PROGRAMS = 32
BLOCK = 256


@pull_step.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def pull_step_triton(inputs_B: Tensor, uploads_QB: Tensor, counter: Tensor) -> None:
    """See ``ops.pull_step``."""
    Q, words = len(uploads_QB), uploads_QB.view(torch.int64)
    inputs = inputs_B.view(torch.int64)
    launch(_pull_kernel, (PROGRAMS,), inputs, words, counter, words.stride(0), Q=Q, BLOCK=BLOCK, num_warps=4)


@triton.jit
def _pull_kernel(
    inputs: tl.tensor,
    uploads: tl.tensor,
    counter: tl.tensor,
    stride: tl.tensor,
    Q: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    after_predecessor(PDL)
    uploads += (tl.load(counter) % Q).to(tl.int64) * stride
    end = tl.load(uploads)
    i = tl.arange(0, BLOCK)
    for start in range(tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        words = tl.load(uploads + start + i, mask=start + i < end)
        tl.store(inputs + start + i, words, mask=start + i < end)
