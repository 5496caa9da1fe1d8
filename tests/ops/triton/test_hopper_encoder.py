"""Attention of long texts and of images on Hopper, as Python on a CPU, against float64, next to texts of NaN."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from octavo_kernels.hopper import encoder_attention as hopper
from octavo_kernels.hopper import prefill_attention
from octavo_kernels.triton.attention import encoder_attention as triton_encoder
from octavo_kernels.triton.attention.encoder_attention import encoder_attention_triton
from tests.ops.test_encoder_attention import reference
from tests.ops.triton.gluon_on_cpu import Kernel
from tests.ops.triton.on_hopper import SHARED_BYTES


@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "ends"), [(72, 3, [130, 143, 400]), (64, 1, [128]), (88, 1, [5, 300])]
)
def test_long_texts(head_dim: int, num_kv_heads: int, ends: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of 100 rows and more; shorter ones are another kernel's, and are NaN here."""
    monkeypatch.setattr(triton_encoder, "has_gluon", lambda device: True)
    monkeypatch.setattr(triton_encoder, "launch", lambda *args, **options: None)
    monkeypatch.setattr(hopper, "LONG", 100)
    monkeypatch.setattr(hopper, "shared_bytes", lambda device: SHARED_BYTES)
    monkeypatch.setattr(hopper, "num_multiprocessors", lambda device: 4)
    monkeypatch.setattr(hopper, "launch", Kernel(hopper, prefill_attention).launch)
    qkv = torch.randn(ends[-1], 3 + 2 * num_kv_heads, head_dim).bfloat16()
    q, k, v = qkv.split_with_sizes([3, num_kv_heads, num_kv_heads], 1)
    expected = reference((q, k, v), ends, 0.3)
    starts = [0, *ends]
    for start, end in zip(starts, ends, strict=False):
        if end - start < 100:
            qkv[start:end] = math.nan
            expected[start:end] = math.nan
    found = encoder_attention_triton(q, k, v, ends, 0.3)
    long = ~expected.isnan()
    torch.testing.assert_close(found.double()[long], expected[long], rtol=2**-6, atol=2**-6)
