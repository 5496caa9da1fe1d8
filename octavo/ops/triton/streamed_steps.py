"""The steps of ``streamed_gemv`` and ``streamed_output_mlp``: weights come through a ring, and tensor cores multiply.

Shapes: K inputs, N outputs; a tile is 16 outputs, a chunk the columns of a word's fields, see ``PackedGroups``.

A step is WARPS x EACH chunks of a tile of WEIGHTS weights, which are 2 where a tile of gates has a tile of ups. It
lies in a slot of the rings, which has PLACES for the chunks of every warp, WEIGHTS x EACH of them or more. Warps
divide the columns of a tile: each computes whole chunks, whose words it has copied itself. Words become numbers in the
registers that tensor cores read. The scale of a group multiplies its sums, from which is taken what the numbers are too
large by (``offset_of``, and zeros), times the sum of the chunk's part of the row.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from octavo.ops.grouped_linear import TILE, WORDS
from octavo.ops.triton.tile_epilogue import finish

_TILE, _WORDS = gl.constexpr(TILE), gl.constexpr(WORDS)


@gluon.jit
def rings_of(scales_ptr: gl.tensor, zeros_ptr: gl.tensor, PLACES: gl.constexpr, WARPS: gl.constexpr) -> gl.tuple:
    """Shared memory for the words, scales and zeros of a chunk of every warp in each place; without zeros, scales stand
    in for them."""
    WORDS_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    words = gl.allocate_shared_memory(gl.int16, [PLACES, WARPS, _TILE, _WORDS], WORDS_LAYOUT)
    scales = gl.allocate_shared_memory(scales_ptr.dtype.element_ty, [PLACES, WARPS, _TILE], PLAIN)
    zeros = scales
    if zeros_ptr is not None:
        zeros = gl.allocate_shared_memory(zeros_ptr.dtype.element_ty, [PLACES, WARPS, _TILE], PLAIN)
    return words, scales, zeros


@gluon.jit
def row_of(PARTS: gl.constexpr, PLANES: gl.constexpr, WARPS: gl.constexpr) -> gl.tuple:
    """Shared memory for the row, in which what a thread reads for all planes lies together, and for the sums of its
    chunks."""
    OFFSETS: gl.constexpr = (
        [[0, 0, 1], [0, 0, 8], [0, 0, 16], [0, 1, 0]] + ([[0, 2, 0]] if PLANES == 4 else [])
        + [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0]] + ([[4, 0, 0]] if WARPS == 8 else [])
    )  # fmt: skip
    row = gl.allocate_shared_memory(gl.bfloat16, [PARTS, WARPS, PLANES, _WORDS], gl.SharedLinearLayout(OFFSETS))
    sums_of_chunks = gl.allocate_shared_memory(gl.float32, [PARTS, WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return row, sums_of_chunks


@gluon.jit
def tiles_of(num_tiles: gl.tensor) -> gl.tensor:
    """How many of the tiles are this program's: every ``num_programs``-th."""
    return (num_tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def ask(
    weight: gl.tuple, rings: gl.tuple, slot: gl.tensor, i: gl.tensor, is_there: gl.tensor, num_tiles: gl.tensor,
    WARPS: gl.constexpr, EACH: gl.constexpr, STEPS: gl.constexpr, WEIGHTS: gl.constexpr, PLACES: gl.constexpr,
    GROUP: gl.constexpr,
) -> None:  # fmt: skip
    """Ask for the words, scales and zeros of this program's step i, which ``weight`` points to, into a slot of the
    rings.

    STEPS: of a tile. GROUP: chunks of a group, or 0 for a scale per output.
    """
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    SCALES: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [WARPS, 1], [1, 0])
    ZEROS: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [WARPS, 1], [1, 0])
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None, None]
    row = gl.arange(0, _TILE, gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :, None]
    word = gl.arange(0, _WORDS, gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :]
    own = (warp * _TILE + row) * _WORDS + word
    step = i % STEPS
    for w in gl.static_range(WEIGHTS):
        tile = gl.program_id(0) + i // STEPS * gl.num_programs(0) + w * num_tiles
        chunk = (tile.to(gl.int64) * STEPS + step) * (WARPS * EACH)
        for e in gl.static_range(EACH):
            place = slot * PLACES + w * EACH + e
            at = weight[0] + (chunk + e * WARPS) * (_TILE * _WORDS) + own
            async_copy.async_copy_global_to_shared(
                rings[0].index(place), at, mask=is_there, eviction_policy="evict_first"
            )
            if GROUP > 0:
                first, outputs = step * (WARPS * EACH) + e * WARPS, num_tiles * (WEIGHTS * _TILE)
                _ask_for_groups(weight[1], rings[1].index(place), first, tile, is_there, outputs, GROUP, WARPS, SCALES)
                if weight[2] is not None:
                    _ask_for_groups(
                        weight[2], rings[2].index(place), first, tile, is_there, outputs, GROUP, WARPS, ZEROS
                    )


