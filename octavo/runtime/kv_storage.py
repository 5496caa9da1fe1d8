"""The tensors that hold keys and values. Which sequence owns which block is not known here.

Shapes: L layers, K kv heads, H head dim.
"""

from __future__ import annotations

import torch

from octavo.models.config import ModelConfig
from octavo.ops.attention import LayerCache


class KVStorage:
    """One pool of blocks for all layers; ``layers[i]`` is layer i's view of it, ``[num_blocks, K, block_size, H]``.

    The memory is left as it comes: nothing may be read before it is written.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        parts = num_parts(config)
        shape = (config.num_layers, parts, num_blocks, config.num_kv_heads, block_size, config.head_dim)
        self.pool = torch.empty(shape, dtype=dtype, device=device)
        self.layers = [LayerCache(layer[0], layer[parts - 1]) for layer in self.pool]

    def copy_slots(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first ``num_tokens`` positions of block ``source``, in all layers, to ``target``."""
        pool_LPNKSH = self.pool
        pool_LPNKSH[:, :, target, :, :num_tokens] = pool_LPNKSH[:, :, source, :, :num_tokens]


def num_parts(config: ModelConfig) -> int:
    """Tensors of a layer: keys and values, or one that is both."""
    return 1 if config.values_are_keys else 2


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """What one position takes, over all layers."""
    return config.num_layers * num_parts(config) * config.num_kv_heads * config.head_dim * dtype.itemsize
