"""Rows of 8 and 4 bits in Triton: the bits of the contract, and attention over them against float64."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.attention.attention import HeadLayout, LayerCache, store_keys
from octavo.ops.attention.cached_rows import STORED, pack_rows, row_length, unpack_rows
from octavo_kernels.triton.attention.cached_rows import pack_store
from octavo_kernels.triton.attention.rotate_store import store_keys_triton, store_kv_triton
from tests.triton_interpreter import quick_first

PACKED = list(STORED.values())
NAN = float("nan")


def rows_of(K: int, H: int, kind: torch.dtype, device: str, block_size: int = 16, num_blocks: int = 3) -> LayerCache:
    shape = (num_blocks, K, block_size, row_length(kind, H))
    return LayerCache(*(torch.full(shape, 7, dtype=kind, device=device) for _ in range(2)))


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("H", quick_first(3, [16, 128, 80, 64, 256, 32, 96]))
def test_bits_are_those_of_the_reference(kind: torch.dtype, H: int, device: str) -> None:
    """Numbers of any size, and such that are not finite; padding rows leave the cache as it is."""
    T, K = 11, 3
    generator = torch.Generator().manual_seed(H)
    kv = torch.randn(2, T, K, H, generator=generator) * 10.0 ** torch.arange(-5, 6)[:, None, None]
    kv[0, 2] = 0
    kv[1, 3, 1, 5], kv[0, 4, 0, H - 1], kv[0, 4, 2, 0] = NAN, float("inf"), -float("inf")
    kv[0, 6] += 1000
    slots = torch.randperm(48, generator=generator)[:T]
    slots[7] = -1
    cache = rows_of(K, H, kind, device)
    store_kv_triton(*kv.to(device), *cache[:2], slots.to(device))
    for x_TKH, found in zip(kv, cache[:2], strict=True):
        by_slot = found.cpu().transpose(1, 2).flatten(0, 1)
        expected = torch.full_like(by_slot, 7)
        expected[slots[slots >= 0]] = pack_rows(x_TKH[slots >= 0], kind)
        is_number = ~unpack_rows(expected, H).isnan()
        assert unpack_rows(by_slot, H).isnan().equal(~is_number)
        same = (by_slot == expected).all(-1) | ~is_number.all(-1)
        assert same.all()


@pytest.mark.parametrize("kind", PACKED)
def test_keys_are_normed_and_rotated_first(kind: torch.dtype, device: str) -> None:
    T, N, K, H = 5, 4, 2, 32
    generator = torch.Generator().manual_seed(1)
    norms = [(1 + torch.rand(H, generator=generator)).to(device) for _ in range(2)]
    heads = HeadLayout(N, K, H, 1.0, *norms, norm_eps=1e-5)
    qkv = torch.randn(T, (N + 2 * K) * H, generator=generator).to(device)
    angles = torch.rand(T, 12, generator=generator).to(device) * 9
    slots = torch.tensor([5, 40, 17, -1, 0], device=device)
    found, expected = (rows_of(K, H, kind, device) for _ in range(2))
    store_keys_triton(qkv, heads, angles.cos(), angles.sin(), found, slots)
    store_keys.reference(qkv, heads, angles.cos(), angles.sin(), expected, slots)
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        ours, theirs = unpack_rows(ours, H), unpack_rows(theirs, H)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02 if kind == torch.int8 else 0.4, equal_nan=True)
        assert ((ours - theirs).abs() < 1e-5).float().nanmean() > 0.99
    rows = slots >= 0
    again = rows_of(K, H, kind, device)
    pack_store(qkv[rows], heads, angles.cos()[rows], angles.sin()[rows], again, slots[rows])
    assert all(torch.equal(a, b) for a, b in zip(again[:2], found[:2], strict=True))
