"""``enter_streams`` and ``leave_streams`` for CUDA devices: the map to numbers is a product, and what is made of them
for a token, one program.

Shapes: T tokens, S streams, D model, M = S (S + 2) numbers; a program's streams P, numbers of a stream B.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.hyper_connections import Mixed, StreamMaps, attend_streams, enter_streams, leave_streams
from octavo.ops.linear.linear import linear
from octavo_kernels.triton.launch import after_predecessor, declines_floats, launch

BLOCK = 1024


@triton.jit(do_not_specialize=["eps", "norm_eps"])
def enter_streams_kernel(
    x_ptr: tl.tensor, given_ptr: tl.tensor, base_ptr: tl.tensor, scales_ptr: tl.tensor, sum_ptr: tl.tensor,
    post_ptr: tl.tensor, mix_ptr: tl.tensor, eps: tl.tensor, norm_eps: tl.tensor, S: tl.constexpr, D: tl.constexpr,
    ITERATIONS: tl.constexpr, SP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One token, whose map is that of streams that are not normalised."""
    t, s_P, i_B = tl.program_id(0).to(tl.int64), tl.arange(0, SP), tl.arange(0, BLOCK)
    M: tl.constexpr = S * (S + 2)
    is_own_P = s_P < S
    is_own_PP = is_own_P[:, None] & is_own_P[None, :]
    at_PP = 2 * S + s_P[:, None] * S + s_P[None, :]
    pre_base_P = tl.load(base_ptr + s_P, mask=is_own_P, other=0.0)
    post_base_P = tl.load(base_ptr + S + s_P, mask=is_own_P, other=0.0)
    mix_base_PP = tl.load(base_ptr + at_PP, mask=is_own_PP, other=0.0)
    after_predecessor(PDL)
    squares_B = tl.zeros([BLOCK], tl.float32)
    for at in tl.range(0, S * D, BLOCK):
        x_B = tl.load(x_ptr + t * S * D + at + i_B, mask=at + i_B < S * D, other=0.0).to(tl.float32)
        squares_B += x_B * x_B
    factor = tl.rsqrt(tl.sum(squares_B, 0) / (S * D) + norm_eps)
    pre_P = tl.load(given_ptr + t * M + s_P, mask=is_own_P, other=0.0) * factor
    post_P = tl.load(given_ptr + t * M + S + s_P, mask=is_own_P, other=0.0) * factor
    mix_PP = tl.load(given_ptr + t * M + at_PP, mask=is_own_PP, other=0.0) * factor
    pre_P = tl.sigmoid(pre_P * tl.load(scales_ptr) + pre_base_P) + eps
    post_P = 2.0 * tl.sigmoid(post_P * tl.load(scales_ptr + 1) + post_base_P)
    tl.store(post_ptr + t * S + s_P, post_P, mask=is_own_P)
    mix_PP = tl.where(is_own_PP, mix_PP * tl.load(scales_ptr + 2) + mix_base_PP, float("-inf"))
    mix_PP = tl.exp(mix_PP - tl.where(is_own_P, tl.max(mix_PP, 1), 0.0)[:, None])
    mix_PP = mix_PP / tl.where(is_own_P, tl.sum(mix_PP, 1), 1.0)[:, None] + eps
    mix_PP = tl.where(is_own_PP, mix_PP, 0.0)
    mix_PP = mix_PP / (tl.sum(mix_PP, 0) + eps)[None, :]
    for _ in tl.range(1, ITERATIONS):
        mix_PP = mix_PP / (tl.sum(mix_PP, 1) + eps)[:, None]
        mix_PP = mix_PP / (tl.sum(mix_PP, 0) + eps)[None, :]
    tl.store(mix_ptr + t * S * S + s_P[:, None] * S + s_P[None, :], mix_PP, mask=is_own_PP)
    for at in tl.range(0, D, BLOCK):
        d_B = at + i_B
        is_in_PB = is_own_P[:, None] & (d_B < D)[None, :]
        x_PB = tl.load(x_ptr + (t * S + s_P)[:, None] * D + d_B[None, :], mask=is_in_PB, other=0.0).to(tl.float32)
        sum_B = tl.sum(x_PB * pre_P[:, None], 0)
        tl.store(sum_ptr + t * D + d_B, sum_B.to(sum_ptr.dtype.element_ty), mask=d_B < D)


@enter_streams.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def enter_streams_triton(x_TX: Tensor, maps: StreamMaps) -> Mixed:
    """See ``ops.enter_streams``."""
    (T, X), S, x_TX = x_TX.shape, maps.num_streams, x_TX.contiguous()
    D = X // S
    given_TM = linear(x_TX.float(), maps.weight_MX)
    sum_TD = torch.empty(T, D, dtype=x_TX.dtype, device=x_TX.device)
    post_TS = torch.empty(T, S, dtype=torch.float32, device=x_TX.device)
    mix_TSS = torch.empty(T, S, S, dtype=torch.float32, device=x_TX.device)
    if T:
        launch(
            enter_streams_kernel, (T,), x_TX, given_TM, maps.base_M, maps.scales, sum_TD, post_TS, mix_TSS, maps.eps,
            maps.norm_eps, S=S, D=D, ITERATIONS=maps.iterations, SP=triton.next_power_of_2(S), BLOCK=BLOCK,
            num_warps=4,
        )  # fmt: skip
    return Mixed(sum_TD, post_TS, mix_TSS)


