"""Checks and conversions of the tensors passed to kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from octavo_kernels.cpu.host import FLOAT_FEATURES, missing
from octavo_kernels.cpu.vector_ir import BFLOAT16, FLOAT16, FLOAT32, LANES

FORMATS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
"""Number formats by dtype."""


def declines_floats(dtype: torch.dtype) -> str | None:
    """Why a kernel for floating-point numbers cannot take ``dtype`` here; ``None`` if it can."""
    return missing(FLOAT_FEATURES) if dtype in FORMATS else f"takes float32, bfloat16 and float16, not {dtype}"


def declines_activations(dtype: torch.dtype) -> str | None:
    """Why a kernel for packed weights cannot take activations of ``dtype`` here; ``None`` if it can."""
    return missing(FLOAT_FEATURES) if dtype == torch.float32 else f"activations must be float32, got {dtype}"


def whole_vectors(x: Tensor) -> Tensor:
    """``x``, contiguous, its last axis zero-padded to a multiple of 16: almost always ``x`` itself."""
    missing_columns = -x.shape[-1] % LANES
    return functional.pad(x, (0, missing_columns)) if missing_columns else x.contiguous()


def format_beside(op: str, x: Tensor, weight: Tensor) -> int:
    """The number format of a weight. Raises ``ValueError`` if ``x`` is neither of its dtype nor of float32."""
    if weight.dtype != x.dtype and (x.dtype != torch.float32 or weight.dtype not in FORMATS):
        raise ValueError(f"{op}: x is of {x.dtype}, the weight of {weight.dtype}")
    return FORMATS[weight.dtype]


def address(x: Tensor | None) -> int:
    """Address of a tensor's data; 0 for ``None``."""
    return 0 if x is None else x.data_ptr()


def rows_at(x: Tensor) -> tuple[int, int]:
    """Address of a float32 tensor's rows, and the bytes between them."""
    return x.data_ptr(), 4 * x.stride(0)
