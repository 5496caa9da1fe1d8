"""Attention of long texts and of images on Hopper: against float64, between neighbours that are NaN."""

from __future__ import annotations

import math

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LENGTHS, REPEATS = [700, 3, 1024, 513, 130, 512, 2000], 20
LONG = (0, 2, 3, 5, 6)
"""Those that the kernel for Hopper computes."""


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    from octavo_kernels.triton.launch import has_gluon

    if not has_gluon(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("needs Hopper, and the version of Triton that the kernel is for")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "num_kv_heads"), [(64, 6), (72, 6), (80, 2), (88, 1), (96, 6), (128, 3)])
def test_texts_equal_float64(head_dim: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    from octavo_kernels.triton.attention.encoder_attention import encoder_attention_triton

    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    qkv = torch.randn(ends[-1], 6 + 2 * num_kv_heads, head_dim, device="cuda").to(dtype)
    q, k, v = qkv.split_with_sizes([6, num_kv_heads, num_kv_heads], 1)
    spoilt = slice(ends[2], ends[3])
    qkv[spoilt] = math.nan
    found = encoder_attention_triton(q, k, v, ends, 0.11)
    for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if start == spoilt.start:
            assert found[spoilt].isnan().all()
            continue
        one, keys, values = (part[start:end].double().transpose(0, 1) for part in (q, k, v))
        keys, values = (part.repeat_interleave(6 // num_kv_heads, dim=0) for part in (keys, values))
        expected = ((one @ keys.mT * 0.11).softmax(-1) @ values).transpose(0, 1)
        difference = (found[start:end].double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
        assert difference.max() < 1e-2, number
    for _ in range(REPEATS):
        assert torch.equal(encoder_attention_triton(q, k, v, ends, 0.11).nan_to_num(), found.nan_to_num())
    for number in LONG:
        own = slice(ends[number] - LENGTHS[number], ends[number])
        alone = encoder_attention_triton(q[own], k[own], v[own], [LENGTHS[number]], 0.11)
        assert torch.equal(alone.nan_to_num(), found[own].nan_to_num())
