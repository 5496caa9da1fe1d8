"""Several rows times a weight of ``PackedGroups`` on Hopper: copies, unpacking and products overlap.

Shapes: T rows, K inputs, N outputs. The weight takes the wide side, weight @ x.T. The tensor memory accelerator copies
words and rows into a ring in shared memory. Words become entries of the weight, with their scale, in the registers that
tensor cores read them from, a plane of words while the plane before it is multiplied: so there is one accumulator for
all of K and no wait but for operands.

The work is divided evenly: a step is a tile of outputs and rows with UNIT columns, and every program takes as many
neighbouring steps as the others ("stream-K", Osama et al., arXiv 2301.03598). Where the columns of a tile fall to
several programs, the last to finish adds their sums in their order, so results do not vary from run to run.

With programmatic dependent launch the first weights are on their way before the kernel that computes the rows ends.

Written in Gluon; see ``launch.has_gluon``.
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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.grouped_linear import TILE, WORDS, PackedGroups, chunk_of
from octavo.ops.triton.grouped_numbers import entry_assembly, entry_offset
from octavo.ops.triton.launch import counters, launch
from octavo.ops.triton.pipelined_configs import ALIGNMENT, BOX_BYTES, MOST_PROGRAMS, UNIT, PipelinedConfig
from octavo.ops.triton.pipelined_epilogue import end_tile, steps_of

_TILE, _WORDS, _UNIT = gl.constexpr(TILE), gl.constexpr(WORDS), gl.constexpr(UNIT)


def pipelined_gemm(
    x_TK: Tensor,
    packed: PackedGroups,
    bias_N: Tensor | None,
    residual_TN: Tensor | None,
    activation: str | None,
    config: PipelinedConfig,
) -> Tensor:
    """``ops.grouped_linear`` without norm and order; the residual is overwritten and returned.

    For products that ``pipelined_configs`` takes, and any number of rows: copies fill a tile up with zeros, and only
    rows that there are have results. Rows and residual are contiguous.
    """
    (T, K), N = x_TK.shape, packed.shape[0]
    if x_TK.data_ptr() % ALIGNMENT:  # a view into other rows
        x_TK = x_TK.clone()
    outputs = N if activation is None else N // 2
    out_TN = x_TK.new_empty(T, outputs) if residual_TN is None else residual_TN
    has_groups = len(packed.scales_GN) > 1
    steps = triton.cdiv(outputs, config.block_n) * triton.cdiv(T, config.block_t) * triton.cdiv(K, UNIT)
    programs = min(config.programs, steps)
    sums = 2 * programs * (1 if activation is None else 2) * config.block_n * config.block_t
    x_box = [config.block_t, UNIT]
    x_tiles = TensorDescriptor.from_tensor(x_TK, x_box, gl.NVMMASharedLayout.get_default_for(x_box, gl.bfloat16))
    launch(
        pipelined_gemm_kernel,
        (programs,),
        *(x_tiles, _word_tiles(packed, config.block_n)),
        _flat_tiles(packed.scales_GN, config.block_n) if has_groups else None,
        None if packed.zeros_GN is None else _flat_tiles(packed.zeros_GN, config.block_n),
        None if has_groups else packed.scales_GN,
        *(bias_N, residual_TN, out_TN, x_TK.new_empty(sums, dtype=torch.float32)),
        counters(x_TK.device, MOST_PROGRAMS),
        *(T, outputs, K, packed.group),
        BLOCK_T=config.block_t,
        BLOCK_N=config.block_n,
        CHUNK=chunk_of(packed.number),
        STAGES=config.stages,
        ACTIVATION=activation,
        OFFSET=entry_offset(packed),
        ASSEMBLY=entry_assembly(packed),
        WARPS=config.warps,
        num_warps=config.warps,
        maxnreg=config.registers,
    )
    return out_TN


def _word_tiles(packed: PackedGroups, block_n: int) -> TensorDescriptor:
    """The words of ``block_n`` outputs and one chunk as a box."""
    tiles, chunks = packed.words.shape[:2]
    shape, strides = [tiles, chunks * TILE, WORDS], [chunks * TILE * WORDS, WORDS, 1]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=3)
    return TensorDescriptor(packed.words, shape, strides, [block_n // TILE, TILE, WORDS], layout)


def _flat_tiles(values_GN: Tensor, block_n: int) -> TensorDescriptor:
    """Scales or zeros of at least ``block_n`` outputs and one group as a box."""
    size = max(block_n, BOX_BYTES // values_GN.element_size())
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * values_GN.element_size(), rank=1)
    return TensorDescriptor(values_GN, [values_GN.numel()], [1], [size], layout)


@gluon.jit
def _ask_for_weights(
    words_tiles: gl.tensor, scales_tiles: gl.tensor, zeros_tiles: gl.tensor, words_ring: gl.tensor,
    scales_ring: gl.tensor, zeros_ring: gl.tensor, barrier: gl.tensor, slot: gl.tensor, unit: gl.tensor,
    first: gl.tensor, num_outputs: gl.tensor, group_size: gl.tensor, X_BYTES: gl.constexpr, CHUNK: gl.constexpr,
    WEIGHTS: gl.constexpr,
) -> None:  # fmt: skip
    """Ask for words, scales and zeros of outputs from ``first`` on, into a place of the rings; rows will follow."""
    CHUNKS: gl.constexpr = _UNIT // CHUNK
    SCALE_BYTES: gl.constexpr = 0 if scales_tiles is None else scales_tiles.block_type.nbytes
    ZERO_BYTES: gl.constexpr = 0 if zeros_tiles is None else zeros_tiles.block_type.nbytes
    OWN_BYTES: gl.constexpr = words_tiles.block_type.nbytes + SCALE_BYTES + ZERO_BYTES
    mbarrier.expect(barrier, X_BYTES + WEIGHTS * CHUNKS * OWN_BYTES)
    for w in gl.static_range(WEIGHTS):
        row = first + w * num_outputs
        for c in gl.static_range(CHUNKS):
            chunk, place = unit * CHUNKS + c, (slot * WEIGHTS + w) * CHUNKS + c
            at = [row // _TILE, chunk * _TILE, 0]
            tma.async_copy_global_to_shared(words_tiles, at, barrier, words_ring.index(place))
            own = chunk * CHUNK // group_size * (num_outputs * WEIGHTS) + row
            if scales_tiles is not None:
                tma.async_copy_global_to_shared(scales_tiles, [own], barrier, scales_ring.index(place))
            if zeros_tiles is not None:
                tma.async_copy_global_to_shared(zeros_tiles, [own], barrier, zeros_ring.index(place))


@gluon.jit
def _produce(
    x_tiles: gl.tensor, words_tiles: gl.tensor, scales_tiles: gl.tensor, zeros_tiles: gl.tensor, x_ring: gl.tensor,
    words_ring: gl.tensor, scales_ring: gl.tensor, zeros_ring: gl.tensor, full: gl.tensor, empty: gl.tensor,
    begin: gl.tensor, end: gl.tensor, units: gl.tensor, tiles_t: gl.tensor, num_outputs: gl.tensor,
    group_size: gl.tensor, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr, WEIGHTS: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
) -> None:  # fmt: skip
    """Bring the operands of all steps into the rings; the first weights before x is there."""
    X_BYTES: gl.constexpr = x_tiles.block_type.nbytes
    BLOCK_T: gl.constexpr = x_ring.shape[1]
    for i in gl.static_range(STAGES):
        if begin + i < end:
            _ask_for_weights(
                words_tiles, scales_tiles, zeros_tiles, words_ring, scales_ring, zeros_ring, full.index(i), i,
                (begin + i) % units, (begin + i) // units // tiles_t * BLOCK_N, num_outputs, group_size, X_BYTES,
                CHUNK, WEIGHTS,
            )  # fmt: skip
    if PDL:
        gdc_wait()
    for i in range(end - begin):
        slot, tile, unit = i % STAGES, (begin + i) // units, (begin + i) % units
        barrier = full.index(slot)
        if i >= STAGES:
            mbarrier.wait(empty.index(slot), i // STAGES & 1 ^ 1)
            _ask_for_weights(
                words_tiles, scales_tiles, zeros_tiles, words_ring, scales_ring, zeros_ring, barrier, slot, unit,
                tile // tiles_t * BLOCK_N, num_outputs, group_size, X_BYTES, CHUNK, WEIGHTS,
            )  # fmt: skip
        at = [tile % tiles_t * BLOCK_T, unit * _UNIT]
        tma.async_copy_global_to_shared(x_tiles, at, barrier, x_ring.index(slot))


@gluon.jit
def _of_outputs(
    ring: gl.tensor, place: gl.tensor, BLOCK_N: gl.constexpr, OFFSET: gl.constexpr, LEFT: gl.constexpr
) -> gl.tensor:
    """Scales or zeros of a chunk's group as bfloat16, for every word: [BLOCK_N, 32]."""
    values = ring.index(place).slice(0, BLOCK_N).load(gl.SliceLayout(1, LEFT))
    if OFFSET:
        values = values.to(gl.float32) + OFFSET
    values = values.to(gl.float32).to(gl.bfloat16)
    return values[:, None].broadcast_to([BLOCK_N, _WORDS])


