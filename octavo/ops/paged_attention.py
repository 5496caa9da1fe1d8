"""Causal attention of a step's tokens over the paged cache, prefill and decode rows alike.

Shapes: T tokens of the step, S sequences, N heads, K kv heads, G = N / K heads that share one, H head dim,
B blocks of the longest table, C positions of a context, Q rows of one sequence that are computed together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.dispatch import op
from octavo.ops.store_kv import KVScales

MAX_SCRATCH = 2**23
"""Maximum elements of an intermediate tensor: bounds the memory of a long prompt."""


@op
def paged_attention(
    q_TNH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SB: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_S: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_N: Tensor | None = None,
    scales: KVScales | None = None,
) -> Tensor:
    """Attend from every row to the positions of its sequence up to its own; a new tensor [T, N, H] of q's dtype.

    With a ``window`` a row sees at most that many positions, its own included; with a ``softcap`` scores become
    ``softcap * tanh(scores / softcap)``; ``sinks`` (float32) add a logit per head to the softmax's denominator.

    Caches are ``[num_blocks, K, block_size, H]`` and hold this step's keys and values already, divided by the
    ``scales`` if given. Rows ``cu_seqlens_q[s]`` to ``cu_seqlens_q[s + 1]`` (int32 [S + 1]) are the last positions of
    sequence s, whose context, these rows included, is ``seq_lens[s]`` long: row i of q rows sits at position
    ``seq_len - q + i``.
    Nothing is read beyond a context: neither table entries past its last block nor slots past its last position.
    Contents before every row's window may be arbitrary, NaN of other sequences included: they change no result.
    Sums are computed in float32 at least.
    """
    rule = Rule(scale, window, softcap, sinks_N, scales)
    out_TNH = torch.empty_like(q_TNH)
    starts, seq_lens = cu_seqlens_q.tolist(), seq_lens_S.tolist()
    single: list[int] = []
    for s, seq_len in enumerate(seq_lens):
        rows = slice(starts[s], starts[s + 1])
        if rows.stop - rows.start == 1:
            single.append(s)
        elif rows.stop > rows.start:
            seen_from = max(0, seq_len - (rows.stop - rows.start) - window + 1) if window else 0
            keys, values = context(k_cache, v_cache, block_tables_SB[s], seen_from, seq_len)
            _attend(q_TNH[rows], keys, values, rule, out_TNH[rows])
    single.sort(key=lambda s: seq_lens[s])
    while single:  # from the longest, as many as fit into one batch
        room = max(1, MAX_SCRATCH // (seq_lens[single[-1]] * k_cache.shape[1] * k_cache.shape[3]))
        group, single = single[-room:], single[:-room]
        group_S = torch.tensor(group, device=q_TNH.device)
        rows_S = cu_seqlens_q[group_S].long()
        tables, lens_S = block_tables_SB[group_S], seq_lens_S[group_S]
        out_TNH[rows_S] = _attend_single(q_TNH[rows_S], k_cache, v_cache, tables, lens_S, rule)
    return out_TNH


class Rule(NamedTuple):
    """How scores become weights, and what the cache holds becomes keys and values."""

    scale: float
    window: int
    softcap: float
    sinks_N: Tensor | None
    scales: KVScales | None

    def scaled(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [..., K, C, H] of what the cache holds."""
        if self.scales is None:
            return keys, values
        keys, values = (x * scale_K[:, None, None] for x, scale_K in zip((keys, values), self.scales, strict=True))
        return keys, values

    def weights(self, products: Tensor, is_hidden: Tensor) -> Tensor:
        """Softmax over the last axis of ``products`` [..., N, rows, C], which is overwritten."""
        scores = products.mul_(self.scale)
        if self.softcap:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        scores = scores.masked_fill_(is_hidden, float("-inf"))
        if self.sinks_N is None:
            return scores.softmax(dim=-1)
        sinks = self.sinks_N.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]


def context(k_cache: Tensor, v_cache: Tensor, table_B: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """Keys and values of positions ``begin`` to ``end`` of one sequence, copied together: two of [K, C, H]."""
    block_size = k_cache.shape[2]
    first = begin // block_size
    blocks = table_B[first : -(-end // block_size)]
    chosen = slice(begin - first * block_size, end - first * block_size)
    keys, values = (cache[blocks].transpose(0, 1).flatten(1, 2)[:, chosen] for cache in (k_cache, v_cache))
    return keys, values


def _attend(q_QNH: Tensor, k_KCH: Tensor, v_KCH: Tensor, rule: Rule, out_QNH: Tensor) -> None:
    """The last rows of one sequence, in chunks; each chunk reads only the keys up to its own last row.

    Keys before all rows' windows may be left out: the last key is that of the last row.
    """
    num_rows, N, H = q_QNH.shape
    K, seq_len, _ = k_KCH.shape
    dtype = torch.promote_types(q_QNH.dtype, torch.float32)
    k_KCH, v_KCH = rule.scaled(k_KCH.to(dtype), v_KCH.to(dtype))
    chunk = max(1, MAX_SCRATCH // (N * seq_len))
    for first in range(0, num_rows, chunk):
        q = q_QNH[first : first + chunk].to(dtype)
        Q = q.shape[0]
        start = seq_len - num_rows + first
        end = start + Q
        q_KGQH = q.view(Q, K, N // K, H).permute(1, 2, 0, 3)
        products = (q_KGQH.reshape(K, -1, H) @ k_KCH[:, :end].mT).view(N, Q, end)
        is_hidden_QC = torch.ones(Q, end, dtype=torch.bool, device=q.device).triu_(start + 1)
        if rule.window:
            is_hidden_QC |= torch.ones_like(is_hidden_QC).tril_(start - rule.window)
        weights = rule.weights(products, is_hidden_QC)
        out_KGQH = (weights.view(K, -1, end) @ v_KCH[:, :end]).view(K, -1, Q, H)
        out_QNH[first : first + Q] = out_KGQH.permute(2, 0, 1, 3).reshape(Q, N, H)


def _attend_single(
    q_SNH: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables_SB: Tensor, seq_lens_S: Tensor, rule: Rule
) -> Tensor:
    """One row for each of several sequences, their contexts padded to the longest."""
    S, N, H = q_SNH.shape
    K, block_size = k_cache.shape[1:3]
    dtype = torch.promote_types(q_SNH.dtype, torch.float32)
    num_blocks = -(-int(seq_lens_S.max()) // block_size)
    tables = block_tables_SB[:, :num_blocks]
    keys, values = (cache[tables].transpose(1, 2).flatten(2, 3).to(dtype) for cache in (k_cache, v_cache))
    k_SKCH, v_SKCH = rule.scaled(keys, values)
    positions = torch.arange(num_blocks * block_size, device=q_SNH.device)
    is_hidden_SC = positions >= seq_lens_S.unsqueeze(1)
    if rule.window:
        is_hidden_SC |= positions < seq_lens_S.unsqueeze(1) - rule.window
    v_SKCH.masked_fill_(is_hidden_SC[:, None, :, None], 0)  # a weight of 0 would not undo a NaN left in a free slot
    products = (q_SNH.to(dtype).view(S, K, N // K, H) @ k_SKCH.mT).view(S, N, 1, -1)
    weights = rule.weights(products, is_hidden_SC[:, None, None, :])
    return (weights.view(S, K, N // K, -1) @ v_SKCH).view(S, N, H).to(q_SNH.dtype)
