"""Causal attention of many rows over the paged cache, for Hopper: copies, products and softmax overlap.

As FlashAttention-3 (Shah et al., arXiv 2407.08608) arranges it: one warp asks the tensor memory accelerator for queries
and for pages of keys and values, a ring of them ahead of two groups of warps with 64 rows each. Within a group the
products of queries with the next keys, and of weights with the last values, run while it takes the softmax. A program
stays on its multiprocessor and takes one tile of rows after another, those of a sequence that see most keys first; its
copying warp asks a counter for the next one, and tells the groups of it with the queries.

A group releases shared memory when all its warps have read it. Reads into registers need a fence before the release:
without it the accelerator's next write overtakes the reads.

Written in Gluon, which exposes barriers and the ring. Its interface is not stable, so this kernel is used only with the
Triton version that it was tested with; otherwise ``prefill_attention`` runs.

Shapes: T tokens, S sequences, N heads, K kv heads, H head dim; M rows of a group, C keys of a page.
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.attention import HeadLayout, LayerCache
from octavo.ops.triton.launch import counters, launch, num_multiprocessors
from octavo.ops.triton.prompt_tiles import find_tile, tiles_of
from octavo.ops.triton.split_sums import LOG2_E

PAGE = 64
"""Keys of a block of the cache, and of a tile."""
ROWS = 64
"""Rows of a group of four warps: what one of its products takes."""
STAGES = 4
"""Pages of keys, and of values, in shared memory at once."""
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
        and not (heads.window or heads.softcap or heads.sinks_N is not None)
        and H == 128
        and block_size == PAGE
        and group <= ROWS
        and ROWS % group == 0
    )


def hopper_prefill(
    q_TNH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SB: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_S: Tensor,
    scale: float,
    skip_single: bool,
    out_TNH: Tensor,
) -> None:
    """``prefill_attention`` into ``out``, for inputs that ``suits`` accepts."""
    (_, N, H), K = q_TNH.shape, k_cache.shape[1]
    assert q_TNH.stride()[1:] == out_TNH.stride()[1:] == (H, 1), "the heads of a row must lie side by side"
    assert k_cache.stride()[2:] == v_cache.stride()[2:] == (H, 1), "the slots of a block must lie side by side"
    dtype = gl.bfloat16 if q_TNH.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([PAGE, H], dtype)
    tiles = [TensorDescriptor(cache, _rows(cache), [H, 1], [PAGE, H], layout) for cache in (k_cache, v_cache)]
    q_tile = [ROWS * K // N, N // K, H]
    q_layout = gl.NVMMASharedLayout.get_default_for(q_tile, dtype)
    q_tiles = TensorDescriptor(q_TNH, list(q_TNH.shape), list(q_TNH.stride()), q_tile, q_layout)
    strides = [stride // H for cache in (k_cache, v_cache) for stride in cache.stride()[:2]]
    launch(
        _hopper_kernel,
        (num_multiprocessors(q_TNH.device),),
        *(q_tiles, *tiles, out_TNH, block_tables_SB, cu_seqlens_q, seq_lens_S, counters(q_TNH.device, 1)),
        *(scale * LOG2_E.value, len(seq_lens_S), out_TNH.stride(0), block_tables_SB.stride(0)),
        *strides,
        K=K,
        GROUP=N // K,
        H=H,
        SEQUENCES=max(128, triton.next_power_of_2(len(seq_lens_S))),
        SKIP_SINGLE=skip_single,
        PAGE=PAGE,
        ROWS=ROWS,
        STAGES=STAGES,
        num_warps=4,
        maxnreg=REGISTERS,
    )


def _rows(cache: Tensor) -> list[int]:
    """The cache as rows of one head of one token, to its end."""
    H = cache.shape[3]
    last = sum((size - 1) * stride for size, stride in zip(cache.shape[:3], cache.stride()[:3], strict=True))
    return [last // H + 1, H]


@gluon.jit
def _produce(
    q_tiles: gl.tensor, k_tiles: gl.tensor, v_tiles: gl.tensor, queries: gl.tensor, plans: gl.tensor,
    k_ring: gl.tensor, v_ring: gl.tensor, q_full: gl.tensor, k_full: gl.tensor, v_full: gl.tensor, q_empty: gl.tensor,
    k_empty: gl.tensor, v_empty: gl.tensor, tables_ptr: gl.tensor, cu_seqlens_ptr: gl.tensor,
    seq_lens_ptr: gl.tensor, counter_ptr: gl.tensor, S: gl.tensor, table_stride: gl.tensor, k_block: gl.tensor,
    k_head: gl.tensor, v_block: gl.tensor, v_head: gl.tensor, K: gl.constexpr, GROUP: gl.constexpr,
    TOKENS: gl.constexpr, SEQUENCES: gl.constexpr, SKIP_SINGLE: gl.constexpr, PAGE: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """Bring the queries of this program's items, and their pages into the rings, one item after the other.

    All programs together increment the counter once per item; the last one resets it.
    """
    BYTES: gl.constexpr = k_tiles.block_type.nbytes
    num_tiles_S, end_tile_S, s_S, num_tiles = tiles_of(cu_seqlens_ptr, S, SEQUENCES, SKIP_SINGLE, TOKENS)
    turn, number, item = 0, 0, gl.program_id(0)
    while item < num_tiles * K:
        asked_before = gl.atomic_add(counter_ptr, 1, sem="relaxed")
        kv_head, s, first, stop, shift = find_tile(
            item, cu_seqlens_ptr, seq_lens_ptr, num_tiles_S, end_tile_S, s_S, num_tiles, K, TOKENS
        )
        for which in gl.static_range(2):
            mbarrier.wait(q_empty.index(which), number & 1 ^ 1)
            _tell(plans.index(which), kv_head, first, stop, shift)
            mbarrier.expect(q_full.index(which), q_tiles.block_type.nbytes)
            at = first + which * (TOKENS // 2)
            tma.async_copy_global_to_shared(
                q_tiles, [at, kv_head * GROUP, 0], q_full.index(which), queries.index(which)
            )
        pages = (shift + gl.minimum(first + TOKENS, stop) + PAGE - 1) // PAGE
        table_ptr = tables_ptr + s.to(gl.int64) * table_stride
        block = gl.load(table_ptr)
        for page in range(pages):
            next_block = gl.load(table_ptr + gl.minimum(page + 1, pages - 1))
            stage, phase = turn % STAGES, turn // STAGES & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), BYTES)
            at = block * k_block + kv_head * k_head
            tma.async_copy_global_to_shared(k_tiles, [at, 0], k_full.index(stage), k_ring.index(stage))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), BYTES)
            at = block * v_block + kv_head * v_head
            tma.async_copy_global_to_shared(v_tiles, [at, 0], v_full.index(stage), v_ring.index(stage))
            block = next_block
            turn += 1
        if asked_before == num_tiles * K - 1:
            gl.store(counter_ptr, 0)
        item = gl.num_programs(0) + asked_before
        number += 1
    for which in gl.static_range(2):
        mbarrier.wait(q_empty.index(which), number & 1 ^ 1)
        _tell(plans.index(which), 0, -1, 0, 0)
        mbarrier.arrive(q_full.index(which))


@gluon.jit
def _tell(
    plan: gl.tensor, kv_head: gl.tensor, first: gl.tensor, stop: gl.tensor, shift: gl.tensor
) -> None:  # fmt: skip
    """Pass the next item to a group; a negative first token means that there is none."""
    at = gl.arange(0, 4, gl.BlockedLayout([4], [32], [1], [0]))
    plan.store(gl.where(at < 2, gl.where(at == 0, kv_head, first), gl.where(at == 2, stop, shift)))
    gl.thread_barrier()


@gluon.jit
def _hear(plan: gl.tensor) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Receive the next item."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at = gl.arange(0, 4, LAYOUT)
    fields = plan.load(LAYOUT)
    kv_head, first = gl.sum(gl.where(at == 0, fields, 0), 0), gl.sum(gl.where(at == 1, fields, 0), 0)
    stop, shift = gl.sum(gl.where(at == 2, fields, 0), 0), gl.sum(gl.where(at == 3, fields, 0), 0)
    return kv_head, first, stop, shift


@gluon.jit
def _softmax(
    scores_MC: gl.tensor, peak_M: gl.tensor, sum_M: gl.tensor, first_key: gl.tensor, position_M: gl.tensor,
    scale: gl.tensor, MASKED: gl.constexpr,
) -> tuple[gl.tensor, ...]:  # fmt: skip
    """Weights of a page's keys, and the running maximum, sum, and what earlier sums shrink by (arXiv 1805.02867)."""
    if MASKED:
        key_C = first_key + gl.arange(0, scores_MC.shape[1], gl.SliceLayout(0, scores_MC.type.layout))
        scores_MC = gl.where(key_C[None, :] <= position_M[:, None], scores_MC, float("-inf"))
    top_M = gl.maximum(peak_M, gl.max(scores_MC, 1) * scale)
    weights_MC = gl.exp2(scores_MC * scale - top_M[:, None])
    shrink_M = gl.exp2(peak_M - top_M)
    return weights_MC, top_M, sum_M * shrink_M + gl.sum(weights_MC, 1), shrink_M


