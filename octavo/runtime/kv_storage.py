"""The tensors that hold keys and values. Which sequence owns which block is not known here.

Shapes: L layers, K kv heads, H head dim.
"""

from __future__ import annotations

import torch

from octavo.models.config import ModelConfig
from octavo.ops.attention import LayerCache, WholeLayerCache


class KVStorage:
    """One pool of blocks for all layers; ``layers[i]`` is layer i's view of it, ``[num_blocks, K, block_size, H]``.

    Or two: with ``num_window_blocks``, ``pool`` has so many of the layers with windows, and ``whole_pool`` has
    ``num_blocks`` of those that see all positions. The memory is left as it comes: nothing may be read before it is
    written.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_window_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        parts = num_parts(config)
        whole = set(config.whole_layers) if num_window_blocks else set()

        def pool(num_layers: int, num_blocks: int) -> torch.Tensor:
            shape = (num_layers, parts, num_blocks, config.num_kv_heads, block_size, config.head_dim)
            return torch.empty(shape, dtype=dtype, device=device)

        self.pool = pool(config.num_layers - len(whole), num_window_blocks or num_blocks)
        self.whole_pool = pool(len(whole), num_blocks) if whole else None
        own, others = iter(self.pool), iter(() if self.whole_pool is None else self.whole_pool)
        self.layers: list[LayerCache] = []
        for i in range(config.num_layers):
            layer = next(others if i in whole else own)
            view = WholeLayerCache if i in whole else LayerCache
            self.layers.append(view(layer[0], layer[parts - 1]))

    @property
    def num_pools(self) -> int:
        return 1 if self.whole_pool is None else 2

    def copy_slots(self, group: int, source: int, target: int, num_tokens: int) -> None:
        """Copy the first ``num_tokens`` positions of a group's block ``source``, in all its layers, to ``target``."""
        pool_LPNKSH = self.pool if group == 0 else self.whole_pool
        assert pool_LPNKSH is not None, f"there is no group {group}"
        pool_LPNKSH[:, :, target, :, :num_tokens] = pool_LPNKSH[:, :, source, :, :num_tokens]

    @property
    def bytes_per_block(self) -> int:
        """Of one block of the first group, over all its layers."""
        return self.pool[:, :, 0].numel() * self.pool.element_size()


def num_parts(config: ModelConfig) -> int:
    """Tensors of a layer: keys and values, or one that is both."""
    return 1 if config.values_are_keys else 2


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype, num_layers: int | None = None) -> int:
    """What one position takes, over all layers or so many."""
    num_layers = config.num_layers if num_layers is None else num_layers
    return num_layers * num_parts(config) * config.num_kv_heads * config.head_dim * dtype.itemsize
