"""Keys and values that a kernel stores are those of the reference."""

from __future__ import annotations

import pytest
import torch

from octavo import ops

pytest.importorskip("triton")

from octavo.ops.triton.store_kv import store_kv_triton
from tests.triton_interpreter import DEVICE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("K", "H"), [(1, 64), (3, 24)])
def test_rows_go_to_their_slots_and_padding_nowhere(K: int, H: int, dtype: torch.dtype) -> None:
    k, v = torch.randn(2, 5, K, H).to(DEVICE, dtype)
    slots = torch.tensor([7, -1, 0, 30, 12], device=DEVICE)
    found, want = ([torch.zeros(4, K, 8, H, dtype=dtype, device=DEVICE) for _ in "kv"] for _ in range(2))
    store_kv_triton(k, v, *found, slots)
    ops.store_kv.reference(k, v, *want, slots)
    assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))
    assert found[0].any()
