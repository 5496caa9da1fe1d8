"""Ragged batches over a paged cache full of traps, and their attention in float64.

Shapes: T tokens, S sequences, N heads, K kv heads, H head dim, C positions of a context, Q rows of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """A model's attention heads, and how its scores are changed."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    has_slopes: bool = False
    extent: int = 0
    """Distances that have a bias."""

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass
class Batch:
    """Arguments of ``paged_attention``. Free slots and blocks hold NaN, and so do positions before all rows' windows;
    tables end in a block of NaN."""

    heads: Heads
    query_lens: list[int]
    seq_lens: list[int]
    q_TNH: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables_SB: Tensor
    cu_seqlens_q: Tensor
    seq_lens_S: Tensor
    sinks_N: Tensor | None
    slopes_N: Tensor | None
    bias_TNE: Tensor | None
    contexts: list[tuple[Tensor, Tensor]]
    """Of each sequence its keys and values [C, K, H], as the cache holds them."""

    def reference(self) -> Tensor:
        """Float64 [rows of all sequences, N, H], each row on its own."""
        rows = []
        start = 0
        for q_len, seq_len, (k_CKH, v_CKH) in zip(self.query_lens, self.seq_lens, self.contexts, strict=True):
            for i in range(q_len):
                bias_NE = None if self.bias_TNE is None else self.bias_TNE[start + i]
                sinks_N = None if self.sinks_N is None else self.sinks_N.expand(self.q_TNH.shape[:2])[start + i]
                q_NH, position = self.q_TNH[start + i], seq_len - q_len + i
                rows.append(self._reference_row(q_NH, position, k_CKH, v_CKH, bias_NE, sinks_N))
            start += q_len
        return torch.stack(rows)

    def _reference_row(
        self,
        q_NH: Tensor,
        position: int,
        k_CKH: Tensor,
        v_CKH: Tensor,
        bias_NE: Tensor | None,
        sinks_N: Tensor | None,
    ) -> Tensor:
        heads, end = self.heads, position + 1
        begin = max(0, end - heads.window) if heads.window else 0
        group = heads.num_heads // heads.num_kv_heads
        k_CNH = k_CKH[begin:end].double().repeat_interleave(group, 1)
        v_CNH = v_CKH[begin:end].double().repeat_interleave(group, 1)
        scores_NC = torch.einsum("nh,cnh->nc", q_NH.double(), k_CNH) * heads.scale
        if heads.softcap:
            scores_NC = heads.softcap * torch.tanh(scores_NC / heads.softcap)
        if self.slopes_N is not None:
            scores_NC = scores_NC - self.slopes_N.double().unsqueeze(1) * (position - torch.arange(begin, end))
        if bias_NE is not None:
            scores_NC = with_bias(scores_NC, bias_NE)
        if sinks_N is not None:
            scores_NC = torch.cat((scores_NC, sinks_N.double().unsqueeze(1)), 1)
        weights_NC = scores_NC.softmax(-1)[:, : end - begin]
        return torch.einsum("nc,cnh->nh", weights_NC, v_CNH)


def with_bias(scores_NC: Tensor, bias_NE: Tensor) -> Tensor:
    """Scores of a row for the keys up to its own, with what they gain by their distance."""
    count = min(scores_NC.shape[1], bias_NE.shape[1])
    scores_NC = scores_NC.clone()
    scores_NC[:, -count:] += bias_NE[:, :count].flip(1).to(scores_NC)
    return scores_NC


def make_batch(
    heads: Heads,
    query_lens: list[int],
    seq_lens: list[int],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    block_size: int = 16,
    padded_rows: int = 0,
    interleaved: bool = False,
) -> Batch:
    """Random values in blocks of random order; ``interleaved``: a block's keys and values are neighbours."""
    generator = torch.Generator().manual_seed(seed)
    N, K, H = heads.num_heads, heads.num_kv_heads, heads.head_dim
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    shape = (sum(counts) + 2, 2, K, block_size, H)
    storage = torch.full(shape, float("nan"), dtype=cache_dtype or dtype)
    caches = [storage[:, 0], storage[:, 1]] if interleaved else [storage[:, 0].clone(), storage[:, 1].clone()]
    order = torch.randperm(shape[0], generator=generator).tolist()
    tables = torch.full((len(seq_lens), max(counts) + 2), order.pop(), dtype=torch.int32)
    contexts: list[tuple[Tensor, Tensor]] = []
    for s, (seq_len, count) in enumerate(zip(seq_lens, counts, strict=True)):
        blocks = [order.pop() for _ in range(count)]
        tables[s, :count] = torch.tensor(blocks, dtype=torch.int32)
        pair = [torch.randn(seq_len, K, H, generator=generator).to(storage.dtype) for _ in caches]
        for cache, values in zip(caches, pair, strict=True):
            for i, block in enumerate(blocks):
                part = values[i * block_size : (i + 1) * block_size]
                cache[block, :, : part.shape[0]] = part.transpose(0, 1)
            for position in range(seq_len - query_lens[s] - heads.window + 1 if heads.window else 0):
                cache[blocks[position // block_size], :, position % block_size] = float("nan")
        contexts.append((pair[0], pair[1]))
    q_TNH = torch.randn(sum(query_lens) + padded_rows, N, H, generator=generator).to(dtype)
    q_TNH[sum(query_lens) :] = float("nan")
    return Batch(
        heads=heads,
        query_lens=query_lens,
        seq_lens=seq_lens,
        q_TNH=q_TNH,
        k_cache=caches[0],
        v_cache=caches[1],
        block_tables_SB=tables,
        cu_seqlens_q=torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        seq_lens_S=torch.tensor(seq_lens, dtype=torch.int32),
        sinks_N=torch.randn(N, generator=generator) if heads.has_sinks else None,
        slopes_N=2.0 ** -torch.arange(1.0, N + 1) if heads.has_slopes else None,
        bias_TNE=torch.randn(len(q_TNH), N, heads.extent, generator=generator).to(dtype) if heads.extent else None,
        contexts=contexts,
    )
