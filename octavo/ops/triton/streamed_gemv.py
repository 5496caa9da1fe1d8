"""One row times a weight of ``PackedGroups``, in a persistent kernel that loads weights before the row is computed.

Shapes: K inputs, N outputs. As many programs as fit at once iterate over tiles of 16 outputs. With programmatic
dependent launch each starts to copy weights to shared memory before it waits for the kernel that computes the row: so
the memory is busy while one kernel ends and the next one starts, which takes as long as reading a small weight. The
row, times the weight of a fused RMSNorm, is then written to shared memory in the order in which tensor cores read it.

Warps divide the columns of a tile: each computes whole chunks, whose words it has copied itself. Words become numbers
in the registers that tensor cores read. The scale of a group multiplies its sums, from which is taken what the numbers
are too large by (``offset_of``, and zeros), times the sum of the chunk's part of the row.

Written in Gluon, which exposes the ring; see ``launch.has_gluon``.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.grouped_linear import TILE, WORDS, PackedGroups, chunk_of
from octavo.ops.triton.grouped_numbers import assembly, offset_of
from octavo.ops.triton.launch import launch, num_multiprocessors
from octavo.ops.triton.streamed_configs import StreamedConfig
from octavo.ops.triton.tile_epilogue import finish

_TILE, _WORDS = gl.constexpr(TILE), gl.constexpr(WORDS)


def streamed_gemv(
    x_1K: Tensor,
    packed: PackedGroups,
    bias_N: Tensor | None,
    norm_K: Tensor | None,
    eps: float,
    residual_1N: Tensor | None,
    activation: str | None,
    config: StreamedConfig,
) -> Tensor:
    """``ops.grouped_linear`` for what ``streamed_configs.takes``, without order; the residual is overwritten and
    returned."""
    N, K = packed.shape
    outputs = N if activation is None else N // 2
    out_1N = x_1K.new_empty(1, outputs) if residual_1N is None else residual_1N
    offset, tiles = offset_of(packed, x_1K.dtype), outputs // TILE
    launch(
        streamed_gemv_kernel,
        (min(tiles, config.programs * num_multiprocessors(x_1K.device)),),
        *(x_1K, packed.words, packed.scales_GN, packed.zeros_GN, bias_N, norm_K, residual_1N, out_1N, eps, tiles),
        K=K,
        CHUNK=chunk_of(packed.number),
        GROUPS=len(packed.scales_GN),
        OFFSET=offset,
        EACH=config.chunks,
        STAGES=config.stages,
        ACTIVATION=activation,
        ASSEMBLY=assembly(packed, x_1K.dtype, offset),
        WARPS=config.warps,
        num_warps=config.warps,
    )
    return out_1N


@gluon.jit
def _ask(
    words_ptr: gl.tensor, scales_ptr: gl.tensor, zeros_ptr: gl.tensor, words_ring: gl.tensor, scales_ring: gl.tensor,
    zeros_ring: gl.tensor, i: gl.tensor, count: gl.tensor, num_tiles: gl.tensor, WARPS: gl.constexpr,
    EACH: gl.constexpr, STEPS: gl.constexpr, WEIGHTS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
) -> None:  # fmt: skip
    """Ask for the words, scales and zeros of step i, of ``count``, into its place of the rings.

    A step is WARPS x EACH chunks of a tile, and of the tile of its ups. GROUP: chunks of a group, or 0 for a scale per
    output.
    """
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    SCALES: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [WARPS, 1], [1, 0])
    ZEROS: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [WARPS, 1], [1, 0])
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None, None]
    row = gl.arange(0, _TILE, gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :, None]
    word = gl.arange(0, _WORDS, gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :]
    own = (warp * _TILE + row) * _WORDS + word
    step, is_there = i % STEPS, i < count
    for w in gl.static_range(WEIGHTS):
        tile = gl.program_id(0) + i // STEPS * gl.num_programs(0) + w * num_tiles
        chunk = (tile.to(gl.int64) * STEPS + step) * (WARPS * EACH)
        for e in gl.static_range(EACH):
            place = (i % STAGES * WEIGHTS + w) * EACH + e
            at = words_ptr + (chunk + e * WARPS) * (_TILE * _WORDS) + own
            async_copy.async_copy_global_to_shared(
                words_ring.index(place), at, mask=is_there, eviction_policy="evict_first"
            )
            if GROUP > 0:
                first = step * (WARPS * EACH) + e * WARPS
                _ask_for_groups(scales_ptr, scales_ring.index(place), first, tile, is_there,
                                num_tiles * WEIGHTS, GROUP, WARPS, SCALES)  # fmt: skip
                if zeros_ptr is not None:
                    _ask_for_groups(zeros_ptr, zeros_ring.index(place), first, tile, is_there,
                                    num_tiles * WEIGHTS, GROUP, WARPS, ZEROS)  # fmt: skip
    async_copy.commit_group()


@gluon.jit
def _ask_for_groups(
    ptr: gl.tensor, place: gl.tensor, first: gl.tensor, tile: gl.tensor, is_there: gl.tensor, num_tiles: gl.tensor,
    GROUP: gl.constexpr, WARPS: gl.constexpr, LAYOUT: gl.constexpr,
) -> None:  # fmt: skip
    """Scales or zeros of a tile's rows, for the group of each warp's chunk."""
    group = (first + gl.arange(0, WARPS, gl.SliceLayout(1, LAYOUT))) // GROUP
    n = tile * _TILE + gl.arange(0, _TILE, gl.SliceLayout(0, LAYOUT))
    at = ptr + group.to(gl.int64)[:, None] * (num_tiles * _TILE) + n[None, :]
    async_copy.async_copy_global_to_shared(place, at, mask=is_there)


@gluon.jit
def _stage_row(
    x_ptr: gl.tensor, norm_ptr: gl.tensor, row: gl.tensor, chunk_sums: gl.tensor, CHUNK: gl.constexpr,
    PARTS: gl.constexpr, WARPS: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Bring the row, times the norm's weight, to shared memory, with the sum of each chunk; returns the sum of squares
    of the row itself, if there is a norm."""
    PLANES: gl.constexpr = CHUNK // _WORDS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, PLANES], [1, PLANES, 32 // PLANES], [WARPS, 1, 1], [2, 1, 0])
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    plane = gl.arange(0, PLANES, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    j = gl.arange(0, _WORDS, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    k = warp * CHUNK + plane * _WORDS + j
    squares = gl.zeros([WARPS, PLANES, _WORDS], gl.float32, LAYOUT)
    for part in gl.static_range(PARTS):
        x = gl.load(x_ptr + part * (WARPS * CHUNK) + k)
        if norm_ptr is not None:
            wide = x.to(gl.float32)
            squares += wide * wide
            x = (wide * gl.load(norm_ptr + part * (WARPS * CHUNK) + k).to(gl.float32)).to(x.dtype)
        row.index(part).store(x)
        chunk_sums.index(part).store(gl.sum(gl.sum(x.to(gl.float32), 2), 1))
    return gl.sum(gl.sum(gl.sum(squares, 2), 1), 0)


@gluon.jit
def _planes(part: gl.tensor, RIGHT: gl.constexpr, WARPS: gl.constexpr, PLANES: gl.constexpr) -> gl.tuple:
    """A part of the row as right operands of tensor cores, one for each plane of words: a column, for all columns."""
    WARP_BASES: gl.constexpr = [[1, 0, 0], [2, 0, 0], [4, 0, 0]] if WARPS == 8 else [[1, 0, 0], [2, 0, 0]]
    OWN_BASES: gl.constexpr = [[0, 0, 1], [0, 0, 8], [0, 0, 16], [0, 1, 0]] + ([[0, 2, 0]] if PLANES == 4 else [])
    LANE_BASES: gl.constexpr = [[0, 0, 2], [0, 0, 4], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    WHOLE: gl.constexpr = gl.DistributedLinearLayout(OWN_BASES, LANE_BASES, WARP_BASES, [], [WARPS, PLANES, 32])
    COLUMN: gl.constexpr = gl.SliceLayout(2, RIGHT)
    x = part.load(WHOLE).permute((0, 2, 1))
    if PLANES == 2:
        x0, x1 = x.split()
        return gl.convert_layout(x0, COLUMN)[:, :, None], gl.convert_layout(x1, COLUMN)[:, :, None]
    else:  # noqa: RET505 (the compiler goes on behind a return)
        even, odd = x.reshape([WARPS, 32, 2, 2]).split()
        x0, x2 = even.split()
        x1, x3 = odd.split()
        return (
            gl.convert_layout(x0, COLUMN)[:, :, None], gl.convert_layout(x1, COLUMN)[:, :, None],
            gl.convert_layout(x2, COLUMN)[:, :, None], gl.convert_layout(x3, COLUMN)[:, :, None],
        )  # fmt: skip


@gluon.jit
def _numbers(words: gl.tensor, PLANE: gl.constexpr, ASSEMBLY: gl.constexpr) -> gl.tensor:
    """The numbers of a plane of words, as in ``grouped_numbers``."""
    return gl.inline_asm_elementwise(ASSEMBLY[PLANE], "=r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def _scaled(
    sums: gl.tensor, chunk_sums: gl.tensor, scales_ring: gl.tensor, zeros_ring: gl.tensor, place: gl.tensor,
    SUMS: gl.constexpr, OFFSET: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """The sums of a chunk, less what its numbers are too large by, times the scales of its group."""
    too_large = OFFSET
    if zeros_ring is not None:
        too_large = zeros_ring.index(place).load(gl.SliceLayout(2, SUMS)).to(gl.float32)[:, :, None] + OFFSET
    scale = scales_ring.index(place).load(gl.SliceLayout(2, SUMS)).to(gl.float32)[:, :, None]
    return (sums - chunk_sums * too_large) * scale


@gluon.jit
def _add_chunks(
    acc: gl.tensor, up: gl.tensor, words_ring: gl.tensor, scales_ring: gl.tensor, zeros_ring: gl.tensor, row: gl.tensor,
    sums_of_chunks: gl.tensor, stage: gl.tensor, step: gl.tensor, WEIGHTS: gl.constexpr, EACH: gl.constexpr,
    PLANES: gl.constexpr, WARPS: gl.constexpr, GROUP: gl.constexpr, OFFSET: gl.constexpr, ASSEMBLY: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:  # fmt: skip
    """The sums of the outputs or gates, and of the ups, with the products of a step's chunks, which are there."""
    SUMS: gl.constexpr = acc.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    none = gl.zeros([WARPS, _TILE, 8], gl.float32, SUMS)
    for e in gl.static_range(EACH):
        place, part = stage * (WEIGHTS * EACH) + e, step * EACH + e
        words = words_ring.index(place).load(LEFT)
        up_words = words
        if WEIGHTS == 2:
            up_words = words_ring.index(place + EACH).load(LEFT)
        x = _planes(row.index(part), RIGHT, WARPS, PLANES)
        sums, up_sums = (none, none) if GROUP > 0 else (acc, up)
        for p in gl.static_range(PLANES):
            column = x[p].broadcast_to([WARPS, _WORDS, 8])
            sums = mma_v2(_numbers(words, p, ASSEMBLY), column, sums)
            if WEIGHTS == 2:
                up_sums = mma_v2(_numbers(up_words, p, ASSEMBLY), column, up_sums)
        if GROUP > 0:
            own = sums_of_chunks.index(part).load(gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None, None]
            acc += _scaled(sums, own, scales_ring, zeros_ring, place, SUMS, OFFSET)
            if WEIGHTS == 2:
                up += _scaled(up_sums, own, scales_ring, zeros_ring, place + EACH, SUMS, OFFSET)
        else:
            acc, up = sums, up_sums
    return acc, up


@gluon.jit(do_not_specialize=["num_tiles"])
def streamed_gemv_kernel(
    x_ptr: gl.tensor, words_ptr: gl.tensor, scales_ptr: gl.tensor, zeros_ptr: gl.tensor, bias_ptr: gl.tensor,
    norm_ptr: gl.tensor, residual_ptr: gl.tensor, out_ptr: gl.tensor, eps: gl.tensor, num_tiles: gl.tensor,
    K: gl.constexpr, CHUNK: gl.constexpr, GROUPS: gl.constexpr, OFFSET: gl.constexpr, EACH: gl.constexpr,
    STAGES: gl.constexpr, ACTIVATION: gl.constexpr, ASSEMBLY: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
) -> None:  # fmt: skip
    """The outputs of every ``num_programs``-th tile, in steps of WARPS x EACH chunks."""
    WEIGHTS: gl.constexpr = 2 if ACTIVATION is not None else 1
    PLANES: gl.constexpr = CHUNK // _WORDS
    PARTS: gl.constexpr = K // (CHUNK * WARPS)
    STEPS: gl.constexpr = PARTS // EACH
    GROUP: gl.constexpr = K // CHUNK // GROUPS if GROUPS > 1 else 0
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    ROW_OFFSETS: gl.constexpr = (
        [[0, 0, 1], [0, 0, 8], [0, 0, 16], [0, 1, 0]] + ([[0, 2, 0]] if PLANES == 4 else [])
        + [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0]] + ([[4, 0, 0]] if WARPS == 8 else [])
    )  # fmt: skip
    """What a thread reads for the planes lies together."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PLACES: gl.constexpr = STAGES * WEIGHTS * EACH
    words_ring = gl.allocate_shared_memory(
        gl.int16, [PLACES, WARPS, _TILE, _WORDS], gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0])
    )
    scales_ring = gl.allocate_shared_memory(scales_ptr.dtype.element_ty, [PLACES, WARPS, _TILE], PLAIN)
    zeros_ring = None
    if zeros_ptr is not None:
        zeros_ring = gl.allocate_shared_memory(zeros_ptr.dtype.element_ty, [PLACES, WARPS, _TILE], PLAIN)
    row = gl.allocate_shared_memory(gl.bfloat16, [PARTS, WARPS, PLANES, _WORDS], gl.SharedLinearLayout(ROW_OFFSETS))
    sums_of_chunks = gl.allocate_shared_memory(gl.float32, [PARTS, WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    count = (num_tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0) * STEPS
    for i in gl.static_range(STAGES - 1):
        _ask(words_ptr, scales_ptr, zeros_ptr, words_ring, scales_ring, zeros_ring, gl.to_tensor(i), count, num_tiles,
             WARPS, EACH, STEPS, WEIGHTS, STAGES, GROUP)  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    factor = 1.0
    squares = _stage_row(x_ptr, norm_ptr, row, sums_of_chunks, CHUNK, PARTS, WARPS)
    if norm_ptr is not None:
        factor = gl.rsqrt(squares / K + eps)
    none = gl.zeros([WARPS, _TILE, 8], gl.float32, SUMS)
    acc, up = none, none
    for i in range(count):
        async_copy.wait_group(STAGES - 2)
        _ask(words_ptr, scales_ptr, zeros_ptr, words_ring, scales_ring, zeros_ring, i + STAGES - 1, count, num_tiles,
             WARPS, EACH, STEPS, WEIGHTS, STAGES, GROUP)  # fmt: skip
        step = i % STEPS
        acc, up = _add_chunks(acc, up, words_ring, scales_ring, zeros_ring, row, sums_of_chunks, i % STAGES, step,
                              WEIGHTS, EACH, PLANES, WARPS, GROUP, OFFSET, ASSEMBLY)  # fmt: skip
        if step == STEPS - 1:
            tile = gl.program_id(0) + i // STEPS * gl.num_programs(0)
            _store_tile(scales_ptr, bias_ptr, residual_ptr, out_ptr, acc, up, factor, tile, num_tiles * _TILE,
                        GROUPS, ACTIVATION)  # fmt: skip
            acc, up = none, none
    async_copy.wait_group(0)


@gluon.jit
def _store_tile(
    scales_ptr: gl.tensor, bias_ptr: gl.tensor, residual_ptr: gl.tensor, out_ptr: gl.tensor, acc: gl.tensor,
    up: gl.tensor, factor: gl.tensor, tile: gl.tensor, num_outputs: gl.tensor, GROUPS: gl.constexpr,
    ACTIVATION: gl.constexpr,
) -> None:  # fmt: skip
    """Add the warps' sums; scales of rows, bias, gate and residual; store the first of the equal columns."""
    y, y_up = gl.sum(acc, 0) * factor, gl.sum(up, 0) * factor
    outputs = tile * _TILE + gl.arange(0, _TILE, gl.SliceLayout(1, y.type.layout))
    column = gl.arange(0, y.shape[1], gl.SliceLayout(0, y.type.layout))
    if GROUPS == 1:
        y *= gl.load(scales_ptr + outputs).to(gl.float32)[:, None]
        if ACTIVATION is not None:
            y_up *= gl.load(scales_ptr + num_outputs + outputs).to(gl.float32)[:, None]
    at, is_first = outputs[:, None] + column[None, :], (column == 0)[None, :] & (outputs >= 0)[:, None]
    residual = 0.0
    if residual_ptr is not None:
        residual = gl.load(residual_ptr + at, mask=is_first, other=0.0).to(gl.float32)
    y = finish(y, y_up, residual, outputs, num_outputs, bias_ptr, ACTIVATION)
    gl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=is_first)