@gluon.jit
def _ask_for_groups(
    ptr: gl.tensor, place: gl.tensor, first: gl.tensor, tile: gl.tensor, is_there: gl.tensor, outputs: gl.tensor,
    GROUP: gl.constexpr, WARPS: gl.constexpr, LAYOUT: gl.constexpr,
) -> None:  # fmt: skip
    """Scales or zeros of a tile's rows, for the group of each warp's chunk."""
    group = (first + gl.arange(0, WARPS, gl.SliceLayout(1, LAYOUT))) // GROUP
    n = tile * _TILE + gl.arange(0, _TILE, gl.SliceLayout(0, LAYOUT))
    at = ptr + group.to(gl.int64)[:, None] * outputs + n[None, :]
    async_copy.async_copy_global_to_shared(place, at, mask=is_there)


@gluon.jit
def load_parts(ptr: gl.tensor, CHUNK: gl.constexpr, PARTS: gl.constexpr, WARPS: gl.constexpr) -> gl.tuple:
    """A vector in registers, in parts of a chunk for each warp, whose loads are all on their way at once; nothing
    where there is no vector."""
    PLANES: gl.constexpr = CHUNK // _WORDS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, PLANES], [1, PLANES, 32 // PLANES], [WARPS, 1, 1], [2, 1, 0])
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    plane = gl.arange(0, PLANES, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    j = gl.arange(0, _WORDS, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    k = warp * CHUNK + plane * _WORDS + j
    parts: gl.tuple = ()
    if ptr is not None:
        for part in gl.static_range(PARTS):
            parts = parts + (gl.load(ptr + part * (WARPS * CHUNK) + k, cache_modifier=".cg"),)  # noqa: RUF005
    return parts


@gluon.jit
def stage_row(
    parts: gl.tuple, norm: gl.tuple, eps: gl.tensor, row: gl.tuple, K: gl.constexpr, PARTS: gl.constexpr,
    HAS_NORM: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Bring the row, times the norm's weight, to shared memory, with the sum of each chunk; returns what a norm
    multiplies all sums by, 1 without one."""
    squares = 0.0
    for part in gl.static_range(PARTS):
        x = parts[part]
        if HAS_NORM:
            wide = x.to(gl.float32)
            squares += wide * wide
            x = (wide * norm[part].to(gl.float32)).to(x.dtype)
        row[0].index(part).store(x)
        row[1].index(part).store(gl.sum(gl.sum(x.to(gl.float32), 2), 1))
    factor = 1.0
    if HAS_NORM:
        factor = gl.rsqrt(gl.sum(gl.sum(gl.sum(squares, 2), 1), 0) / K + eps)
    return factor


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
    sums: gl.tensor, chunk_sums: gl.tensor, rings: gl.tuple, place: gl.tensor, SUMS: gl.constexpr,
    OFFSET: gl.constexpr, HAS_ZEROS: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """The sums of a chunk, less what its numbers are too large by, times the scales of its group."""
    too_large = OFFSET
    if HAS_ZEROS:
        too_large = rings[2].index(place).load(gl.SliceLayout(2, SUMS)).to(gl.float32)[:, :, None] + OFFSET
    scale = rings[1].index(place).load(gl.SliceLayout(2, SUMS)).to(gl.float32)[:, :, None]
    return (sums - chunk_sums * too_large) * scale


@gluon.jit
def add_chunks(
    acc: gl.tensor, up: gl.tensor, rings: gl.tuple, row: gl.tuple, slot: gl.tensor, step: gl.tensor,
    WEIGHTS: gl.constexpr, EACH: gl.constexpr, PLACES: gl.constexpr, PLANES: gl.constexpr, WARPS: gl.constexpr,
    GROUP: gl.constexpr, OFFSET: gl.constexpr, HAS_ZEROS: gl.constexpr, ASSEMBLY: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:  # fmt: skip
    """The sums of the outputs or gates, and of the ups, with the products of a step's chunks, which are there.

    Each chunk has sums of its own: tensor cores would wait for one product of a chain after another.
    """
    SUMS: gl.constexpr = acc.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    none = gl.zeros([WARPS, _TILE, 8], gl.float32, SUMS)
    words: gl.tuple = ()
    sums: gl.tuple = ()
    x: gl.tuple = ()
    for j in gl.static_range(WEIGHTS * EACH):  # a kernel has no starred tuples
        words = words + (rings[0].index(slot * PLACES + j).load(LEFT),)  # noqa: RUF005
        sums = sums + (none,)  # noqa: RUF005
    for e in gl.static_range(EACH):
        x = x + (_planes(row[0].index(step * EACH + e), RIGHT, WARPS, PLANES),)  # noqa: RUF005
    for p in gl.static_range(PLANES):
        longer: gl.tuple = ()
        for j in gl.static_range(WEIGHTS * EACH):
            column = x[j % EACH][p].broadcast_to([WARPS, _WORDS, 8])
            longer = longer + (mma_v2(_numbers(words[j], p, ASSEMBLY), column, sums[j]),)  # noqa: RUF005
        sums = longer
    for j in gl.static_range(WEIGHTS * EACH):
        own = sums[j]
        if GROUP > 0:
            of_row = row[1].index(step * EACH + j % EACH).load(gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))
            own = _scaled(own, of_row[:, None, None], rings, slot * PLACES + j, SUMS, OFFSET, HAS_ZEROS)
        if j < EACH:
            acc += own
        else:
            up += own
    return acc, up


@gluon.jit
def residual_of(ptr: gl.tensor, tile: gl.tensor, SUMS: gl.constexpr) -> gl.tensor:
    """The residual of a tile's outputs, for the first of the equal columns of its sums."""
    outputs = tile * _TILE + gl.arange(0, _TILE, gl.SliceLayout(1, SUMS))
    column = gl.arange(0, 8, gl.SliceLayout(0, SUMS))
    is_first = (column == 0)[None, :] & (outputs >= 0)[:, None]
    at = ptr + outputs[:, None] + column[None, :]
    return gl.load(at, mask=is_first, other=0.0, cache_modifier=".cg").to(gl.float32)


@gluon.jit
def store_tile(
    scales_ptr: gl.tensor, bias_ptr: gl.tensor, out_ptr: gl.tensor, acc: gl.tensor, up: gl.tensor, residual: gl.tensor,
    factor: gl.tensor, tile: gl.tensor, num_outputs: gl.tensor, GROUPS: gl.constexpr, ACTIVATION: gl.constexpr,
) -> None:  # fmt: skip
    """Add the warps' sums; scales of rows, bias, gate and residual; store the first of the equal columns."""
    y, y_up = gl.sum(acc, 0) * factor, gl.sum(up, 0) * factor
    outputs = tile * _TILE + gl.arange(0, _TILE, gl.SliceLayout(1, y.type.layout))
    column = gl.arange(0, y.shape[1], gl.SliceLayout(0, y.type.layout))
    if GROUPS == 1:
        y *= gl.load(scales_ptr + outputs).to(gl.float32)[:, None]
        if ACTIVATION is not None:
            y_up *= gl.load(scales_ptr + num_outputs + outputs).to(gl.float32)[:, None]
    y = finish(y, y_up, residual, outputs, num_outputs, bias_ptr, ACTIVATION)
    is_first = (column == 0)[None, :] & (outputs >= 0)[:, None]
    gl.store(out_ptr + outputs[:, None] + column[None, :], y.to(out_ptr.dtype.element_ty), mask=is_first)
