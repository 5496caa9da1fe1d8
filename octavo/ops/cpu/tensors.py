"""What kernels expect of the tensors that they are given."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.cpu.host import FLOAT_FEATURES, missing
from octavo.ops.cpu.vector_ir import BFLOAT16, FLOAT16, FLOAT32, LANES

FORMATS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
"""Number formats by dtype."""


def declines_floats(dtype: torch.dtype) -> str | None:
    """Why a kernel for floating-point numbers cannot take ``dtype`` here; ``None`` if it can."""
    return missing(FLOAT_FEATURES) if dtype in FORMATS else f"takes float32, bfloat16 and float16, not {dtype}"


def whole_vectors(x: Tensor) -> Tensor:
    """``x``, contiguous, its last axis filled up with zeros to a multiple of 16: almost always ``x`` itself."""
    missing_columns = -x.shape[-1] % LANES
    return functional.pad(x, (0, missing_columns)) if missing_columns else x.contiguous()


def by_token(x: Tensor) -> Tensor:
    """``x`` as float32 [T, heads, H] with the heads of a token side by side, as they are in a wider projection."""
    x = x.float()
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
