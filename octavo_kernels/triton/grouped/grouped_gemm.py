"""Several rows times a weight of ``PackedGroups`` on tensor cores, which read its numbers from registers.

Shapes: T rows, K inputs, N outputs. As in ``skinny_gemm``, the weight takes the wide side, weight @ x.T, and where N
gives too few programs K is split among several, whose sums the last to finish adds in their order. Words go through
shared memory to the registers of the tensor cores' left operand and become entries of the weight there, with the scale
of their group, so that there is one accumulator for all groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.linear.grouped_linear import HALF, TILE, WORDS, PackedGroups, chunk_of
from octavo.ops.linear.linear import Fused
from octavo_kernels.triton.grouped.grouped_numbers import SUM_FACTOR, entries, entry_assembly, scale_factor, word_rows
from octavo_kernels.triton.launch import counters, launch, start_successor, wait_for_predecessor
from octavo_kernels.triton.linear.skinny_gemm import GROUP as TILES_BESIDE
from octavo_kernels.triton.linear.skinny_gemm import MAX_TILES, place
from octavo_kernels.triton.linear.tile_epilogue import add_splits, finish, residual_tile, store_split

_TILE, _WORDS = tl.constexpr(TILE), tl.constexpr(WORDS)


@dataclass(frozen=True)
class GroupedGemmConfig:
    """Tiling parameters."""

    block_n: int
    """Outputs of a tile: 64 or 128."""
    block_t: int
    """Rows of a tile, a power of two from 16 on."""
    warps: int
    stages: int
    """Chunks of columns in shared memory at once, and on their way to it."""
    splits: int = 1
    """Programs that share the columns of a tile."""
    release: str = "early"
    """When the next kernel may start: "early" before the products, "late" after them."""


@triton.jit
def _of_group(
    ptr: tl.tensor, group: tl.tensor, rows: tl.tensor, num_rows: tl.tensor, is_group: tl.tensor, FACTOR: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Scales, zeros or minima of a group, for these rows, times a factor."""
    values = tl.load(ptr + group.to(tl.int64) * num_rows + rows, mask=is_group, other=0.0).to(tl.float32)
    if FACTOR != 1:
        values *= FACTOR
    return values.to(DTYPE)


