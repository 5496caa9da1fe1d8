"""Keys and values that a kernel stores are those of the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo import ops

pytest.importorskip("triton")

from octavo.ops.attention.attention import HeadLayout, KVScales, LayerCache
from octavo_kernels.triton.attention.rotate_store import store_keys_triton, store_kv_triton
from tests.triton_interpreter import DEVICE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("K", "H"), [(1, 64), (3, 24)])
@pytest.mark.parametrize("scale", [None, 4.0])
def test_rows_go_to_their_slots_and_padding_nowhere(scale: float | None, K: int, H: int, dtype: torch.dtype) -> None:
    k, v = torch.randn(2, 5, K, H).to(DEVICE, dtype)
    slots = torch.tensor([7, -1, 0, 30, 12], device=DEVICE)
    found, want = ([torch.zeros(4, K, 8, H, dtype=dtype, device=DEVICE) for _ in "kv"] for _ in range(2))
    scales = None if scale is None else KVScales(*(scale ** torch.arange(2 * K, device=DEVICE)).float().view(2, K))
    store_kv_triton(k, v, *found, slots, scales)
    ops.store_kv.reference(k, v, *want, slots, scales)
    assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))
    assert found[0].any()


@pytest.mark.parametrize(("K", "H", "num_queries"), [(1, 64, 0), (3, 32, 6)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_keys_are_normed_and_rotated_before_they_are_stored(K: int, H: int, num_queries: int, has_norm: bool) -> None:
    """By every kernel, whether or not there are queries in front of the keys."""
    heads = HeadLayout(6, K, H, 1.0, *(torch.rand(2, H) if has_norm else (None, None)), norm_eps=1e-5)
    qkv, angles = torch.randn(5, (num_queries + 2 * K) * H), torch.rand(5, H // 2) * 9
    slots = torch.tensor([7, -1, 0, 30, 12])
    stored = []
    runs = ("cpu", ops.store_keys.reference), ("cpu", ops.store_keys), (DEVICE, store_keys_triton)
    for where, run in runs:
        norms = {name: part.to(where) for name, part in heads._asdict().items() if isinstance(part, Tensor)}
        on = heads._replace(**norms)
        cache = LayerCache(*(torch.zeros(4, K, 8, H, device=where) for _ in "kv"))
        run(qkv.to(where), on, angles.cos().to(where), angles.sin().to(where), cache, slots.to(where))
        stored.append([part.cpu() for part in cache[:2]])
    (want_keys, want_values), *others = stored
    assert want_keys.any()
    for keys, values in others:
        torch.testing.assert_close(keys, want_keys, rtol=2e-5, atol=2e-6)
        assert torch.equal(values, want_values)
