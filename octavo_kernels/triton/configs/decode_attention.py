"""Tiling of decode attention by the number of (sequence, kv head) pairs and the bytes of a head."""

from __future__ import annotations

from typing import NamedTuple

PROGRAMS = 4 * 132
"""Programs that fill a device: a few for each multiprocessor of an H200."""
RESIDENT = 3 * 132
"""Programs of 4 warps that run at once on an H200, with the registers of ``LONG``."""
MAX_SPLITS = 32
MAX_LONG_SPLITS = 64
"""In a long context, where each has more to compute than sums to leave."""


class DecodeConfig(NamedTuple):
    """Tiling parameters."""

    tile: int
    """Positions computed together; a power of two from 16."""
    warps: int
    splits: int
    """Most programs that share the positions of a pair."""
    min_tiles: int = 1
    """Fewest tiles that are worth a program."""
    dot: bool = True
    """Tensor cores, which take 16 queries at least, or one multiplication after another."""
    registers: int | None = None
    """Most of a thread, so that more programs share a multiprocessor."""
    stages: int = 2
    """Tiles at once: those on their way through shared memory, and the one in use."""
    by_warp: bool = False
    """Whether each warp computes a share of a tile, of at least 16 positions, by itself until a run's end."""


WIDEST = 256
"""Most bytes of a head in the table."""
LONG = DecodeConfig(tile=64, warps=4, splits=1, min_tiles=2, registers=168, stages=3, by_warp=True)
"""For long contexts and queries of 16 bits: warps wait for each other only where a tile arrives, and two more tiles are
on their way. Its programs are as many as run at once, as one that waits for another to end takes twice as long."""
TILE_BYTES_A_WARP = 4096
"""Of keys, and as many of values, at most, as in the table. The first tile, queries and sums are held in registers:
with 32 keys of 512 bytes and 8 warps one program fits on a multiprocessor, with 16 keys and 2 warps four do."""
CONFIGS: dict[tuple[int, int], DecodeConfig] = {
    (8, 128): DecodeConfig(32, 2, 16, stages=3),
    (16, 128): DecodeConfig(32, 4, 16),
    (32, 128): DecodeConfig(64, 4, 8),
    (64, 128): DecodeConfig(64, 4, 8),
    (128, 128): DecodeConfig(64, 4, 4, stages=3),
    (256, 128): DecodeConfig(64, 4, 2),
    (512, 128): DecodeConfig(64, 4, 1),
    (1024, 128): DecodeConfig(32, 2, 1),
    (2048, 128): DecodeConfig(32, 2, 1),
    (8, 256): DecodeConfig(32, 4, 16),
    (16, 256): DecodeConfig(64, 4, 16),
    (32, 256): DecodeConfig(32, 4, 8),
    (64, 256): DecodeConfig(32, 2, 8, 2),
    (128, 256): DecodeConfig(32, 2, 4, 2),
    (256, 256): DecodeConfig(32, 2, 2, 2),
    (512, 256): DecodeConfig(32, 2, 1),
    (1024, 256): DecodeConfig(32, 2, 1),
    (2048, 256): DecodeConfig(32, 2, 1),
}
"""By (most pairs, bytes of a head, filled up to a power of two). An entry serves the pairs down to half as many.
Those for 8, 128, 256, 512, 1024 and 2048 pairs were the fastest of a measurement on an H200 in chains of layers without
their MLPs, at contexts of 256 to 1280 positions, with two and four query heads to a kv head; the others lie between."""


def config_for(
    pairs: int, group: int, head_dim: int, element: int, block_size: int, has_long_context: bool = False
) -> DecodeConfig:
    """The cut for this many pairs, ``group`` query heads to a kv head, and queries of ``element`` bytes a number.

    One program on each multiprocessor, which is best for a short context, cannot keep the memory busy in a long one: it
    waits for a tile's products before it asks for another tile.
    """
    head_bytes = _power_of_two(head_dim) * element
    has_shares = block_size % (LONG.tile // LONG.warps) == 0  # a warp's positions do not cross blocks
    if has_long_context and has_shares and element == 2 and head_bytes <= WIDEST and group <= 16:
        return LONG._replace(splits=min(MAX_LONG_SPLITS, max(1, RESIDENT // pairs)))
    config = CONFIGS.get((_power_of_two(pairs), min(head_bytes, WIDEST))) or _default(pairs)
    if has_long_context:
        splits = min(MAX_LONG_SPLITS, max(config.splits, -(-PROGRAMS // pairs)))
        config = config._replace(splits=splits, min_tiles=max(2, config.min_tiles))
    if group == 1:
        config = _of_lone_queries(config, head_bytes, element)
    if element < 4:  # 16 positions are the fewest of a tile
        config = config._replace(warps=max(config.warps, 16 * head_bytes // TILE_BYTES_A_WARP))
    tile = min(config.tile, max(16, TILE_BYTES_A_WARP * config.warps // head_bytes), block_size)
    if group > 16 or (element == 4 and head_bytes > WIDEST):  # what waits in registers would not fit
        tile = min(tile, 16 if element == 4 else 32)
        config = config._replace(warps=8, dot=config.dot and element < 4)
    return config._replace(tile=tile, min_tiles=config.min_tiles * config.tile // tile)


def _of_lone_queries(config: DecodeConfig, head_bytes: int, element: int) -> DecodeConfig:
    """A key serves one query: in float32, which has no tensor cores, a dot would compute 15 more for nothing.

    Where pairs alone fill the device, one warp for each was the fastest (GPT-2's 12 heads of 64, 512 sequences of 45
    positions on an H200: 258 to 42 us in float32, 39 to 26 in bfloat16; 64 of 300 in float32: 136 to 34).
    """
    if config.splits == 1 and head_bytes <= WIDEST:
        config = config._replace(tile=16, warps=1)
    return config._replace(dot=element < 4)


def _default(pairs: int) -> DecodeConfig:
    splits = max(1, min(MAX_SPLITS, -(-PROGRAMS // pairs)))
    return DecodeConfig(tile=32, warps=4, splits=splits, min_tiles=1 if splits == MAX_SPLITS else 4)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
