"""Attention of whole steps in Triton: every kind of step against the reference, and the same bits where asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.ops.attention import HeadLayout, LayerCache, PagedRows, attention
from octavo.ops.triton.attention import attention_triton
from octavo.ops.triton.launch import invariant

N, K, H, BLOCK_SIZE, NUM_BLOCKS = 6, 2, 32, 16, 64


def make_heads() -> HeadLayout:
    weights = [1 + torch.rand(H, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    return HeadLayout(
        N, K, H, H**-0.5, *weights, norm_eps=1e-5, window=70, softcap=20.0, sinks_N=torch.linspace(-2, 2, N)
    )


class Contexts:
    """Rows of some sequences, and an empty cache for them. Any run of rows can be taken as a step."""

    def __init__(self, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = lengths
        self.qkv = [torch.randn(length, (N + 2 * K) * H, generator=generator) for length in lengths]
        self.angles = [torch.rand(length, H // 2, generator=generator) * 6 for length in lengths]
        self.tables = torch.randperm(NUM_BLOCKS, generator=generator)[: len(lengths) * 8].int().view(len(lengths), 8)

    def cache(self) -> LayerCache:
        keys = torch.full((NUM_BLOCKS, K, BLOCK_SIZE, H), float("nan"))
        return LayerCache(keys, keys.clone())

    def step(
        self, run: Callable[..., Tensor], heads: HeadLayout, cache: LayerCache, spans: list[tuple[int, int]]
    ) -> list[Tensor]:
        """Rows ``start`` to ``stop`` of each sequence in one step, then two padded rows; each sequence's results."""
        parts = list(enumerate(spans))
        qkv = torch.cat([*(self.qkv[s][a:b] for s, (a, b) in parts), torch.zeros(2, (N + 2 * K) * H)])
        angles = torch.cat([*(self.angles[s][a:b] for s, (a, b) in parts), torch.zeros(2, H // 2)])
        slots = [
            int(self.tables[s, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
            for s, (a, b) in parts
            for p in range(a, b)
        ]
        counts = [b - a for a, b in spans]
        single = max(counts) == 1
        pads = 2 if single else 0  # padded sequences
        starts = torch.tensor([0, *counts, *[0] * pads]).cumsum(0).int()
        lens = torch.tensor([*(b if b > a else 0 for a, b in spans), *[0] * pads]).int()
        tables = torch.cat((self.tables, torch.zeros(pads, 8, dtype=torch.int32)))
        rows = PagedRows(torch.tensor([*slots, -1, -1]), tables, starts, lens, max(counts))
        out = run(qkv, heads, angles.cos(), angles.sin(), cache, rows)
        return list(out.split([*counts, 2]))[:-1]


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 1), (0, 1), (0, 1)],
        [(0, 40), (0, 33), (0, 17)],
        [(0, 40), (0, 1), (0, 90)],
    ],
)
def test_steps_are_those_of_the_reference(spans: list[tuple[int, int]]) -> None:
    contexts, heads = Contexts([100, 100, 100]), make_heads()
    cache, expected_cache = contexts.cache(), contexts.cache()
    following = [(b, b + 1) for _, b in spans]
    mixed = [(b + 1, b + 1 + n) for (_, b), n in zip(spans, (1, 5, 0), strict=True)]
    for step in (spans, following, mixed):
        got = contexts.step(attention_triton, heads, cache, step)
        expected = contexts.step(attention.reference, heads, expected_cache, step)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    for a, b in zip(cache, expected_cache, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, equal_nan=True)


def test_rows_are_the_same_in_any_step_where_asked_for() -> None:
    contexts, heads = Contexts([60, 50, 20]), make_heads()
    with invariant():
        one, other = contexts.cache(), contexts.cache()
        whole = contexts.step(attention_triton, heads, one, [(0, 60), (0, 50), (0, 0)])
        contexts.step(attention_triton, heads, other, [(0, 37), (0, 49), (0, 0)])
        rest = contexts.step(attention_triton, heads, other, [(37, 58), (0, 0), (0, 20)])
        last = contexts.step(attention_triton, heads, other, [(58, 59), (49, 50), (0, 0)])
    assert torch.equal(rest[0], whole[0][37:58])
    assert torch.equal(last[0], whole[0][58:59])
    assert torch.equal(last[1], whole[1][49:50])
