"""Up to sixteen rows times a weight of ``PackedGroups`` on tensor cores, with fused norm and epilogue.

Shapes: T rows, K inputs, N outputs. A program owns BLOCK_N outputs. Its chunks of columns are dealt out to SPLIT parts,
one for each warp, which multiply their own columns and add their sums at the end; so even a small weight has many loads
under way. Words of the weight go through shared memory into the registers that the tensor cores read, where they become
numbers; the scale of a group multiplies its sums.

RMSNorm may be fused for one row: x is multiplied by the norm's weight on its way to the tensor cores, and every program
takes the sum of squares from the whole row.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.linear.grouped_linear import TILE, WORDS, PackedGroups, chunk_of
from octavo.ops.linear.linear import Fused
from octavo_kernels.triton.grouped.grouped_numbers import assembly, less, numbers, offset_of, word_rows
from octavo_kernels.triton.launch import launch, no_pdl, prefetch_lines, start_successor, wait_for_predecessor
from octavo_kernels.triton.linear.tile_epilogue import finish, residual_tile

_TILE, _WORDS = tl.constexpr(TILE), tl.constexpr(WORDS)
MAX_ROWS = 16


@dataclass(frozen=True)
class GroupedGemvConfig:
    """Tiling parameters."""

    block_n: int
    """Outputs of a tile, a power of two from 16 on."""
    split: int
    """Parts that share the columns of a tile: a multiple of ``warps``."""
    warps: int
    stages: int
    """Chunks of columns in shared memory at once, and on their way to it."""
    release: str = "early"
    """When the next kernel may start: "early" before the products, "late" after them. With "never" it starts when this
    one has ended, and this one when the one before it has."""
    prefetch: bool = True
    """Whether the tile is brought into the cache while the kernel before this one runs."""


@triton.jit
def _prefetch(
    words_ptr: tl.tensor, scales_ptr: tl.tensor, n: tl.tensor, num_rows: tl.tensor,
    CHUNKS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    """Bring the words and scales of a tile into the cache: rows ``n`` on, all in whole tiles of 16."""
    tile = n // _TILE + tl.arange(0, BLOCK_N // _TILE)
    tile = tl.minimum(tile, (num_rows - 1) // _TILE).to(tl.int64)
    prefetch_lines((words_ptr + tile * (CHUNKS * _TILE * _WORDS))[:, None], CHUNKS * _TILE * _WORDS)
    if GROUPS > 1:
        group = tl.minimum(tl.arange(0, triton.next_power_of_2(GROUPS)), GROUPS - 1)
        at = scales_ptr + group.to(tl.int64) * num_rows + tl.minimum(n, num_rows - 1)
        prefetch_lines(at[:, None], BLOCK_N)


@triton.jit
def _scale_tile(
    ptr: tl.tensor, group: tl.tensor, rows: tl.tensor, num_rows: tl.tensor, GROUPS: tl.constexpr
) -> tl.tensor:
    """Scales or zeros of these groups and rows in float32, 0 beyond the last group.

    Those of 16 bits are read in pairs of rows, which are an even number, as asynchronous copies have 32 bits at least:
    others would hold up every step.
    """
    DTYPE: tl.constexpr = ptr.dtype.element_ty
    group, rows, mask = group.to(tl.int64)[:, None], rows[None, :], (group < GROUPS)[:, None]
    if DTYPE.primitive_bitwidth == 16:
        pairs_ptr = ptr.to(tl.pointer_type(tl.int32))
        pairs = tl.load(pairs_ptr + (group * (num_rows >> 1) + (rows >> 1)), mask=mask, other=0)
        values = tl.where((rows & 1) == 1, pairs >> 16, pairs).to(tl.int16).to(DTYPE, bitcast=True)
    else:
        values = tl.load(ptr + (group * num_rows + rows), mask=mask, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _add_plane(
    sums: tl.tensor, words: tl.tensor, x: tl.tensor, zeros_ptr: tl.tensor, group: tl.tensor, rows: tl.tensor,
    num_rows: tl.tensor, GROUPS: tl.constexpr, NUMBER: tl.constexpr, OFFSET: tl.constexpr, PLANE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """``sums`` and the products of a plane's numbers, less the zeros of its group; or plus OFFSET, if there is one."""
    values = numbers(words, NUMBER, PLANE, x.dtype, ASSEMBLY)
    if OFFSET:
        if ASSEMBLY is None:
            values = (values.to(tl.float32) + OFFSET).to(x.dtype)
    elif zeros_ptr is not None:
        zeros = _scale_tile(zeros_ptr, group, rows, num_rows, GROUPS)
        values = less(values, zeros[:, :, None], ASSEMBLY)
    return tl.dot(values, x, sums)


