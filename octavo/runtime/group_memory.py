"""How the memory of the KV cache is divided among the KV groups of a model: a number of blocks for each.

A group with a sliding window holds of a sequence what the first group holds, or less. So as many blocks for it as for
the first are always enough, and so are, for the running batch, as many as ``max_num_seqs`` windows and a step take. It
gets twice that, so that prefixes stay findable, or a quarter of its even share, whichever is more, but never more than
the even share. What that saves goes to the first group. However long or short the texts, no fewer of them run than with
one pool of blocks of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from octavo.models.layer_cache import KVGroup, LayerCacheSpec

EVEN_SHARES = 4
"""One in so many of the blocks that would be theirs by an even division is what groups with windows get at least: what
is behind windows is found again by those who go on from the middle of a text."""


class GroupMemory(NamedTuple):
    """What the division follows from; a number for each group, the first one's first."""

    block_size: int
    bytes_per_block: list[int]
    spans: list[int]
    """Positions that one sequence keeps at most in groups with windows: a window, a step, and a block more, as these
    need not begin at a block's edge. 0: all positions."""
    plenty: list[int]
    """Twice the blocks that the running batch holds at once in groups with windows."""

    @classmethod
    def of(
        cls,
        specs: Sequence[LayerCacheSpec],
        groups: Sequence[KVGroup],
        dtype: torch.dtype,
        block_size: int,
        max_num_seqs: int,
        max_step_tokens: int,
    ) -> GroupMemory:
        """For the groups of a model's layers, with steps of at most so many sequences and tokens."""
        step_blocks = -(-max_step_tokens // block_size)
        return cls(
            block_size,
            [group.bytes_per_token(specs, dtype) * block_size for group in groups],
            [group.window + max_step_tokens + block_size if group.window else 0 for group in groups],
            [2 * (max_num_seqs * (-(-group.window // block_size) + 1) + step_blocks) for group in groups],
        )

    def kept(self, max_model_len: int) -> list[int]:
        """Positions of a sequence of ``max_model_len`` tokens that each group holds at once."""
        return [min(max_model_len, span) if span else max_model_len for span in self.spans]

    def _least(self, max_model_len: int) -> list[int]:
        """The blocks of these positions."""
        return [-(-kept // self.block_size) for kept in self.kept(max_model_len)]

    def least_bytes(self, max_model_len: int) -> int:
        """What one sequence of ``max_model_len`` tokens takes."""
        return self.num_bytes(self._least(max_model_len))

    def num_bytes(self, num_blocks: Sequence[int]) -> int:
        """What so many blocks of each group take."""
        return sum(count * size for count, size in zip(num_blocks, self.bytes_per_block, strict=True))

    def divide(self, size: int, max_model_len: int) -> list[int]:
        """The blocks of each group that ``size`` bytes are made into.

        Those of the first group are fewer than ``max_model_len`` tokens need only where nothing else would help.
        """
        least = self._least(max_model_len)
        even = size // sum(self.bytes_per_block)
        shares = [min(even, max(plenty, even // EVEN_SHARES)) for plenty in self.plenty[1:]]
        more = [max(0, share - count) for share, count in zip(shares, least[1:], strict=True)]
        room, asked = max(0, size - self.num_bytes(least)), self.num_bytes([0, *more])
        if asked > room:
            more = [count * room // asked for count in more]
        others = [count + extra for count, extra in zip(least[1:], more, strict=True)]
        first = (size - self.num_bytes([0, *others])) // self.bytes_per_block[0]
        return [max(first, even), *others]
