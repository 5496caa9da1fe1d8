"""What ``attention`` does with keys and values, without attending: for rows whose output nobody needs.

Shapes: T tokens of the step, K kv heads, H head dim, W = (N + 2 K) H for any number N of query heads, R rotated pairs.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.apply_rope import apply_rope
from octavo.ops.attention import HeadLayout, LayerCache
from octavo.ops.dispatch import op
from octavo.ops.rms_norm import rms_norm
from octavo.ops.store_kv import store_kv


@op
def store_keys(
    qkv_TW: Tensor, heads: HeadLayout, cos_TR: Tensor, sin_TR: Tensor, cache: LayerCache, slot_mapping_T: Tensor
) -> None:
    """Norm and rotate keys, store keys and values, as ``attention`` does.

    A row of ``qkv`` ends with K key heads, then K value heads; queries before them, as many as there are, are skipped.
    """
    T, H = len(qkv_TW), heads.head_dim
    k_TKH, v_TKH = qkv_TW[:, -2 * heads.num_kv_heads * H :].reshape(T, 2, -1, H).unbind(1)
    if heads.k_norm_H is not None:
        k_TKH = rms_norm(k_TKH.reshape(-1, H), heads.k_norm_H, heads.norm_eps).view(k_TKH.shape)
    _, k_TKH = apply_rope(k_TKH[:, :1], k_TKH, cos_TR, sin_TR)
    store_kv(k_TKH, v_TKH, cache.keys, cache.values, slot_mapping_T, cache.scales)