@triton.jit
def _plane(
    words: tl.tensor, scales_ptr: tl.tensor, zeros_ptr: tl.tensor, minima_ptr: tl.tensor, group: tl.tensor,
    rows: tl.tensor, num_rows: tl.tensor, is_group: tl.tensor, PER_ROW: tl.constexpr, NUMBER: tl.constexpr,
    PLANE: tl.constexpr, DTYPE: tl.constexpr, FACTOR: tl.constexpr, ASSEMBLY: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The entries of the weight for a plane of words, which is of one group; without scales of rows."""
    zeros, scales, minima = None, None, None
    if zeros_ptr is not None:
        zeros = _of_group(zeros_ptr, group, rows, num_rows, is_group, 1, DTYPE)
    if not PER_ROW:
        scales = _of_group(scales_ptr, group, rows, num_rows, is_group, FACTOR, DTYPE)
    if minima_ptr is not None:
        minima = _of_group(minima_ptr, group, rows, num_rows, is_group, 1, DTYPE)
    return entries(words, zeros, scales, minima, NUMBER, PLANE, DTYPE, ASSEMBLY)


@triton.jit
def sum_chunks(
    x_ptr: tl.tensor, words_ptr: tl.tensor, scales_ptr: tl.tensor, zeros_ptr: tl.tensor, minima_ptr: tl.tensor,
    rows_t: tl.tensor, rows: tl.tensor, T: tl.tensor, num_outputs: tl.tensor, num_rows: tl.tensor, K: tl.tensor,
    group_size: tl.tensor, num_groups: tl.tensor, begin: tl.tensor, end: tl.tensor,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, PER_ROW: tl.constexpr,
    NUMBER: tl.constexpr, CHUNK: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
    FACTOR: tl.constexpr, ASSEMBLY: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Products of chunks ``begin`` to ``end``: the outputs or gates, and the ups, all without scales of rows."""
    PLANES: tl.constexpr = CHUNK // 32
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    j = tl.arange(0, WIDTH)
    chunks = tl.cdiv(K, CHUNK)
    words_at = words_ptr + word_rows(rows, chunks)[:, None] + j[None, :]
    ups_at = words_ptr + word_rows(rows + num_outputs, chunks)[:, None] + j[None, :]
    x_at = x_ptr + rows_t.to(tl.int64)[:, None] * K + j[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for chunk in tl.range(begin, end, num_stages=STAGES):
        for first in tl.static_range(0, 32, WIDTH):
            words = tl.load(words_at + chunk * (_TILE * _WORDS) + first, eviction_policy="evict_first")
            up_words = words
            if GATED:
                up_words = tl.load(ups_at + chunk * (_TILE * _WORDS) + first, eviction_policy="evict_first")
            for i in tl.static_range(PLANES):
                group = (chunk * CHUNK + i // (PLANES // PARTS) * (CHUNK // PARTS) + first) // group_size
                is_group = group < num_groups
                k = chunk * CHUNK + i * _WORDS + first
                mask = (rows_t < T)[:, None]
                if not EVEN_K:
                    mask &= (k + j < K)[None, :]
                x = tl.trans(tl.load(x_at + k, mask=mask, other=0.0))
                plane = _plane(
                    words, scales_ptr, zeros_ptr, minima_ptr, group, rows, num_rows, is_group,
                    PER_ROW, NUMBER, i, DTYPE, FACTOR, ASSEMBLY,
                )  # fmt: skip
                acc = tl.dot(plane, x, acc)
                if GATED:
                    plane = _plane(
                        up_words, scales_ptr, zeros_ptr, minima_ptr, group, rows + num_outputs, num_rows, is_group,
                        PER_ROW, NUMBER, i, DTYPE, FACTOR, ASSEMBLY,
                    )  # fmt: skip
                    up = tl.dot(plane, x, up)
    if FACTOR != 1:
        acc, up = acc * SUM_FACTOR, up * SUM_FACTOR
    return acc, up


@triton.jit(do_not_specialize=["T", "late"])
def grouped_gemm_kernel(
    x_ptr: tl.tensor, words_ptr: tl.tensor, scales_ptr: tl.tensor, zeros_ptr: tl.tensor, minima_ptr: tl.tensor,
    bias_ptr: tl.tensor, residual_ptr: tl.tensor, out_ptr: tl.tensor, sums_ptr: tl.tensor, counters_ptr: tl.tensor,
    T: tl.tensor, num_outputs: tl.tensor, K: tl.tensor, group_size: tl.tensor, num_groups: tl.tensor, late: tl.tensor,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, SPLITS_IN_TURN: tl.constexpr,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, PER_ROW: tl.constexpr, NUMBER: tl.constexpr, CHUNK: tl.constexpr,
    EVEN_K: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr, BESIDE: tl.constexpr,
    FACTOR: tl.constexpr, ASSEMBLY: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One tile [BLOCK_T, BLOCK_N] of the output with SPLITS_IN_TURN, else one split of it; the same bits either way.

    ``sums`` holds for each tile and split the sums [1 or 2, BLOCK_N, BLOCK_T].
    """
    GATED: tl.constexpr = ACTIVATION is not None
    SUMS: tl.constexpr = (2 if GATED else 1) * BLOCK_N * BLOCK_T
    chunks = tl.cdiv(K, CHUNK)
    tile, split = tl.program_id(0), tl.program_id(1)
    tile_n, tile_t = place(tile, tl.cdiv(num_outputs, BLOCK_N), tl.cdiv(T, BLOCK_T), BESIDE)
    rows_t, outputs = tile_t * BLOCK_T + tl.arange(0, BLOCK_T), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows, num_rows = tl.minimum(outputs, num_outputs - 1), num_outputs
    if GATED:
        num_rows = 2 * num_outputs
    wait_for_predecessor(PDL)
    if late == 0:
        start_successor(PDL)
    acc, up = sum_chunks(
        x_ptr, words_ptr, scales_ptr, zeros_ptr, minima_ptr, rows_t, rows, T, num_outputs, num_rows, K, group_size,
        num_groups, split * chunks // SPLITS, (split + 1) * chunks // SPLITS,
        BLOCK_T, BLOCK_N, WIDTH, PARTS, PER_ROW, NUMBER, CHUNK, GATED, EVEN_K, STAGES, FACTOR, ASSEMBLY,
    )  # fmt: skip
    if SPLITS_IN_TURN:
        for s in range(1, SPLITS):
            acc_s, up_s = sum_chunks(
                x_ptr, words_ptr, scales_ptr, zeros_ptr, minima_ptr, rows_t, rows, T, num_outputs, num_rows, K,
                group_size, num_groups, s * chunks // SPLITS, (s + 1) * chunks // SPLITS,
                BLOCK_T, BLOCK_N, WIDTH, PARTS, PER_ROW, NUMBER, CHUNK, GATED, EVEN_K, STAGES, FACTOR, ASSEMBLY,
            )  # fmt: skip
            acc, up = acc + acc_s, up + up_s
    if late != 0:
        start_successor(PDL)
    is_last = True
    if SPLITS > 1 and not SPLITS_IN_TURN:
        at = sums_ptr + tile.to(tl.int64) * SPLITS * SUMS
        at += tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        is_last = store_split(acc, up, acc, at, at, split, counters_ptr + tile, SUMS, SPLITS, GATED, False)
    if is_last:
        at_out = rows_t.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
        mask = (rows_t < T)[None, :] & (outputs < num_outputs)[:, None]
        residual = residual_tile(residual_ptr, at_out, mask)
        if SPLITS > 1 and not SPLITS_IN_TURN:
            tl.store(counters_ptr + tile, 0)
            acc, up, _ = add_splits(acc, up, acc, at, at, SUMS, SPLITS, GATED, False)
        if PER_ROW:
            acc *= tl.load(scales_ptr + rows).to(tl.float32)[:, None]
            if GATED:
                up *= tl.load(scales_ptr + num_outputs + rows).to(tl.float32)[:, None]
        acc = finish(acc, up, residual, outputs, num_outputs, bias_ptr, ACTIVATION)
        tl.store(out_ptr + at_out, acc.to(out_ptr.dtype.element_ty), mask=mask)


def parts_of(packed: PackedGroups) -> dict[str, Any]:
    """Constants of ``sum_chunks`` for this form of weight."""
    groups, group, chunk = len(packed.scales_GN), packed.group, chunk_of(packed.number)
    return {
        "WIDTH": HALF if groups > 1 and group == HALF else WORDS,
        "PARTS": 1 if groups == 1 else max(1, min(chunk // group, chunk // WORDS)),
        "PER_ROW": groups == 1,
        "NUMBER": packed.number,
        "CHUNK": chunk,
        "EVEN_K": packed.shape[1] % chunk == 0,
    }


def grouped_gemm(
    x_TK: Tensor, packed: PackedGroups, fused: Fused, config: GroupedGemmConfig, splits_in_turn: bool = False
) -> Tensor:
    """``ops.grouped_linear`` without norm and order; the residual is overwritten and returned.

    With ``splits_in_turn`` one program sums the splits of a tile one after the other, to the same bits. Raises
    ``AssertionError`` for more than MAX_TILES tiles that are split.
    """
    bias_N, _, _, residual_TN, activation = fused
    (T, K), outputs = x_TK.shape, fused.width(packed.shape[0])
    out_TN = x_TK.new_empty(T, outputs) if residual_TN is None else residual_TN
    tiles = triton.cdiv(outputs, config.block_n) * triton.cdiv(T, config.block_t)
    is_split = config.splits > 1 and not splits_in_turn
    assert tiles <= MAX_TILES or not is_split, f"{tiles} tiles are more than {MAX_TILES}"
    sums = tiles * config.splits * (1 if activation is None else 2) * config.block_n * config.block_t
    groups = len(packed.scales_GN)
    launch(
        grouped_gemm_kernel, (tiles, config.splits if is_split else 1),
        *(x_TK, packed.words, packed.scales_GN, packed.zeros_GN, packed.minima_GN, bias_N, residual_TN, out_TN),
        x_TK.new_empty(sums, dtype=torch.float32) if is_split else None,
        counters(x_TK.device, MAX_TILES) if is_split else None,
        *(T, outputs, K, packed.group, groups, int(config.release == "late")), BLOCK_T=config.block_t,
        BLOCK_N=config.block_n, SPLITS=config.splits, SPLITS_IN_TURN=splits_in_turn, **parts_of(packed),
        STAGES=config.stages, ACTIVATION=activation, BESIDE=TILES_BESIDE,
        FACTOR=scale_factor(packed, x_TK.dtype), ASSEMBLY=entry_assembly(packed, x_TK.dtype), num_warps=config.warps,
    )  # fmt: skip
    return out_TN
