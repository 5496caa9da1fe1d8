"""Attention within whole texts and images on Hopper, without a cache: as ``prefill_attention``, but of all keys.

Queries, keys and values are copied from the rows of a projection, one head of ``KEYS`` or ``ROWS`` tokens at a time.
Columns come in one part or in two, 64 and 16 of heads of 72 numbers, say: what is copied from behind a head's end is 0.
A program takes one tile of rows after another, all of one head before the next.

Written in Gluon: see ``prefill_attention``.

Shapes: T tokens, N heads, K kv heads, H head dim; M rows of a group of warps, C keys of a chunk, P columns of a part.
"""

from __future__ import annotations

import torch
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

from octavo_kernels.hopper.prefill_attention import BARRIER_BYTES, KEYS, REGISTERS, ROWS, softmax
from octavo_kernels.hopper.prefill_producer import num_bytes
from octavo_kernels.triton.launch import launch, num_multiprocessors, shared_bytes
from octavo_kernels.triton.split_sums import LOG2_E

MOST_STAGES = 4
"""Chunks of keys, and of values, in shared memory at once, as far as there is room."""
TILE = 2 * ROWS
"""Rows of a tile."""
LONG = 512
"""Rows of a text from which on it is faster than ``encoder_attention_kernel``, whose programs need no start."""
ALIGNMENT = 16
"""Bytes that addresses and strides of what is copied are a multiple of."""


def suits(parts: tuple[Tensor, Tensor, Tensor]) -> bool:
    """Whether the kernel supports these queries, keys and values [T, heads, H]."""
    H = parts[0].shape[2]
    return (
        parts[0].dtype in (torch.bfloat16, torch.float16)
        and 64 <= H <= 128
        and all(part.stride(2) == 1 and part.data_ptr() % ALIGNMENT == 0 for part in parts)
        and all(stride * 2 % ALIGNMENT == 0 for part in parts for stride in part.stride()[:2])
    )