@gluon.jit
def _entries(
    words: gl.tensor, zeros: gl.tensor, scales: gl.tensor, PLANE: gl.constexpr, ASSEMBLY: gl.constexpr
) -> gl.tensor:
    """Entries of the weight for a plane of words."""
    operands = [words, zeros, scales]
    return gl.inline_asm_elementwise(ASSEMBLY[PLANE], "=r,r,r,r", operands, gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def _load_chunk(
    words_ring: gl.tensor, scales_ring: gl.tensor, zeros_ring: gl.tensor, place: gl.tensor, OFFSET: gl.constexpr,
    LEFT: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """A chunk's words, zeros and scales in the registers of tensor cores' left operand; words for what there is not."""
    BLOCK_N: gl.constexpr = words_ring.shape[1] * _TILE
    words = words_ring.index(place).reshape([BLOCK_N, _WORDS]).load(LEFT)
    zeros, scales = words, words
    if zeros_ring is not None:
        zeros = _of_outputs(zeros_ring, place, BLOCK_N, OFFSET, LEFT)
    if scales_ring is not None:
        scales = _of_outputs(scales_ring, place, BLOCK_N, 0, LEFT)
    return words, zeros, scales


@gluon.jit
def _sum_steps(
    acc: gl.tensor, up: gl.tensor, last: gl.tensor, x_ring: gl.tensor, words_ring: gl.tensor, scales_ring: gl.tensor,
    zeros_ring: gl.tensor, full: gl.tensor, empty: gl.tensor, first: gl.tensor, stop: gl.tensor, CHUNK: gl.constexpr,
    WEIGHTS: gl.constexpr, STAGES: gl.constexpr, OFFSET: gl.constexpr, ASSEMBLY: gl.constexpr,
) -> tuple[gl.tensor, ...]:  # fmt: skip
    """The sums of a tile's steps from ``first`` to ``stop``. ``last`` is the operand of the product that is not over.

    The product of a plane runs while the next plane becomes its operand. When that has been given to the tensor cores,
    the one before has been read, and so has all of the step before.
    """
    LEFT: gl.constexpr = last.type.layout
    CHUNKS: gl.constexpr = _UNIT // CHUNK
    for i in range(first, stop):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), i // STAGES & 1)
        for c in gl.static_range(CHUNKS):
            place = slot * (WEIGHTS * CHUNKS) + c
            words, zeros, scales = _load_chunk(words_ring, scales_ring, zeros_ring, place, OFFSET, LEFT)
            up_words, up_zeros, up_scales = words, zeros, scales
            if WEIGHTS == 2:
                up_words, up_zeros, up_scales = _load_chunk(
                    words_ring, scales_ring, zeros_ring, place + CHUNKS, OFFSET, LEFT
                )
            for p in gl.static_range(CHUNK // _WORDS):
                x = x_ring.index(slot).slice(c * CHUNK + p * _WORDS, _WORDS, 1).permute((1, 0))
                is_sum = i > first if c + p == 0 else True
                entries = _entries(words, zeros, scales, p, ASSEMBLY)
                acc = warpgroup_mma(entries, x, acc, use_acc=is_sum, is_async=True)
                acc, up, last = warpgroup_mma_wait(1, deps=(acc, up, last))
                acc, up, last = warpgroup_mma_init(acc), warpgroup_mma_init(up), entries
                if c + p == 0:
                    _release(empty.index((i + STAGES - 1) % STAGES), i > 0)
                if WEIGHTS == 2:
                    entries = _entries(up_words, up_zeros, up_scales, p, ASSEMBLY)
                    up = warpgroup_mma(entries, x, up, use_acc=is_sum, is_async=True)
                    acc, up, last = warpgroup_mma_wait(1, deps=(acc, up, last))
                    acc, up, last = warpgroup_mma_init(acc), warpgroup_mma_init(up), entries
    return acc, up, last


@gluon.jit
def _release(empty: gl.tensor, is_full: gl.tensor) -> None:
    """Let a step's place be filled again, when all warps have read it."""
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(empty, pred=is_full)


@gluon.jit
def _consume(
    x_ring: gl.tensor, words_ring: gl.tensor, scales_ring: gl.tensor, zeros_ring: gl.tensor, full: gl.tensor,
    empty: gl.tensor, scales_ptr: gl.tensor, bias_ptr: gl.tensor, residual_ptr: gl.tensor, out_ptr: gl.tensor,
    sums_ptr: gl.tensor, counters_ptr: gl.tensor, begin: gl.tensor, end: gl.tensor, count: gl.tensor, units: gl.tensor,
    tiles_t: gl.tensor, T: gl.tensor, num_outputs: gl.tensor, CHUNK: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, OFFSET: gl.constexpr, ASSEMBLY: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
) -> None:  # fmt: skip
    """Multiply, a tile after the other."""
    BLOCK_N: gl.constexpr = words_ring.shape[1] * _TILE
    BLOCK_T: gl.constexpr = x_ring.shape[1]
    WEIGHTS: gl.constexpr = 2 if ACTIVATION is not None else 1
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_T, 16])
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    none = gl.zeros([BLOCK_N, BLOCK_T], gl.float32, SUMS)
    nothing = gl.zeros([BLOCK_N, _WORDS], gl.bfloat16, gl.DotOperandLayout(0, SUMS, 2))
    step = begin
    while step < end:
        tile = step // units
        stop = gl.minimum(end, (tile + 1) * units)
        acc, up, last = _sum_steps(
            warpgroup_mma_init(none), warpgroup_mma_init(none), nothing, x_ring, words_ring, scales_ring, zeros_ring,
            full, empty, step - begin, stop - begin, CHUNK, WEIGHTS, STAGES, OFFSET, ASSEMBLY,
        )  # fmt: skip
        acc, up, last = warpgroup_mma_wait(0, deps=(acc, up, last))
        end_tile(
            acc, up, scales_ptr, bias_ptr, residual_ptr, out_ptr, sums_ptr, counters_ptr, tile * units, units, count,
            tile // tiles_t * BLOCK_N, tile % tiles_t * BLOCK_T, T, num_outputs, ACTIVATION,
        )  # fmt: skip
        step = stop


