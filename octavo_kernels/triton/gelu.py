"""``gelu`` for CUDA devices, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.activation import gelu
from octavo_kernels.triton.gates import gated
from octavo_kernels.triton.launch import after_predecessor, declines_floats, launch

BLOCK = 1024


@triton.jit
def gelu_kernel(
    x_ptr: tl.tensor, out_ptr: tl.tensor, size: tl.tensor, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One block of numbers."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    after_predecessor(PDL)
    x = tl.load(x_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, gated(x, 1.0, ACTIVATION).to(out_ptr.dtype.element_ty), mask=i < size)


@gelu.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def gelu_triton(x_TF: Tensor, approximate: bool) -> Tensor:
    """See ``ops.gelu``."""
    x, out = x_TF.contiguous(), torch.empty_like(x_TF, memory_format=torch.contiguous_format)
    if x.numel():
        activation = "gelu_tanh" if approximate else "gelu"
        launch(gelu_kernel, (triton.cdiv(x.numel(), BLOCK),), x, out, x.numel(), activation, BLOCK)
    return out
