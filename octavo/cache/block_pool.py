"""Blocks of the KV cache as numbers: a free list, and how many sequences hold each block."""

from __future__ import annotations


class BlockPool:
    """``num_blocks`` interchangeable blocks with a reference count each; every operation is O(1).

    A block with references is held by that many block tables. One without is either on the free list or
    kept by the prefix cache for reuse: the pool does not know which, its owner says so with ``free``.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.free_blocks = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self.free_blocks)

    def take(self) -> int:
        """Take a free block, with one reference; there must be one."""
        block = self.free_blocks.pop()
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to ``block``."""
        self.refs[block] += 1

    def drop(self, block: int) -> bool:
        """Take a reference back; says whether that was the last one."""
        self.refs[block] -= 1
        return self.refs[block] == 0

    def free(self, block: int) -> None:
        """Put ``block``, which has no reference, on the free list: its content is forgotten."""
        self.free_blocks.append(block)