@triton.jit
def leave_streams_kernel(
    y_ptr: tl.tensor, x_ptr: tl.tensor, post_ptr: tl.tensor, mix_ptr: tl.tensor, out_ptr: tl.tensor, S: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Some numbers of all streams of one token."""
    t, d_B = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    after_predecessor(PDL)
    y_B = tl.load(y_ptr + t * D + d_B, mask=d_B < D, other=0.0).to(tl.float32)
    for j in tl.static_range(S):
        sum_B = y_B * tl.load(post_ptr + t * S + j)
        for i in tl.static_range(S):
            x_B = tl.load(x_ptr + (t * S + i) * D + d_B, mask=d_B < D, other=0.0).to(tl.float32)
            sum_B += x_B * tl.load(mix_ptr + (t * S + i) * S + j)
        tl.store(out_ptr + (t * S + j) * D + d_B, sum_B.to(out_ptr.dtype.element_ty), mask=d_B < D)


@leave_streams.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def leave_streams_triton(y_TD: Tensor, x_TX: Tensor, post_TS: Tensor, mix_TSS: Tensor) -> Tensor:
    """See ``ops.leave_streams``."""
    (T, D), S = y_TD.shape, post_TS.shape[1]
    out_TX = torch.empty(T, S * D, dtype=x_TX.dtype, device=x_TX.device)
    if T:
        vectors = (x.contiguous() for x in (y_TD, x_TX, post_TS, mix_TSS))
        block = min(BLOCK, triton.next_power_of_2(D))
        launch(leave_streams_kernel, (T, triton.cdiv(D, block)), *vectors, out_TX, S=S, D=D, BLOCK=block, num_warps=4)
    return out_TX


# ---- attend_streams: ``attend_streams`` for CUDA devices, a program for each token and query.


@triton.jit(do_not_specialize=["S"])
def attend_streams_kernel(
    x_ptr: tl.tensor, y_ptr: tl.tensor, queries_ptr: tl.tensor, out_ptr: tl.tensor, x_stride: tl.tensor,
    y_stride: tl.tensor, S: tl.tensor, scale: tl.tensor, eps: tl.tensor, D: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The sum grows stream by stream, the present one last."""
    t, q, d_B = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    is_in_B = d_B < D
    query_B = tl.load(queries_ptr + q * D + d_B, mask=is_in_B, other=0.0) * scale
    after_predecessor(PDL)
    peak, total, sum_B = float("-inf"), 0.0, tl.zeros([BLOCK], tl.float32)
    for s in tl.range(0, S):
        x_B = tl.load(x_ptr + t * x_stride + s * D + d_B, mask=is_in_B, other=0.0).to(tl.float32)
        peak, total, sum_B = _with_stream(x_B, query_B, peak, total, sum_B, eps, D)
    y_B = tl.load(y_ptr + t * y_stride + d_B, mask=is_in_B, other=0.0).to(tl.float32)
    peak, total, sum_B = _with_stream(y_B, query_B, peak, total, sum_B, eps, D)
    tl.store(out_ptr + (q * tl.num_programs(0) + t) * D + d_B, sum_B / total, mask=is_in_B)


@triton.jit
def _with_stream(
    x_B: tl.tensor, query_B: tl.tensor, peak: tl.tensor, total: tl.tensor, sum_B: tl.tensor, eps: tl.tensor,
    D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    normed_B = x_B * tl.rsqrt(tl.sum(x_B * x_B, 0) / D + eps)
    score = tl.sum(normed_B * query_B, 0)
    higher = tl.maximum(peak, score)
    fade, weight = tl.exp(peak - higher), tl.exp(score - higher)
    return higher, total * fade + weight, sum_B * fade + normed_B * weight


@attend_streams.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def attend_streams_triton(x_TSD: Tensor, y_TD: Tensor, queries_QD: Tensor, eps: float) -> Tensor:
    """See ``ops.attend_streams``."""
    (T, S, D), Q = x_TSD.shape, len(queries_QD)
    assert y_TD.stride(1) == 1, "the numbers of a stream must lie side by side"
    assert not S or x_TSD.stride()[1:] == (D, 1), "the streams of a token must lie side by side"
    out_QTD = torch.empty(Q, T, D, dtype=torch.float32, device=y_TD.device)
    if T:
        block = triton.next_power_of_2(D)
        launch(
            attend_streams_kernel, (T, Q), x_TSD, y_TD, queries_QD, out_QTD, x_TSD.stride(0), y_TD.stride(0), S,
            D**-0.5, eps, D=D, BLOCK=block, num_warps=8 if block > BLOCK else 4,
        )  # fmt: skip
    return out_QTD
