"""The kernel for whole texts against float64, with poisoned results and neighbours."""

from __future__ import annotations

import pytest
import torch

from octavo_kernels.triton.attention import encoder_attention
from octavo_kernels.triton.attention.encoder_attention import encoder_attention_triton, widths
from tests.ops.test_encoder_attention import reference
from tests.ops.triton.poison import poison_new_tensors
from tests.triton_interpreter import quick_first

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
ENDS = [1, 8, 48, 150]


@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "window", "biases", "dtype"),
    quick_first(
        4,
        [
            (72, 3, 0, 0, torch.float32),
            (20, 1, 6, 9, torch.bfloat16),
            (64, 1, 40, 0, torch.float32),
            (8, 3, 0, 301, torch.float16),
            (32, 3, 1, 0, torch.bfloat16),
            (128, 3, 0, 9, torch.float32),
            (8, 1, 200, 0, torch.float16),
            (40, 1, 9, 9, torch.float32),
            (32, 3, 0, 0, torch.float32),
            (192, 3, 0, 0, torch.bfloat16),  # those of SAM's layers with and without windows
            (92, 3, 0, 0, torch.float32),
        ],
    ),
)
def test_texts(
    head_dim: int,
    num_kv_heads: int,
    window: int,
    biases: int,
    dtype: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    T, sizes = ENDS[-1], [3 * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    qkv = torch.randn(T, sum(sizes), device=device).to(dtype)
    q, k, v = (part.view(T, -1, head_dim) for part in qkv.split(sizes, dim=1))  # rows lie apart
    bias_NM = torch.randn(3, biases, device=device) if biases else None
    expected = reference((q, k, v), ENDS, 0.3, window, bias_NM)
    poison_new_tensors(monkeypatch)
    found = encoder_attention_triton(q, k, v, ENDS, 0.3, window, bias_NM)
    assert (found.dtype, found.shape) == (dtype, q.shape)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


def test_heads_of_72_take_no_128_columns() -> None:
    sizes = (8, 16, 20, 32, 40, 64, 72, 80, 88, 96, 112, 128, 160, 256)
    for head_dim in sizes:
        width, rest = widths(head_dim)
        assert width + rest >= head_dim
    assert [sum(widths(head_dim)) for head_dim in sizes] == [16, 16, 32, 32, 48, 64, 80, 80, 96, 96, 128, 128, 160, 256]


def test_large_tiles(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a GPU with much shared memory."""
    monkeypatch.setattr(encoder_attention, "shared_bytes", lambda device: 227 * 1024)
    q, k, v = (torch.randn(150, 3, 24, device=device).bfloat16() for _ in range(3))
    found = encoder_attention_triton(q, k, v, ENDS, 0.3)
    expected = reference((q, k, v), ENDS, 0.3)
    torch.testing.assert_close(found.double(), expected, rtol=2**-6, atol=2**-5)


def test_a_text_does_not_depend_on_the_others(device: str) -> None:
    q, k, v = (torch.randn(150, 2, 32, device=device) for _ in range(3))
    alone = encoder_attention_triton(q[48:150], k[48:150], v[48:150], [102], 0.3, 20)
    for part in (q, k, v):
        part[:48] = torch.nan
    assert torch.equal(encoder_attention_triton(q, k, v, ENDS, 0.3, 20)[48:], alone)
