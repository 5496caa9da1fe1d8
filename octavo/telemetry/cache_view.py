"""What the console shows of an engine's KV cache: who owns which block, and the prefix tree.

There is no token in it.
"""

from __future__ import annotations

import msgspec

FREE, CACHED, SHARED = -2, -1, 0
"""Owners of blocks that are free, kept by the prefix cache, or held by several sequences; request ids are positive."""


class PrefixView(msgspec.Struct, frozen=True, gc=False):
    """A chain of cached blocks in the prefix tree, up to where it branches or ends."""

    parent: int
    """Index of the chain above it; -1 for the root."""
    blocks: int
    held: int
    """Of those, blocks that sequences hold."""


class CacheView(msgspec.Struct, frozen=True, gc=False):
    """The first KV group between two steps; its size is bounded."""

    blocks_per_cell: int
    owners: list[int]
    """Owners of the cells of ``blocks_per_cell`` blocks each, run-length encoded: owner, number of cells, and so on.
    A cell has the owner of the youngest request in it."""
    prefixes: list[PrefixView]
    """The first chains of the prefix tree, parents before children."""
    has_more: bool
    """Whether the prefix tree has further chains."""
    seconds: float
    """Seconds that this view took to make."""
