"""Free list and reference counts of the KV cache's blocks."""

from __future__ import annotations


class BlockPool:
    """``num_blocks`` interchangeable blocks with a reference count each; every operation is O(1).

    The reference count is the number of block tables that hold the block. A block without references is either on the
    free list or kept by the prefix cache for reuse; the caller decides which, by calling ``free`` or not.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.free_blocks = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self.free_blocks)

    def take(self) -> int:
        """Allocate a free block, with one reference; the free list must not be empty."""
        block = self.free_blocks.pop()
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to ``block``."""
        self.refs[block] += 1

    def drop(self, block: int) -> bool:
        """Drop a reference to ``block``; returns whether it was the last one."""
        self.refs[block] -= 1
        return self.refs[block] == 0

    def free(self, block: int) -> None:
        """Put ``block``, which has no references, on the free list; its content is lost."""
        self.free_blocks.append(block)
