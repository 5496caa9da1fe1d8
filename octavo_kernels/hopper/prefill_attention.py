"""Causal attention of many rows over the paged cache, for Hopper: copies, products and softmax overlap.

As FlashAttention-3 (Shah et al., arXiv 2407.08608) arranges it: one warp asks the tensor memory accelerator for queries
and for chunks of keys and values, a ring of them ahead of two groups of warps with 64 rows each. Within a group the
products of queries with the next keys, and of weights with the last values, run while it takes the softmax. A program
stays on its multiprocessor and takes one tile of rows after another, those of a sequence that see most keys first; its
copying warp asks a counter for the next one, and tells the groups of it with the queries.

Keys may be wider than values, and come in two parts: those of latent attention do (``latent_prompts``). A group
releases shared memory when all its warps have read it.

Written in Gluon, which exposes barriers and the ring. Its interface is not stable, so this kernel is used only with the
Triton version that it was tested with; otherwise ``prefill_attention`` runs.

Shapes: T tokens, S sequences, N heads, K kv heads, H head dim, P width of a part; M rows of a group, C keys of a chunk.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.attention.attention import HeadLayout, LayerCache
from octavo_kernels.hopper.prefill_producer import hear, produce
from octavo_kernels.triton.launch import counters, launch, num_multiprocessors, shared_bytes
from octavo_kernels.triton.split_sums import LOG2_E

PAGE = 64
"""Keys of a block of the cache."""
KEYS = 128
"""Keys that are taken at a time."""
COLUMNS = 64
"""Numbers of a key in a copy: 128 bytes, in which shared memory is laid out."""
ROWS = 64
"""Rows of a group of four warps: what one of its products takes."""
MOST_STAGES = 4
"""Chunks of ``KEYS`` keys, and of values, in shared memory at once, as far as there is room."""
BARRIER_BYTES = 1024
"""Bytes of shared memory for barriers and plans, at most."""
REGISTERS = 168
"""Registers of a thread at the start; the groups then get those that the copying warp does not need."""


def suits(q_TNH: Tensor, heads: HeadLayout, cache: LayerCache) -> bool:
    """Whether the kernel supports these inputs, provided that Gluon is available (``launch.has_gluon``)."""
    K, block_size, H = cache.keys.shape[1:]
    group = heads.num_heads // K
    return (
        q_TNH.dtype in (torch.bfloat16, torch.float16)
        and cache.keys.dtype == cache.values.dtype == q_TNH.dtype
        and cache.scales is None
        and not (heads.window or heads.softcap)
        and all(x is None for x in (heads.sinks_N, heads.slopes_N, heads.bias_TNE))
        and H == 128
        and block_size == PAGE
        and group <= ROWS
        and ROWS % group == 0
    )


def hopper_prefill(
    q_parts: tuple[Tensor, ...],
    k_parts: tuple[Tensor, ...],
    v_cache: Tensor,
    block_tables_SB: Tensor,
    rows_S: tuple[Tensor, Tensor],
    seq_lens_S: Tensor,
    scale: float,
    skip_single: bool,
    out_TNH: Tensor,
) -> None:
    """``prefill_attention`` into ``out`` of the rows from ``rows_S[0]`` to ``rows_S[1]`` of each sequence.

    Queries and keys come in one part or two, tensors [T, N, P] and [num_blocks, K, PAGE, P], of widths that are powers
    of two; values are H = 128 wide.
    """
    (_, N, H), K = out_TNH.shape, v_cache.shape[1]
    width, itemsize = sum(part.shape[2] for part in q_parts), out_TNH.element_size()
    room = shared_bytes(out_TNH.device) - BARRIER_BYTES - 2 * ROWS * width * itemsize
    assert out_TNH.stride()[1:] == (H, 1), "the heads of a row must lie side by side"
    launch(
        _hopper_kernel, (num_multiprocessors(out_TNH.device),),
        *_both([_query_tiles(part, N // K) for part in q_parts]), *_both([_page_tiles(part) for part in k_parts]),
        _page_tiles(v_cache), *(out_TNH, block_tables_SB, *rows_S, seq_lens_S, counters(out_TNH.device, 1)),
        *(scale * LOG2_E.value, len(seq_lens_S), out_TNH.stride(0), block_tables_SB.stride(0)),
        *(_page_strides(k_parts[0]), _page_strides(k_parts[-1]), _page_strides(v_cache)), K=K, GROUP=N // K, H=H,
        SEQUENCES=max(128, triton.next_power_of_2(len(seq_lens_S))), SKIP_SINGLE=skip_single, PAGE=PAGE, KEYS=KEYS,
        ROWS=ROWS, STAGES=max(2, min(MOST_STAGES, room // (KEYS * (width + H) * itemsize))), num_warps=4,
        maxnreg=REGISTERS,
    )  # fmt: skip


def _query_tiles(part_TNP: Tensor, group: int) -> TensorDescriptor:
    """Tiles of the queries that share a kv head, of the tokens of one group of warps."""
    tile = [ROWS // group, group, part_TNP.shape[2]]
    assert part_TNP.stride(2) == 1, "the numbers of a head must lie side by side"
    layout = gl.NVMMASharedLayout.get_default_for(tile, _element(part_TNP))
    return TensorDescriptor(part_TNP, list(part_TNP.shape), list(part_TNP.stride()), tile, layout)


def _both(tiles: list[TensorDescriptor]) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """The tiles of the first and of the second part: a kernel takes no tuple of them."""
    return tiles[0], tiles[1] if len(tiles) > 1 else None


def _page_tiles(cache: Tensor) -> TensorDescriptor:
    """A cache as rows of one head of one token, to its end."""
    P = cache.shape[3]
    assert cache.stride()[2:] == (P, 1), "the slots of a block must lie side by side"
    last = sum((size - 1) * stride for size, stride in zip(cache.shape[:3], cache.stride()[:3], strict=True))
    layout = gl.NVMMASharedLayout.get_default_for([PAGE, COLUMNS], _element(cache))
    return TensorDescriptor(cache, [last // P + 1, P], [P, 1], [PAGE, COLUMNS], layout)


def _page_strides(cache: Tensor) -> tuple[int, int]:
    """Rows from a block, and from a head, to the next; the latter is 0 where there is one head for all."""
    P = cache.shape[3]
    return cache.stride(0) // P, cache.stride(1) // P if cache.shape[1] > 1 else 0


def _element(tensor: Tensor) -> gl.dtype:
    return gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16


@gluon.jit
def _softmax(
    scores_MC: gl.tensor, peak_M: gl.tensor, sum_M: gl.tensor, first_key: gl.tensor, position_M: gl.tensor,
    scale: gl.tensor, MASKED: gl.constexpr,
) -> tuple[gl.tensor, ...]:  # fmt: skip
    """Weights of a chunk's keys, and the running maximum, sum, and what earlier sums shrink by (arXiv 1805.02867)."""
    if MASKED:
        key_C = first_key + gl.arange(0, scores_MC.shape[1], gl.SliceLayout(0, scores_MC.type.layout))
        scores_MC = gl.where(key_C[None, :] <= position_M[:, None], scores_MC, float("-inf"))
    top_M = gl.maximum(peak_M, gl.max(scores_MC, 1) * scale)
    weights_MC = gl.exp2(scores_MC * scale - top_M[:, None])
    shrink_M = gl.exp2(peak_M - top_M)
    return weights_MC, top_M, sum_M * shrink_M + gl.sum(weights_MC, 1), shrink_M


