"""How memory is divided where some layers of a model have windows and others see all positions: a pool for each kind.

The layers with windows hold of a sequence what the others hold, or less. So as many blocks for them as for the others
are always enough, and so are, for those who run, as many as ``max_num_seqs`` windows and a step take. They get twice
that, so that prefixes stay findable, or a quarter of their even share, whichever is more, but never more than the even
share. What that saves goes to the other layers. However long or short the texts, no fewer of them run than in one pool
of blocks of all layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from octavo.models.config import ModelConfig
from octavo.runtime.kv_storage import kv_bytes_per_token

EVEN_SHARES = 4
"""One in so many of the blocks that would be theirs by an even division is what layers with windows get at least: what
is behind windows is found again by those who go on from the middle of a text."""


class TwoPools(NamedTuple):
    """What the division follows from."""

    block_size: int
    bytes_per_whole_block: int
    bytes_per_window_block: int
    least: int
    """Blocks of the layers with windows for one sequence and a step."""
    plenty: int
    """Twice what all who run hold at once."""

    @classmethod
    def of(
        cls, model: ModelConfig, dtype: torch.dtype, block_size: int, kept: int, max_num_seqs: int, max_step_tokens: int
    ) -> TwoPools:
        """For a model of whose windows and steps one sequence keeps ``kept`` positions."""
        num_whole = len(model.whole_layers)
        running = max_num_seqs * (-(-model.window // block_size) + 1) + -(-max_step_tokens // block_size)
        return cls(
            block_size,
            kv_bytes_per_token(model, dtype, num_whole) * block_size,
            kv_bytes_per_token(model, dtype, model.num_layers - num_whole) * block_size,
            -(-kept // block_size),
            2 * running,
        )

    def least_bytes(self, max_model_len: int) -> int:
        """What one sequence of ``max_model_len`` tokens takes."""
        num_blocks = -(-max_model_len // self.block_size)
        return num_blocks * self.bytes_per_whole_block + min(num_blocks, self.least) * self.bytes_per_window_block

    def divide(self, size: int, max_model_len: int) -> tuple[int, int]:
        """Blocks of the layers that see all positions, and of those with windows, that ``size`` bytes are made into.

        The first are fewer than ``max_model_len`` tokens need only where nothing else would help.
        """
        needed = -(-max_model_len // self.block_size)
        even = size // (self.bytes_per_whole_block + self.bytes_per_window_block)
        spare = (size - needed * self.bytes_per_whole_block) // self.bytes_per_window_block
        wanted = min(even, max(self.plenty, even // EVEN_SHARES))
        num_windows = max(min(wanted, spare), min(needed, self.least))
        num_whole = (size - num_windows * self.bytes_per_window_block) // self.bytes_per_whole_block
        return max(num_whole, even), num_windows
