"""Attention of whole steps in Triton: every kind of step against the reference, and the same bits where asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.ops.attention.attention import (
    GroupRows,
    HeadLayout,
    KVScales,
    LayerCache,
    PagedRows,
    apply_rope,
    attention,
    paged_attention,
)
from octavo.ops.attention.cached_rows import STORED, row_length, unpack_rows
from octavo.ops.norms import rms_norm
from octavo_kernels.triton.attention.attention import attention_triton
from octavo_kernels.triton.launch import invariant
from tests.tiers import one_in
from tests.triton_interpreter import DEVICE, quick_first

N, K, H, BLOCK_SIZE, NUM_BLOCKS = 6, 2, 32, 16, 64
PACKED = tuple(STORED.values())


def make_heads() -> HeadLayout:
    weights = [(1 + torch.rand(H, generator=torch.Generator().manual_seed(i))).to(DEVICE) for i in range(2)]
    sinks = torch.linspace(-2, 2, N, device=DEVICE)
    return HeadLayout(N, K, H, H**-0.5, *weights, norm_eps=1e-5, window=70, softcap=20.0, sinks_N=sinks)


class Contexts:
    """Rows of some sequences, and an empty cache for them. Any run of rows can be taken as a step."""

    def __init__(self, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = lengths
        self.qkv = [torch.randn(length, (N + 2 * K) * H, generator=generator) for length in lengths]
        self.angles = [torch.rand(length, H // 2, generator=generator) * 6 for length in lengths]
        self.tables = torch.randperm(NUM_BLOCKS, generator=generator)[: len(lengths) * 8].int().view(len(lengths), 8)

    def cache(self, dtype: torch.dtype = torch.float32, scales: KVScales | None = None) -> LayerCache:
        """All bits of rows of 8 and 4 bits are set, which makes their scales NaN."""
        if dtype in PACKED:
            shape = (NUM_BLOCKS, K, BLOCK_SIZE, row_length(dtype, H))
            keys = torch.full(shape, 255, dtype=torch.uint8, device=DEVICE).view(dtype)
        else:
            keys = torch.full((NUM_BLOCKS, K, BLOCK_SIZE, H), float("nan"), device=DEVICE).to(dtype)
        return LayerCache(keys, keys.clone(), scales=scales)

    def step(
        self, run: Callable[..., Tensor], heads: HeadLayout, cache: LayerCache, spans: list[tuple[int, int]]
    ) -> list[Tensor]:
        """Rows ``start`` to ``stop`` of each sequence in one step, then two padded rows; each sequence's results."""
        runs = list(enumerate(spans))
        padding = self.qkv[0].new_zeros(2, (N + 2 * K) * H)
        qkv = torch.cat([*(self.qkv[s][a:b] for s, (a, b) in runs), padding])
        angles = torch.cat([*(self.angles[s][a:b] for s, (a, b) in runs), torch.zeros(2, H // 2)])
        slots = [
            int(self.tables[s, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
            for s, (a, b) in runs
            for p in range(a, b)
        ]
        counts = [b - a for a, b in spans]
        single = max(counts) == 1
        pads = 2 if single else 0  # padded sequences
        starts = torch.tensor([0, *counts, *[0] * pads]).cumsum(0).int()
        lens = torch.tensor([*(b if b > a else 0 for a, b in spans), *[0] * pads]).int()
        tables = torch.cat((self.tables, torch.zeros(pads, 8, dtype=torch.int32)))
        group = GroupRows(torch.tensor([*slots, -1, -1]).to(DEVICE), tables.to(DEVICE))
        rows = PagedRows((group,), starts.to(DEVICE), lens.to(DEVICE), max(counts))
        out = run(qkv.to(DEVICE), heads, angles.cos().to(DEVICE), angles.sin().to(DEVICE), cache, rows)
        return list(out.split([*counts, 2]))[:-1]


@one_in(2)
@pytest.mark.parametrize(
    "spans",
    quick_first(
        2,
        [
            [(0, 1), (0, 1), (0, 1)],
            [(0, 40), (0, 1), (0, 90)],
            [(0, 40), (0, 33), (0, 17)],
        ],
    ),
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
    for a, b in zip(cache[:2], expected_cache[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, equal_nan=True)


@one_in(2)
@pytest.mark.parametrize("run", [attention, attention.reference, attention_triton])
def test_a_layer_goes_by_the_tables_of_its_group(run: Callable[..., Tensor]) -> None:
    contexts, heads = Contexts([40, 70]), make_heads()
    cache, expected_cache = contexts.cache()._replace(group=1), contexts.cache()

    def in_second_group(*step: Any) -> Tensor:
        *inputs, cache, rows = step
        (slots, tables), *_ = rows.groups
        return run(*inputs, cache, replace(rows, groups=(GroupRows(-slots, -tables), *rows.groups)))

    for spans in ([(0, 39), (0, 33)], [(39, 40), (33, 34)]):
        expected = contexts.step(attention.reference, heads, expected_cache, spans)
        for a, b in zip(contexts.step(in_second_group, heads, cache, spans), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def attend_stored(
    qkv_TW: Tensor, heads: HeadLayout, cos_TR: Tensor, sin_TR: Tensor, cache: LayerCache, rows: PagedRows
) -> Tensor:
    """The reference's attention to keys and values that are in the cache already."""
    q_TNH, k_TKH, _ = (part.reshape(len(qkv_TW), -1, H) for part in qkv_TW.split(heads.sizes, dim=-1))
    assert heads.q_norm_H is not None
    q_TNH = rms_norm.reference(q_TNH, heads.q_norm_H, heads.norm_eps)
    q_TNH, _ = apply_rope.reference(q_TNH, k_TKH, cos_TR, sin_TR)
    place = rows.groups[0].block_tables_SB, rows.cu_seqlens_q, rows.seq_lens_S
    rule = heads.scale, heads.window, heads.softcap, heads.sinks_N
    out_TNH: Tensor = paged_attention.reference(q_TNH, *cache[:2], *place, *rule)
    return out_TNH.flatten(1)


def check_steps(
    contexts: Contexts, heads: HeadLayout, cache: LayerCache, expected_cache: LayerCache, tolerance: float
) -> None:
    """Prompts, decodes and both, next to attention over the stored numbers; the reference fills ``expected_cache``."""
    at = [0, 0, 0]
    for counts in ((20, 1, 35), (1, 1, 1), (1, 5, 0)):
        spans = [(start, start + count) for start, count in zip(at, counts, strict=True)]
        at = [end for _, end in spans]
        got = contexts.step(attention_triton, heads, cache, spans)
        contexts.step(attention.reference, heads, expected_cache, spans)
        for a, b in zip(got, contexts.step(attend_stored, heads, cache, spans), strict=True):
            assert a.dtype == contexts.qkv[0].dtype
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_steps_over_an_8_bit_cache() -> None:
    """Free slots and blocks are NaN, all bits set; what is stored is the nearest 8-bit number, or the one beside it."""
    contexts, heads = Contexts([100, 100, 100]), make_heads()
    cache, expected_cache = contexts.cache(torch.float8_e4m3fn), contexts.cache()
    check_steps(contexts, heads, cache, expected_cache, 2e-5)
    for a, b in zip(cache[:2], expected_cache[:2], strict=True):
        torch.testing.assert_close(a.float(), b, rtol=2**-3, atol=2**-9, equal_nan=True)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    quick_first(
        2,
        [
            (torch.int8, torch.float32),
            (torch.uint8, torch.float16),
            (torch.uint8, torch.float32),
            (torch.int8, torch.bfloat16),
        ],
    ),
)
def test_steps_over_rows_of_8_and_4_bits(kind: torch.dtype, dtype: torch.dtype) -> None:
    """A stored number is half a step off at most, but where rounding before decides between two codes."""
    contexts, heads = Contexts([100, 100, 100]), make_heads()
    contexts.qkv = [rows.to(dtype) for rows in contexts.qkv]
    cache, expected_cache = contexts.cache(kind), contexts.cache(kind)
    check_steps(contexts, heads, cache, expected_cache, 2e-5 if dtype == torch.float32 else 2e-2)
    for a, b in zip(cache[:2], expected_cache[:2], strict=True):
        error = (unpack_rows(a, H) - unpack_rows(b, H)).abs()
        assert error.isnan().equal(unpack_rows(b, H).isnan())
        assert error.nan_to_num().max() < 0.5
        assert (error[~error.isnan()] < 5e-3).double().mean() > (0.99 if dtype == torch.float32 else 0.5)


def scales_of_heads() -> KVScales:
    return KVScales(torch.tensor([0.02, 5.0], device=DEVICE), torch.tensor([30.0, 0.3], device=DEVICE))


@one_in(2)
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("run", [attention.reference, attention_triton])
def test_scales_of_a_cache_change_what_it_holds_and_not_the_results(run: Callable[..., Tensor], softcap: float) -> None:
    contexts, heads = Contexts([100, 100, 100]), make_heads()._replace(softcap=softcap)
    cache, expected_cache = contexts.cache(scales=scales_of_heads()), contexts.cache()
    at = [0, 0, 0]
    for counts in ((20, 1, 35), (1, 1, 1), (1, 5, 0)):
        spans = [(start, start + count) for start, count in zip(at, counts, strict=True)]
        at = [end for _, end in spans]
        expected = contexts.step(attention.reference, heads, expected_cache, spans)
        for a, b in zip(contexts.step(run, heads, cache, spans), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    for a, b, scale_K in zip(cache[:2], expected_cache[:2], scales_of_heads(), strict=True):
        torch.testing.assert_close(a * scale_K[:, None, None], b, rtol=2e-5, atol=2e-5, equal_nan=True)


@one_in(2)
@pytest.mark.parametrize("run", [attention.reference, attention_triton])
def test_scales_keep_large_and_small_numbers_in_an_8_bit_cache(run: Callable[..., Tensor]) -> None:
    """Keys of a thousandth and values of hundreds of thousands; each stored number is off by 1/16 at most."""
    contexts, heads = Contexts([60, 60, 60]), make_heads()._replace(k_norm_H=None, q_norm_H=None, scale=1000.0)
    for rows in contexts.qkv:
        rows[:, N * H : (N + K) * H] *= 1e-3
        rows[:, (N + K) * H :] *= 1e5
    scales = KVScales(*(torch.full((K,), scale, device=DEVICE) for scale in (1e-5, 1e3)))
    exact, cache = contexts.cache(), contexts.cache(torch.float8_e4m3fn, scales)
    for spans in ([(0, 40), (0, 20), (0, 1)], [(40, 41), (20, 21), (1, 2)]):
        expected = contexts.step(attention.reference, heads, exact, spans)
        for a, b in zip(contexts.step(run, heads, cache, spans), expected, strict=True):
            assert (a - b).norm() < 0.1 * b.norm()


@pytest.mark.parametrize("kind", quick_first(2, [torch.float32, torch.uint8, torch.int8]))
def test_rows_are_the_same_in_any_step_where_asked_for(kind: torch.dtype) -> None:
    contexts, heads = Contexts([60, 50, 20]), make_heads()
    with invariant():
        one, other = contexts.cache(kind), contexts.cache(kind)
        whole = contexts.step(attention_triton, heads, one, [(0, 60), (0, 50), (0, 0)])
        contexts.step(attention_triton, heads, other, [(0, 37), (0, 49), (0, 0)])
        rest = contexts.step(attention_triton, heads, other, [(37, 58), (0, 0), (0, 20)])
        last = contexts.step(attention_triton, heads, other, [(58, 59), (49, 50), (0, 0)])
    assert torch.equal(rest[0], whole[0][37:58])
    assert torch.equal(last[0], whole[0][58:59])
    assert torch.equal(last[1], whole[1][49:50])


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        *((run, torch.float32) for run in (attention, attention.reference, attention_triton)),
        *quick_first(1, [(attention_triton, torch.uint8), (attention_triton, torch.int8)]),
    ],
)
def test_a_layer_may_read_what_another_has_stored(run: Callable[..., Tensor], kind: torch.dtype) -> None:
    """Steps of chunks, of single rows and of both; the cache stays as it is."""
    contexts, heads = Contexts([100, 100, 100]), make_heads()
    cache = contexts.cache(kind)

    def read(qkv_TW: Tensor, heads: HeadLayout, *rest: Any) -> Tensor:
        sharing = heads._replace(shares_cache=True, k_norm_H=None)
        return run(qkv_TW[:, : N * H].contiguous(), sharing, *rest)

    at = [0, 0, 0]
    for counts in ((20, 1, 35), (1, 1, 1), (1, 5, 0)):
        spans = [(start, start + count) for start, count in zip(at, counts, strict=True)]
        at = [end for _, end in spans]
        contexts.step(attention.reference, heads, cache, spans)
        before = [part.clone() for part in cache[:2]]
        got = contexts.step(read, heads, cache, spans)
        for a, b in zip(got, contexts.step(attend_stored, heads, cache, spans), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
        for a, b in zip(cache[:2], before, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
