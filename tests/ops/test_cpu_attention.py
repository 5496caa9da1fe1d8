"""``paged_attention``: close to float64, blind to unused slots, and the same bits however a prompt is cut."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from octavo.ops import paged_attention
from octavo.ops.cpu import threads
from tests.ops.cpu_cases import needs_float_kernels, poison_new_tensors

pytestmark = needs_float_kernels
CACHE_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(9, 3, 64, 16), (4, 4, 80, 8), (8, 1, 256, 32), (6, 2, 24, 5), (4, 2, 128, 64), (2, 1, 96, 256)]
"""(heads, kv heads, head dim, block size)"""


class Case(NamedTuple):
    """Sequences whose keys and values sit in shuffled blocks; every other slot is NaN."""

    q_TNH: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables_SB: Tensor
    cu_seqlens_q: Tensor
    seq_lens_S: Tensor
    scale: float

    def part(self, s: int, first: int, last: int) -> Case:
        """Rows ``first .. last`` of sequence s alone, as a step of their own."""
        begin, end = int(self.cu_seqlens_q[s]), int(self.cu_seqlens_q[s + 1])
        seen = int(self.seq_lens_S[s]) - (end - begin) + last
        lengths = torch.tensor([seen], dtype=torch.int32)
        starts = torch.tensor([0, last - first], dtype=torch.int32)
        q = self.q_TNH[begin + first : begin + last]
        return self._replace(
            q_TNH=q, block_tables_SB=self.block_tables_SB[s : s + 1], cu_seqlens_q=starts, seq_lens_S=lengths
        )


def make_case(
    lengths: list[int], queries: list[int], sizes: tuple[int, int, int, int], dtype: torch.dtype, seed: int = 0
) -> Case:
    torch.manual_seed(seed)
    N, K, H, block_size = sizes
    needed = [-(-length // block_size) for length in lengths]
    num_blocks = sum(needed) + 3
    k_cache, v_cache = (torch.full((num_blocks, K, block_size, H), float("nan"), dtype=dtype) for _ in range(2))
    tables = torch.zeros(len(lengths), max(needed) + 2, dtype=torch.int32)
    free = torch.randperm(num_blocks).tolist()
    for s, length in enumerate(lengths):
        blocks = [free.pop() for _ in range(needed[s])]
        tables[s, : needed[s]] = torch.tensor(blocks, dtype=torch.int32)
        for cache in (k_cache, v_cache):
            for i, block in enumerate(blocks):
                used = min(block_size, length - i * block_size)
                cache[block, :, :used] = torch.randn(K, used, H).to(dtype)
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    q = torch.randn(sum(queries), N, H)
    return Case(q, k_cache, v_cache, tables, starts, torch.tensor(lengths, dtype=torch.int32), H**-0.5)


def exact(case: Case) -> Tensor:
    """Attention in float64, one row at a time."""
    out = torch.empty(case.q_TNH.shape, dtype=torch.float64)
    K, block_size = case.k_cache.shape[1:3]
    group = case.q_TNH.shape[1] // K
    for s, length in enumerate(case.seq_lens_S.tolist()):
        positions = torch.arange(length)
        blocks = case.block_tables_SB[s].long()[positions // block_size]
        rows = [cache[blocks, :, positions % block_size] for cache in (case.k_cache, case.v_cache)]
        keys, values = (row.double().repeat_interleave(group, 1) for row in rows)
        begin, end = case.cu_seqlens_q[s : s + 2].tolist()
        for t in range(begin, end):
            seen = length - (end - t) + 1
            scores = torch.einsum("nh,cnh->nc", case.q_TNH[t].double(), keys[:seen]) * case.scale
            out[t] = torch.einsum("nc,cnh->nh", scores.softmax(-1), values[:seen])
    return out


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_tensors(monkeypatch)


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_close_to_float64(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    case = make_case([1, 7, 40, 130, 33, 3], [1, 7, 1, 50, 20, 0], sizes, dtype)
    torch.testing.assert_close(paged_attention(*case).double(), exact(case), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_bits_do_not_depend_on_chunks_or_neighbours(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    case = make_case([90, 17, 140], [90, 1, 60], sizes, dtype)
    together = paged_attention(*case)
    choose = random.Random(1)
    for s in range(3):
        begin, end = case.cu_seqlens_q[s : s + 2].tolist()
        first = 0
        while first < end - begin:
            last = min(end - begin, first + choose.choice([1, 1, 2, 5, 8, 9, 30]))
            alone = paged_attention(*case.part(s, first, last))
            assert torch.equal(alone, together[begin + first : begin + last])
            first = last


def test_bits_do_not_depend_on_threads_or_on_where_blocks_lie() -> None:
    case = make_case([200, 64, 65], [120, 1, 3], SIZES[0], torch.float32)
    expected = paged_attention(*case)
    try:
        for count in (2, 3):
            threads.set_num_threads(count)
            for _ in range(20):
                assert torch.equal(paged_attention(*case), expected)
    finally:
        threads.set_num_threads(1)
    order = torch.randperm(len(case.k_cache))
    place = torch.argsort(order).int()
    moved = case._replace(
        k_cache=case.k_cache[order], v_cache=case.v_cache[order], block_tables_SB=place[case.block_tables_SB.long()]
    )
    assert torch.equal(paged_attention(*moved), expected)


def test_bits_do_not_depend_on_the_block_size() -> None:
    keys, values = torch.randn(2, 150, 3, 64)
    q, results = torch.randn(40, 9, 64), []
    for block_size in (5, 16, 24, 150, 256):
        num_blocks = -(-150 // block_size)
        caches = [torch.zeros(num_blocks, 3, block_size, 64) for _ in range(2)]
        for cache, rows in zip(caches, (keys, values), strict=True):
            padded = torch.zeros(num_blocks * block_size, 3, 64)
            padded[:150] = rows
            cache[:] = padded.view(num_blocks, block_size, 3, 64).transpose(1, 2)
        table = torch.arange(num_blocks, dtype=torch.int32)[None]
        starts, lengths = torch.tensor([0, 40], dtype=torch.int32), torch.tensor([150], dtype=torch.int32)
        results.append(paged_attention(q, *caches, table, starts, lengths, 0.125))
    assert all(torch.equal(found, results[0]) for found in results)


def test_queries_inside_a_wider_projection() -> None:
    case = make_case([20, 9], [20, 1], SIZES[0], torch.float32)
    wide = torch.randn(21, 960)
    wide[:, :576] = case.q_TNH.view(21, 576)
    found = paged_attention(*case._replace(q_TNH=wide[:, :576].view(21, 9, 64)))
    assert torch.equal(found, paged_attention(*case))


def test_half_precision_queries_give_half_precision_results() -> None:
    case = make_case([30], [4], SIZES[0], torch.bfloat16)
    found = paged_attention(*case._replace(q_TNH=case.q_TNH.bfloat16()))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), paged_attention(*case), rtol=2e-2, atol=2e-2)


def test_a_query_that_is_not_finite_spoils_itself_alone() -> None:
    case = make_case([40, 12], [30, 1], SIZES[0], torch.float32)
    expected = paged_attention(*case)
    case.q_TNH[3, 1, 5] = float("nan")
    found = paged_attention(*case)
    assert bool(found[3, 1].isnan().all())
    found[3, 1] = expected[3, 1]
    assert torch.equal(found, expected)


def test_what_does_not_fit_is_refused() -> None:
    case = make_case([40], [3], SIZES[0], torch.float32)
    beyond = torch.tensor([1000], dtype=torch.int32)
    broken = [
        case._replace(seq_lens_S=beyond),
        case._replace(seq_lens_S=torch.tensor([2], dtype=torch.int32)),
        case._replace(block_tables_SB=case.block_tables_SB + 100),
        case._replace(block_tables_SB=case.block_tables_SB - 100),
        case._replace(cu_seqlens_q=torch.tensor([0, 4], dtype=torch.int32)),
    ]
    for step in broken:
        with pytest.raises(IndexError, match="do not fit"):
            paged_attention(*step)
