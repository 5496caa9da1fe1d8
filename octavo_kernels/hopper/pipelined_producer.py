"""The warp of ``pipelined_gemm`` that asks the tensor memory accelerator for the operands of all steps.

Shapes: a step is a tile of outputs and rows with UNIT columns, that is one or more chunks of the weight. A chunk has
PARTS groups, each with a scale for every output, and perhaps zeros and minima.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from octavo.ops.linear.grouped_linear import TILE
from octavo_kernels.hopper.pipelined_configs import UNIT
from octavo_kernels.hopper.pipelined_tiles import rows_of_tile

_TILE, _UNIT = gl.constexpr(TILE), gl.constexpr(UNIT)


@gluon.jit
def _ask_for(tiles: gl.tensor, at: gl.tensor, barrier: gl.tensor, ring: gl.tensor, place: gl.tensor) -> None:
    """Ask for a group's scales, zeros or minima, if there are any."""
    if tiles is not None:
        tma.async_copy_global_to_shared(tiles, [at], barrier, ring.index(place))


@gluon.jit
def _ask_for_weights(
    words_tiles: gl.tensor, scales_tiles: gl.tensor, zeros_tiles: gl.tensor, minima_tiles: gl.tensor,
    words_ring: gl.tensor, scales_ring: gl.tensor, zeros_ring: gl.tensor, minima_ring: gl.tensor, barrier: gl.tensor,
    slot: gl.tensor, unit: gl.tensor, first: gl.tensor, num_outputs: gl.tensor, num_rows: gl.tensor,
    group_size: gl.tensor, X_BYTES: gl.constexpr, CHUNK: gl.constexpr, PARTS: gl.constexpr, WEIGHTS: gl.constexpr,
) -> None:  # fmt: skip
    """Ask for words, scales, zeros and minima of the weight's rows from ``first`` on, into a place of the rings; x will
    follow."""
    CHUNKS: gl.constexpr = _UNIT // CHUNK
    SCALE_BYTES: gl.constexpr = 0 if scales_tiles is None else scales_tiles.block_type.nbytes
    ZERO_BYTES: gl.constexpr = 0 if zeros_tiles is None else zeros_tiles.block_type.nbytes
    MINIMUM_BYTES: gl.constexpr = 0 if minima_tiles is None else minima_tiles.block_type.nbytes
    PART_BYTES: gl.constexpr = SCALE_BYTES + ZERO_BYTES + MINIMUM_BYTES
    mbarrier.expect(barrier, X_BYTES + WEIGHTS * CHUNKS * (words_tiles.block_type.nbytes + PARTS * PART_BYTES))
    for w in gl.static_range(WEIGHTS):
        row = first + w * num_outputs
        for c in gl.static_range(CHUNKS):
            chunk, place = unit * CHUNKS + c, (slot * WEIGHTS + w) * CHUNKS + c
            at = [row // _TILE, chunk * _TILE, 0]
            tma.async_copy_global_to_shared(words_tiles, at, barrier, words_ring.index(place))
            for p in gl.static_range(PARTS):
                own = (chunk * CHUNK + p * (CHUNK // PARTS)) // group_size * num_rows + row
                _ask_for(scales_tiles, own, barrier, scales_ring, place * PARTS + p)
                _ask_for(zeros_tiles, own, barrier, zeros_ring, place * PARTS + p)
                _ask_for(minima_tiles, own, barrier, minima_ring, place * PARTS + p)


@gluon.jit
def produce(
    x_tiles: gl.tensor, words_tiles: gl.tensor, scales_tiles: gl.tensor, zeros_tiles: gl.tensor,
    minima_tiles: gl.tensor, x_ring: gl.tensor, words_ring: gl.tensor, scales_ring: gl.tensor, zeros_ring: gl.tensor,
    minima_ring: gl.tensor, full: gl.tensor, empty: gl.tensor, expert_ptr: gl.tensor, first_ptr: gl.tensor,
    rows_ptr: gl.tensor, begin: gl.tensor, end: gl.tensor, units: gl.tensor, tiles_t: gl.tensor, T: gl.tensor,
    num_outputs: gl.tensor, num_rows: gl.tensor, group_size: gl.tensor, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr,
    PARTS: gl.constexpr, WEIGHTS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
) -> None:  # fmt: skip
    """Bring the operands of all steps into the rings; the first weights before x is there."""
    X_BYTES: gl.constexpr = x_tiles.block_type.nbytes
    BLOCK_T: gl.constexpr = x_ring.shape[1]
    for i in gl.static_range(STAGES):
        if begin + i < end:
            tile = (begin + i) // units
            expert, _, _ = rows_of_tile(tile % tiles_t, expert_ptr, first_ptr, rows_ptr, T, BLOCK_T)
            own = expert * (WEIGHTS * num_outputs) + tile // tiles_t * BLOCK_N
            _ask_for_weights(
                words_tiles, scales_tiles, zeros_tiles, minima_tiles, words_ring, scales_ring, zeros_ring, minima_ring,
                full.index(i), i, (begin + i) % units, own, num_outputs, num_rows, group_size, X_BYTES, CHUNK, PARTS,
                WEIGHTS,
            )  # fmt: skip
    if PDL:
        gdc_wait()
    for i in range(end - begin):
        slot, tile, unit = i % STAGES, (begin + i) // units, (begin + i) % units
        expert, first, _ = rows_of_tile(tile % tiles_t, expert_ptr, first_ptr, rows_ptr, T, BLOCK_T)
        barrier = full.index(slot)
        if i >= STAGES:
            mbarrier.wait(empty.index(slot), i // STAGES & 1 ^ 1)
            own = expert * (WEIGHTS * num_outputs) + tile // tiles_t * BLOCK_N
            _ask_for_weights(
                words_tiles, scales_tiles, zeros_tiles, minima_tiles, words_ring, scales_ring, zeros_ring, minima_ring,
                barrier, slot, unit, own, num_outputs, num_rows, group_size, X_BYTES, CHUNK, PARTS, WEIGHTS,
            )  # fmt: skip
        tma.async_copy_global_to_shared(x_tiles, [first, unit * _UNIT], barrier, x_ring.index(slot))
