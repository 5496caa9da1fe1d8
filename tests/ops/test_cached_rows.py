"""Rows of 8 and 4 bits: how far they are from the numbers, and what attention over them makes of it."""

from __future__ import annotations

import pytest
import torch

from octavo.models.layer_cache import KVGroup, LayerCacheSpec
from octavo.ops.attention.cached_rows import (
    GROUP,
    INT4,
    STORED,
    pack_rows,
    rotated,
    rotated_together,
    row_bytes,
    row_length,
    unpack_rows,
)
from octavo.runtime.kv_storage import KVStorage
from tests.ops.test_cpu_attention import exact, make_case

PACKED = [torch.int8, INT4]
NAN = float("nan")


@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128])
@pytest.mark.parametrize("dtype", PACKED)
def test_numbers_are_off_by_half_a_step(dtype: torch.dtype, head_dim: int) -> None:
    x = torch.randn(50, 3, head_dim, generator=torch.Generator().manual_seed(1))
    x[:, :, 5] *= 40  # a channel of outliers
    x[:20] += 7
    rows = pack_rows(x, STORED[dtype])
    assert rows.shape == (50, 3, row_length(STORED[dtype], head_dim))
    assert rows[0, 0].nbytes == row_bytes(dtype, head_dim)
    found = unpack_rows(rows, head_dim)
    if dtype == torch.int8:
        assert ((found - x).abs() <= x.abs().amax(-1, keepdim=True) / 127 * 0.5001).all()
        return
    x, found = (rotated(torch.nn.functional.pad(part, (0, -head_dim % 16))) for part in (x, found))
    error = (found - x).abs()
    for first in range(0, head_dim, GROUP):
        part, own = x[..., first : first + GROUP], error[..., first : first + GROUP]
        low, high = part.amin(-1, keepdim=True), part.amax(-1, keepdim=True)
        # Least numbers and scales have 8 bits, rounded away from the numbers.
        step = (high - low + low.abs() / 128) / 15 * (1 + 1 / 128)
        assert head_dim % 16 or (own <= step * 0.501).all()
        assert own.square().sum() <= (step * 0.501).square().sum() * GROUP


def test_rotation_keeps_products() -> None:
    x, y = torch.randn(2, 5, 80, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind(0)
    n = rotated_together(80)
    assert n == 16
    torch.testing.assert_close((rotated(x) * rotated(y)).sum(-1) / n, (x * y).sum(-1))
    torch.testing.assert_close(rotated(rotated(x)) / n, x)
    assert rotated(torch.eye(80)[3]).tolist() == [*((-1.0) ** (i + (i >> 1)) for i in range(16)), *[0.0] * 64]


@pytest.mark.parametrize("dtype", PACKED)
def test_numbers_that_are_not_finite_spoil_no_others(dtype: torch.dtype) -> None:
    x = torch.ones(4, 64)
    x[0, 3], x[1, 3], x[2, 3] = NAN, float("inf"), -float("inf")
    found = unpack_rows(pack_rows(x, STORED[dtype]), 64)
    assert found[:3].isnan().all()
    torch.testing.assert_close(found[3], x[3], rtol=0.01, atol=0)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.int8, 0.03), (INT4, 0.25)])
def test_attention_is_as_near_as_the_bits_allow(dtype: torch.dtype, bound: float) -> None:
    """Relative to float32, with a key channel ten times as large as the others. A step of int8 is 10 / 127 there, which
    makes errors of 10 / 127 / sqrt(12) = 2.3 % in scores of unit size; one of int4 13 / 15, in half of the channels."""
    lengths, queries = [40, 300, 33, 260], [1, 50, 20, 1]
    cases = [make_case(lengths, queries, (8, 2, 64, 16), kind, rotated=0) for kind in (torch.float32, dtype)]
    for case in cases:
        case.qkv_TW.view(-1, 12, 64)[:, 8:10, 7] *= 10
    expected, found = (case.run() for case in cases)
    torch.testing.assert_close(expected.double(), exact(cases[0]), rtol=1e-5, atol=2e-6)
    error = float((found - expected).norm() / expected.norm())
    assert bound / 6 < error < bound


def test_bytes_are_those_of_the_tensors() -> None:
    specs = [LayerCacheSpec(3, 64), LayerCacheSpec(1, 80), LayerCacheSpec(1, 576, kind="latent")]
    for dtype, each in ((torch.int8, [2 * 3 * 68, 2 * 84, 580]), (INT4, [2 * 3 * 40, 2 * 52, 360])):
        assert [spec.bytes_per_block(dtype, 1) for spec in specs] == each
        storage = KVStorage(specs, [KVGroup((0, 1, 2), 0)], [5], 16, dtype, torch.device("cpu"))
        assert storage.bytes_per_block == 16 * sum(each)
