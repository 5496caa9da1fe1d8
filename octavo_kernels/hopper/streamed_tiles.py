"""The steps of ``streamed_gemv`` and ``streamed_output_mlp``: weights come through a ring, and tensor cores multiply.

Shapes: K inputs, N outputs; a tile is 16 outputs, a chunk the columns of a word's fields, see ``PackedGroups``.

A step is WARPS x EACH chunks of a tile of WEIGHTS weights, which are 2 where a tile of gates has a tile of ups. It
lies in a slot of the rings, which has PLACES for the chunks of every warp, WEIGHTS x EACH of them or more. Warps
divide the columns of a tile: each computes whole chunks, whose words it has copied itself. Words become numbers in the
registers that tensor cores read.

A chunk has inputs of PIECES quantisation groups: 1 where a group is a chunk or several. The right operand of an ``mma``
instruction has eight columns, and a GEMV needs one: so each group has 8 / PIECES equal columns of its own, which are 0
for the inputs of other groups. The scale of a group multiplies its sums, from which is taken what the numbers are too
large by (``offset_of``, and zeros), times the sum of the group's part of the row; its minimum is added as often.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from octavo.ops.linear.grouped_linear import TILE, WORDS
from octavo_kernels.triton.linear.tile_epilogue import finish

_TILE, _WORDS = gl.constexpr(TILE), gl.constexpr(WORDS)


@gluon.constexpr_function
def pieces_of(GROUPS: int, CHUNK: int, K: int) -> int:
    """Groups that a chunk has inputs of."""
    return max(1, GROUPS * CHUNK // K) if GROUPS > 1 else 1


@gluon.constexpr_function
def chunks_of_group(GROUPS: int, CHUNK: int, K: int) -> int:
    """Chunks with the scale of one group, at least 1; 0 for a scale per output."""
    return max(1, K // CHUNK // GROUPS) if GROUPS > 1 else 0


@gluon.constexpr_function
def sums_layout(WARPS: int, PIECES: int) -> gl.DistributedLinearLayout:
    """Of sums [WARPS, 16, PIECES, 8 / PIECES] where tensor cores leave them, in tiles of 16 x 8."""
    column = [[0, 0, bit * PIECES // 8, bit % (8 // PIECES)] for bit in (1, 2, 4)]
    warps = [[bit, 0, 0, 0] for bit in (1, 2, 4) if bit < WARPS]
    lanes = [column[1], column[2], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    return gl.DistributedLinearLayout([column[0], [0, 8, 0, 0]], lanes, warps, [], [WARPS, 16, PIECES, 8 // PIECES])


@gluon.jit
def rings_of(weight: gl.tuple, PLACES: gl.constexpr, WARPS: gl.constexpr, PIECES: gl.constexpr) -> gl.tuple:
    """Shared memory for the words, scales, zeros and minima of a chunk of every warp in each place; where there are no
    zeros or minima, scales stand in for them."""
    WORDS_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    words = gl.allocate_shared_memory(gl.int16, [PLACES, WARPS, _TILE, _WORDS], WORDS_LAYOUT)
    scales = gl.allocate_shared_memory(weight[1].dtype.element_ty, [PLACES, WARPS, PIECES, _TILE], PLAIN)
    zeros, minima = scales, scales
    if weight[2] is not None:
        zeros = gl.allocate_shared_memory(weight[2].dtype.element_ty, [PLACES, WARPS, PIECES, _TILE], PLAIN)
    if weight[3] is not None:
        minima = gl.allocate_shared_memory(weight[3].dtype.element_ty, [PLACES, WARPS, PIECES, _TILE], PLAIN)
    return words, scales, zeros, minima


@gluon.jit
def row_of(PARTS: gl.constexpr, PLANES: gl.constexpr, WARPS: gl.constexpr, PIECES: gl.constexpr) -> gl.tuple:
    """Shared memory for the row, in which what a thread reads for all planes lies together, and for the sums of its
    groups in each chunk."""
    OFFSETS: gl.constexpr = (
        [[0, 0, 1], [0, 0, 8], [0, 0, 16], [0, 1, 0]] + ([[0, 2, 0]] if PLANES == 4 else [])
        + [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0]] + ([[4, 0, 0]] if WARPS == 8 else [])
    )  # fmt: skip
    row = gl.allocate_shared_memory(gl.bfloat16, [PARTS, WARPS, PLANES, _WORDS], gl.SharedLinearLayout(OFFSETS))
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return row, gl.allocate_shared_memory(gl.float32, [PARTS, WARPS, PIECES], PLAIN)


@gluon.jit
def tiles_of(num_tiles: gl.tensor) -> gl.tensor:
    """How many of the tiles are this program's: every ``num_programs``-th."""
    return (num_tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def ask(
    weight: gl.tuple, rings: gl.tuple, slot: gl.tensor, i: gl.tensor, is_there: gl.tensor, num_tiles: gl.tensor,
    WARPS: gl.constexpr, EACH: gl.constexpr, STEPS: gl.constexpr, WEIGHTS: gl.constexpr, PLACES: gl.constexpr,
    GROUP: gl.constexpr, PIECES: gl.constexpr,
) -> None:  # fmt: skip
    """Ask for the words, scales, zeros and minima of this program's step i, which ``weight`` points to, into a slot of
    the rings.

    STEPS: of a tile. GROUP: chunks of a group, or 0 for a scale per output.
    """
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    FLOATS: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 16, 2], [WARPS, 1, 1], [2, 1, 0])
    ZEROS: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
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
                for part in gl.static_range(1, 4):
                    if weight[part] is not None:
                        _ask_for_groups(
                            weight[part], rings[part].index(place), first, tile, is_there, outputs, GROUP, PIECES,
                            WARPS, ZEROS if part == 2 else FLOATS,
                        )  # fmt: skip


