"""``choose_blocks`` for CUDA devices: a score of each block for some rows in one launch, and a sort of these.

The bits of a score are turned into those of an integer in its order. The number of the block, counted from the end, is
beside it: no two are equal.

Shapes: T rows, Q rows at once, N heads and W width of the indexer, B blocks of a context; a program's heads M, numbers
C and blocks G.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.attention.attention import MAX_SCRATCH, LayerCache, PagedRows
from octavo.ops.attention.cached_rows import unpack_rows
from octavo.ops.attention.choose_blocks import RowPlaces, choose_blocks
from octavo.ops.attention.choose_keys import MOST_SCORES
from octavo_kernels.triton.attention.cached_rows import is_packed
from octavo_kernels.triton.launch import after_predecessor, declines_floats, empty_indices, launch

BLOCKS = 64
"""Of a program."""
LAST = 2**32 - 1
NONE = -(2**63) + 1
"""The rank of a block that ends behind a row."""


@choose_blocks.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def choose_blocks_triton(
    q_TNW: Tensor, cache: LayerCache, rows: PagedRows, size: int, count: int, weights_TN: Tensor | None = None
) -> Tensor:
    """See ``ops.choose_blocks``; sums are computed in float32. Nothing is read by the host."""
    assert cache.index_keys is not None, "the layer has no indexer"
    (T, N, W), places = q_TNW.shape, RowPlaces.of(cache, rows, len(q_TNW))
    num_blocks = places.tables_SB.shape[1] * places.block_size // size
    most, none = max(1, min(count, num_blocks)), places.tables_SB.shape[1] * places.block_size
    if not num_blocks or not T:
        return torch.full((T, most), none, dtype=torch.int64, device=q_TNW.device)
    has_wide, q_TNW = is_packed(cache.index_keys), q_TNW.contiguous()
    weights_TN = None if weights_TN is None else weights_TN.contiguous()
    at_once = max(1, min(T, MAX_SCRATCH // (num_blocks * (N + W)) if has_wide else MOST_SCORES // num_blocks))
    ranks_QB = empty_indices(0 if has_wide else at_once * num_blocks, torch.int64, q_TNW.device).view(-1, num_blocks)
    chosen_TC = empty_indices(T * most, torch.int64, q_TNW.device).view(T, most)
    for first in range(0, T, at_once):
        part = slice(first, min(T, first + at_once))
        if has_wide:
            of_rows = None if weights_TN is None else weights_TN[part]
            ranks_QB = _packed_ranks(q_TNW[part], cache.index_keys, places.part(part), size, num_blocks, of_rows)
        else:
            launch(
                _rank_kernel, (part.stop - first, triton.cdiv(num_blocks, BLOCKS)), q_TNW, cache.index_keys,
                places.tables_SB, places.seqs_T, places.positions_T, weights_TN, ranks_QB, first, num_blocks,
                places.tables_SB.shape[1], N=N, W=W, SIZE=size, BLOCK_SIZE=places.block_size, BLOCKS=BLOCKS,
                HEADS=max(16, triton.next_power_of_2(N)), WIDTH=max(16, triton.next_power_of_2(W)),
            )  # fmt: skip
        best_QC = ranks_QB[: part.stop - first].topk(most, dim=1).values
        chosen_TC[part] = torch.where(best_QC == NONE, none, LAST - (best_QC & LAST)).sort(dim=1).values
    return chosen_TC


def _packed_ranks(
    q_QNW: Tensor, index: Tensor, places: RowPlaces, size: int, num_blocks: int, weights_QN: Tensor | None
) -> Tensor:
    """The ranks of blocks for rows at these places, of keys of 8 or 4 bits, which are made wide before."""
    (Q, _, W), numbers_B = q_QNW.shape, torch.arange(num_blocks, device=q_QNW.device)
    ends_QB = (numbers_B * size + size - 1).expand(Q, num_blocks)
    keys_QBW = unpack_rows(index.flatten(0, 2)[places.slots(ends_QB)], W).float()
    parts_QNB = (q_QNW.float() @ keys_QBW.mT).relu_()
    if weights_QN is not None:
        parts_QNB *= weights_QN[:, :, None]
    bits_QB = (parts_QNB.sum(dim=1) + 0.0).view(torch.int32)
    order_QB = bits_QB ^ ((bits_QB >> 31) & 0x7FFFFFFF)
    ranks_QB = order_QB.long() << 32 | LAST - numbers_B
    return ranks_QB.masked_fill(ends_QB > places.positions_T[:, None], NONE)


@triton.jit(do_not_specialize=["first", "num_blocks", "table_width"])
def _rank_kernel(
    q_ptr: tl.tensor, index_ptr: tl.tensor, tables_ptr: tl.tensor, seqs_ptr: tl.tensor, positions_ptr: tl.tensor,
    weights_ptr: tl.tensor, ranks_ptr: tl.tensor, first: tl.tensor, num_blocks: tl.tensor, table_width: tl.tensor,
    N: tl.constexpr, W: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Ranks of some blocks for a row: their scores, and their numbers."""
    after_predecessor(PDL)
    t = first + tl.program_id(0).to(tl.int64)
    b_G = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    position = tl.load(positions_ptr + t)
    end_G = b_G.to(tl.int64) * SIZE + SIZE - 1
    is_open_G = (end_G > position) | (b_G >= num_blocks)
    rank_G = tl.full([BLOCKS], -0x7FFFFFFFFFFFFFFF, tl.int64)
    if tl.program_id(1).to(tl.int64) * BLOCKS * SIZE + SIZE - 1 <= position:
        m_M, c_C = tl.arange(0, HEADS), tl.arange(0, WIDTH)
        q_at = q_ptr + t * N * W + (m_M * W)[:, None] + c_C[None, :]
        q_MC = tl.load(q_at, mask=(m_M < N)[:, None] & (c_C < W)[None, :], other=0.0)
        table_ptr = tables_ptr + tl.load(seqs_ptr + t) * table_width
        block_G = tl.load(table_ptr + end_G // BLOCK_SIZE, mask=~is_open_G, other=0).to(tl.int64)
        slot_G = block_G * BLOCK_SIZE + end_G % BLOCK_SIZE
        key_at = index_ptr + (slot_G * W)[:, None] + c_C[None, :]
        key_GC = tl.load(key_at, mask=(~is_open_G)[:, None] & (c_C < W)[None, :], other=0.0).to(q_MC.dtype)
        products_MG = tl.dot(q_MC, tl.trans(key_GC), input_precision="ieee")
        parts_MG = tl.maximum(products_MG, 0.0)
        if weights_ptr is not None:
            parts_MG *= tl.load(weights_ptr + t * N + m_M, mask=m_M < N, other=0.0)[:, None]
        bits_G = (tl.sum(parts_MG, axis=0) + 0.0).to(tl.int32, bitcast=True)
        order_G = bits_G ^ ((bits_G >> 31) & 0x7FFFFFFF)
        number_G = 4294967295 - b_G.to(tl.int64)
        rank_G = tl.where(is_open_G, rank_G, (order_G.to(tl.int64) << 32) | number_G)
    tl.store(ranks_ptr + tl.program_id(0).to(tl.int64) * num_blocks + b_G, rank_G, mask=b_G < num_blocks)
