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

from octavo.models.layer_cache import KVGroup, LayerCacheSpec, state_bytes
from octavo.steps.limits import INTERVAL, StateSize

EVEN_SHARES = 4
"""Sliding-window groups get at least 1 / ``EVEN_SHARES`` of an even share: blocks behind the window serve prefix hits
of requests that continue from the middle of a cached text."""


STATELESS_EVERY = 2048
"""Tokens between snapshots of models that cache no keys and values."""
MOST_EMPTY_BLOCKS = 1 << 18
"""Blocks of such a model, which take no memory and only say which prefixes are cached: at most so many, or those of one
sequence."""


class StateMemory(NamedTuple):
    """What a model's recurrent states take."""

    bytes_per_slot: int
    num_held: int
    """Slots that the running batch can need at once."""
    every: int
    """See ``StateSize``."""
    flags: tuple[bool, bool]
    """``has_drafts`` and ``has_marks`` of the same."""

    @classmethod
    def of(
        cls,
        stages: Sequence[Sequence[LayerCacheSpec]],
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
        max_num_seqs: int,
        flags: tuple[bool, bool],
        num_parts: int = 1,
    ) -> StateMemory:
        """``stages``: what each caches. ``dtypes``: those of the model, of recurrent states, and of keys and values, of
        which a rank has one of ``num_parts``."""
        dtype, state_dtype, kv_dtype = dtypes
        per_slot = max(state_bytes(own, dtype, state_dtype) for own in stages)
        per_token = max(sum(spec.bytes_per_block(kv_dtype, 1) for spec in own) for own in stages)
        every = -(-per_slot * num_parts // per_token) if per_token else STATELESS_EVERY
        return cls(per_slot, max_num_seqs * (1 + flags[0]) if per_slot else 0, every, flags)

    @property
    def held_bytes(self) -> int:
        return self.num_held * self.bytes_per_slot

    def pool(self, num_snapshots: int) -> StateSize | None:
        """The size of the pool; ``None`` for models without recurrent state."""
        if not self.bytes_per_slot:
            return None
        return StateSize(self.num_held + num_snapshots, self.num_held, self.every, INTERVAL, *self.flags)


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
        stages: Sequence[Sequence[LayerCacheSpec]],
        groups: Sequence[KVGroup],
        dtype: torch.dtype,
        block_size: int,
        max_num_seqs: int,
        max_step_tokens: int,
        num_parts: int = 1,
    ) -> GroupMemory:
        """For these groups of all layers, with at most ``max_num_seqs`` and ``max_step_tokens`` per step, on a rank
        that has one of ``num_parts`` of each block, in the layers of the largest of the ``stages``."""
        step_blocks = -(-max_step_tokens // block_size)
        return cls(
            block_size,
            [max(group.bytes_per_block(own, dtype, block_size) for own in stages) // num_parts for group in groups],
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

    def num_empty(self, max_model_len: int) -> int:
        """Blocks of a model that caches no keys and values."""
        return max(self._least(max_model_len)[0], MOST_EMPTY_BLOCKS)

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
