"""Attention of whole texts against float64, text by text."""

from __future__ import annotations

import importlib

import pytest
import torch

from octavo import ops
from tests.tiers import nightly_after

N, H = 3, 8
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def heads(T: int, K: int = N, dtype: torch.dtype = torch.float32, size: int = H) -> Heads:
    q, k, v = (torch.randn(T, count, size).to(dtype) for count in (N, K, K))
    return q, k, v


def reference(
    of: Heads, ends: list[int], scale: float, window: int = 0, bias_NM: torch.Tensor | None = None
) -> torch.Tensor:
    rows = []
    for start, end in zip([0, *ends], ends, strict=False):
        q, k, v = (part[start:end].double().transpose(0, 1) for part in of)
        k, v = (part.repeat_interleave(N // len(part), dim=0) for part in (k, v))
        scores = q @ k.mT * scale
        for i in range(end - start):
            for j in range(end - start):
                if window and abs(i - j) > window:
                    scores[:, i, j] = -torch.inf
                if bias_NM is not None:
                    most = bias_NM.shape[1] // 2
                    scores[:, i, j] += bias_NM[:, max(-most, min(most, j - i)) + most]
        rows.append((scores.softmax(dim=-1) @ v).transpose(0, 1))
    return torch.cat(rows)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("ends", [[1], [5], [1, 2, 40], [17, 18, 50, 130]])
def test_each_text_attends_to_all_of_itself(dtype: torch.dtype, tolerance: float, ends: list[int]) -> None:
    of = heads(ends[-1], dtype=dtype)
    found = ops.encoder_attention(*of, ends, H**-0.5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), reference(of, ends, H**-0.5), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("scratch", [1 << 23, 200])
@pytest.mark.parametrize("biases", [0, 2 * 4 + 1, 2 * 100 + 1])
@pytest.mark.parametrize("window", [0, 1, 6, 39])
def test_windows_biases_and_shared_heads(
    window: int, biases: int, scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("octavo.ops.attention.attention"), "MAX_SCRATCH", scratch)
    ends, of = [1, 8, 48], heads(48, K=1)
    bias_NM = torch.randn(N, biases) if biases else None
    found = ops.encoder_attention(*of, ends, 0.7, window, bias_NM)
    torch.testing.assert_close(found.double(), reference(of, ends, 0.7, window, bias_NM), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("size", [32, *nightly_after(0, [16, 24, 64, 80, 128])])
@pytest.mark.parametrize("window", [0, 37])
def test_texts_longer_than_a_tile(size: int, window: int) -> None:
    """Also of heads that are parts of one tensor, as they come from a product."""
    ends, columns = [150, 151, 440], 3 * N * size
    qkv = torch.randn(440, columns)
    q, k, v = (part.view(440, N, size) for part in qkv.chunk(3, dim=1))
    found = ops.encoder_attention(q, k, v, ends, size**-0.5, window)
    expected = reference((q, k, v), ends, size**-0.5, window)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2e-6)
    own = ops.encoder_attention(*(part[151:].contiguous() for part in (q, k, v)), [289], size**-0.5, window)
    assert torch.equal(found[151:], own), "a text's bits depend on the others"


def test_texts_that_do_not_fit_the_rows() -> None:
    of = heads(10)
    for ends in ([9], [11], []):
        with pytest.raises(ValueError, match="texts that end at"):
            ops.encoder_attention(*of, ends, 1.0)
    assert ops.encoder_attention(*heads(0), [], 1.0).shape == (0, N, H)


def test_a_text_that_is_no_number_spoils_no_other() -> None:
    of = heads(30)
    alone = ops.encoder_attention(*(part[10:20].contiguous() for part in of), [10], 1.0)
    for part in of:
        part[:10] = torch.nan
        part[20:] = torch.inf
    assert torch.equal(ops.encoder_attention(*of, [10, 20, 30], 1.0)[10:20], alone)