@triton.jit
def _x_tile(
    x_ptr: tl.tensor, norm_ptr: tl.tensor, t: tl.tensor, k: tl.tensor, T: tl.tensor, K: tl.constexpr,
    EVEN_K: tl.constexpr, ASSEMBLY: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Columns of x, times the norm's weight: two products at a time, so that they are taken where tensor cores read."""
    mask = t < T
    if not EVEN_K:
        mask &= k < K
    x = tl.load(x_ptr + t * K + k, mask=mask, other=0.0)
    if norm_ptr is not None:  # addresses like those of x, so that it takes the same way; there is one row
        norm = tl.load(norm_ptr + t * K + k, mask=mask, other=0.0)
        if ASSEMBLY is not None:
            text: tl.constexpr = "{.reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z;}"
            x = tl.inline_asm_elementwise(text, "=r,r,r", [x, norm], dtype=tl.bfloat16, is_pure=True, pack=2)
        else:
            x = (x.to(tl.float32) * norm.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def products(
    x_ptr: tl.tensor, words_ptr: tl.tensor, scales_ptr: tl.tensor, zeros_ptr: tl.tensor, minima_ptr: tl.tensor,
    norm_ptr: tl.tensor, rows: tl.tensor, num_outputs: tl.tensor, num_rows: tl.tensor, T: tl.tensor,
    K: tl.constexpr, GROUPS: tl.constexpr, NUMBER: tl.constexpr, OFFSET: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Sums of each part [SPLIT, BLOCK_N, BLOCK_T]: the outputs or gates, and the ups; without scales of rows."""
    PLANES: tl.constexpr = CHUNK // 32
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    GROUP: tl.constexpr = K // GROUPS
    WIDTH: tl.constexpr = 16 if GROUPS > 1 and GROUP == 16 else 32
    PARTS: tl.constexpr = 1 if GROUPS == 1 or GROUP >= CHUNK else PLANES if GROUP == 16 else CHUNK // GROUP
    EVEN_K: tl.constexpr = K % (CHUNK * SPLIT) == 0
    part, t, j = tl.arange(0, SPLIT), tl.arange(0, BLOCK_T), tl.arange(0, WIDTH)
    words_at = words_ptr + word_rows(rows, CHUNKS)[None, :, None] + j[None, None, :]
    ups = rows + num_outputs
    ups_at = words_ptr + word_rows(ups, CHUNKS)[None, :, None] + j[None, None, :]
    acc = tl.zeros([SPLIT, BLOCK_N, BLOCK_T], tl.float32)
    up = tl.zeros([SPLIT, BLOCK_N, BLOCK_T], tl.float32)
    for step in tl.range(0, (CHUNKS + SPLIT - 1) // SPLIT, num_stages=STAGES):
        chunk = step * SPLIT + part
        is_chunk = True
        if not EVEN_K:
            is_chunk = (chunk < CHUNKS)[:, None, None]
        for first in tl.static_range(0, 32, WIDTH):
            at = (chunk * (_TILE * _WORDS))[:, None, None] + first
            words = tl.load(words_at + at, mask=is_chunk, other=0, eviction_policy="evict_first")
            up_words = words
            if GATED:
                up_words = tl.load(ups_at + at, mask=is_chunk, other=0, eviction_policy="evict_first")
            for p in tl.static_range(PARTS):
                group = (chunk * CHUNK + p * (CHUNK // PARTS) + first) // GROUP
                x_sums = tl.zeros([SPLIT, BLOCK_N, BLOCK_T], tl.float32)
                sums, up_sums = acc, up
                if GROUPS > 1:
                    sums, up_sums = x_sums, x_sums
                for i in tl.static_range(p * (PLANES // PARTS), (p + 1) * (PLANES // PARTS)):
                    k = chunk[:, None, None] * CHUNK + i * _WORDS + first + j[None, :, None]
                    x = _x_tile(x_ptr, norm_ptr, t[None, None, :], k, T, K, EVEN_K, ASSEMBLY)
                    sums = _add_plane(
                        sums, words, x, zeros_ptr, group, rows, num_rows, GROUPS, NUMBER, OFFSET, i, ASSEMBLY
                    )
                    if GATED:
                        up_sums = _add_plane(
                            up_sums, up_words, x, zeros_ptr, group, ups, num_rows, GROUPS, NUMBER, OFFSET, i, ASSEMBLY
                        )
                    if OFFSET or minima_ptr is not None:
                        x_sums = tl.dot(tl.full([SPLIT, BLOCK_N, WIDTH], 1.0, x.dtype), x, x_sums)
                if GROUPS > 1:
                    acc = _scaled(
                        acc, sums, x_sums, scales_ptr, zeros_ptr, minima_ptr, group, rows, num_rows, GROUPS, OFFSET
                    )
                    if GATED:
                        up = _scaled(
                            up, up_sums, x_sums, scales_ptr, zeros_ptr, minima_ptr, group, ups, num_rows, GROUPS, OFFSET
                        )
                else:
                    acc, up = sums, up_sums
    return acc, up


@triton.jit
def _scaled(
    acc: tl.tensor, sums: tl.tensor, x_sums: tl.tensor, scales_ptr: tl.tensor, zeros_ptr: tl.tensor,
    minima_ptr: tl.tensor, group: tl.tensor, rows: tl.tensor, num_rows: tl.tensor, GROUPS: tl.constexpr,
    OFFSET: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """``acc`` and a group's sums with its scale, and with its minimum the sums of x.

    What numbers are too large by, an offset with the zeros of the groups, is taken from the sums.
    """
    if OFFSET:
        if zeros_ptr is None:
            sums -= x_sums * OFFSET
        else:
            sums -= x_sums * (_scale_tile(zeros_ptr, group, rows, num_rows, GROUPS) + OFFSET)[:, :, None]
    acc += sums * _scale_tile(scales_ptr, group, rows, num_rows, GROUPS)[:, :, None]
    if minima_ptr is not None:
        acc += x_sums * _scale_tile(minima_ptr, group, rows, num_rows, GROUPS)[:, :, None]
    return acc


@triton.jit(do_not_specialize=["T", "late"])
def grouped_gemv_kernel(
    x_ptr: tl.tensor, words_ptr: tl.tensor, scales_ptr: tl.tensor, zeros_ptr: tl.tensor, minima_ptr: tl.tensor,
    bias_ptr: tl.tensor, norm_ptr: tl.tensor, residual_ptr: tl.tensor, out_ptr: tl.tensor, eps: tl.tensor, T: tl.tensor,
    num_outputs: tl.tensor, late: tl.tensor, K: tl.constexpr, GROUPS: tl.constexpr, NUMBER: tl.constexpr,
    OFFSET: tl.constexpr, CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, ACTIVATION: tl.constexpr, PREFETCH: tl.constexpr, ASSEMBLY: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_N outputs of all rows, of as many gates and ups with an activation."""
    GATED: tl.constexpr = ACTIVATION is not None
    start = tl.program_id(0) * BLOCK_N
    num_rows = num_outputs
    if GATED:
        num_rows = 2 * num_outputs
    if PDL and PREFETCH:
        _prefetch(words_ptr, scales_ptr, start, num_rows, (K + CHUNK - 1) // CHUNK, GROUPS, BLOCK_N)
        if GATED:
            _prefetch(words_ptr, scales_ptr, num_outputs + start, num_rows, (K + CHUNK - 1) // CHUNK, GROUPS, BLOCK_N)
    t, outputs = tl.arange(0, BLOCK_T), start + tl.arange(0, BLOCK_N)
    rows = tl.minimum(outputs, num_outputs - 1)
    wait_for_predecessor(PDL)
    if late == 0:
        start_successor(PDL)
    if norm_ptr is not None:  # under way while the products are summed
        whole = tl.arange(0, triton.next_power_of_2(K))
        x_K = tl.load(x_ptr + whole, mask=whole < K, other=0.0)
    acc, up = products(
        x_ptr, words_ptr, scales_ptr, zeros_ptr, minima_ptr, norm_ptr, rows, num_outputs, num_rows, T,
        K, GROUPS, NUMBER, OFFSET, CHUNK, BLOCK_T, BLOCK_N, SPLIT, STAGES, GATED, ASSEMBLY,
    )  # fmt: skip
    if late != 0:
        start_successor(PDL)
    y, y_up = tl.sum(acc, 0), tl.sum(up, 0)
    if GROUPS == 1:
        y *= tl.load(scales_ptr + rows).to(tl.float32)[:, None]
        if GATED:
            y_up *= tl.load(scales_ptr + num_outputs + rows).to(tl.float32)[:, None]
    if norm_ptr is not None:
        squares = x_K.to(tl.float32) * x_K.to(tl.float32)
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y, y_up = y * factor, y_up * factor
    at_out = t[None, :] * num_outputs + outputs[:, None]
    mask_out = (t < T)[None, :] & (outputs < num_outputs)[:, None]
    y = finish(y, y_up, residual_tile(residual_ptr, at_out, mask_out), outputs, num_outputs, bias_ptr, ACTIVATION)
    tl.store(out_ptr + at_out, y.to(out_ptr.dtype.element_ty), mask=mask_out)


def grouped_gemv(x_TK: Tensor, packed: PackedGroups, fused: Fused, config: GroupedGemvConfig) -> Tensor:
    """``ops.grouped_linear`` for up to MAX_ROWS rows, without order; a norm for one row of bfloat16 only.

    The residual is overwritten and returned.
    """
    bias_N, norm_K, eps, residual_TN, activation = fused
    (T, K), outputs = x_TK.shape, fused.width(packed.shape[0])
    assert T <= MAX_ROWS, f"{T} rows"
    assert norm_K is None or (T == 1 and x_TK.dtype == torch.bfloat16), f"{T} rows of {x_TK.dtype} with a norm"
    out_TN = x_TK.new_empty(T, outputs) if residual_TN is None else residual_TN
    offset = offset_of(packed, x_TK.dtype)
    with no_pdl() if config.release == "never" else contextlib.nullcontext():
        launch(
            grouped_gemv_kernel, (triton.cdiv(outputs, config.block_n),),
            *(x_TK, packed.words, *_sides(packed)), *(bias_N, norm_K, residual_TN, out_TN),
            *(eps, T, outputs, int(config.release == "late")), K=K,
            GROUPS=len(packed.scales_GN), NUMBER=packed.number, OFFSET=offset, CHUNK=chunk_of(packed.number),
            BLOCK_T=8 if T <= 8 else MAX_ROWS, BLOCK_N=config.block_n, SPLIT=config.split, STAGES=config.stages,
            ACTIVATION=activation, PREFETCH=config.prefetch, ASSEMBLY=assembly(packed, x_TK.dtype, offset),
            num_warps=config.warps,
        )  # fmt: skip
    return out_TN


def _sides(packed: PackedGroups) -> tuple[Tensor | None, ...]:
    """Scales, zeros and minima as ``products`` takes them: of an odd number of rows none has 16 bits."""
    scales, zeros, minima = packed.scales_GN, packed.zeros_GN, packed.minima_GN
    if packed.shape[0] % 2:
        scales, minima = scales.float(), None if minima is None else minima.float()
    return scales, zeros, minima
