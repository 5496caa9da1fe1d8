"""``store_keys``: the first half of ``attention``, by the same task."""

from __future__ import annotations

import functools

import numpy as np
from torch import Tensor

from octavo.ops.attention import HeadLayout, LayerCache, store_keys
from octavo_kernels.cpu.attention import NUMBERS_A_PIECE
from octavo_kernels.cpu.attention_rows import STEP, prepare_task
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import compiled_driver
from octavo_kernels.cpu.memory import keep, read, view
from octavo_kernels.cpu.tensors import FORMATS, address, declines_floats, whole_vectors
from octavo_kernels.cpu.threads import run
from octavo_kernels.cpu.vector_ir import LANES


@functools.cache
def _driver() -> int:
    def drive(pool: int, arguments: int) -> int:
        a = read(arguments, STEP)
        for slot in view(a.slots, a.T, np.int64):
            if slot >= a.num_blocks * a.block_size:
                return 1
        q = np.empty(a.T * a.N * a.width, np.float32)
        a.q = q.ctypes.data
        run(pool, a.prepare, arguments, a.T, max(1, NUMBERS_A_PIECE // ((a.N + 2 * a.K) * a.H)))
        keep(q)
        return 0

    return compiled_driver(drive)


@store_keys.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def store_keys_numba(
    qkv_TW: Tensor, heads: HeadLayout, cos_TR: Tensor, sin_TR: Tensor, cache: LayerCache, slot_mapping_T: Tensor
) -> None:
    """See ``ops.store_keys``; the caches must be contiguous. Raises ``IndexError`` for slots that are not in them."""
    K, H, dtype = heads.num_kv_heads, heads.head_dim, cache.keys.dtype
    (T, W), (num_blocks, _, block_size, _) = qkv_TW.shape, cache.keys.shape
    N = W // H - 2 * K
    assert cache.keys.is_contiguous(), "the caches must be contiguous"
    assert cache.values.is_contiguous(), "the caches must be contiguous"
    assert W == (N + 2 * K) * H, f"rows of {W} numbers are not heads of {H}"
    qkv, slots = qkv_TW.float().contiguous(), slot_mapping_T.contiguous()
    cos_TR, sin_TR = cos_TR.contiguous(), sin_TR.contiguous()
    norm = None if heads.k_norm_H is None else whole_vectors(heads.k_norm_H.float())
    values = {"prepare": prepare_task(FORMATS[dtype]), "qkv": qkv.data_ptr(), "T": T, "N": N, "K": K, "stored": K}
    values |= {"H": H, "width": -(-H // LANES) * LANES, "k_norm": address(norm), "cos": cos_TR.data_ptr()}
    values |= {"sin": sin_TR.data_ptr(), "R": cos_TR.shape[1], "slots": slots.data_ptr(), "num_blocks": num_blocks}
    values |= {"k_cache": cache.keys.data_ptr(), "v_cache": cache.values.data_ptr(), "block_size": block_size}
    arguments = np.zeros(1, STEP)
    for name, value in values.items():
        arguments[name] = value
    arguments["eps"] = heads.norm_eps
    call(_driver(), arguments, "store_keys: slots do not fit the caches")
