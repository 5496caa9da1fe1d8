"""Attention of many rows on Hopper: against float64, on ragged batches, with NaN wherever nobody may look."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from octavo.ops.attention.attention import HeadLayout, LayerCache

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BLOCK, PADDING, REPEATS = 64, 5, 20
QUERY_LENS = [1, 300, 0, 129, 64, 1, 700, 33]
SEQ_LENS = [777, 300, 0, 1129, 64, 1, 1948, 4000]


class Batch:
    """Queries, and a cache whose free slots and blocks are NaN."""

    def __init__(
        self, query_lens: list[int], seq_lens: list[int], N: int, K: int, H: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        counts = [-(-length // BLOCK) for length in seq_lens]
        self.query_lens, self.seq_lens, self.group = query_lens, seq_lens, N // K
        self.q_TNH = torch.randn(sum(query_lens) + PADDING, N, H, device="cuda").to(dtype)
        self.q_TNH[-PADDING:] = math.nan
        self.keys, self.values = torch.randn(2, sum(counts) + 1, K, BLOCK, H, device="cuda").to(dtype)
        order = torch.randperm(sum(counts), device="cuda").int()
        self.tables_SB = torch.full((len(counts), max(counts)), sum(counts), dtype=torch.int32, device="cuda")
        for s, blocks in enumerate(torch.split(order, counts)):
            self.tables_SB[s, : len(blocks)] = blocks
            if seq_lens[s] % BLOCK:
                for cache in (self.keys, self.values):
                    cache[blocks[-1], :, seq_lens[s] % BLOCK :] = math.nan
        self.keys[-1] = self.values[-1] = math.nan
        self.cu_seqlens_q = torch.tensor([0, *query_lens], device="cuda").cumsum(0).int()
        self.seq_lens_S = torch.tensor(seq_lens, device="cuda").int()

    def run(self, skip_single: bool = False) -> Tensor:
        from octavo_kernels.hopper.prefill_attention import hopper_prefill, suits

        N, H = self.q_TNH.shape[1:]
        heads = HeadLayout(N, N // self.group, H, H**-0.5, None, None)
        assert suits(self.q_TNH, heads, LayerCache(self.keys, self.values))
        out_TNH = torch.full_like(self.q_TNH, math.nan)
        spans = self.cu_seqlens_q[:-1], self.cu_seqlens_q[1:]
        parts = (self.q_TNH,), (self.keys,), self.values
        hopper_prefill(*parts, self.tables_SB, spans, self.seq_lens_S, heads.scale, skip_single, out_TNH)
        return out_TNH

    def expected(self, s: int) -> Tensor:
        length, rows = self.seq_lens[s], self.rows(s)
        blocks = self.tables_SB[s, : -(-length // BLOCK)].long()
        keys, values = (
            cache[blocks].transpose(1, 2).flatten(0, 1)[:length].double().repeat_interleave(self.group, 1)
            for cache in (self.keys, self.values)
        )
        q = self.q_TNH[rows].double()
        scores = torch.einsum("qnh,cnh->nqc", q, keys) * q.shape[2] ** -0.5
        position = torch.arange(length - len(q), length, device="cuda")
        scores.masked_fill_(torch.arange(length, device="cuda") > position[:, None], -math.inf)
        return torch.einsum("nqc,cnh->qnh", scores.softmax(-1), values)

    def rows(self, s: int) -> slice:
        start = sum(self.query_lens[:s])
        return slice(start, start + self.query_lens[s])


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    from octavo_kernels.triton.launch import has_gluon

    if not has_gluon(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("needs Hopper, and the version of Triton that the kernel is for")


def worst_row(found: Tensor, expected: Tensor) -> float:
    difference = (found.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    return float(difference.max())


@pytest.mark.parametrize("shape", [(32, 8, 128), (16, 8, 128), (12, 12, 128), (8, 1, 128)])
@pytest.mark.parametrize("skip_single", [False, True])
def test_rows_equal_float64_and_nothing_else_is_written(shape: tuple[int, int, int], skip_single: bool) -> None:
    batch = Batch(QUERY_LENS, SEQ_LENS, *shape)
    out_TNH = batch.run(skip_single)
    for s, length in enumerate(batch.query_lens):
        rows = out_TNH[batch.rows(s)]
        if skip_single and length == 1:
            assert rows.isnan().all()
        elif length:
            assert worst_row(rows, batch.expected(s)) < 5e-3
    assert out_TNH[-PADDING:].isnan().all()
    for _ in range(REPEATS):
        assert torch.equal(batch.run(skip_single).nan_to_num(), out_TNH.nan_to_num())


def test_float16_and_many_sequences() -> None:
    for batch in (
        Batch(QUERY_LENS, SEQ_LENS, 32, 8, 128, torch.float16),
        Batch([1, 2, 5, 40] * 40, [200, 2, 64, 130] * 40, 32, 8, 128),
        Batch([2048], [8192], 32, 8, 128),
    ):
        out_TNH = batch.run()
        assert all(
            worst_row(out_TNH[batch.rows(s)], batch.expected(s)) < 5e-3
            for s, length in enumerate(batch.query_lens)
            if length
        )
        for _ in range(REPEATS):
            assert torch.equal(batch.run()[:-PADDING], out_TNH[:-PADDING])
