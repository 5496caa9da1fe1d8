"""One row times a weight of ``PackedGroups``, in a persistent kernel that loads weights before the row is computed.

Shapes: K inputs, N outputs. As many programs as fit at once iterate over tiles of 16 outputs. With programmatic
dependent launch each starts to copy weights to shared memory before it waits for the kernel that computes the row: so
the memory is busy while one kernel ends and the next one starts, which takes as long as reading a small weight. The
row, times the weight of a fused RMSNorm, is then written to shared memory in the order in which tensor cores read it.

See ``streamed_steps`` for what is done with them.

Written in Gluon, which exposes the ring; see ``launch.has_gluon``.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.linear.grouped_linear import TILE, WORDS, PackedGroups, chunk_of
from octavo.ops.linear.linear import Fused
from octavo_kernels.hopper.streamed_configs import StreamedConfig
from octavo_kernels.hopper.streamed_tiles import (
    add_chunks,
    ask,
    chunks_of_group,
    load_parts,
    pieces_of,
    residual_of,
    rings_of,
    row_of,
    stage_row,
    store_tile,
    sums_layout,
    tiles_of,
)
from octavo_kernels.triton.grouped.grouped_numbers import assembly, offset_of
from octavo_kernels.triton.launch import launch, num_multiprocessors

_TILE, _WORDS = gl.constexpr(TILE), gl.constexpr(WORDS)


def streamed_gemv(x_1K: Tensor, packed: PackedGroups, fused: Fused, config: StreamedConfig) -> Tensor:
    """``ops.grouped_linear`` for what ``streamed_configs.takes``, without order; the residual is overwritten and
    returned."""
    bias_N, norm_K, eps, residual_1N, activation = fused
    outputs, K = fused.width(packed.shape[0]), packed.shape[1]
    out_1N = x_1K.new_empty(1, outputs) if residual_1N is None else residual_1N
    offset, tiles = offset_of(packed, x_1K.dtype), outputs // TILE
    launch(
        streamed_gemv_kernel, (min(tiles, config.programs * num_multiprocessors(x_1K.device)),),
        *(x_1K, packed.words, packed.scales_GN, packed.zeros_GN, packed.minima_GN),
        *(bias_N, norm_K, residual_1N, out_1N, eps, tiles), K=K, CHUNK=chunk_of(packed.number),
        GROUPS=len(packed.scales_GN), OFFSET=offset, EACH=config.chunks, STAGES=config.stages, ACTIVATION=activation,
        ASSEMBLY=assembly(packed, x_1K.dtype, offset), WARPS=config.warps, num_warps=config.warps,
    )  # fmt: skip
    return out_1N


@gluon.jit(do_not_specialize=["num_tiles"])
def streamed_gemv_kernel(
    x_ptr: gl.tensor, words_ptr: gl.tensor, scales_ptr: gl.tensor, zeros_ptr: gl.tensor, minima_ptr: gl.tensor,
    bias_ptr: gl.tensor, norm_ptr: gl.tensor, residual_ptr: gl.tensor, out_ptr: gl.tensor, eps: gl.tensor,
    num_tiles: gl.tensor,
    K: gl.constexpr, CHUNK: gl.constexpr, GROUPS: gl.constexpr, OFFSET: gl.constexpr, EACH: gl.constexpr,
    STAGES: gl.constexpr, ACTIVATION: gl.constexpr, ASSEMBLY: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
) -> None:  # fmt: skip
    """The outputs of every ``num_programs``-th tile, in steps of WARPS x EACH chunks."""
    WEIGHTS: gl.constexpr = 2 if ACTIVATION is not None else 1
    PLANES: gl.constexpr = CHUNK // _WORDS
    PARTS: gl.constexpr = K // (CHUNK * WARPS)
    STEPS: gl.constexpr = PARTS // EACH
    PLACES: gl.constexpr = WEIGHTS * EACH
    GROUP: gl.constexpr = chunks_of_group(GROUPS, CHUNK, K)
    PIECES: gl.constexpr = pieces_of(GROUPS, CHUNK, K)
    SUMS: gl.constexpr = sums_layout(WARPS, PIECES)
    COLUMN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(3, SUMS))
    weight = words_ptr, scales_ptr, zeros_ptr, minima_ptr
    rings = rings_of(weight, STAGES * PLACES, WARPS, PIECES)
    row = row_of(PARTS, PLANES, WARPS, PIECES)
    count = tiles_of(num_tiles) * STEPS
    for i in gl.static_range(STAGES - 1):
        ask(weight, rings, i, gl.to_tensor(i), i < count, num_tiles, WARPS, EACH, STEPS, WEIGHTS, PLACES, GROUP, PIECES)
        async_copy.commit_group()
    norm = load_parts(norm_ptr, CHUNK, PARTS, WARPS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    parts = load_parts(x_ptr, CHUNK, PARTS, WARPS)
    factor = stage_row(parts, norm, eps, row, K, PARTS, norm_ptr is not None, PIECES)
    none = gl.zeros([WARPS, _TILE, PIECES, 8 // PIECES], gl.float32, SUMS)
    acc, up = none, none
    residual = gl.zeros([_TILE, 1], gl.float32, COLUMN)
    for i in range(count):
        step, tile = i % STEPS, gl.program_id(0) + i // STEPS * gl.num_programs(0)
        if residual_ptr is not None:  # noqa: SIM102 (the compiler leaves out what a constant rules out, but not `and`)
            if step == 0:
                residual = residual_of(residual_ptr, tile, COLUMN)
        async_copy.wait_group(STAGES - 2)
        j = i + STAGES - 1
        ask(weight, rings, j % STAGES, j, j < count, num_tiles, WARPS, EACH, STEPS, WEIGHTS, PLACES, GROUP, PIECES)
        async_copy.commit_group()
        acc, up = add_chunks(
            acc, up, rings, row, i % STAGES, step, WEIGHTS, EACH, PLACES, PLANES, WARPS, GROUP, PIECES,
            OFFSET, zeros_ptr is not None, minima_ptr is not None, ASSEMBLY,
        )  # fmt: skip
        if step == STEPS - 1:
            store_tile(
                scales_ptr, bias_ptr, out_ptr, acc, up, residual, factor, tile, num_tiles * _TILE, GROUPS, ACTIVATION
            )
            acc, up = none, none
    async_copy.wait_group(0)
