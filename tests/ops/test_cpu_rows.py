"""Norms, gates, rotations and cache writes: close to float64, same bits in any batch, caches rounded as torch does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo import ops
from octavo.ops import dispatch
from octavo.ops.cpu import threads
from tests.ops.cpu_cases import needs_float_kernels, poison_new_tensors

pytestmark = needs_float_kernels
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison_new_tensors(monkeypatch)


def assert_close(found: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(found.double(), exact, rtol=TOLERANCE[found.dtype], atol=TOLERANCE[found.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 576), (2, 3, 64), (0, 64)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    wide = x.double()
    found = ops.rms_norm(x, weight, 1e-5)
    assert (found.dtype, found.shape) == (dtype, x.shape)
    assert_close(found, wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (5, 3072), (0, 32)])
def test_silu_and_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 3).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    found = ops.silu_and_mul(x)
    assert found.dtype == dtype
    assert_close(found, gate / (1 + torch.exp(-gate)) * up)


def test_silu_over_the_whole_range() -> None:
    gate = torch.cat([torch.linspace(-200, 200, 4001), torch.tensor([float("inf"), float("nan"), 1e38, -1e38])])
    found = ops.silu_and_mul(torch.cat([gate, torch.ones_like(gate)])[None])[0]
    wide = gate.double()
    exact = wide / (1 + torch.exp(-wide))
    normal = wide.abs() < 87
    assert bool(((found.double() - exact).abs() <= 4e-7 * exact.abs())[normal].all())
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-35, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(9, 3, 64, 32), (2, 2, 80, 40), (4, 1, 24, 8), (1, 1, 2, 1)])
def test_apply_rope(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    N, K, H, R = sizes
    wide = torch.randn(7, (N + 2 * K) * H).to(dtype)
    q, k = wide[:, : N * H].view(7, N, H), wide[:, N * H : (N + K) * H].view(7, K, H)
    angle = torch.randn(7, R) * 10
    rotated = ops.apply_rope(q, k, angle.cos(), angle.sin())
    cos, sin = angle.cos().double()[:, None], angle.sin().double()[:, None]
    for x, found in zip((q, k), rotated, strict=True):
        first, second, rest = x.double()[..., :R], x.double()[..., R : 2 * R], x.double()[..., 2 * R :]
        assert found.dtype == dtype
        assert_close(found, torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1))


def test_angles_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(1, 1, 8)
    with pytest.raises(ValueError, match="at most 4"):
        ops.apply_rope(x, x, torch.zeros(1, 5), torch.zeros(1, 5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_store_kv_rounds_as_torch_does_and_touches_nothing_else(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    wide = torch.randn(40, 6 * 64).to(dtype) * torch.logspace(-9, 6, 40)[:, None].to(dtype)
    k, v = wide[:, : 3 * 64].view(40, 3, 64), wide[:, 3 * 64 :].view(40, 3, 64)
    k[0, 0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    slots = torch.randperm(10 * 16)[:40]
    caches = [torch.full((10, 3, 16, 64), 5.0, dtype=cache_dtype) for _ in range(4)]
    ops.store_kv(k, v, caches[0], caches[1], slots)
    with dispatch.only("reference"):
        ops.store_kv(k, v, caches[2], caches[3], slots)
    torch.testing.assert_close(caches[0], caches[2], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(caches[1], caches[3])
    assert int((caches[1] == 5.0).all(-1).sum()) == (10 * 16 - 40) * 3


def test_slots_outside_the_cache_are_refused() -> None:
    x, cache = torch.zeros(1, 2, 8), torch.zeros(4, 2, 16, 8)
    for slot in (-1, 64):
        with pytest.raises(IndexError, match="0 to 63"):
            ops.store_kv(x, x, cache, cache.clone(), torch.tensor([slot]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(dtype: torch.dtype) -> None:
    x, weight = torch.randn(64, 1800).to(dtype), torch.randn(1800).to(dtype)
    angle = torch.randn(64, 16)

    def compute(rows: slice) -> list[Tensor]:
        heads = x[rows, : 6 * 32].view(-1, 6, 32)
        rotated = ops.apply_rope(heads, heads[:, :2], angle[rows].cos(), angle[rows].sin())
        return [ops.rms_norm(x[rows], weight, 1e-6), ops.silu_and_mul(x[rows]), *rotated]

    alone = [torch.cat(rows) for rows in zip(*(compute(slice(t, t + 1)) for t in range(64)), strict=True)]
    try:
        for count in (1, 3):
            threads.set_num_threads(count)
            for num_rows in range(1, 65):
                for found, expected in zip(compute(slice(64 - num_rows, 64)), alone, strict=True):
                    assert torch.equal(found, expected[64 - num_rows :]), num_rows
    finally:
        threads.set_num_threads(1)
