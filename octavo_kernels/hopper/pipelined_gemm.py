"""Several rows times a weight of ``PackedGroups`` on Hopper: copies, unpacking and products overlap.

Shapes: T rows, K inputs, N outputs, P pairs of a token and an expert. The weight takes the wide side, weight @ x.T. The
tensor memory accelerator copies words and rows into a ring in shared memory. Words become entries of the weight, with
their scale, in the registers that tensor cores read them from, a plane of words while the plane before it is
multiplied: so there is one accumulator for all of K and no wait but for operands.

The work is divided evenly: a step is a tile of outputs and rows with UNIT columns, and every program takes as many
neighbouring steps as the others ("stream-K", Osama et al., arXiv 2301.03598), or undivided tiles where the last wave of
them is nearly full. Where the columns of a tile fall to several programs, the last to finish adds their sums in their
order, so results do not vary from run to run.

Of experts, each tile has rows of one, whose part of the weight it meets. How many tiles there are is known on the
device alone.

With programmatic dependent launch the first weights are on their way before the kernel that computes the rows ends.

Written in Gluon; see ``launch.has_gluon``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.linear.grouped_linear import TILE, WORDS, PackedGroups, chunk_of
from octavo.ops.linear.linear import Fused
from octavo_kernels.hopper.pipelined_configs import ALIGNMENT, BOX_BYTES, MOST_PROGRAMS, UNIT, PipelinedConfig
from octavo_kernels.hopper.pipelined_epilogue import end_tile
from octavo_kernels.hopper.pipelined_producer import produce
from octavo_kernels.hopper.pipelined_tiles import grain_of, rows_of_tile, steps_of, tiles_of_rows
from octavo_kernels.triton.activation import activation_of
from octavo_kernels.triton.experts.expert_tiles import Tiles
from octavo_kernels.triton.grouped.grouped_numbers import SUM_FACTOR, entry_assembly, entry_offset, scale_factor
from octavo_kernels.triton.grouped.grouped_product import GroupedProduct
from octavo_kernels.triton.launch import counters, launch

_TILE, _WORDS, _UNIT = gl.constexpr(TILE), gl.constexpr(WORDS), gl.constexpr(UNIT)


def pipelined_gemm(x_TK: Tensor, packed: PackedGroups, fused: Fused, config: PipelinedConfig) -> Tensor:
    """``ops.grouped_linear`` without norm and order; the residual is overwritten and returned.

    For products that ``pipelined_configs`` takes, and any number of rows: copies fill a tile up with zeros, and only
    rows that there are have results. Rows and residual are contiguous.
    """
    bias_N, _, _, residual_TN, activation = fused
    out_TN = x_TK.new_empty(len(x_TK), fused.width(packed.shape[0])) if residual_TN is None else residual_TN
    _multiply(x_TK, packed, bias_N, residual_TN, None, activation_of(activation), out_TN, None, config)
    return out_TN


def pipelined_experts(
    x_PK: Tensor,
    packed: PackedGroups,
    bias_XN: Tensor | None,
    shares_TS: Tensor | None,
    activation: dict[str, Any],
    out_PN: Tensor,
    tiles: Tiles,
    config: PipelinedConfig,
) -> None:
    """Fill ``out`` with the products of pairs of a token and an expert, gated by an ``activation_of``.

    x has their rows in the order of the tiles, which were made before the kernel that comes before this one began.
    Results are in the same order or, times their shares, in the order of pairs.
    """
    _multiply(x_PK, packed, bias_XN, None, shares_TS, activation, out_PN, tiles, config)


def _multiply(
    x_TK: Tensor,
    packed: PackedGroups,
    bias: Tensor | None,
    residual_TN: Tensor | None,
    shares: Tensor | None,
    activation: dict[str, Any],
    out: Tensor,
    tiles: Tiles | None,
    config: PipelinedConfig,
) -> None:
    if x_TK.data_ptr() % ALIGNMENT:  # a view into other rows
        x_TK = x_TK.clone()
    (T, K), outputs = x_TK.shape, out.shape[1]
    has_groups = len(packed.scales_GN) > 1
    sums = 2 * config.programs * (1 if activation["ACTIVATION"] is None else 2) * config.block_n * config.block_t
    x_box = [config.block_t, UNIT]
    x_tiles = TensorDescriptor.from_tensor(x_TK, x_box, gl.NVMMASharedLayout.get_default_for(x_box, gl.bfloat16))
    launch(
        pipelined_gemm_kernel,
        (config.programs,),
        *(x_tiles, _word_tiles(packed, config.block_n)),
        _flat_tiles(packed.scales_GN, config.block_n) if has_groups else None,
        *(
            None if values is None else _flat_tiles(values, config.block_n)
            for values in (packed.zeros_GN, packed.minima_GN)
        ),
        None if has_groups else packed.scales_GN,
        *(bias, residual_TN, shares),
        *((None,) * 5 if tiles is None else (tiles.used, tiles.expert, tiles.first, tiles.rows, tiles.order_P)),
        *(out, x_TK.new_empty(sums, dtype=torch.float32), counters(x_TK.device, MOST_PROGRAMS)),
        *(T, outputs, K, packed.shape[0], packed.group),
        BLOCK_T=config.block_t,
        BLOCK_N=config.block_n,
        CHUNK=chunk_of(packed.number),
        PARTS=GroupedProduct.of(packed, False, x_TK.dtype).parts,
        STAGES=config.stages,
        **activation,
        OFFSET=entry_offset(packed),
        FACTOR=scale_factor(packed, torch.bfloat16),
        ASSEMBLY=entry_assembly(packed, torch.bfloat16, entry_offset(packed)),
        WARPS=config.warps,
        num_warps=config.warps,
        maxnreg=config.registers,
    )


def _word_tiles(packed: PackedGroups, block_n: int) -> TensorDescriptor:
    """The words of ``block_n`` outputs and one chunk as a box."""
    tiles, chunks = packed.words.shape[:2]
    shape, strides = [tiles, chunks * TILE, WORDS], [chunks * TILE * WORDS, WORDS, 1]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=3)
    return TensorDescriptor(packed.words, shape, strides, [block_n // TILE, TILE, WORDS], layout)


def _flat_tiles(values_GN: Tensor, block_n: int) -> TensorDescriptor:
    """Scales, zeros or minima of at least ``block_n`` outputs and one group as a box."""
    size = max(block_n, BOX_BYTES // values_GN.element_size())
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * values_GN.element_size(), rank=1)
    return TensorDescriptor(values_GN, [values_GN.numel()], [1], [size], layout)


@gluon.jit
def _of_outputs(
    ring: gl.tensor, place: gl.tensor, BLOCK_N: gl.constexpr, OFFSET: gl.constexpr, FACTOR: gl.constexpr,
    LEFT: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Scales, zeros or minima of a group as bfloat16, for every word: [BLOCK_N, 32]."""
    values = ring.index(place).slice(0, BLOCK_N).load(gl.SliceLayout(1, LEFT))
    if OFFSET:
        values = values.to(gl.float32) + OFFSET
    if FACTOR != 1:
        values = values.to(gl.float32) * FACTOR
    values = values.to(gl.float32).to(gl.bfloat16)
    return values[:, None].broadcast_to([BLOCK_N, _WORDS])