@gluon.jit
def _ask_for_groups(
    ptr: gl.tensor, place: gl.tensor, first: gl.tensor, tile: gl.tensor, is_there: gl.tensor, outputs: gl.tensor,
    GROUP: gl.constexpr, PIECES: gl.constexpr, WARPS: gl.constexpr, LAYOUT: gl.constexpr,
) -> None:  # fmt: skip
    """Scales, zeros or minima of a tile's rows, for the groups of each warp's chunk."""
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    piece = gl.arange(0, PIECES, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    row = gl.arange(0, _TILE, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    group = ((first + warp) * PIECES + piece) // GROUP
    at = ptr + group.to(gl.int64) * outputs + (tile * _TILE + row)
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
    HAS_NORM: gl.constexpr, PIECES: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Bring the row, times the norm's weight, to shared memory, with the sums of its groups in each chunk; returns what
    a norm multiplies all sums by, 1 without one."""
    squares = 0.0
    for part in gl.static_range(PARTS):
        x = parts[part]
        if HAS_NORM:
            wide = x.to(gl.float32)
            squares += wide * wide
            x = (wide * norm[part].to(gl.float32)).to(x.dtype)
        row[0].index(part).store(x)
        of_groups = x.to(gl.float32).reshape([x.shape[0], PIECES, x.shape[1] * x.shape[2] // PIECES])
        row[1].index(part).store(gl.sum(of_groups, 2))
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
def _own_columns(
    column: gl.tensor, RIGHT: gl.constexpr, WARPS: gl.constexpr, PLANE: gl.constexpr, PLANES: gl.constexpr,
    PIECES: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """A plane of the row in the columns of its groups, 0 in those of others."""
    columns = column.broadcast_to([WARPS, _WORDS, 8])
    if PIECES > 1:
        j = gl.arange(0, _WORDS, gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))[None, :, None]
        n = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, RIGHT)))[None, None, :]
        is_own = (PLANE * _WORDS + j) * PIECES // (PLANES * _WORDS) == n * PIECES // 8
        mask = gl.where(is_own, -1, 0).to(gl.int16).broadcast_to([WARPS, _WORDS, 8])
        columns = gl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [columns, mask], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    return columns


@gluon.jit
def _numbers(words: gl.tensor, PLANE: gl.constexpr, ASSEMBLY: gl.constexpr) -> gl.tensor:
    """The numbers of a plane of words, as in ``grouped_numbers``."""
    return gl.inline_asm_elementwise(ASSEMBLY[PLANE], "=r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def _scaled(
    sums: gl.tensor, of_row: gl.tensor, rings: gl.tuple, place: gl.tensor, OFFSET: gl.constexpr,
    HAS_ZEROS: gl.constexpr, HAS_MINIMA: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """The sums of a chunk's groups, less what their numbers are too large by, times their scales, plus their minima."""
    LAYOUT: gl.constexpr = gl.SliceLayout(3, sums.type.layout)
    too_large = OFFSET
    if HAS_ZEROS:
        too_large = rings[2].index(place).permute((0, 2, 1)).load(LAYOUT).to(gl.float32)[:, :, :, None] + OFFSET
    scale = rings[1].index(place).permute((0, 2, 1)).load(LAYOUT).to(gl.float32)[:, :, :, None]
    sums = (sums - of_row * too_large) * scale
    if HAS_MINIMA:
        sums += of_row * rings[3].index(place).permute((0, 2, 1)).load(LAYOUT).to(gl.float32)[:, :, :, None]
    return sums


@gluon.jit
def add_chunks(
    acc: gl.tensor, up: gl.tensor, rings: gl.tuple, row: gl.tuple, slot: gl.tensor, step: gl.tensor,
    WEIGHTS: gl.constexpr, EACH: gl.constexpr, PLACES: gl.constexpr, PLANES: gl.constexpr, WARPS: gl.constexpr,
    GROUP: gl.constexpr, PIECES: gl.constexpr, OFFSET: gl.constexpr, HAS_ZEROS: gl.constexpr, HAS_MINIMA: gl.constexpr,
    ASSEMBLY: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:  # fmt: skip
    """The sums of the outputs or gates, and of the ups, with the products of a step's chunks, which are there.

    Each chunk has sums of its own: tensor cores would wait for one product of a chain after another.
    """
    OWN: gl.constexpr = acc.type.layout
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
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
            columns = _own_columns(x[j % EACH][p], RIGHT, WARPS, p, PLANES, PIECES)
            longer = longer + (mma_v2(_numbers(words[j], p, ASSEMBLY), columns, sums[j]),)  # noqa: RUF005
        sums = longer
    for j in gl.static_range(WEIGHTS * EACH):
        own = gl.convert_layout(sums[j].reshape([WARPS, _TILE, PIECES, 8 // PIECES]), OWN)
        if GROUP > 0:
            of_row = row[1].index(step * EACH + j % EACH).load(gl.SliceLayout(1, gl.SliceLayout(3, OWN)))
            own = _scaled(own, of_row[:, None, :, None], rings, slot * PLACES + j, OFFSET, HAS_ZEROS, HAS_MINIMA)
        if j < EACH:
            acc += own
        else:
            up += own
    return acc, up


@gluon.jit
def residual_of(ptr: gl.tensor, tile: gl.tensor, COLUMN: gl.constexpr) -> gl.tensor:
    """The residual of a tile's outputs, a column."""
    outputs = tile * _TILE + gl.arange(0, _TILE, gl.SliceLayout(1, COLUMN))
    return gl.load(ptr + outputs[:, None], cache_modifier=".cg").to(gl.float32)


@gluon.jit
def _column(acc: gl.tensor) -> gl.tensor:
    """The sums of all groups and warps [16, 1]; of a group's equal columns, which are a power of two, one is meant."""
    of_groups = gl.sum(acc, 3) * (acc.shape[2] / 8)
    return gl.sum(gl.sum(of_groups, 2, keep_dims=True), 0)


@gluon.jit
def store_tile(
    scales_ptr: gl.tensor, bias_ptr: gl.tensor, out_ptr: gl.tensor, acc: gl.tensor, up: gl.tensor, residual: gl.tensor,
    factor: gl.tensor, tile: gl.tensor, num_outputs: gl.tensor, GROUPS: gl.constexpr, ACTIVATION: gl.constexpr,
) -> None:  # fmt: skip
    """Add the sums of groups and warps; scales of rows, bias, gate and residual; store."""
    y, y_up = _column(acc) * factor, _column(up) * factor
    outputs = tile * _TILE + gl.arange(0, _TILE, gl.SliceLayout(1, y.type.layout))
    if GROUPS == 1:
        y *= gl.load(scales_ptr + outputs).to(gl.float32)[:, None]
        if ACTIVATION is not None:
            y_up *= gl.load(scales_ptr + num_outputs + outputs).to(gl.float32)[:, None]
    y = finish(y, y_up, residual, outputs, num_outputs, bias_ptr, ACTIVATION)
    gl.store(out_ptr + outputs[:, None], y.to(out_ptr.dtype.element_ty))
