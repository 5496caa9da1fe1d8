"""What follows attention in a layer, for one row and packed weights, in one persistent kernel.

Shapes: D model, F feed-forward, A attention's outputs; weights of the output projection [D, A], of gates and ups
[2 F, D], and of the down projection [D, F], all ``PackedGroups``.

Three products of ``streamed_gemv`` depend on each other: every output of one is an input of all outputs of the next. As
kernels of their own each would start when the one before it has ended, with empty buffers. Here all programs are
resident and wait for each other between the products, while the weights of the next one are on their way already: the
memory stays busy. See ``streamed_steps`` for the products.

The two grid-wide barriers need all programs resident. They become so unless another stream runs a kernel with such
barriers, see ``launch.no_grid_barriers``: other kernels end, and a successor starts after all programs of this one.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.linear.grouped_linear import TILE, WORDS, PackedGroups, chunk_of
from octavo_kernels.hopper.streamed_configs import OutputMLPConfig
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
from octavo_kernels.triton.launch import counters, launch, num_multiprocessors

_TILE, _WORDS = gl.constexpr(TILE), gl.constexpr(WORDS)


def streamed_output_mlp(
    attended_1A: Tensor,
    x_1D: Tensor,
    output: PackedGroups,
    norm_D: Tensor,
    eps: float,
    gate_up: PackedGroups,
    down: PackedGroups,
    activation: str,
    config: OutputMLPConfig,
) -> Tensor:
    """``ops.grouped_output_mlp`` for what ``output_mlp_config`` takes; x is overwritten and returned."""
    device = x_1D.device
    offset = offset_of(output, x_1D.dtype)
    chunks = tuple(packed.shape[1] // chunk_of(packed.number) for packed in (output, gate_up, down))
    inner_1F = x_1D.new_empty(1, down.shape[1])
    launch(
        streamed_output_mlp_kernel, (config.programs * num_multiprocessors(device),),
        *(attended_1A, x_1D, inner_1F, counters(device, 1), norm_D, eps),
        *(part for packed in (output, gate_up, down) for part in _parts(packed)),
        *(x_1D.shape[1] // TILE, inner_1F.shape[1] // TILE), CHUNKS=chunks, MOST=max(chunks),
        GROUPS=tuple(len(packed.scales_GN) for packed in (output, gate_up, down)), CHUNK=chunk_of(output.number),
        OFFSET=offset, EACH=config.chunks, PLACES=config.places, STAGES=config.stages, ACTIVATION=activation,
        ASSEMBLY=assembly(output, x_1D.dtype, offset), WARPS=config.warps, num_warps=config.warps,
    )  # fmt: skip
    return x_1D


def _parts(packed: PackedGroups) -> tuple[Tensor | None, ...]:
    return packed.words, packed.scales_GN, packed.zeros_GN, packed.minima_GN


@gluon.jit
def _ask_of(
    own: gl.tensor, slot: gl.tensor, count: gl.tensor, tiles: gl.tensor, weight: gl.tuple, rings: gl.tuple,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, EACH: gl.constexpr, WEIGHTS: gl.constexpr, PLACES: gl.constexpr,
    WARPS: gl.constexpr,
) -> None:  # fmt: skip
    """Ask for this program's step ``own`` of a product of ``count`` steps, if it is one of them."""
    GROUP: gl.constexpr = chunks_of_group(GROUPS, 1, CHUNKS)
    PIECES: gl.constexpr = pieces_of(GROUPS, 1, CHUNKS)
    STEPS: gl.constexpr = CHUNKS // (WARPS * EACH)
    if (own >= 0) & (own < count):
        ask(weight, rings, slot, own, own >= 0, tiles, WARPS, EACH, STEPS, WEIGHTS, PLACES, GROUP, PIECES)


