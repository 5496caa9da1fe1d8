"""Divides KV cache memory among the KV groups of a model: the number of blocks of each group.

A sliding-window group holds at most as many positions of a sequence as the first group, so the same number of blocks
always suffices; for the running batch, ``max_num_seqs`` windows plus one step suffice. Such a group gets twice the
latter, so that cached prefixes survive, or a quarter of an even share, whichever is more, but never more than the even
share. The saved memory goes to the first group. For any sequence lengths, at least as many sequences can run as with
one pool of blocks across all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from octavo.models.layer_cache import KVGroup, LayerCacheSpec

EVEN_SHARES = 4
"""Sliding-window groups get at least 1 / ``EVEN_SHARES`` of an even share: blocks behind the window serve prefix hits
of requests that continue from the middle of a cached text."""


class GroupMemory(NamedTuple):
    """The inputs of the division; lists have one entry per KV group, in group order."""

    block_size: int
    bytes_per_block: list[int]
    spans: list[int]
    """Most positions of one sequence held in a sliding-window group: the window, a step's tokens, and one block because
    these need not be aligned to blocks. 0: all positions (full attention)."""
    plenty: list[int]
    """Twice the blocks that the running batch can hold at once, for sliding-window groups."""

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
        """For these groups of the layers ``specs``, with at most ``max_num_seqs`` and ``max_step_tokens`` per step."""
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
        """Blocks of each group that one sequence of ``max_model_len`` tokens needs."""
        return [-(-kept // self.block_size) for kept in self.kept(max_model_len)]

    def least_bytes(self, max_model_len: int) -> int:
        """Bytes that one sequence of ``max_model_len`` tokens takes."""
        return self.num_bytes(self._least(max_model_len))

    def num_bytes(self, num_blocks: Sequence[int]) -> int:
        """Bytes that ``num_blocks`` blocks of each group take."""
        return sum(count * size for count, size in zip(num_blocks, self.bytes_per_block, strict=True))

    def divide(self, size: int, max_model_len: int) -> list[int]:
        """The number of blocks of each group in ``size`` bytes.

        The first group gets fewer blocks than ``max_model_len`` tokens need only if no division would provide them.
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