@gluon.jit
def _of_plane(
    ring: gl.tensor, place: gl.tensor, BLOCK_N: gl.constexpr, HALVES: gl.constexpr, OFFSET: gl.constexpr,
    FACTOR: gl.constexpr, LEFT: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """The same of a plane, whose halves may be of two groups; the compiler knows of which half a register is."""
    values = _of_outputs(ring, place, BLOCK_N, OFFSET, FACTOR, LEFT)
    if HALVES == 2:
        is_first = gl.arange(0, _WORDS, gl.SliceLayout(0, LEFT)) < _WORDS // 2
        values = gl.where(is_first[None, :], values, _of_outputs(ring, place + 1, BLOCK_N, OFFSET, FACTOR, LEFT))
    return values


@gluon.jit
def _entries(
    words: gl.tensor, zeros: gl.tensor, scales: gl.tensor, minima: gl.tensor, PLANE: gl.constexpr,
    ASSEMBLY: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Entries of the weight for a plane of words."""
    operands = [words, zeros, scales, minima]
    return gl.inline_asm_elementwise(ASSEMBLY[PLANE], "=r,r,r,r,r", operands, gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def _load_words(words_ring: gl.tensor, place: gl.tensor, LEFT: gl.constexpr) -> gl.tensor:
    """A chunk's words in the registers of tensor cores' left operand."""
    return words_ring.index(place).reshape([words_ring.shape[1] * _TILE, _WORDS]).load(LEFT)


@gluon.jit
def _load_part(
    words: gl.tensor, scales_ring: gl.tensor, zeros_ring: gl.tensor, minima_ring: gl.tensor, place: gl.tensor,
    HALVES: gl.constexpr, OFFSET: gl.constexpr, FACTOR: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """Zeros, scales and minima of a part of a chunk, in the registers of its words; words for what there is not."""
    BLOCK_N: gl.constexpr = words.shape[0]
    LEFT: gl.constexpr = words.type.layout
    zeros, scales, minima = words, words, words
    if zeros_ring is not None:
        zeros = _of_plane(zeros_ring, place, BLOCK_N, HALVES, OFFSET, 1, LEFT)
    if scales_ring is not None:
        scales = _of_plane(scales_ring, place, BLOCK_N, HALVES, 0, FACTOR, LEFT)
    if minima_ring is not None:
        minima = _of_plane(minima_ring, place, BLOCK_N, HALVES, 0, 1, LEFT)
    return zeros, scales, minima


@gluon.constexpr_function
def sums_in_turn(WEIGHTS: int, BLOCK_T: int) -> int:
    """Sums that planes are added to in turn: tensor cores wait for one product of a chain after another."""
    return 2 if WEIGHTS == 1 and BLOCK_T <= 32 else 1


@gluon.jit
def _sum_steps(
    acc: gl.tensor, up: gl.tensor, last: gl.tensor, x_ring: gl.tensor, words_ring: gl.tensor, scales_ring: gl.tensor,
    zeros_ring: gl.tensor, minima_ring: gl.tensor, full: gl.tensor, empty: gl.tensor, first: gl.tensor, stop: gl.tensor,
    CHUNK: gl.constexpr, PARTS: gl.constexpr, WEIGHTS: gl.constexpr, STAGES: gl.constexpr, OFFSET: gl.constexpr,
    FACTOR: gl.constexpr, ASSEMBLY: gl.constexpr,
) -> tuple[gl.tensor, ...]:  # fmt: skip
    """The sums of a tile's steps from ``first`` to ``stop``. ``last`` is the operand of the product that is not over.

    The product of a plane runs while the next plane becomes its operand. When that has been given to the tensor cores,
    the one before has been read, and so has all of the step before.
    """
    LEFT: gl.constexpr = last.type.layout
    CHUNKS: gl.constexpr = _UNIT // CHUNK
    PLANES: gl.constexpr = CHUNK // _WORDS
    HALVES: gl.constexpr = 2 if PARTS > PLANES else 1  # of a plane, with a group each
    OF_PART: gl.constexpr = 1 if PARTS > PLANES else PLANES // PARTS  # planes
    IN_TURN: gl.constexpr = sums_in_turn(WEIGHTS, x_ring.shape[1])
    for i in range(first, stop):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), i // STAGES & 1)
        for c in gl.static_range(CHUNKS):
            place = slot * (WEIGHTS * CHUNKS) + c
            words = _load_words(words_ring, place, LEFT)
            up_words = words
            if WEIGHTS == 2:
                up_words = _load_words(words_ring, place + CHUNKS, LEFT)
            zeros, scales, minima = words, words, words
            up_zeros, up_scales, up_minima = words, words, words
            for p in gl.static_range(PLANES):
                if p % OF_PART == 0:
                    at = place * PARTS + p // OF_PART * HALVES
                    zeros, scales, minima = _load_part(
                        words, scales_ring, zeros_ring, minima_ring, at, HALVES, OFFSET, FACTOR
                    )
                    if WEIGHTS == 2:
                        up_zeros, up_scales, up_minima = _load_part(
                            up_words, scales_ring, zeros_ring, minima_ring, at + CHUNKS * PARTS, HALVES, OFFSET, FACTOR
                        )
                x = x_ring.index(slot).slice(c * CHUNK + p * _WORDS, _WORDS, 1).permute((1, 0))
                is_sum = i > first if c * PLANES + p < IN_TURN else True
                entries = _entries(words, zeros, scales, minima, p, ASSEMBLY)
                if (c * PLANES + p) % IN_TURN == 0:
                    acc = warpgroup_mma(entries, x, acc, use_acc=is_sum, is_async=True)
                else:
                    up = warpgroup_mma(entries, x, up, use_acc=is_sum, is_async=True)
                acc, up, last = warpgroup_mma_wait(1, deps=(acc, up, last))
                acc, up, last = warpgroup_mma_init(acc), warpgroup_mma_init(up), entries
                if c + p == 0:
                    _release(empty.index((i + STAGES - 1) % STAGES), i > 0)
                if WEIGHTS == 2:
                    entries = _entries(up_words, up_zeros, up_scales, up_minima, p, ASSEMBLY)
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
    x_ring: gl.tensor, words_ring: gl.tensor, scales_ring: gl.tensor, zeros_ring: gl.tensor, minima_ring: gl.tensor,
    full: gl.tensor, empty: gl.tensor, scales_ptr: gl.tensor, bias_ptr: gl.tensor, residual_ptr: gl.tensor,
    share_ptr: gl.tensor, expert_ptr: gl.tensor, first_ptr: gl.tensor, rows_ptr: gl.tensor, order_ptr: gl.tensor,
    out_ptr: gl.tensor, sums_ptr: gl.tensor, counters_ptr: gl.tensor, begin: gl.tensor, end: gl.tensor,
    programs: gl.tensor, count: gl.tensor, grain: gl.tensor, units: gl.tensor, tiles_t: gl.tensor, T: gl.tensor,
    num_outputs: gl.tensor, CHUNK: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr, LIMIT: gl.constexpr, OFFSET: gl.constexpr, FACTOR: gl.constexpr, ASSEMBLY: gl.constexpr,
    WARPS: gl.constexpr, PDL: gl.constexpr,
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
            minima_ring, full, empty, step - begin, stop - begin, CHUNK, PARTS, WEIGHTS, STAGES, OFFSET, FACTOR,
            ASSEMBLY,
        )  # fmt: skip
        acc, up, last = warpgroup_mma_wait(0, deps=(acc, up, last))
        if sums_in_turn(WEIGHTS, BLOCK_T) == 2:
            acc += up
        if FACTOR != 1:
            acc, up = acc * SUM_FACTOR, up * SUM_FACTOR
        expert, first_row, stop_row = rows_of_tile(tile % tiles_t, expert_ptr, first_ptr, rows_ptr, T, BLOCK_T)
        own_scales, own_bias = scales_ptr, bias_ptr
        if scales_ptr is not None:
            own_scales = scales_ptr + expert * (WEIGHTS * num_outputs)
        if bias_ptr is not None:
            own_bias = bias_ptr + expert * (WEIGHTS * num_outputs)
        end_tile(
            acc, up, own_scales, own_bias, residual_ptr, order_ptr, share_ptr, out_ptr, sums_ptr, counters_ptr,
            tile * units, units, grain, programs, count, tile // tiles_t * BLOCK_N, first_row, stop_row, num_outputs,
            ACTIVATION, ALPHA, LIMIT,
        )  # fmt: skip
        step = stop


@gluon.jit
def _ring_of(tiles: gl.tensor, places: gl.constexpr) -> gl.tensor:
    """Room for so many boxes."""
    return gl.allocate_shared_memory(tiles.dtype, [places, tiles.block_shape[0]], tiles.layout)


@gluon.jit(do_not_specialize=["T", "K", "num_outputs", "num_rows", "group_size"])
def pipelined_gemm_kernel(
    x_tiles: gl.tensor, words_tiles: gl.tensor, scales_tiles: gl.tensor, zeros_tiles: gl.tensor,
    minima_tiles: gl.tensor, scales_ptr: gl.tensor, bias_ptr: gl.tensor, residual_ptr: gl.tensor, share_ptr: gl.tensor,
    tiles_ptr: gl.tensor, expert_ptr: gl.tensor, first_ptr: gl.tensor, rows_ptr: gl.tensor, order_ptr: gl.tensor,
    out_ptr: gl.tensor, sums_ptr: gl.tensor, counters_ptr: gl.tensor, T: gl.tensor, num_outputs: gl.tensor,
    K: gl.tensor, num_rows: gl.tensor, group_size: gl.tensor, BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr,
    CHUNK: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr, OFFSET: gl.constexpr, FACTOR: gl.constexpr, ASSEMBLY: gl.constexpr, WARPS: gl.constexpr,
    PDL: gl.constexpr,
) -> None:  # fmt: skip
    """Set up the rings, and specialise the warps.

    ``sums`` holds for each program the sums [2, 1 or 2, BLOCK_N, BLOCK_T] of a tile that others have begun, and of one
    that others go on with. The weight has ``num_rows``: of an expert, so many as it has outputs, twice if gated.
    """
    WEIGHTS: gl.constexpr = 2 if ACTIVATION is not None else 1
    PLACES: gl.constexpr = STAGES * WEIGHTS * (_UNIT // CHUNK)
    x_ring = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, BLOCK_T, _UNIT], x_tiles.layout)
    words_ring = gl.allocate_shared_memory(
        words_tiles.dtype, [PLACES, BLOCK_N // _TILE, _TILE, _WORDS], words_tiles.layout
    )
    scales_ring, zeros_ring, minima_ring = None, None, None
    if scales_tiles is not None:
        scales_ring = _ring_of(scales_tiles, PLACES * PARTS)
    if zeros_tiles is not None:
        zeros_ring = _ring_of(zeros_tiles, PLACES * PARTS)
    if minima_tiles is not None:
        minima_ring = _ring_of(minima_tiles, PLACES * PARTS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    units, tiles_t = (K + _UNIT - 1) // _UNIT, tiles_of_rows(tiles_ptr, T, BLOCK_T)
    tiles = (num_outputs + BLOCK_N - 1) // BLOCK_N * tiles_t
    grain = grain_of(tiles, units, gl.num_programs(0))
    count = tiles * units // grain
    programs = gl.maximum(gl.minimum(gl.num_programs(0), count), 1)  # there may be no rows of these experts
    begin, end = steps_of(gl.program_id(0), programs, count, grain)
    end = gl.minimum(end, tiles * units)  # programs beyond the last have none
    gl.warp_specialize(
        [
            (_consume, (x_ring, words_ring, scales_ring, zeros_ring, minima_ring, full, empty, scales_ptr, bias_ptr,
                        residual_ptr, share_ptr, expert_ptr, first_ptr, rows_ptr, order_ptr, out_ptr, sums_ptr,
                        counters_ptr, begin, end, programs, count, grain, units, tiles_t, T, num_outputs, CHUNK, PARTS,
                        STAGES, ACTIVATION, ALPHA, LIMIT, OFFSET, FACTOR, ASSEMBLY, WARPS, PDL)),
            (produce, (x_tiles, words_tiles, scales_tiles, zeros_tiles, minima_tiles, x_ring, words_ring, scales_ring,
                       zeros_ring, minima_ring, full, empty, expert_ptr, first_ptr, rows_ptr, begin, end, units,
                       tiles_t, T, num_outputs, num_rows, group_size, BLOCK_N, CHUNK, PARTS, WEIGHTS, STAGES, PDL)),
        ],
        [1],
        [40],
    )  # fmt: skip
