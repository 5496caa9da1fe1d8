"""Stores the keys and values of a step in the paged cache.

Shapes: T tokens, K kv heads, H head dim. A layer's caches are ``[num_blocks, K, block_size, H]``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.dispatch import op

FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max


class KVScales(NamedTuple):
    """What the numbers in a layer's cache are multiplied by to give keys and values: positive, float32 [K]."""

    keys_K: Tensor
    values_K: Tensor


@op
def store_kv(
    k_TKH: Tensor,
    v_TKH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping_T: Tensor,
    scales: KVScales | None = None,
) -> None:
    """Store row t in slot ``slot_mapping[t]`` = block * block_size + offset (int64, distinct).

    Keys and values are divided by the scales, if given. Numbers that a float8 cache cannot hold become the nearest
    that it can. Rows with a negative slot are padding and are not stored.
    """
    block_size = k_cache.shape[2]
    is_row_T = slot_mapping_T >= 0
    slots = slot_mapping_T[is_row_T]
    for x_TKH, cache, scale_K in zip((k_TKH, v_TKH), (k_cache, v_cache), scales or (None, None), strict=True):
        x_RKH = x_TKH[is_row_T] if scale_K is None else x_TKH[is_row_T] / scale_K[:, None]
        if cache.dtype == torch.float8_e4m3fn:
            x_RKH = x_RKH.clamp(-FLOAT8_MAX, FLOAT8_MAX)
        cache[slots // block_size, :, slots % block_size] = x_RKH.to(cache.dtype)
