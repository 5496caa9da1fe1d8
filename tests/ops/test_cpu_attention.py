"""``attention`` on the CPU: close to float64, blind to unused slots, and the same bits however a prompt is cut."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.ops import attention, dispatch
from octavo.ops.attention.attention import (
    GroupRows,
    HeadLayout,
    KVScales,
    LayerCache,
    PagedRows,
    paged_attention,
    stored_heads,
)
from octavo.ops.attention.cached_rows import INT4, STORED, pack_rows, row_length, unpack_rows
from octavo_kernels.cpu import threads
from tests.ops.cpu_cases import needs_float_kernels, poison_new_tensors
from tests.ops.triton.paged_cases import with_bias
from tests.tiers import nightly_after, one_in

pytestmark = needs_float_kernels
CACHE_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PACKED_DTYPES = [torch.int8, INT4]
SIZES = [(9, 3, 64, 16), (4, 4, 80, 8), (8, 1, 256, 32), (6, 2, 24, 5), (4, 2, 128, 64), (2, 1, 96, 256)]
"""(heads, kv heads, head dim, block size)"""
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """Sequences whose past sits in shuffled blocks; every other slot is NaN, those of this step's rows too, and those
    that are before all rows' windows."""

    qkv_TW: Tensor
    heads: HeadLayout
    cos_TR: Tensor | None
    sin_TR: Tensor | None
    cache: LayerCache
    rows: PagedRows

    def run(self) -> Tensor:
        return attention(self.qkv_TW, self.heads, self.cos_TR, self.sin_TR, self.cache, self.rows)

    def copy(self) -> Case:
        """The same with caches of its own."""
        return replace(self, cache=LayerCache(self.cache.keys.clone(), self.cache.values.clone()))

    def part(self, s: int, first: int, last: int) -> Case:
        """Rows ``first .. last`` of sequence s alone, as a step of their own."""
        begin, end = self.rows.cu_seqlens_q[s : s + 2].tolist()
        seen = int(self.rows.seq_lens_S[s]) - (end - begin) + last
        here = slice(begin + first, begin + last)
        slots, tables = self.rows.groups[0]
        rows = PagedRows(
            (GroupRows(slots[here], tables[s : s + 1]),),
            torch.tensor([0, last - first], dtype=torch.int32),
            torch.tensor([seen], dtype=torch.int32),
            last - first,
        )
        cos, sin = (None if x is None else x[here] for x in (self.cos_TR, self.sin_TR))
        return replace(self, qkv_TW=self.qkv_TW[here], cos_TR=cos, sin_TR=sin, rows=rows)