@gluon.jit
def _scores(q_parts: gl.tuple, k_rings: gl.tuple, stage: gl.tensor, scores: gl.tensor) -> gl.tensor:
    """Start the products of queries with a chunk's keys, of one part after the other."""
    for part in gl.static_range(len(q_parts)):
        keys = k_rings[part].index(stage).permute((1, 0))
        scores = warpgroup_mma(q_parts[part], keys, scores, use_acc=part > 0, is_async=True)
    return scores


@gluon.jit
def _next_chunk(
    chunk: gl.tensor, turn: gl.tensor, q_parts: gl.tuple, weights_MC: gl.tensor, acc_MH: gl.tensor, peak_M: gl.tensor,
    sum_M: gl.tensor, position_M: gl.tensor, scale: gl.tensor, k_rings: gl.tuple, v_ring: gl.tensor,
    k_full: gl.tensor, v_full: gl.tensor, k_empty: gl.tensor, v_empty: gl.tensor, SCORES: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
) -> tuple[gl.tensor, ...]:  # fmt: skip
    """Scores and weights of a chunk, while the weights of the one before it meet their values."""
    stage, last = turn % STAGES, (turn - 1) % STAGES
    mbarrier.wait(k_full.index(stage), turn // STAGES & 1)
    scores = _scores(q_parts, k_rings, stage, gl.zeros([acc_MH.shape[0], KEYS], gl.float32, SCORES))
    mbarrier.wait(v_full.index(last), (turn - 1) // STAGES & 1)
    acc = warpgroup_mma(weights_MC, v_ring.index(last), acc_MH, is_async=True)
    scores_MC = warpgroup_mma_wait(1, deps=(scores,))
    gl.thread_barrier()
    mbarrier.arrive(k_empty.index(stage))
    next_MC, peak_M, sum_M, shrink_M = _softmax(scores_MC, peak_M, sum_M, chunk * KEYS, position_M, scale, MASKED)
    # The product reads its weights from registers until then: as its operand here, they keep theirs.
    acc_MH, weights_MC = warpgroup_mma_wait(0, deps=(acc, weights_MC))
    gl.thread_barrier()
    mbarrier.arrive(v_empty.index(last))
    acc_MH *= gl.convert_layout(shrink_M, gl.SliceLayout(1, acc_MH.type.layout))[:, None]
    return gl.convert_layout(next_MC.to(weights_MC.dtype), weights_MC.type.layout), acc_MH, peak_M, sum_M


@gluon.jit
def _last_chunk(
    turn: gl.tensor, weights_MC: gl.tensor, acc_MH: gl.tensor, v_ring: gl.tensor, v_full: gl.tensor,
    v_empty: gl.tensor, first_key: gl.tensor, end: gl.tensor, length: gl.tensor, STAGES: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """The sums with a tile's last chunk. Slots behind the sequence's ``length`` may hold anything, also NaN, which a
    weight of 0 would not undo: values from ``end`` on become 0 then. Each group does so before it reads them."""
    KEYS: gl.constexpr = weights_MC.shape[1]
    H: gl.constexpr = acc_MH.shape[1]
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // H, H // 8], [4, 1], [1, 0])
    stage = turn % STAGES
    mbarrier.wait(v_full.index(stage), turn // STAGES & 1)
    if first_key + KEYS > length:
        v_CH = v_ring.index(stage).load(LOADED)
        key_C = first_key + gl.arange(0, KEYS, gl.SliceLayout(1, LOADED))
        v_ring.index(stage).store(gl.where((key_C < end)[:, None], v_CH, 0.0).to(weights_MC.dtype))
        fence_async_shared()
        gl.thread_barrier()
    acc_MH = warpgroup_mma(weights_MC, v_ring.index(stage), acc_MH)
    gl.thread_barrier()
    mbarrier.arrive(v_empty.index(stage))
    return acc_MH


@gluon.jit
def _consume(
    out_ptr: gl.tensor, queries: gl.tuple, plans: gl.tensor, k_rings: gl.tuple, v_ring: gl.tensor,
    q_full: gl.tensor, k_full: gl.tensor, v_full: gl.tensor, q_empty: gl.tensor,
    k_empty: gl.tensor, v_empty: gl.tensor, scale: gl.tensor, out_stride: gl.tensor, WHICH: gl.constexpr,
    GROUP: gl.constexpr, H: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """The rows of one group of warps: the first or second half of each tile's tokens."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    TOKENS: gl.constexpr = 2 * ROWS // GROUP
    turn, number = 0, 0
    mbarrier.wait(q_full.index(WHICH), 0)
    kv_head, first, stop, shift = hear(plans.index(WHICH))
    while first >= 0:
        end = shift + gl.minimum(first + TOKENS, stop)
        chunks = (end + KEYS - 1) // KEYS
        own = first + WHICH * (ROWS // GROUP)
        q_parts = ()  # type: tuple[gl.tensor, ...]
        for part in gl.static_range(len(queries)):
            q_parts += (queries[part].index(WHICH).reshape([ROWS, queries[part].shape[3]]),)
        position_M = shift + own + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)) // GROUP
        stage = turn % STAGES
        mbarrier.wait(k_full.index(stage), turn // STAGES & 1)
        scores = _scores(q_parts, k_rings, stage, gl.zeros([ROWS, KEYS], gl.float32, SCORES))
        scores_MC = warpgroup_mma_wait(0, deps=(scores,))
        gl.thread_barrier()
        mbarrier.arrive(k_empty.index(stage))
        peak_M = gl.full([ROWS], -1.0e30, gl.float32, gl.SliceLayout(1, SCORES))
        sum_M = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
        weights_MC, peak_M, sum_M, _ = _softmax(scores_MC, peak_M, sum_M, 0, position_M, scale, True)
        weights_MC = gl.convert_layout(weights_MC.to(v_ring.dtype), WEIGHTS)
        acc_MH = gl.zeros([ROWS, H], gl.float32, SUMS)
        whole = gl.maximum(gl.minimum((shift + own + 1) // KEYS, chunks), 1)
        for chunk in range(1, whole):
            weights_MC, acc_MH, peak_M, sum_M = _next_chunk(
                chunk, turn + chunk, q_parts, weights_MC, acc_MH, peak_M, sum_M, position_M, scale, k_rings, v_ring,
                k_full, v_full, k_empty, v_empty, SCORES, KEYS, STAGES, False,
            )  # fmt: skip
        for chunk in range(whole, chunks):
            weights_MC, acc_MH, peak_M, sum_M = _next_chunk(
                chunk, turn + chunk, q_parts, weights_MC, acc_MH, peak_M, sum_M, position_M, scale, k_rings, v_ring,
                k_full, v_full, k_empty, v_empty, SCORES, KEYS, STAGES, True,
            )  # fmt: skip
        turn += chunks
        gl.thread_barrier()
        mbarrier.arrive(q_empty.index(WHICH))
        acc_MH = _last_chunk(
            turn - 1, weights_MC, acc_MH, v_ring, v_full, v_empty, (chunks - 1) * KEYS, end, shift + stop, STAGES
        )
        acc_MH = acc_MH / gl.convert_layout(sum_M, gl.SliceLayout(1, SUMS))[:, None]
        row_M = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
        h_H = gl.arange(0, H, gl.SliceLayout(0, SUMS))
        at_M = (own + row_M // GROUP).to(gl.int64) * out_stride + (kv_head * GROUP + row_M % GROUP) * H
        is_row_M = own + row_M // GROUP < stop
        gl.store(out_ptr + at_M[:, None] + h_H[None, :], acc_MH.to(v_ring.dtype), mask=is_row_M[:, None])
        number += 1
        mbarrier.wait(q_full.index(WHICH), number & 1)
        kv_head, first, stop, shift = hear(plans.index(WHICH))


@gluon.jit(do_not_specialize=["S", "table_stride"])
def _hopper_kernel(
    q_first: gl.tensor, q_second: gl.tensor, k_first: gl.tensor, k_second: gl.tensor, v_tiles: gl.tensor,
    out_ptr: gl.tensor, tables_ptr: gl.tensor, starts_ptr: gl.tensor, ends_ptr: gl.tensor, seq_lens_ptr: gl.tensor,
    counter_ptr: gl.tensor, scale: gl.tensor, S: gl.tensor, out_stride: gl.tensor, table_stride: gl.tensor,
    first_strides: gl.tuple, second_strides: gl.tuple, v_strides: gl.tuple, K: gl.constexpr, GROUP: gl.constexpr,
    H: gl.constexpr, SEQUENCES: gl.constexpr, SKIP_SINGLE: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
) -> None:  # fmt: skip
    """Set up the rings, and specialise the warps."""
    TOKENS: gl.constexpr = 2 * ROWS // GROUP
    q_tiles, k_tiles, k_strides = (q_first, q_second), (k_first, k_second), (first_strides, second_strides)
    PARTS: gl.constexpr = 1 if q_second is None else 2
    queries, k_rings = (), ()  # type: tuple[gl.tensor, ...], tuple[gl.tensor, ...]
    for part in gl.static_range(PARTS):
        tile = q_tiles[part]
        queries += (gl.allocate_shared_memory(tile.dtype, [2, TOKENS // 2, GROUP, tile.block_shape[2]], tile.layout),)
        k_rings += (gl.allocate_shared_memory(tile.dtype, [STAGES, KEYS, tile.block_shape[2]], k_tiles[part].layout),)
    plans = gl.allocate_shared_memory(gl.int32, [2, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    v_ring = gl.allocate_shared_memory(v_tiles.dtype, [STAGES, KEYS, H], v_tiles.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for which in gl.static_range(2):
        mbarrier.init(q_full.index(which), count=1)
        mbarrier.init(q_empty.index(which), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)  # a group of warps each
        mbarrier.init(v_empty.index(stage), count=2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (out_ptr, queries, plans, k_rings, v_ring, q_full, k_full, v_full, q_empty, k_empty, v_empty,
                        scale, out_stride, 0, GROUP, H, KEYS, ROWS, STAGES)),
            (_consume, (out_ptr, queries, plans, k_rings, v_ring, q_full, k_full, v_full, q_empty, k_empty, v_empty,
                        scale, out_stride, 1, GROUP, H, KEYS, ROWS, STAGES)),
            (produce, (q_tiles, k_tiles, k_strides, v_tiles, v_strides, queries, plans, k_rings, v_ring, q_full,
                        k_full, v_full, q_empty, k_empty, v_empty, tables_ptr, starts_ptr, ends_ptr, seq_lens_ptr,
                        counter_ptr, S, table_stride, K, GROUP, TOKENS, SEQUENCES, SKIP_SINGLE, PAGE, KEYS, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