@gluon.jit(do_not_specialize=["T", "K", "num_outputs", "group_size"])
def pipelined_gemm_kernel(
    x_tiles: gl.tensor, words_tiles: gl.tensor, scales_tiles: gl.tensor, zeros_tiles: gl.tensor, scales_ptr: gl.tensor,
    bias_ptr: gl.tensor, residual_ptr: gl.tensor, out_ptr: gl.tensor, sums_ptr: gl.tensor, counters_ptr: gl.tensor,
    T: gl.tensor, num_outputs: gl.tensor, K: gl.tensor, group_size: gl.tensor, BLOCK_T: gl.constexpr,
    BLOCK_N: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
    OFFSET: gl.constexpr, ASSEMBLY: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
) -> None:  # fmt: skip
    """Set up the rings, and specialise the warps.

    ``sums`` holds for each program the sums [2, 1 or 2, BLOCK_N, BLOCK_T] of a tile that others have begun, and of one
    that others go on with.
    """
    WEIGHTS: gl.constexpr = 2 if ACTIVATION is not None else 1
    PLACES: gl.constexpr = STAGES * WEIGHTS * (_UNIT // CHUNK)
    x_ring = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, BLOCK_T, _UNIT], x_tiles.layout)
    words_ring = gl.allocate_shared_memory(
        words_tiles.dtype, [PLACES, BLOCK_N // _TILE, _TILE, _WORDS], words_tiles.layout
    )
    scales_ring, zeros_ring = None, None
    if scales_tiles is not None:
        scales_ring = gl.allocate_shared_memory(
            scales_tiles.dtype, [PLACES, scales_tiles.block_shape[0]], scales_tiles.layout
        )
    if zeros_tiles is not None:
        zeros_ring = gl.allocate_shared_memory(
            zeros_tiles.dtype, [PLACES, zeros_tiles.block_shape[0]], zeros_tiles.layout
        )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    units, tiles_t = (K + _UNIT - 1) // _UNIT, (T + BLOCK_T - 1) // BLOCK_T
    count = (num_outputs + BLOCK_N - 1) // BLOCK_N * tiles_t * units
    begin, end = steps_of(gl.program_id(0), gl.num_programs(0), count)
    gl.warp_specialize(
        [
            (_consume, (x_ring, words_ring, scales_ring, zeros_ring, full, empty, scales_ptr, bias_ptr, residual_ptr,
                        out_ptr, sums_ptr, counters_ptr, begin, end, count, units, tiles_t, T, num_outputs, CHUNK,
                        STAGES, ACTIVATION, OFFSET, ASSEMBLY, WARPS, PDL)),
            (_produce, (x_tiles, words_tiles, scales_tiles, zeros_tiles, x_ring, words_ring, scales_ring, zeros_ring,
                        full, empty, begin, end, units, tiles_t, num_outputs, group_size, BLOCK_N, CHUNK, WEIGHTS,
                        STAGES, PDL)),
        ],
        [1],
        [40],
    )  # fmt: skip
