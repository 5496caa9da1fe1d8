"""Packed experts of a few tokens: each pair of a token and an expert by programs of its own, as in ``grouped_gemv``.

Shapes: P pairs, X experts, K inputs, N outputs of an expert.
"""

from __future__ import annotations

import contextlib
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.grouped_linear import PackedGroups, chunk_of
from octavo_kernels.triton.grouped.grouped_gemv import GroupedGemvConfig, products
from octavo_kernels.triton.grouped.grouped_numbers import assembly, offset_of
from octavo_kernels.triton.launch import launch, no_pdl, start_successor, wait_for_predecessor
from octavo_kernels.triton.linear.tile_epilogue import finish

BLOCK_T = 8
"""Tensor cores take no fewer rows; one of them is used."""


@triton.jit(do_not_specialize=["late"])
def grouped_pair_kernel(
    x_ptr: tl.tensor, words_ptr: tl.tensor, scales_ptr: tl.tensor, zeros_ptr: tl.tensor, minima_ptr: tl.tensor,
    bias_ptr: tl.tensor, ids_ptr: tl.tensor, share_ptr: tl.tensor, out_ptr: tl.tensor,
    num_outputs: tl.tensor, num_rows: tl.tensor, pairs_a_row: tl.tensor, late: tl.tensor,
    K: tl.constexpr, GROUPS: tl.constexpr, NUMBER: tl.constexpr, OFFSET: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, ASSEMBLY: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_N outputs of a pair that has an expert: it reads row pair / pairs_a_row of x and writes its own row of the
    result."""
    GATED: tl.constexpr = ACTIVATION is not None and ACTIVATION != "squared_relu"
    pair, start = tl.program_id(0), tl.program_id(1) * BLOCK_N
    t, outputs = tl.arange(0, BLOCK_T), start + tl.arange(0, BLOCK_N)
    wait_for_predecessor(PDL)
    if late == 0:
        start_successor(PDL)
    expert = tl.load(ids_ptr + pair).to(tl.int32)
    if expert >= 0:
        first_row = expert * num_outputs
        if GATED:
            first_row *= 2
        rows = first_row + tl.minimum(outputs, num_outputs - 1)
        acc, up = products(
            x_ptr + (pair // pairs_a_row).to(tl.int64) * K, words_ptr, scales_ptr, zeros_ptr, minima_ptr, None,
            rows, num_outputs, num_rows, 1,
            K, GROUPS, NUMBER, OFFSET, CHUNK, BLOCK_T, BLOCK_N, SPLIT, STAGES, GATED, ASSEMBLY,
        )  # fmt: skip
        if late != 0:
            start_successor(PDL)
        y, y_up = tl.sum(acc, 0), tl.sum(up, 0)
        if GROUPS == 1:
            y *= tl.load(scales_ptr + rows).to(tl.float32)[:, None]
            if GATED:
                y_up *= tl.load(scales_ptr + num_outputs + rows).to(tl.float32)[:, None]
        own_bias = bias_ptr
        if bias_ptr is not None:
            own_bias = bias_ptr + first_row
        y = finish(y, y_up, 0.0, outputs, num_outputs, own_bias, ACTIVATION, ALPHA, LIMIT)
        if share_ptr is not None:
            y *= tl.load(share_ptr + pair)
        at = out_ptr + pair.to(tl.int64) * num_outputs + outputs[:, None] + t[None, :]
        tl.store(at, y.to(out_ptr.dtype.element_ty), mask=(t < 1)[None, :] & (outputs < num_outputs)[:, None])


def grouped_pairs(
    x: Tensor,
    packed: PackedGroups,
    bias_XN: Tensor | None,
    ids: Tensor,
    shares: Tensor | None,
    activation: dict[str, Any],
    out_PN: Tensor,
    config: GroupedGemvConfig,
) -> Tensor:
    """Fill ``out``: of each pair that has an expert, with an id that is not negative, the expert's outputs, gated by an
    ``activation_of``, times the pair's share."""
    (num_rows, K), (P, N) = packed.shape, out_PN.shape
    offset = offset_of(packed, x.dtype)
    with no_pdl() if config.release == "never" else contextlib.nullcontext():
        launch(
            grouped_pair_kernel, (P, triton.cdiv(N, config.block_n)),
            *(x, packed.words, packed.scales_GN, packed.zeros_GN, packed.minima_GN, bias_XN, ids, shares, out_PN),
            *(N, num_rows, P // len(x), int(config.release == "late")), K=K, GROUPS=len(packed.scales_GN),
            NUMBER=packed.number, OFFSET=offset, CHUNK=chunk_of(packed.number), BLOCK_T=BLOCK_T, BLOCK_N=config.block_n,
            SPLIT=config.split, STAGES=config.stages, **activation, ASSEMBLY=assembly(packed, x.dtype, offset),
            num_warps=config.warps,
        )  # fmt: skip
    return out_PN
