"""How decode attention is cut: by the number of pairs of a sequence and a kv head, and the bytes of a head."""

from __future__ import annotations

from typing import NamedTuple

PROGRAMS = 4 * 132
"""Programs that fill a device: a few for each multiprocessor of an H200."""
MAX_SPLITS = 32
MAX_TILE_BYTES = 16384
"""Keys of one tile: they wait in registers for the row's query."""


class DecodeConfig(NamedTuple):
    """One way to cut the work."""

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


CONFIGS: dict[tuple[int, int], DecodeConfig] = {}
"""By (most pairs, bytes of a head, filled up to a power of two). An entry serves the pairs down to half as many."""


def config_for(pairs: int, head_bytes: int, block_size: int) -> DecodeConfig:
    """The cut for this many pairs, fitted to blocks and heads."""
    config = CONFIGS.get((_power_of_two(pairs), _power_of_two(head_bytes))) or _default(pairs)
    tile = min(config.tile, block_size, max(16, MAX_TILE_BYTES // _power_of_two(head_bytes)))
    return config._replace(tile=tile, min_tiles=config.min_tiles * config.tile // tile)


def _default(pairs: int) -> DecodeConfig:
    splits = max(1, min(MAX_SPLITS, -(-PROGRAMS // pairs)))
    return DecodeConfig(tile=32, warps=4, splits=splits, min_tiles=1 if splits == MAX_SPLITS else 4)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