@gluon.jit
def _ask_next(
    own: gl.tensor, slot: gl.tensor, counts: gl.tuple, tiles: gl.tuple, weights: gl.tuple, rings: gl.tuple,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, EACH: gl.constexpr, PRODUCT: gl.constexpr, PLACES: gl.constexpr,
    WARPS: gl.constexpr,
) -> None:  # fmt: skip
    """Ask for step ``own`` of this program, counted from PRODUCT's first on: it may be that of a later product, or
    beyond the last."""
    for product in gl.static_range(PRODUCT, 3):
        _ask_of(
            own, slot, counts[product], tiles[product], weights[product], rings, CHUNKS[product], GROUPS[product],
            EACH[product], 2 if product == 1 else 1, PLACES, WARPS,
        )  # fmt: skip
        own -= counts[product]
    async_copy.commit_group()


@gluon.jit
def _grid_barrier(counter_ptr: gl.tensor) -> None:
    """Wait until all programs are here, with what they have written visible.

    The highest bit changes when all have arrived: after two barriers the counter is what it was.
    """
    gl.thread_barrier()
    last = gl.num_programs(0) - 1
    step = gl.where(gl.program_id(0) == 0, -0x80000000 - last, 1)
    before = gl.atomic_add(counter_ptr, step, sem="acq_rel", scope="gpu")
    seen = before
    while (seen ^ before) >= 0:
        seen = gl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu")
    gl.thread_barrier()


