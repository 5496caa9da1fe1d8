"""Writing the keys and values of a step into the paged cache.

Shapes: T tokens, K kv heads, H head dim. A layer's caches are ``[num_blocks, K, block_size, H]``.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.dispatch import op


@op
def store_kv(k_TKH: Tensor, v_TKH: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor) -> None:
    """Put row t at slot ``slot_mapping[t]`` = block * block_size + offset (int64, all different, none negative)."""
    block_size = k_cache.shape[2]
    blocks_T = slot_mapping_T // block_size
    offsets_T = slot_mapping_T % block_size
    k_cache[blocks_T, :, offsets_T] = k_TKH.to(k_cache.dtype)
    v_cache[blocks_T, :, offsets_T] = v_TKH.to(v_cache.dtype)