@gluon.jit
def _next_page(
    page: gl.tensor, turn: gl.tensor, q_MH: gl.tensor, weights_MC: gl.tensor, acc_MH: gl.tensor, peak_M: gl.tensor,
    sum_M: gl.tensor, position_M: gl.tensor, scale: gl.tensor, k_ring: gl.tensor, v_ring: gl.tensor,
    k_full: gl.tensor, v_full: gl.tensor, k_empty: gl.tensor, v_empty: gl.tensor, SCORES: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
) -> tuple[gl.tensor, ...]:  # fmt: skip
    """Scores and weights of a page, while the weights of the one before it meet their values."""
    stage, last = turn % STAGES, (turn - 1) % STAGES
    mbarrier.wait(k_full.index(stage), turn // STAGES & 1)
    none_MC = gl.zeros([q_MH.shape[0], PAGE], gl.float32, SCORES)
    scores = warpgroup_mma(q_MH, k_ring.index(stage).permute((1, 0)), none_MC, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(last), (turn - 1) // STAGES & 1)
    acc = warpgroup_mma(weights_MC, v_ring.index(last), acc_MH, is_async=True)
    scores_MC = warpgroup_mma_wait(1, deps=(scores,))
    gl.thread_barrier()
    mbarrier.arrive(k_empty.index(stage))
    next_MC, peak_M, sum_M, shrink_M = _softmax(scores_MC, peak_M, sum_M, page * PAGE, position_M, scale, MASKED)
    # The product reads its weights from registers until then: as its operand here, they keep theirs.
    acc_MH, weights_MC = warpgroup_mma_wait(0, deps=(acc, weights_MC))
    gl.thread_barrier()
    mbarrier.arrive(v_empty.index(last))
    acc_MH *= gl.convert_layout(shrink_M, gl.SliceLayout(1, acc_MH.type.layout))[:, None]
    return gl.convert_layout(next_MC.to(q_MH.dtype), weights_MC.type.layout), acc_MH, peak_M, sum_M


@gluon.jit
def _last_page(
    turn: gl.tensor, weights_MC: gl.tensor, acc_MH: gl.tensor, v_ring: gl.tensor, clean_CH: gl.tensor,
    v_full: gl.tensor, v_empty: gl.tensor, first_key: gl.tensor, end: gl.tensor, length: gl.tensor,
    STAGES: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """The sums with a tile's last page. Slots behind the sequence's ``length`` may hold anything, also NaN, which a
    weight of 0 would not undo: values are taken through ``clean_CH`` then, without those from ``end`` on."""
    PAGE: gl.constexpr = weights_MC.shape[1]
    H: gl.constexpr = acc_MH.shape[1]
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // H, H // 8], [4, 1], [1, 0])
    stage = turn % STAGES
    mbarrier.wait(v_full.index(stage), turn // STAGES & 1)
    if first_key + PAGE > length:
        v_CH = v_ring.index(stage).load(LOADED)
        key_C = first_key + gl.arange(0, PAGE, gl.SliceLayout(1, LOADED))
        clean_CH.store(gl.where((key_C < end)[:, None], v_CH, 0.0).to(weights_MC.dtype))
        fence_async_shared()
        gl.thread_barrier()
        acc_MH = warpgroup_mma(weights_MC, clean_CH, acc_MH)
    else:
        acc_MH = warpgroup_mma(weights_MC, v_ring.index(stage), acc_MH)
    gl.thread_barrier()
    mbarrier.arrive(v_empty.index(stage))
    return acc_MH


@gluon.jit
def _consume(
    out_ptr: gl.tensor, queries: gl.tensor, plans: gl.tensor, k_ring: gl.tensor, v_ring: gl.tensor,
    last_values: gl.tensor, q_full: gl.tensor, k_full: gl.tensor, v_full: gl.tensor, q_empty: gl.tensor,
    k_empty: gl.tensor, v_empty: gl.tensor, scale: gl.tensor, out_stride: gl.tensor, WHICH: gl.constexpr,
    GROUP: gl.constexpr, H: gl.constexpr, PAGE: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """The rows of one group of warps: the first or second half of each tile's tokens."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAGE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    TOKENS: gl.constexpr = 2 * ROWS // GROUP
    turn, number = 0, 0
    mbarrier.wait(q_full.index(WHICH), 0)
    kv_head, first, stop, shift = _hear(plans.index(WHICH))
    while first >= 0:
        end = shift + gl.minimum(first + TOKENS, stop)
        pages = (end + PAGE - 1) // PAGE
        own = first + WHICH * (ROWS // GROUP)
        q_MH = queries.index(WHICH).reshape([ROWS, H]).load(gl.DotOperandLayout(0, SCORES, 2))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(q_empty.index(WHICH))
        position_M = shift + own + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)) // GROUP
        stage = turn % STAGES
        mbarrier.wait(k_full.index(stage), turn // STAGES & 1)
        none_MC = gl.zeros([ROWS, PAGE], gl.float32, SCORES)
        scores_MC = warpgroup_mma(q_MH, k_ring.index(stage).permute((1, 0)), none_MC, use_acc=False)
        gl.thread_barrier()
        mbarrier.arrive(k_empty.index(stage))
        peak_M = gl.full([ROWS], -1.0e30, gl.float32, gl.SliceLayout(1, SCORES))
        sum_M = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
        weights_MC, peak_M, sum_M, _ = _softmax(scores_MC, peak_M, sum_M, 0, position_M, scale, True)
        weights_MC = gl.convert_layout(weights_MC.to(q_MH.dtype), WEIGHTS)
        acc_MH = gl.zeros([ROWS, H], gl.float32, SUMS)
        whole = gl.maximum(gl.minimum((shift + own + 1) // PAGE, pages), 1)
        for page in range(1, whole):
            weights_MC, acc_MH, peak_M, sum_M = _next_page(
                page, turn + page, q_MH, weights_MC, acc_MH, peak_M, sum_M, position_M, scale, k_ring, v_ring, k_full,
                v_full, k_empty, v_empty, SCORES, PAGE, STAGES, False,
            )  # fmt: skip
        for page in range(whole, pages):
            weights_MC, acc_MH, peak_M, sum_M = _next_page(
                page, turn + page, q_MH, weights_MC, acc_MH, peak_M, sum_M, position_M, scale, k_ring, v_ring, k_full,
                v_full, k_empty, v_empty, SCORES, PAGE, STAGES, True,
            )  # fmt: skip
        turn += pages

        acc_MH = _last_page(
            turn - 1, weights_MC, acc_MH, v_ring, last_values.index(WHICH), v_full, v_empty, (pages - 1) * PAGE, end,
            shift + stop, STAGES,
        )  # fmt: skip
        acc_MH = acc_MH / gl.convert_layout(sum_M, gl.SliceLayout(1, SUMS))[:, None]
        row_M = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
        h_H = gl.arange(0, H, gl.SliceLayout(0, SUMS))
        at_M = (own + row_M // GROUP).to(gl.int64) * out_stride + (kv_head * GROUP + row_M % GROUP) * H
        is_row_M = own + row_M // GROUP < stop
        gl.store(out_ptr + at_M[:, None] + h_H[None, :], acc_MH.to(q_MH.dtype), mask=is_row_M[:, None])
        number += 1
        mbarrier.wait(q_full.index(WHICH), number & 1)
        kv_head, first, stop, shift = _hear(plans.index(WHICH))


@gluon.jit(do_not_specialize=["S", "table_stride"])
def _hopper_kernel(
    q_tiles: gl.tensor, k_tiles: gl.tensor, v_tiles: gl.tensor, out_ptr: gl.tensor, tables_ptr: gl.tensor,
    cu_seqlens_ptr: gl.tensor, seq_lens_ptr: gl.tensor, counter_ptr: gl.tensor, scale: gl.tensor, S: gl.tensor,
    out_stride: gl.tensor, table_stride: gl.tensor, k_block: gl.tensor, k_head: gl.tensor, v_block: gl.tensor,
    v_head: gl.tensor, K: gl.constexpr, GROUP: gl.constexpr, H: gl.constexpr, SEQUENCES: gl.constexpr,
    SKIP_SINGLE: gl.constexpr, PAGE: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
) -> None:  # fmt: skip
    """Set up the rings, and specialise the warps."""
    TOKENS: gl.constexpr = 2 * ROWS // GROUP
    queries = gl.allocate_shared_memory(q_tiles.dtype, [2, TOKENS // 2, GROUP, H], q_tiles.layout)
    plans = gl.allocate_shared_memory(gl.int32, [2, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_ring = gl.allocate_shared_memory(k_tiles.dtype, [STAGES, PAGE, H], k_tiles.layout)
    v_ring = gl.allocate_shared_memory(v_tiles.dtype, [STAGES, PAGE, H], v_tiles.layout)
    last_values = gl.allocate_shared_memory(v_tiles.dtype, [2, PAGE, H], v_tiles.layout)
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
            (_consume, (out_ptr, queries, plans, k_ring, v_ring, last_values, q_full, k_full, v_full, q_empty, k_empty,
                        v_empty, scale, out_stride, 0, GROUP, H, PAGE, ROWS, STAGES)),
            (_consume, (out_ptr, queries, plans, k_ring, v_ring, last_values, q_full, k_full, v_full, q_empty, k_empty,
                        v_empty, scale, out_stride, 1, GROUP, H, PAGE, ROWS, STAGES)),
            (_produce, (q_tiles, k_tiles, v_tiles, queries, plans, k_ring, v_ring, q_full, k_full, v_full, q_empty,
                        k_empty, v_empty, tables_ptr, cu_seqlens_ptr, seq_lens_ptr, counter_ptr, S, table_stride,
                        k_block, k_head, v_block, v_head, K, GROUP, TOKENS, SEQUENCES, SKIP_SINGLE, PAGE, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