@gluon.jit
def _multiply(
    first: gl.tensor, counts: gl.tuple, tiles: gl.tuple, weights: gl.tuple, rings: gl.tuple, row: gl.tuple,
    norm: gl.tuple, eps: gl.tensor, in_ptr: gl.tensor, residual_ptr: gl.tensor, out_ptr: gl.tensor,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, EACH: gl.constexpr, PRODUCT: gl.constexpr, CHUNK: gl.constexpr,
    OFFSET: gl.constexpr, PLACES: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
    ASSEMBLY: gl.constexpr, WARPS: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """This program's tiles of PRODUCT, whose steps come after ``first`` others; returns the number of steps so far."""
    WEIGHTS: gl.constexpr = 1 if ACTIVATION is None else 2
    PARTS: gl.constexpr = CHUNKS[PRODUCT] // WARPS
    STEPS: gl.constexpr = PARTS // EACH[PRODUCT]
    GROUP: gl.constexpr = chunks_of_group(GROUPS[PRODUCT], 1, CHUNKS[PRODUCT])
    PIECES: gl.constexpr = pieces_of(GROUPS[PRODUCT], 1, CHUNKS[PRODUCT])
    SUMS: gl.constexpr = sums_layout(WARPS, PIECES)
    COLUMN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(3, SUMS))
    parts = load_parts(in_ptr, CHUNK, PARTS, WARPS)
    factor = stage_row(parts, norm, eps, row, PARTS * WARPS * CHUNK, PARTS, PRODUCT == 1, PIECES)
    none = gl.zeros([WARPS, _TILE, PIECES, 8 // PIECES], gl.float32, SUMS)
    acc, up = none, none
    residual = gl.zeros([_TILE, 1], gl.float32, COLUMN)
    for i in range(counts[PRODUCT]):
        step, tile = i % STEPS, gl.program_id(0) + i // STEPS * gl.num_programs(0)
        if residual_ptr is not None:  # noqa: SIM102 (the compiler leaves out what a constant rules out, but not `and`)
            if step == 0:
                residual = residual_of(residual_ptr, tile, COLUMN)
        async_copy.wait_group(STAGES - 2)
        _ask_next(
            i + STAGES - 1, (first + i + STAGES - 1) % STAGES, counts, tiles, weights, rings, CHUNKS, GROUPS, EACH,
            PRODUCT, PLACES, WARPS,
        )  # fmt: skip
        acc, up = add_chunks(
            acc, up, rings, row, (first + i) % STAGES, step, WEIGHTS, EACH[PRODUCT], PLACES, CHUNK // _WORDS, WARPS,
            GROUP, PIECES, OFFSET, weights[PRODUCT][2] is not None, weights[PRODUCT][3] is not None, ASSEMBLY,
        )  # fmt: skip
        if step == STEPS - 1:
            store_tile(
                weights[PRODUCT][1], None, out_ptr, acc, up, residual, factor, tile, tiles[PRODUCT] * _TILE,
                GROUPS[PRODUCT], ACTIVATION,
            )  # fmt: skip
            acc, up = none, none
    return first + counts[PRODUCT]


@gluon.jit(do_not_specialize=["tiles_D", "tiles_F"])
def streamed_output_mlp_kernel(
    attended_ptr: gl.tensor, x_ptr: gl.tensor, inner_ptr: gl.tensor, counter_ptr: gl.tensor, norm_ptr: gl.tensor,
    eps: gl.tensor, o_words: gl.tensor, o_scales: gl.tensor, o_zeros: gl.tensor, o_minima: gl.tensor,
    g_words: gl.tensor, g_scales: gl.tensor, g_zeros: gl.tensor, g_minima: gl.tensor,
    d_words: gl.tensor, d_scales: gl.tensor, d_zeros: gl.tensor, d_minima: gl.tensor,
    tiles_D: gl.tensor, tiles_F: gl.tensor, CHUNKS: gl.constexpr, MOST: gl.constexpr, GROUPS: gl.constexpr,
    CHUNK: gl.constexpr, OFFSET: gl.constexpr, EACH: gl.constexpr, PLACES: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, ASSEMBLY: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
) -> None:  # fmt: skip
    """Each product's outputs of every ``num_programs``-th tile; the steps of all three follow each other in one ring.

    CHUNKS, GROUPS and EACH are those of each product, MOST the largest of CHUNKS.
    """
    PIECES: gl.constexpr = pieces_of(GROUPS[0], 1, CHUNKS[0])
    tiles = tiles_D, tiles_F, tiles_D
    weights = (
        (o_words, o_scales, o_zeros, o_minima),
        (g_words, g_scales, g_zeros, g_minima),
        (d_words, d_scales, d_zeros, d_minima),
    )
    rings = rings_of(weights[0], STAGES * PLACES, WARPS, PIECES)
    row = row_of(MOST // WARPS, CHUNK // _WORDS, WARPS, PIECES)
    counts = (
        tiles_of(tiles_D) * (CHUNKS[0] // (WARPS * EACH[0])),
        tiles_of(tiles_F) * (CHUNKS[1] // (WARPS * EACH[1])),
        tiles_of(tiles_D) * (CHUNKS[2] // (WARPS * EACH[2])),
    )
    for i in range(STAGES - 1):
        _ask_next(i, i, counts, tiles, weights, rings, CHUNKS, GROUPS, EACH, 0, PLACES, WARPS)
    norm = load_parts(norm_ptr, CHUNK, CHUNKS[1] // WARPS, WARPS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    done = _multiply(
        gl.to_tensor(0), counts, tiles, weights, rings, row, norm, eps, attended_ptr, x_ptr, x_ptr, CHUNKS, GROUPS,
        EACH, 0, CHUNK, OFFSET, PLACES, STAGES, None, ASSEMBLY, WARPS,
    )  # fmt: skip
    _grid_barrier(counter_ptr)
    done = _multiply(
        done, counts, tiles, weights, rings, row, norm, eps, x_ptr, None, inner_ptr, CHUNKS, GROUPS, EACH, 1, CHUNK,
        OFFSET, PLACES, STAGES, ACTIVATION, ASSEMBLY, WARPS,
    )  # fmt: skip
    _grid_barrier(counter_ptr)
    _multiply(
        done, counts, tiles, weights, rings, row, norm, eps, inner_ptr, x_ptr, x_ptr, CHUNKS, GROUPS, EACH, 2, CHUNK,
        OFFSET, PLACES, STAGES, None, ASSEMBLY, WARPS,
    )  # fmt: skip
    async_copy.wait_group(0)
