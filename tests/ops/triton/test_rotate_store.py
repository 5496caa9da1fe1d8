"""Norm, rotation and storing in one kernel against the same in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.ops.attention.attention import HeadLayout, KVScales
from octavo_kernels.triton.attention.rotate_store import apply_rope_triton, rotate_store

ROUNDING = {torch.float32: 2**-21, torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float8_e4m3fn: 2**-3}


def head_layout(N: int = 4, K: int = 2, H: int = 64, norm_dtype: torch.dtype | None = None) -> HeadLayout:
    generator = torch.Generator().manual_seed(1)
    norms = [None if norm_dtype is None else torch.randn(H, generator=generator).to(norm_dtype) for _ in range(2)]
    return HeadLayout(N, K, H, H**-0.5, *norms, norm_eps=1e-5)


def normed_and_rotated(
    x_THd: Tensor, norm: Tensor | None, eps: float, cos: Tensor | None, sin: Tensor | None
) -> Tensor:
    x = x_THd.double()
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.double()
    if cos is None or sin is None:
        return x
    R, cos, sin = cos.shape[1], cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    first, second = x[..., :R], x[..., R : 2 * R]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., 2 * R :]), -1)


def assert_rounded(got: Tensor, expected: Tensor) -> None:
    """Right up to the rounding of its dtype, and of a float32 sum near 0."""
    error = (got.double() - expected).abs() - expected.abs() * ROUNDING[got.dtype]
    assert error.max() < (2e-3 if got.dtype == torch.float8_e4m3fn else 4e-6), f"largest error {error.max()}"


def check(
    heads: HeadLayout,
    device: str,
    *,
    T: int = 9,
    rotated: int | None = None,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    block_size: int = 16,
    padded: tuple[int, ...] = (),
) -> None:
    """Queries, what every slot of the caches holds, and that no other slot was touched."""
    generator = torch.Generator().manual_seed(T)
    K, H = heads.num_kv_heads, heads.head_dim
    R = H // 2 if rotated is None else rotated
    qkv = torch.randn(T, sum(heads.sizes) + 8, generator=generator).to(dtype)[:, :-8]  # rows of a wider tensor
    angles = torch.rand(T, R, generator=generator) * 100
    cos, sin = (angles.cos(), angles.sin()) if R else (None, None)
    slots = torch.randperm(6 * block_size, generator=generator)[:T]
    slots[list(padded)] = -1
    caches = [torch.full((6, K, block_size, H), float("nan")).to(device, cache_dtype or dtype) for _ in range(2)]
    on_device = HeadLayout(*(part.to(device) if isinstance(part, Tensor) else part for part in heads))
    q = rotate_store(qkv.to(device), on_device, _to(cos, device), _to(sin, device), *caches, slots.to(device)).cpu()
    q_part, k_part, v_part = (part.reshape(T, -1, H) for part in qkv.split(heads.sizes, -1))
    assert_rounded(q, normed_and_rotated(q_part, heads.q_norm_H, heads.norm_eps, cos, sin))
    stored = slots >= 0
    wanted = (normed_and_rotated(k_part, heads.k_norm_H, heads.norm_eps, cos, sin), v_part.double())
    for cache, rows in zip(caches, wanted, strict=True):
        by_slot = cache.cpu().float().transpose(1, 2).flatten(0, 1).to(cache.dtype)
        assert_rounded(by_slot[slots[stored]], rows[stored])
        others = torch.ones(len(by_slot), dtype=torch.bool).index_fill_(0, slots[stored], False)
        assert by_slot[others].float().isnan().all(), "a slot of no row was written"


def _to(tensor: Tensor | None, device: str) -> Any:
    return None if tensor is None else tensor.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 4, 9])
def test_rotation_and_storing(T: int, dtype: torch.dtype, device: str) -> None:
    check(head_layout(), device, T=T, dtype=dtype)


@pytest.mark.parametrize("norm_dtype", [torch.float32, torch.bfloat16])
def test_norm_of_each_head(norm_dtype: torch.dtype, device: str) -> None:
    check(head_layout(norm_dtype=norm_dtype), device, dtype=torch.bfloat16)


@pytest.mark.parametrize("rotated", [0, 8, 16, 20])
@pytest.mark.parametrize("norm_dtype", [None, torch.float32])
def test_heads_rotated_in_part_or_not_at_all(rotated: int, norm_dtype: torch.dtype | None, device: str) -> None:
    check(head_layout(norm_dtype=norm_dtype), device, rotated=rotated)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 512])
def test_head_dims(head_dim: int, device: str) -> None:
    check(head_layout(H=head_dim, norm_dtype=torch.float32), device)


@pytest.mark.parametrize(("N", "K"), [(1, 1), (9, 3), (40, 1), (20, 10)])
def test_numbers_of_heads(N: int, K: int, device: str) -> None:
    check(head_layout(N, K), device)


def test_padded_rows_are_not_stored(device: str) -> None:
    check(head_layout(), device, padded=(0, 5, 8))


def test_a_row_without_slot_among_all_padded(device: str) -> None:
    check(head_layout(), device, T=6, padded=(0, 1, 2, 3, 4))


def test_float8_cache(device: str) -> None:
    check(head_layout(), device, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn)


def test_keys_and_values_are_divided_by_the_scale_of_their_head(device: str) -> None:
    T, N, K, H = 9, 4, 10, 64
    qkv, angles = torch.randn(T, (N + 2 * K) * H, device=device), torch.rand(T, 20, device=device) * 6
    scales = KVScales(*(torch.rand(2, K, device=device) * 9 + 0.1))
    slots = torch.tensor([3, -1, *range(20, 27)], device=device)
    heads = HeadLayout(N, K, H, 1.0, *torch.rand(2, H, device=device), norm_eps=1e-5)
    plain, scaled = (torch.zeros(2, 3, K, 16, H, device=device).unbind() for _ in range(2))
    given = qkv, heads, angles.cos(), angles.sin()
    queries = rotate_store(*given, *plain, slots)
    assert torch.equal(rotate_store(*given, *scaled, slots, scales), queries)
    for without, stored, scale_K in zip(plain, scaled, scales, strict=True):
        assert without[0].any()
        torch.testing.assert_close(stored * scale_K[:, None, None], without, rtol=1e-5, atol=0)


def test_numbers_beyond_float8_are_clamped(device: str) -> None:
    caches = [torch.zeros(1, 1, 16, 16, dtype=torch.float8_e4m3fn, device=device) for _ in range(2)]
    qkv = torch.tensor([[-1e4, 1e4] * 24], dtype=torch.bfloat16, device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    rotate_store(qkv, HeadLayout(1, 1, 16, 1.0), None, None, *caches, slots)
    for cache in caches:
        assert cache[0, 0, 0].tolist() == [-448.0, 448.0] * 8


def test_an_infinite_value_stays_by_itself(device: str) -> None:
    caches = [torch.zeros(1, 1, 16, 16, device=device) for _ in range(2)]
    qkv = torch.zeros(1, 48, device=device)
    qkv[0, 40] = float("inf")
    angles = torch.ones(1, 8, device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    rotate_store(qkv, HeadLayout(1, 1, 16, 1.0), angles, angles, *caches, slots)
    assert caches[1][0, 0, 0].tolist() == [0.0] * 8 + [float("inf")] + [0.0] * 7


@pytest.mark.parametrize(("H", "pairs", "dtype"), [(72, 36, torch.bfloat16), (20, 6, torch.float32)])
def test_rotation_of_some_heads_of_a_row(H: int, pairs: int, dtype: torch.dtype, device: str) -> None:
    qkv = torch.randn(9, 14, H, device=device).to(dtype)
    angles = torch.rand(9, pairs, device=device) * 100
    cos, sin = torch.cat([angles, angles], -1).cos()[:, :pairs], torch.cat([angles, angles], -1).sin()[:, :pairs]
    for q, k in ((qkv[:, :9], qkv[:, 9:11]), (qkv[:, 1:3], qkv[:, :0])):
        for found, x in zip(apply_rope_triton(q, k, cos, sin), (q, k), strict=True):
            assert (found.shape, found.is_contiguous()) == (x.shape, True)
            if x.numel():
                assert_rounded(found, normed_and_rotated(x, None, 0.0, cos, sin))
