"""``store_kv`` for CUDA devices: a program copies a row's keys and values; the host need not know what is padding.

Shapes: T tokens, K kv heads, H head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.attention import KVScales, store_kv
from octavo_kernels.triton.launch import after_predecessor, declines_floats, launch


@triton.jit
def store_kv_kernel(
    k_ptr: tl.tensor, v_ptr: tl.tensor, k_cache_ptr: tl.tensor, v_cache_ptr: tl.tensor, slots_ptr: tl.tensor,
    k_scale_ptr: tl.tensor, v_scale_ptr: tl.tensor, block_size: tl.tensor, K: tl.constexpr, H: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One row of K heads, filled up to BLOCK numbers."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    after_predecessor(PDL)
    slot = tl.load(slots_ptr + row)
    mask = (i < K * H) & (slot >= 0)
    block, offset = slot // block_size, slot % block_size
    place = ((block * K + i // H) * block_size + offset) * H + i % H
    source = row * K * H + i
    keys, values = tl.load(k_ptr + source, mask=mask), tl.load(v_ptr + source, mask=mask)
    if k_scale_ptr is not None:
        keys = keys.to(tl.float32) / tl.load(k_scale_ptr + i // H, mask=i < K * H, other=1.0)
        values = values.to(tl.float32) / tl.load(v_scale_ptr + i // H, mask=i < K * H, other=1.0)
    tl.store(k_cache_ptr + place, keys.to(k_cache_ptr.dtype.element_ty), mask=mask)
    tl.store(v_cache_ptr + place, values.to(v_cache_ptr.dtype.element_ty), mask=mask)


@store_kv.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def store_kv_triton(
    k_TKH: Tensor,
    v_TKH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping_T: Tensor,
    scales: KVScales | None = None,
) -> None:
    """See ``ops.store_kv``."""
    T, K, H = k_TKH.shape
    if T:
        rows = k_TKH.contiguous(), v_TKH.contiguous()
        sizes = k_cache.shape[2], K, H, triton.next_power_of_2(K * H)
        caches = k_cache, v_cache, slot_mapping_T, *(scales or (None, None))
        launch(store_kv_kernel, (T,), *rows, *caches, *sizes, num_warps=4)
