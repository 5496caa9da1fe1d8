"""``store_kv``: rows into slots, rounded to the cache's format on the way."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from torch import Tensor

from octavo.ops.cpu.compiled import compiled
from octavo.ops.cpu.half import bfloat16_bits, float16_bits
from octavo.ops.cpu.memory import view
from octavo.ops.cpu.tensors import FORMATS, by_token, declines_floats
from octavo.ops.cpu.vector_ir import BFLOAT16, FLOAT32
from octavo.ops.store_kv import store_kv


@functools.cache
def _store(number_format: int) -> Callable[..., None]:
    """The compiled loop for one format of the cache."""

    def store(x: int, x_stride: int, cache: int, slots: int, T: int, K: int, block_size: int, H: int) -> None:
        for t in range(T):
            slot = view(slots, T, np.int64)[t]
            for head in range(K):
                row = view(x + 4 * (t * x_stride + head * H), H, np.float32)
                at = ((slot // block_size * K + head) * block_size + slot % block_size) * H
                if number_format == FLOAT32:
                    floats = view(cache + 4 * at, H, np.float32)
                    for i in range(H):
                        floats[i] = row[i]
                elif number_format == BFLOAT16:
                    halves = view(cache + 2 * at, H, np.uint16)
                    for i in range(H):
                        halves[i] = bfloat16_bits(row[i])
                else:
                    halves = view(cache + 2 * at, H, np.uint16)
                    for i in range(H):
                        halves[i] = float16_bits(row[i])

    return compiled(store)


@store_kv.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def store_kv_numba(k_TKH: Tensor, v_TKH: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor) -> None:
    """See ``ops.store_kv``; the caches must be contiguous."""
    T, K, H = k_TKH.shape
    num_blocks, K_cache, block_size, H_cache = k_cache.shape
    if (K_cache, H_cache) != (K, H) or v_cache.shape != k_cache.shape or v_TKH.shape != k_TKH.shape:
        raise ValueError(f"store_kv: rows of {K} x {H}, caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)}")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("store_kv: the caches must be contiguous")
    slots = slot_mapping_T.contiguous()
    if T and not 0 <= int(slots.min()) <= int(slots.max()) < num_blocks * block_size:
        raise IndexError(f"store_kv: slots must be from 0 to {num_blocks * block_size - 1}")
    for rows, cache in ((k_TKH, k_cache), (v_TKH, v_cache)):
        x = by_token(rows)
        store = _store(FORMATS[cache.dtype])
        store(x.data_ptr(), x.stride(0), cache.data_ptr(), slots.data_ptr(), T, K, block_size, H)
