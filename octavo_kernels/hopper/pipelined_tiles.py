"""The tiles of ``pipelined_gemm``: which steps a program takes, and where a tile's rows and outputs are."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_MOST_IDLE = gl.constexpr(8)
"""Tiles are not divided if the idle time that this costs is at most so many steps of a program."""


@gluon.jit
def grain_of(tiles: gl.tensor, units: gl.tensor, programs: gl.tensor) -> gl.tensor:
    """The unit in which steps are divided among programs: a tile of ``units`` steps, if the last wave of tiles leaves
    little time idle, else one step (stream-K), which costs more than that."""
    idle = (tiles + programs - 1) // programs * programs - tiles
    grain = 1
    if tiles >= programs and idle * units <= programs * _MOST_IDLE:
        grain = units
    return grain


@gluon.jit
def steps_of(
    program: gl.tensor, programs: gl.tensor, count: gl.tensor, grain: gl.tensor
) -> tuple[gl.tensor, gl.tensor]:
    """Where the steps of a program, of ``count`` times ``grain``, begin and end."""
    return program * count // programs * grain, (program + 1) * count // programs * grain


@gluon.jit
def programs_of(
    start: gl.tensor, units: gl.tensor, grain: gl.tensor, programs: gl.tensor, count: gl.tensor
) -> tuple[gl.tensor, gl.tensor]:
    """The first and the last program that have steps of the tile whose ``units`` steps begin at ``start``."""
    first, stop = start // grain, (start + units) // grain
    return ((first + 1) * programs - 1) // count, (stop * programs - 1) // count


@gluon.jit
def tiles_of_rows(tiles_ptr: gl.tensor, T: gl.tensor, BLOCK_T: gl.constexpr) -> gl.tensor:
    """Number of tiles of rows: those of experts that have any, or those of T rows."""
    if tiles_ptr is not None:  # noqa: SIM108 (an expression would load in any case)
        tiles_t = gl.load(tiles_ptr)
    else:
        tiles_t = (T + BLOCK_T - 1) // BLOCK_T
    return tiles_t


@gluon.jit
def rows_of_tile(
    tile_t: gl.tensor, expert_ptr: gl.tensor, first_ptr: gl.tensor, rows_ptr: gl.tensor, T: gl.tensor,
    BLOCK_T: gl.constexpr,
) -> tuple[gl.tensor, ...]:  # fmt: skip
    """The expert of a tile of rows, its first row, and where its rows end; the expert is 0 where there are none."""
    if expert_ptr is not None:
        expert, first = gl.load(expert_ptr + tile_t), gl.load(first_ptr + tile_t)
        stop = first + gl.load(rows_ptr + tile_t)
    else:
        expert, first, stop = 0, tile_t * BLOCK_T, T
    return expert, first, stop