def make_case(
    lengths: list[int],
    queries: list[int],
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    rotated: int | None = None,
    **layout: Any,
) -> Case:
    """``rotated`` pairs of each head; none for ``None``."""
    torch.manual_seed(0)
    N, K, H, block_size = sizes
    T = sum(queries)
    qkv_TW, needed = torch.randn(T, (N + 2 * K) * H), [-(-length // block_size) for length in lengths]
    num_blocks = sum(needed) + 3
    keys, values = (unwritten((num_blocks, K, block_size), H, dtype) for _ in range(2))
    cache = LayerCache(keys, values)
    tables = torch.zeros(len(lengths), max(needed) + 2, dtype=torch.int32)
    free, slots = torch.randperm(num_blocks).tolist(), []
    for s, length in enumerate(lengths):
        blocks = torch.tensor([free.pop() for _ in range(needed[s])], dtype=torch.int64)
        tables[s, : needed[s]] = blocks
        positions = torch.arange(length)
        places = blocks[positions // block_size] * block_size + positions % block_size
        window = layout.get("window", 0)
        seen_from = max(0, length - queries[s] - window + 1) if window else 0
        past, now = places[seen_from : length - queries[s]], places[length - queries[s] :]
        slots.append(now)
        for part in cache[:2]:
            x = torch.randn(len(past), K, H)
            stored = pack_rows(x, part.dtype) if dtype in STORED else x.to(dtype)
            part[past // block_size, :, past % block_size] = stored
    angles = None if rotated is None else torch.randn(T, rotated) * 9
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    rows = PagedRows(
        (GroupRows(torch.cat(slots), tables),), starts, torch.tensor(lengths, dtype=torch.int32), max(queries)
    )
    heads = HeadLayout(N, K, H, H**-0.5)._replace(**layout)
    cos, sin = (None, None) if angles is None else (angles.cos(), angles.sin())
    return Case(qkv_TW, heads, cos, sin, cache, rows)


def unwritten(shape: tuple[int, ...], H: int, dtype: torch.dtype) -> Tensor:
    """Rows of a cache that are NaN."""
    stored = STORED.get(dtype, dtype)
    value = NAN if stored == dtype and dtype.is_floating_point else -1 if stored == torch.int8 else 255
    return torch.full((*shape, row_length(stored, H)), value, dtype=stored)


def prepared(case: Case, first: int, count: int, norm: Tensor | None) -> Tensor:
    """``count`` heads from column ``first`` on, normed and rotated, in float64."""
    H = case.heads.head_dim
    x = case.qkv_TW[:, first * H : (first + count) * H].double().view(-1, count, H)
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + case.heads.norm_eps).sqrt() * norm.double()
    if case.cos_TR is None or case.sin_TR is None:
        return x
    R, cos, sin = case.cos_TR.shape[1], case.cos_TR.double()[:, None], case.sin_TR.double()[:, None]
    a, b = x[..., :R], x[..., R : 2 * R]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * R :]), dim=-1)


