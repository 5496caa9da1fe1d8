"""A weight of ``PackedGroups`` made dense on the device, for products of so many rows that a library's kernels pay."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.linear.grouped_linear import TILE, WORDS, PackedGroups, chunk_of
from octavo_kernels.triton.grouped.grouped_numbers import assembly, numbers
from octavo_kernels.triton.launch import after_predecessor, launch

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
        dense_kernel, (tiles, triton.cdiv(chunks, CHUNKS_AT_ONCE)),
        *(packed.words, packed.scales_GN, packed.zeros_GN, packed.minima_GN, out_NK, N, K, packed.group),
        NUMBER=packed.number, CHUNK=chunk_of(packed.number), AT_ONCE=CHUNKS_AT_ONCE, SHORT=packed.group < WORDS,
        ASSEMBLY=assembly(packed, dtype),
    )  # fmt: skip
    return out_NK
