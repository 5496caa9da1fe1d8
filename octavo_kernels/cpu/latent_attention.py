"""``latent_attention`` for the CPU: the kernel of ``attention``, over a cache whose keys are the values, too."""

from __future__ import annotations

from torch import Tensor

from octavo.ops.attention import HeadLayout, LayerCache, PagedRows
from octavo.ops.latent_attention import LatentHeads, latent_attention, store_latents
from octavo.ops.linear import head_linear
from octavo_kernels.cpu.attention import attention_numba
from octavo_kernels.cpu.tensors import declines_floats


@latent_attention.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def latent_attention_numba(
    q_TW: Tensor, kv_TC: Tensor, heads: LatentHeads, cos_TR: Tensor, sin_TR: Tensor, cache: LayerCache, rows: PagedRows
) -> Tensor:
    """See ``ops.latent_attention``; the cache must be contiguous, of float32, bfloat16 or float16."""
    q_TNH = store_latents(q_TW, kv_TC, heads, cos_TR, sin_TR, cache, rows)
    layout = HeadLayout(q_TNH.shape[1], 1, q_TNH.shape[2], heads.scale, shares_cache=True)
    out_TW = attention_numba(q_TNH.flatten(1), layout, None, None, cache, rows)
    return head_linear(out_TW.view(q_TNH.shape)[..., 2 * cos_TR.shape[1] :], heads.value_map_NVL)
