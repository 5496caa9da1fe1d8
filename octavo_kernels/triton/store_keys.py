"""``store_keys`` for CUDA devices: the kernel that prepares attention, without queries."""

from __future__ import annotations

from torch import Tensor

from octavo.ops.attention import HeadLayout, LayerCache, store_keys
from octavo_kernels.triton.launch import declines_floats
from octavo_kernels.triton.rotate_store import rotate_store


@store_keys.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def store_keys_triton(
    qkv_TW: Tensor, heads: HeadLayout, cos_TR: Tensor, sin_TR: Tensor, cache: LayerCache, slot_mapping_T: Tensor
) -> None:
    """See ``ops.store_keys``."""
    kv_TW = qkv_TW[:, -2 * heads.num_kv_heads * heads.head_dim :]
    places = cache.keys, cache.values, slot_mapping_T, cache.scales
    rotate_store(kv_TW, heads._replace(num_heads=0), cos_TR, sin_TR, *places)
