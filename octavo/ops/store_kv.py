"""Stores the keys and values of a step in the paged cache.

Shapes: T tokens, K kv heads, H head dim. A layer's caches are ``[num_blocks, K, block_size, H]``.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.dispatch import op


@op
def store_kv(k_TKH: Tensor, v_TKH: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor) -> None:
    """Store row t in slot ``slot_mapping[t]`` = block * block_size + offset (int64, distinct).

    Rows with a negative slot are padding and are not stored.
    """
    block_size = k_cache.shape[2]
    is_row_T = slot_mapping_T >= 0
    slots = slot_mapping_T[is_row_T]
    k_cache[slots // block_size, :, slots % block_size] = k_TKH[is_row_T].to(k_cache.dtype)
    v_cache[slots // block_size, :, slots % block_size] = v_TKH[is_row_T].to(v_cache.dtype)
