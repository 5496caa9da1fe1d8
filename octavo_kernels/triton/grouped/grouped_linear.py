"""``grouped_linear`` for CUDA devices: one row fused, more on tensor cores, many by cuBLAS on a dense copy.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.grouped_linear import TILE, WORDS, PackedGroups, chunk_of, grouped_linear
from octavo.ops.linear import Activation
from octavo_kernels.hopper.pipelined_configs import PipelinedConfig
from octavo_kernels.hopper.streamed_configs import StreamedConfig
from octavo_kernels.triton.grouped.grouped_configs import GroupedConfig, config_for, invariant_config
from octavo_kernels.triton.grouped.grouped_gemm import grouped_gemm
from octavo_kernels.triton.grouped.grouped_gemv import GroupedGemvConfig, grouped_gemv
from octavo_kernels.triton.grouped.grouped_numbers import assembly, numbers
from octavo_kernels.triton.grouped.grouped_product import GroupedProduct
from octavo_kernels.triton.launch import after_predecessor, is_invariant, launch
from octavo_kernels.triton.linear.linear import cublas_linear
from octavo_kernels.triton.norms import rms_norm_triton
from octavo_kernels.triton.tuning.product_calls import note_call

FLOATS = (torch.bfloat16, torch.float16)


def declines_grouped(dtype: torch.dtype) -> str | None:
    """Why kernels for packed groups cannot take activations of this type, or ``None``."""
    return None if dtype in FLOATS else f"tensor cores take {', '.join(map(str, FLOATS))}; this is {dtype}"


@grouped_linear.kernel(device="cuda", name="triton", preference=10, supports=declines_grouped)
def grouped_linear_triton(
    x_TK: Tensor,
    packed: PackedGroups,
    bias_N: Tensor | None = None,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    residual_TN: Tensor | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """See ``ops.grouped_linear``; the residual is overwritten and shares no memory with x. Raises ``ValueError`` for
    shapes that do not go together."""
    (T, K), (N, K_weight) = x_TK.shape, packed.shape
    if K_weight != K:
        raise ValueError(f"grouped_linear: x has {K} columns, the weight {K_weight}")
    if activation is not None and N % 2:
        raise ValueError(f"grouped_linear: {N} outputs cannot be gates and as many ups, for activation {activation!r}")
    if T == 0:
        return x_TK.new_empty(0, N if activation is None else N // 2)
    note_call(x_TK, packed, bias_N, norm_K, residual_TN, activation)
    if is_invariant():
        config: GroupedConfig
        config, in_turn = invariant_config(T, packed, activation is not None)
    else:
        product = GroupedProduct.of(packed, activation is not None, x_TK.dtype)
        config, in_turn = config_for(T, product, x_TK.device), False
    return run_grouped(x_TK, packed, bias_N, norm_K, eps, residual_TN, activation, config, in_turn)


def run_grouped(
    x_TK: Tensor,
    packed: PackedGroups,
    bias_N: Tensor | None,
    norm_K: Tensor | None,
    eps: float,
    residual_TN: Tensor | None,
    activation: Activation | None,
    config: GroupedConfig,
    splits_in_turn: bool = False,
) -> Tensor:
    """``ops.grouped_linear`` in this configuration, whose kernel takes the product."""
    x_TK = x_TK.contiguous()
    residual_TN = None if residual_TN is None else residual_TN.contiguous()
    is_few = isinstance(config, StreamedConfig | GroupedGemvConfig)
    # In float16 the product of x and the norm's weight could overflow.
    fuses_norm = is_few and len(x_TK) == 1 and packed.order_K is None and x_TK.dtype == torch.bfloat16
    if norm_K is not None and not fuses_norm:
        x_TK, norm_K = rms_norm_triton(x_TK, norm_K, eps), None
    if packed.order_K is not None:
        x_TK = x_TK.index_select(1, packed.order_K)
    if isinstance(config, StreamedConfig):
        from octavo_kernels.hopper.streamed_gemv import streamed_gemv

        return streamed_gemv(x_TK, packed, bias_N, norm_K, eps, residual_TN, activation, config)
    if isinstance(config, PipelinedConfig):
        from octavo_kernels.hopper.pipelined_gemm import pipelined_gemm

        return pipelined_gemm(x_TK, packed, bias_N, residual_TN, activation, config)
    if isinstance(config, GroupedGemvConfig):
        return grouped_gemv(x_TK, packed, bias_N, norm_K, eps, residual_TN, activation, config)
    if config is not None:
        return grouped_gemm(x_TK, packed, bias_N, residual_TN, activation, config, splits_in_turn)
    return cublas_linear(x_TK, dense(packed, x_TK.dtype), bias_N, residual_TN, activation)


CHUNKS_AT_ONCE = 8
_TILE, _WORDS = tl.constexpr(TILE), tl.constexpr(WORDS)


@triton.jit
def dense_kernel(
    words_ptr: tl.tensor, scales_ptr: tl.tensor, zeros_ptr: tl.tensor, minima_ptr: tl.tensor, out_ptr: tl.tensor,
    N: tl.tensor, K: tl.tensor, group_size: tl.tensor,
    NUMBER: tl.constexpr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr, SHORT: tl.constexpr, ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """A few chunks of a tile of 16 rows."""
    PLANES: tl.constexpr = CHUNK // 32
    chunks = tl.cdiv(K, CHUNK)
    tile = tl.program_id(0)
    n = tile * _TILE + tl.arange(0, _TILE)[:, None]
    chunk = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)[None, :]
    j = tl.arange(0, _WORDS)[None, None, :]
    words_at = (
        words_ptr + (tile.to(tl.int64) * chunks + chunk) * (_TILE * _WORDS) + tl.arange(0, _TILE)[:, None] * _WORDS
    )
    words = tl.load(words_at[:, :, None] + j, mask=(chunk < chunks)[:, :, None], other=0)
    after_predecessor(PDL)
    for i in tl.static_range(PLANES):
        values = numbers(words, NUMBER, i, out_ptr.dtype.element_ty, ASSEMBLY).to(tl.float32)
        k = chunk * CHUNK + i * _WORDS
        inside = (n < N)[:, :, None] & (k[:, :, None] + j < K)
        at, mask = (k // group_size * N + n)[:, :, None], ((n < N) & (k < K))[:, :, None]
        if SHORT:  # several groups in a plane
            at, mask = (k[:, :, None] + j) // group_size * N + n[:, :, None], inside
        if zeros_ptr is not None:
            values -= tl.load(zeros_ptr + at, mask=mask, other=0.0).to(tl.float32)
        values *= tl.load(scales_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if minima_ptr is not None:
            values += tl.load(minima_ptr + at, mask=mask, other=0.0).to(tl.float32)
        out_at = out_ptr + (n.to(tl.int64) * K + k)[:, :, None] + j
        tl.store(out_at, values.to(out_ptr.dtype.element_ty), mask=inside)


def dense(packed: PackedGroups, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] rounded to this type of 16 bits, without regard to its order."""
    N, K = packed.shape
    out_NK = torch.empty(N, K, dtype=dtype, device=packed.words.device)
    tiles, chunks = packed.words.shape[:2]
    launch(
        dense_kernel,
        (tiles, triton.cdiv(chunks, CHUNKS_AT_ONCE)),
        *(packed.words, packed.scales_GN, packed.zeros_GN, packed.minima_GN, out_NK, N, K, packed.group),
        NUMBER=packed.number,
        CHUNK=chunk_of(packed.number),
        AT_ONCE=CHUNKS_AT_ONCE,
        SHORT=packed.group < WORDS,
        ASSEMBLY=assembly(packed, dtype),
    )
    return out_NK