def hopper_encoder(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, tiles: Tensor, widths: tuple[int, int], scale: float, out_TNH: Tensor
) -> None:
    """``ops.encoder_attention`` of some texts into ``out``.

    ``tiles``: for each ``TILE`` rows of a text the first one, and the text's first row and end, int32 [tiles, 3].
    ``widths``: columns of the parts of a head, 0 for a part that there is not.
    """
    (_, N, H), K = q_TNH.shape, k_TKH.shape[1]
    width = sum(widths)
    room = shared_bytes(q_TNH.device) - BARRIER_BYTES - 2 * ROWS * width * 2
    items = len(tiles) * N
    launch(
        _encoder_kernel,
        (min(items, num_multiprocessors(q_TNH.device)),),
        *_boxes(q_TNH, ROWS, widths),
        *_boxes(k_TKH, KEYS, widths),
        *_boxes(v_TKH, KEYS, widths),
        *(out_TNH, tiles, len(tiles), items, scale * LOG2_E.value, out_TNH.stride(0)),
        GROUP=N // K,
        H=H,
        KEYS=KEYS,
        ROWS=ROWS,
        STAGES=max(2, min(MOST_STAGES, room // (2 * KEYS * width * 2))),
        num_warps=4,
        maxnreg=REGISTERS,
    )


def _boxes(x_TNH: Tensor, rows: int, widths: tuple[int, int]) -> tuple[TensorDescriptor | None, ...]:
    """Rows of one head, each part's columns."""
    element = gl.bfloat16 if x_TNH.dtype == torch.bfloat16 else gl.float16
    found: list[TensorDescriptor | None] = []
    for width in widths:
        box = [rows, 1, width]
        layout = gl.NVMMASharedLayout.get_default_for(box, element) if width else None
        found.append(TensorDescriptor(x_TNH, list(x_TNH.shape), list(x_TNH.stride()), box, layout) if width else None)
    return tuple(found)


@gluon.jit
def _find(item: gl.tensor, tiles_ptr: gl.tensor, num_tiles: gl.tensor) -> tuple[gl.tensor, ...]:
    """An item's head, its first row, and the first row and the end of its text."""
    at = tiles_ptr + item % num_tiles * 3
    return item // num_tiles, gl.load(at), gl.load(at + 1), gl.load(at + 2)


@gluon.jit
def _copy(
    boxes: gl.tuple, rings: gl.tuple, stage: gl.tensor, full: gl.tensor, row: gl.tensor, head: gl.tensor
) -> None:  # fmt: skip
    """Ask for all parts of some rows of a head."""
    BYTES: gl.constexpr = num_bytes(rings)
    mbarrier.expect(full, BYTES)
    for part in gl.static_range(len(boxes)):
        tma.async_copy_global_to_shared(
            boxes[part], [row, head, part * rings[0].shape[3]], full, rings[part].index(stage)
        )


@gluon.jit
def _produce(
    q_boxes: gl.tuple, k_boxes: gl.tuple, v_boxes: gl.tuple, queries: gl.tuple, k_rings: gl.tuple, v_rings: gl.tuple,
    q_full: gl.tensor, k_full: gl.tensor, v_full: gl.tensor, q_empty: gl.tensor, k_empty: gl.tensor,
    v_empty: gl.tensor, tiles_ptr: gl.tensor, num_tiles: gl.tensor, items: gl.tensor, GROUP: gl.constexpr,
    KEYS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """Bring the queries of this program's items, and their keys and values into the rings."""
    turn, phase_q = 0, 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head, first, start, end = _find(item, tiles_ptr, num_tiles)
        for which in gl.static_range(2):
            mbarrier.wait(q_empty.index(which), phase_q ^ 1)
            _copy(q_boxes, queries, which, q_full.index(which), first + which * ROWS, head)
        for key in range(start, end, KEYS):
            stage, phase = turn % STAGES, turn // STAGES & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            _copy(k_boxes, k_rings, stage, k_full.index(stage), key, head // GROUP)
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            _copy(v_boxes, v_rings, stage, v_full.index(stage), key, head // GROUP)
            turn += 1
        phase_q ^= 1


@gluon.jit
def _rows_of(rings: gl.tuple, stage: gl.tensor) -> gl.tuple:
    """All parts of a place of the rings, [rows, P]."""
    found = ()  # type: tuple[gl.tensor, ...]
    for part in gl.static_range(len(rings)):
        found += (rings[part].index(stage).reshape([rings[part].shape[1], rings[part].shape[3]]),)
    return found


@gluon.jit
def _scores(q_parts: gl.tuple, keys: gl.tuple, scores: gl.tensor) -> gl.tensor:
    """Start the products of queries with a chunk's keys, of one part after the other."""
    for part in gl.static_range(len(q_parts)):
        scores = warpgroup_mma(q_parts[part], keys[part].permute((1, 0)), scores, use_acc=part > 0, is_async=True)
    return scores


@gluon.jit
def _operand(weights_MC: gl.tensor, sums_MP: gl.tensor) -> gl.tensor:
    """The weights as the product that is added to the sums reads them, from registers."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, sums_MP.type.layout, 2)
    return gl.convert_layout(weights_MC, LAYOUT)


@gluon.jit
def _weigh(weights_MC: gl.tensor, values: gl.tuple, sums: gl.tuple) -> gl.tuple:
    """Start the products of weights with values, of one part after the other."""
    found = ()  # type: tuple[gl.tensor, ...]
    for part in gl.static_range(len(values)):
        found += (warpgroup_mma(_operand(weights_MC, sums[part]), values[part], sums[part], is_async=True),)
    return found


@gluon.jit
def _next_chunk(
    turn: gl.tensor, first_key: gl.tensor, q_parts: gl.tuple, weights_MC: gl.tensor, sums: gl.tuple,
    peak_M: gl.tensor, sum_M: gl.tensor, last_key_M: gl.tensor, scale: gl.tensor, k_rings: gl.tuple,
    v_rings: gl.tuple, k_full: gl.tensor, v_full: gl.tensor, k_empty: gl.tensor, v_empty: gl.tensor,
    SCORES: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
) -> tuple[gl.tensor, gl.tuple, gl.tensor, gl.tensor]:  # fmt: skip
    """Scores and weights of a chunk, while the weights of the one before it meet their values."""
    stage, last = turn % STAGES, (turn - 1) % STAGES
    mbarrier.wait(k_full.index(stage), turn // STAGES & 1)
    scores = gl.zeros([weights_MC.shape[0], weights_MC.shape[1]], gl.float32, SCORES)
    scores = _scores(q_parts, _rows_of(k_rings, stage), scores)
    mbarrier.wait(v_full.index(last), (turn - 1) // STAGES & 1)
    started = _weigh(weights_MC, _rows_of(v_rings, last), sums)
    scores_MC = warpgroup_mma_wait(len(v_rings), deps=(scores,))
    gl.thread_barrier()
    mbarrier.arrive(k_empty.index(stage))
    next_MC, peak_M, sum_M, shrink_M = softmax(scores_MC, peak_M, sum_M, first_key, last_key_M, scale, MASKED)
    # The products read their weights from registers until then: as an operand here, they keep theirs.
    ended = warpgroup_mma_wait(0, deps=started + (weights_MC,))  # noqa: RUF005 (Gluon has no *)
    gl.thread_barrier()
    mbarrier.arrive(v_empty.index(last))
    next_sums = ()  # type: tuple[gl.tensor, ...]
    for part in gl.static_range(len(v_rings)):
        shrink = gl.convert_layout(shrink_M, gl.SliceLayout(1, ended[part].type.layout))
        next_sums += (ended[part] * shrink[:, None],)
    return gl.convert_layout(next_MC.to(weights_MC.dtype), weights_MC.type.layout), next_sums, peak_M, sum_M


@gluon.jit
def _clear_behind(values_CP: gl.tensor, count: gl.tensor) -> None:
    """Values from ``count`` on become 0: they are another text's, also NaN, which a weight of 0 would not undo."""
    P: gl.constexpr = values_CP.shape[1]
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // P, P // 8], [4, 1], [1, 0])
    key_C = gl.arange(0, values_CP.shape[0], gl.SliceLayout(1, LOADED))
    loaded_CP = values_CP.load(LOADED)
    values_CP.store(gl.where((key_C < count)[:, None], loaded_CP, 0.0).to(values_CP.dtype))


@gluon.jit
def _no_sums(ROWS: gl.constexpr, P: gl.constexpr) -> gl.tensor:
    return gl.zeros([ROWS, P], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P, 16]))


@gluon.jit
def _store(
    out_ptr: gl.tensor, sums_MP: gl.tensor, sum_M: gl.tensor, first: gl.tensor, end: gl.tensor, column: gl.tensor,
    out_stride: gl.tensor, H: gl.constexpr,
) -> None:  # fmt: skip
    """Divide and write a part of a head."""
    LAYOUT: gl.constexpr = sums_MP.type.layout
    out_MP = sums_MP / gl.convert_layout(sum_M, gl.SliceLayout(1, LAYOUT))[:, None]
    row_M = first + gl.arange(0, sums_MP.shape[0], gl.SliceLayout(1, LAYOUT))
    h_P = column + gl.arange(0, sums_MP.shape[1], gl.SliceLayout(0, LAYOUT))
    mask = (row_M < end)[:, None] & (h_P < H)[None, :]
    at_M = row_M.to(gl.int64) * out_stride
    gl.store(out_ptr + at_M[:, None] + h_P[None, :], out_MP.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _consume(
    out_ptr: gl.tensor, tiles_ptr: gl.tensor, num_tiles: gl.tensor, items: gl.tensor, queries: gl.tuple,
    k_rings: gl.tuple, v_rings: gl.tuple, q_full: gl.tensor, k_full: gl.tensor, v_full: gl.tensor, q_empty: gl.tensor,
    k_empty: gl.tensor, v_empty: gl.tensor, scale: gl.tensor, out_stride: gl.tensor, WHICH: gl.constexpr,
    H: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """The rows of one group of warps: the first or second half of each tile."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    turn, phase_q = 0, 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head, first, start, end = _find(item, tiles_ptr, num_tiles)
        own = first + WHICH * ROWS
        chunks = (end - start + KEYS - 1) // KEYS
        last_key_M = gl.full([ROWS], 0, gl.int32, gl.SliceLayout(1, SCORES)) + (end - 1)
        mbarrier.wait(q_full.index(WHICH), phase_q)
        q_parts = _rows_of(queries, WHICH)
        mbarrier.wait(k_full.index(turn % STAGES), turn // STAGES & 1)
        scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
        scores = _scores(q_parts, _rows_of(k_rings, turn % STAGES), scores)
        scores_MC = warpgroup_mma_wait(0, deps=(scores,))
        gl.thread_barrier()
        mbarrier.arrive(k_empty.index(turn % STAGES))
        peak_M = gl.full([ROWS], -1.0e30, gl.float32, gl.SliceLayout(1, SCORES))
        sum_M = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
        weights_MC, peak_M, sum_M, _ = softmax(scores_MC, peak_M, sum_M, start, last_key_M, scale, True)
        sums = ()  # type: tuple[gl.tensor, ...]
        for part in gl.static_range(len(v_rings)):
            sums += (_no_sums(ROWS, v_rings[part].shape[3]),)
        weights_MC = _operand(weights_MC.to(v_rings[0].dtype), sums[0])
        whole = gl.maximum((end - start) // KEYS, 1)
        for chunk in range(1, whole):
            weights_MC, sums, peak_M, sum_M = _next_chunk(
                turn + chunk, start + chunk * KEYS, q_parts, weights_MC, sums, peak_M, sum_M, last_key_M, scale,
                k_rings, v_rings, k_full, v_full, k_empty, v_empty, SCORES, STAGES, False,
            )  # fmt: skip
        for chunk in range(whole, chunks):
            weights_MC, sums, peak_M, sum_M = _next_chunk(
                turn + chunk, start + chunk * KEYS, q_parts, weights_MC, sums, peak_M, sum_M, last_key_M, scale,
                k_rings, v_rings, k_full, v_full, k_empty, v_empty, SCORES, STAGES, True,
            )  # fmt: skip
        turn += chunks
        gl.thread_barrier()
        mbarrier.arrive(q_empty.index(WHICH))
        last = (turn - 1) % STAGES
        mbarrier.wait(v_full.index(last), (turn - 1) // STAGES & 1)
        values = _rows_of(v_rings, last)
        if (end - start) % KEYS != 0:
            for part in gl.static_range(len(values)):
                _clear_behind(values[part], end - start - (chunks - 1) * KEYS)
            fence_async_shared()
            gl.thread_barrier()
        ended = warpgroup_mma_wait(0, deps=_weigh(weights_MC, values, sums) + (weights_MC,))  # noqa: RUF005
        gl.thread_barrier()
        mbarrier.arrive(v_empty.index(last))
        for part in gl.static_range(len(values)):
            _store(out_ptr + head * H, ended[part], sum_M, own, end, part * v_rings[0].shape[3], out_stride, H)
        phase_q ^= 1


@gluon.jit
def _ring(box: gl.tensor, COUNT: gl.constexpr) -> gl.tensor:
    """Shared memory for so many boxes."""
    return gl.allocate_shared_memory(box.dtype, [COUNT, box.block_shape[0], 1, box.block_shape[2]], box.layout)


@gluon.jit(do_not_specialize=["num_tiles", "items"])
def _encoder_kernel(
    q_first: gl.tensor, q_second: gl.tensor, k_first: gl.tensor, k_second: gl.tensor, v_first: gl.tensor,
    v_second: gl.tensor, out_ptr: gl.tensor, tiles_ptr: gl.tensor, num_tiles: gl.tensor, items: gl.tensor,
    scale: gl.tensor, out_stride: gl.tensor, GROUP: gl.constexpr, H: gl.constexpr, KEYS: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
) -> None:  # fmt: skip
    """Set up the rings, and specialise the warps."""
    PARTS: gl.constexpr = 1 if q_second is None else 2
    q_both, k_both, v_both = (q_first, q_second), (k_first, k_second), (v_first, v_second)
    q_boxes, k_boxes, v_boxes = (), (), ()  # type: tuple[gl.tensor, ...], tuple[gl.tensor, ...], tuple[gl.tensor, ...]
    queries, k_rings, v_rings = (), (), ()  # type: tuple[gl.tensor, ...], tuple[gl.tensor, ...], tuple[gl.tensor, ...]
    for part in gl.static_range(PARTS):
        q_boxes += (q_both[part],)
        k_boxes += (k_both[part],)
        v_boxes += (v_both[part],)
        queries += (_ring(q_both[part], 2),)
        k_rings += (_ring(k_both[part], STAGES),)
        v_rings += (_ring(v_both[part], STAGES),)
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
            (_consume, (out_ptr, tiles_ptr, num_tiles, items, queries, k_rings, v_rings, q_full, k_full, v_full,
                        q_empty, k_empty, v_empty, scale, out_stride, 0, H, KEYS, ROWS, STAGES)),
            (_consume, (out_ptr, tiles_ptr, num_tiles, items, queries, k_rings, v_rings, q_full, k_full, v_full,
                        q_empty, k_empty, v_empty, scale, out_stride, 1, H, KEYS, ROWS, STAGES)),
            (_produce, (q_boxes, k_boxes, v_boxes, queries, k_rings, v_rings, q_full, k_full, v_full, q_empty, k_empty,
                        v_empty, tiles_ptr, num_tiles, items, GROUP, KEYS, ROWS, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