def exact(case: Case) -> Tensor:
    """Attention in float64, one row at a time, over the keys and values that are in the cache."""
    heads, block_size = case.heads, case.cache.keys.shape[2]
    N, K = heads.num_heads, heads.num_kv_heads
    queries = prepared(case, 0, N, heads.q_norm_H)
    out = torch.empty_like(queries)
    for s, length in enumerate(case.rows.seq_lens_S.tolist()):
        positions = torch.arange(length)
        blocks = case.rows.groups[0].block_tables_SB[s].long()[positions // block_size]
        found = [part[blocks, :, positions % block_size] for part in case.cache[:2]]
        keys, values = (unpack_rows(x, heads.head_dim).double().repeat_interleave(N // K, 1) for x in found)
        begin, end = case.rows.cu_seqlens_q[s : s + 2].tolist()
        for t in range(begin, end):
            last = length - (end - t)
            seen = slice(max(0, last - heads.window + 1) if heads.window else 0, last + 1)
            scores = torch.einsum("nh,cnh->nc", queries[t], keys[seen]) * heads.scale
            if heads.softcap:
                scores = heads.softcap * torch.tanh(scores / heads.softcap)
            if heads.slopes_N is not None:
                scores = scores - heads.slopes_N.double()[:, None] * (last - torch.arange(last + 1)[seen])
            if heads.bias_TNE is not None:
                scores = with_bias(scores, heads.bias_TNE[t])
            if heads.sinks_N is not None:
                sinks_TN = heads.sinks_N.double().expand(len(out), N)
                scores = torch.cat((scores, sinks_TN[t][:, None]), dim=1)
            weights = scores.softmax(-1)[:, : keys[seen].shape[0]]
            out[t] = torch.einsum("nc,cnh->nh", weights, values[seen])
    return out.flatten(1)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_tensors(monkeypatch)


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_close_to_float64(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    case = make_case([1, 7, 40, 300, 33, 3, 260], [1, 7, 1, 50, 20, 0, 1], sizes, dtype, rotated=sizes[2] // 2)
    torch.testing.assert_close(case.run().double(), exact(case), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_rows_with_scales_are_read_to_the_last_bit(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Numbers that the format has exactly are not asked for: what is compared is float64 over what the cache holds."""
    lengths, queries = [1, 7, 40, 300, 33, 3, 260], [1, 7, 1, 50, 20, 0, 1]
    case = make_case(lengths, queries, sizes, dtype, rotated=sizes[2] // 2, window=41)
    torch.testing.assert_close(case.run().double(), exact(case), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
@pytest.mark.parametrize("sizes", [SIZES[1], SIZES[3], SIZES[4]])
def test_rows_with_scales_are_written_as_the_reference_writes_them(
    sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Numbers of all sizes, outliers, zeros, ties, subnormal numbers, and what is not finite."""
    case, K, H = make_case([90], [90], sizes, dtype), sizes[1], sizes[2]
    kv = case.qkv_TW[:, -2 * K * H :].view(90, 2 * K, H)
    kv.mul_(torch.logspace(-44, 37, 90)[:, None, None])
    kv[:, :, 3] *= torch.linspace(1, 300, 90)[:, None]
    kv[:8] = torch.arange(-H // 2, H - H // 2)
    kv[8, 0], kv[9, 0, 1:], kv[10, 0] = 0, -0.0, 5
    kv[11, 0, 2], kv[12, 0, 5], kv[13, 0, H - 1] = NAN, float("inf"), -float("inf")
    kv[14, 0, 0], kv[14, 0, 1] = 3e38, -3e38
    reference = case.copy()
    case.run()
    with dispatch.only(dispatch.REFERENCE):
        reference.run()
    for ours, theirs in zip(case.cache[:2], reference.cache[:2], strict=True):
        found, expected = unpack_rows(ours, H), unpack_rows(theirs, H)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        is_number = expected.isfinite().all(-1)
        assert torch.equal(ours[is_number], theirs[is_number])


LAYOUTS: dict[str, dict[str, Any]] = {
    "window": {"window": 37},
    "wide window": {"window": 200},
    "one position": {"window": 1},
    "softcap": {"softcap": 0.7},
    "slopes": {"slopes_N": 2.0 ** -torch.arange(6.0), "window": 200},
    "biases of distances": {"bias_TNE": torch.linspace(-3, 4, 68 * 6 * 90).sin().view(68, 6, 90)},
    "biases and a window": {"bias_TNE": torch.linspace(-3, 400, 68 * 6 * 5).sin().view(68, 6, 5), "window": 37},
    "sinks": {"sinks_N": torch.linspace(-2, 4, 6)},
    "sinks of rows": {"sinks_N": torch.linspace(-2, 40, 68 * 6).sin().view(68, 6) * 4},
    "norms": {"q_norm_H": torch.linspace(0.5, 2, 24), "k_norm_H": torch.linspace(-1, 1, 24), "norm_eps": 1e-4},
}


@pytest.mark.parametrize("rotated", [None, 3, 12])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_part_of_the_layout(layout: str, rotated: int | None) -> None:
    case = make_case([7, 310, 290], [7, 60, 1], (6, 2, 24, 16), torch.float32, rotated, **LAYOUTS[layout])
    torch.testing.assert_close(case.run().double(), exact(case), rtol=1e-5, atol=2e-6)
    q_TNH = stored_heads(case.qkv_TW, case.heads, case.cos_TR, case.sin_TR, case.cache, case.rows)
    rule = case.heads.scale, case.heads.window, case.heads.softcap, case.heads.sinks_N, None, case.heads.slopes_N
    tables, starts, lengths = case.rows.of(case.cache).block_tables_SB, case.rows.cu_seqlens_q, case.rows.seq_lens_S
    plain = paged_attention(q_TNH, *case.cache[:2], tables, starts, lengths, *rule, case.heads.bias_TNE)
    torch.testing.assert_close(plain.flatten(1).double(), exact(case), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_keys_and_values_are_rounded_into_their_slots_and_nothing_else_is_touched(dtype: torch.dtype) -> None:
    case = make_case([50, 20], [9, 20], SIZES[0], dtype, rotated=32)
    before = case.copy().cache
    case.run()
    block_size, slots = 16, case.rows.groups[0].slot_mapping_T
    wanted = prepared(case, 9, 3, None), case.qkv_TW[:, 12 * 64 :].view(-1, 3, 64)
    for part, old, x in zip(case.cache[:2], before[:2], wanted, strict=True):
        found = part[slots // block_size, :, slots % block_size]
        torch.testing.assert_close(found, x.float().to(dtype), rtol=2e-2 if dtype != torch.float32 else 1e-6, atol=1e-6)
        part[slots // block_size, :, slots % block_size] = NAN
        torch.testing.assert_close(part, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_values_are_rounded_as_torch_does(dtype: torch.dtype) -> None:
    case = make_case([40], [40], (1, 1, 71, 16), dtype)
    case.qkv_TW.mul_(torch.logspace(-9, 6, 40)[:, None])
    case.qkv_TW[0, 142:146] = torch.tensor([NAN, float("inf"), -float("inf"), -0.0])
    case.run()
    slots = case.rows.groups[0].slot_mapping_T
    found = case.cache.values[slots // 16, 0, slots % 16]
    torch.testing.assert_close(found, case.qkv_TW[:, 142:].to(dtype), rtol=0, atol=0, equal_nan=True)


@one_in(7)
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("dtype", [*CACHE_DTYPES, *PACKED_DTYPES])
@pytest.mark.parametrize("sizes", SIZES)
def test_bits_do_not_depend_on_chunks_or_other_sequences(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, window: int
) -> None:
    case = make_case([190, 17, 140], [190, 1, 60], sizes, dtype, rotated=4, window=window)
    pieces = case.copy()
    together, choose = case.run(), random.Random(1)
    for s in range(3):
        begin, end = case.rows.cu_seqlens_q[s : s + 2].tolist()
        first = 0
        while first < end - begin:
            last = min(end - begin, first + choose.choice([1, 1, 2, 5, 8, 9, 30]))
            alone = pieces.part(s, first, last).run()
            assert torch.equal(alone, together[begin + first : begin + last])
            first = last


def test_bits_do_not_depend_on_threads_or_on_where_blocks_lie() -> None:
    case = make_case([200, 600, 65], [120, 1, 3], SIZES[0], torch.float32, rotated=32)
    order = torch.randperm(len(case.cache.keys))
    place = torch.argsort(order)
    slots, tables = case.rows.groups[0]
    group = GroupRows(place[slots // 16] * 16 + slots % 16, place[tables.long()].int())
    rows = replace(case.rows, groups=(group,))
    moved = replace(case, cache=LayerCache(case.cache.keys[order], case.cache.values[order]), rows=rows)
    expected = case.run()
    assert torch.equal(moved.run(), expected)
    try:
        for count in (2, 3):
            threads.set_num_threads(count)
            for _ in range(20):
                assert torch.equal(case.run(), expected)
    finally:
        threads.set_num_threads(1)


def test_bits_do_not_depend_on_the_block_size() -> None:
    results = []
    for block_size in (5, 16, 24, 150, 256):
        case = make_case([150], [150], (9, 3, 64, block_size), torch.float32)
        results.append(case.run())
    assert all(torch.equal(found, results[0]) for found in results)


def test_padding_is_left_alone() -> None:
    case = make_case([20, 33], [3, 1], SIZES[0], torch.float16, rotated=32)
    expected, cos, sin = case.copy().run(), case.cos_TR, case.sin_TR
    assert cos is not None
    assert sin is not None
    rows = PagedRows(
        (
            GroupRows(
                torch.cat((case.rows.groups[0].slot_mapping_T, torch.tensor([-1, -1]))),
                torch.cat((case.rows.groups[0].block_tables_SB, torch.full((1, 5), 10**6, dtype=torch.int32))),
            ),
        ),
        torch.cat((case.rows.cu_seqlens_q, case.rows.cu_seqlens_q[-1:])),
        torch.cat((case.rows.seq_lens_S, torch.zeros(1, dtype=torch.int32))),
        3,
    )
    qkv, cos, sin = (torch.cat((x, torch.full_like(x[:2], NAN))) for x in (case.qkv_TW, cos, sin))
    padded = replace(case, qkv_TW=qkv, cos_TR=cos, sin_TR=sin, rows=rows)
    assert torch.equal(padded.run()[:4], expected)


def test_half_precision_rows_give_half_precision_results() -> None:
    case = make_case([30], [4], SIZES[0], torch.bfloat16, rotated=32)
    found = replace(case.copy(), qkv_TW=case.qkv_TW.bfloat16()).run()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), case.run(), rtol=5e-2, atol=5e-2)


def test_a_query_that_is_not_finite_spoils_itself_alone() -> None:
    case = make_case([40, 12], [30, 1], SIZES[0], torch.float32)
    expected = case.run().view(-1, 9, 64)
    case.qkv_TW[3, 64 + 5] = NAN
    found = case.run().view(-1, 9, 64)
    assert bool(found[3, 1].isnan().all())
    found[3, 1] = expected[3, 1]
    assert torch.equal(found, expected)


def test_the_reference_says_the_same() -> None:
    case = make_case([40, 12], [30, 1], SIZES[0], torch.float32, rotated=32, window=20)
    with dispatch.only("reference"):
        expected = case.copy().run()
    torch.testing.assert_close(case.run(), expected, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    case = make_case([40], [3], SIZES[0], torch.float32)
    rows = case.rows
    slots, tables = rows.groups[0]
    broken = [
        replace(rows, seq_lens_S=torch.tensor([1000], dtype=torch.int32)),
        replace(rows, seq_lens_S=torch.tensor([2], dtype=torch.int32)),
        replace(rows, groups=(GroupRows(slots, tables + 100),)),
        replace(rows, groups=(GroupRows(slots, tables - 100),)),
        replace(rows, cu_seqlens_q=torch.tensor([0, 4], dtype=torch.int32)),
        replace(rows, groups=(GroupRows(slots + 1000, tables),)),
    ]
    for step in broken:
        with pytest.raises(IndexError, match="do not fit"):
            replace(case, rows=step).run()
    with pytest.raises(ValueError, match="at most 32"):
        replace(case, cos_TR=torch.zeros(3, 33), sin_TR=torch.zeros(3, 33)).run()
    with pytest.raises(ValueError, match="rows of 100"):
        replace(case, qkv_TW=torch.zeros(3, 100)).run()


@pytest.mark.parametrize(
    ("queries", "sizes"), [([3, 1], SIZES[0]), *nightly_after(0, [([60, 9], SIZES[1]), ([1, 1], SIZES[4])])]
)
def test_a_cache_of_8_bits_holds_what_the_reference_stores(
    queries: list[int], sizes: tuple[int, int, int, int]
) -> None:
    """With scales, and with numbers that are rounded in every way: ties, subnormal ones, and too large ones."""
    case = make_case([70, 200], queries, sizes, torch.float8_e4m3fn, rotated=8)
    K, H = sizes[1], sizes[2]
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].sort().values
    edges = torch.cat((codes, (codes[1:] + codes[:-1]) / 2, torch.tensor([448.01, -1e9, 1e-9, 464.0]))).sort().values
    scales = KVScales(torch.rand(K) + 0.5, torch.rand(K) + 0.5)
    values = case.qkv_TW[:, -K * H :]
    values.copy_(
        (edges[torch.arange(values.numel()) * 7 % len(edges)].view(-1, K, H) * scales.values_K[:, None]).flatten(1)
    )
    case = replace(case, cache=case.cache._replace(scales=scales))
    reference = replace(case.copy(), cache=case.copy().cache._replace(scales=scales))
    found = case.run()
    with dispatch.only(dispatch.REFERENCE):
        expected = reference.run()
    for ours, theirs in zip(case.cache[:2], reference.cache[:2], strict=True):
        is_same = (ours.view(torch.uint8) == theirs.view(torch.uint8)) | (ours.float() == theirs.float())
        assert is_same.all()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
