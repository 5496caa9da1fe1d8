"""Attention over the paged cache, and what stores keys and values in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.attention.cached_rows import STORED, pack_rows, unpack_rows
from octavo.ops.collective import ContextPart, ContextRanks
from octavo.ops.dispatch import op, op_of_ids
from octavo.ops.embedding import embedding
from octavo.ops.norms import rms_norm
from octavo.ops.recurrent.recurrence import StateRows

# ---- attention: The attention of one layer, from the projected queries, keys and values to the heads' outputs.
# Shapes: T tokens of the step, S sequences, N heads, K kv heads, H head dim, W = (N + 2 K) H, R rotated pairs, B
# blocks of the longest table.


class HeadLayout(NamedTuple):
    """Static parameters of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    q_norm_H: Tensor | None = None
    """RMSNorm weight of every query head, applied before the rotation; given together with ``k_norm_H``."""
    k_norm_H: Tensor | None = None
    norm_eps: float = 0.0
    window: int = 0
    """Sliding-window size in positions, the row's own included; 0 for full attention."""
    softcap: float = 0.0
    """Scores become ``softcap * tanh(scores / softcap)``; 0 for no capping."""
    sinks_N: Tensor | None = None
    """float32: an additional logit per head in the denominator of the softmax; [T, N] for each row of a step."""
    slopes_N: Tensor | None = None
    """float32: what a score loses for each position from the key to the query (ALiBi, arXiv 2108.12409)."""
    bias_TNE: Tensor | None = None
    """Of the model's dtype, for each row of a step: what is added to a head's score for a key so many positions before
    the row, from 0 to E - 1; nothing is for others."""
    shares_cache: bool = False
    """Whether another layer has stored this layer's keys and values: rows of ``qkv`` then hold queries only."""

    @property
    def sizes(self) -> list[int]:
        """Number of columns of queries, keys and values in a row."""
        num_stored = 0 if self.shares_cache else self.num_kv_heads
        return [heads * self.head_dim for heads in (self.num_heads, num_stored, num_stored)]


class LayerCache(NamedTuple):
    """One layer's keys and values, each ``[num_blocks, K, block_size, H]``; with rows of ``cached_rows.py`` in place
    of H numbers if they are of 8 or 4 bits."""

    keys: Tensor
    values: Tensor
    group: int = 0
    """The KV group whose block tables and slots refer to this cache."""
    scales: KVScales | None = None
    """Keys and values are divided by these when stored; ``None``: stored as they are."""
    states: tuple[Tensor, ...] = ()
    """Of a layer with recurrent state: each tensor of it, ``[slots, ...]``."""
    context: ContextRanks | None = None
    """The ranks that divide each context; ``None``: the cache holds all of it. See ``partial_attention``."""
    index_keys: Tensor | None = None
    """Keys of an indexer that chooses what is attended to, as those of one head (``ops.choose_keys``)."""
    beside: tuple[LayerCache, ...] = ()
    """What the layer caches besides, each in its own KV group."""


class GroupRows(NamedTuple):
    """Slots and block tables of a step's rows in one KV group."""

    slot_mapping_T: Tensor
    """int64: the slot of each row, block * block_size + offset; negative for padding."""
    block_tables_SB: Tensor
    """int32; padding entries are arbitrary."""


class SingleRows(NamedTuple):
    """The rows of a step of few rows for each sequence, one by one: a kernel may compute each like a sequence's only
    row."""

    seqs_T: Tensor
    """int32: the sequence of each row; -1 for padding."""
    positions_T: Tensor
    """int64"""


class Span(NamedTuple):
    """Rows of one sequence that attend to each other in both directions."""

    first_row: int
    num_rows: int
    seq: int
    start: int
    """Position of the span's first row, which may be in an earlier step than this."""
    end: int
    """Position behind its last row, which is in this step."""


class ImageRows(NamedTuple):
    """The rows of a step that are embeddings of images instead of tokens."""

    slots_T: Tensor
    """int64: the row of ``pool``, -1 for tokens."""
    pool: Tensor
    """[slots, L * D]: an embedding, then what is added to the residual stream after each of the first layers."""
    spans: tuple[Span, ...] = ()

    def put(self, x_TD: Tensor) -> Tensor:
        """Embeddings of a step's tokens, with those of images in their places."""
        D = x_TD.shape[1]
        is_token_T = self.slots_T < 0
        return torch.where(is_token_T[:, None], x_TD, self.pool[self.slots_T.clamp(min=0), :D].to(x_TD.dtype))

    def deepen(self, layer: int, x_TD: Tensor, rows_R: Tensor | None = None) -> Tensor:
        """The residual stream after a layer, with what the tower adds there (deepstack, arXiv 2406.04334).

        ``rows_R``: the rows of the step that are left, if not all.
        """
        D = x_TD.shape[1]
        first = (1 + layer) * D
        if first >= self.pool.shape[1]:
            return x_TD
        slots_T = self.slots_T if rows_R is None else self.slots_T[rows_R]
        added_TD = self.pool[slots_T.clamp(min=0), first : first + D].to(x_TD.dtype)
        return x_TD + added_TD.masked_fill((slots_T < 0)[:, None], 0)


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Paged metadata of a step's rows: their sequences, and where their keys and values are stored.

    Rows from ``cu_seqlens_q[S]`` on are padding, as are sequences without rows, whose length is 0.
    """

    groups: tuple[GroupRows, ...]
    """One for each KV group."""
    cu_seqlens_q: Tensor
    """int32 [S + 1]: rows ``cu_seqlens_q[s]`` to ``cu_seqlens_q[s + 1]`` belong to sequence s."""
    seq_lens_S: Tensor
    """int32: context length of each sequence, the rows of this step included."""
    max_query_len: int
    """Upper bound of a sequence's rows. With 1, row s belongs to sequence s."""
    logits_indices_R: Tensor | None = None
    """Rows whose logits are needed, ``None`` for all. After the last layer's attention, where rows are independent,
    the others are not computed; of a prompt, only the last row is."""
    single: SingleRows | None = None
    """Given where sequences have few rows each: decodes with drafts."""
    has_long_context: bool = False
    """Whether kernels should expect a long context, where that makes a difference."""
    most_context: int = 0
    """No context is longer; 0: the block tables alone tell."""
    rope_shifts_AT: Tensor | None = None
    """int64: rotary positions less positions, for each axis; ``None``: they are the same. Where rotary frequencies
    depend on a text's length, [1, T]: the set of each row's (``RopeSets``)."""
    images: ImageRows | None = None
    """Rows that are embeddings of images, if there are any."""
    state_slots_S: Tensor | None = None
    """int32: the slot of each sequence's recurrent state, -1 for padding; ``None`` for models without."""
    state_marks_T: Tensor | None = None
    """See ``StateRows``."""

    @property
    def states(self) -> StateRows:
        """Where ops with recurrent state find it."""
        assert self.state_slots_S is not None, "the rows have no slots of recurrent state"
        slots_S, marks_T = self.state_slots_S, self.state_marks_T
        return StateRows(self.cu_seqlens_q, self.seq_lens_S, slots_S, self.max_query_len, marks_T)

    def of(self, cache: LayerCache) -> GroupRows:
        """Slots and block tables in the KV group of ``cache``."""
        return self.groups[cache.group]

    def owned(self, part: ContextPart) -> PagedRows:
        """The metadata for a cache that holds a part of each context: slots are those there, -1 for other parts."""
        own = [group._replace(slot_mapping_T=part.slots(group.slot_mapping_T)) for group in self.groups]
        return replace(self, groups=tuple(own))

    def of_layers(self, count: int) -> list[PagedRows]:
        """The metadata for each of a model's layers: all but the last compute every row."""
        if self.logits_indices_R is None:
            return [self] * count
        return [*[replace(self, logits_indices_R=None)] * (count - 1), self]

    def pick(self, attended_TX: Tensor, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of attention's result and of the residual stream whose logits are needed."""
        if self.logits_indices_R is None:
            return attended_TX, x_TD
        return self._picked(attended_TX), self._picked(x_TD)

    def _picked(self, x: Tensor) -> Tensor:
        assert self.logits_indices_R is not None
        # This op can be recorded, and indexing cannot.
        return embedding(self.logits_indices_R, x) if x.dim() == 2 else x[self.logits_indices_R]


@op
def attention(
    qkv_TW: Tensor, heads: HeadLayout, cos_TR: Tensor | None, sin_TR: Tensor | None, cache: LayerCache, rows: PagedRows
) -> Tensor:
    """Norm and rotate queries and keys, store keys and values, attend; a new tensor [T, N * H] of qkv's dtype.

    A row of ``qkv`` holds N query heads, then K key heads, then K value heads; with ``heads.shares_cache``, N query
    heads only. Angles are float32, or ``None`` for a model without rotary positions. The results of padding rows are
    unspecified, and nothing is stored for them.
    """
    assert cache.context is None, "the cache has a part of each context"
    q_TNH = stored_heads(qkv_TW, heads, cos_TR, sin_TR, cache, rows)
    out_TNH = paged_attention(
        q_TNH,
        cache.keys,
        cache.values,
        rows.of(cache).block_tables_SB,
        rows.cu_seqlens_q,
        rows.seq_lens_S,
        *(heads.scale, heads.window, heads.softcap, heads.sinks_N, cache.scales, heads.slopes_N, heads.bias_TNE),
    )
    return out_TNH.flatten(1).to(qkv_TW.dtype)


def stored_heads(
    qkv_TW: Tensor, heads: HeadLayout, cos_TR: Tensor | None, sin_TR: Tensor | None, cache: LayerCache, rows: PagedRows
) -> Tensor:
    """Norm and rotate as ``attention`` does, and store keys and values; the queries [T, N, H], float32 at least.

    Keys are rounded once, when they are stored.
    """
    parts, wide = qkv_TW.split_with_sizes(heads.sizes, dim=-1), torch.promote_types(qkv_TW.dtype, torch.float32)
    q_TNH, k_TKH, v_TKH = (part.view(len(qkv_TW), -1, heads.head_dim) for part in parts)
    q_TNH, k_TKH = q_TNH.to(wide), k_TKH.to(wide)
    if heads.q_norm_H is not None:
        q_TNH = rms_norm(q_TNH.reshape(-1, heads.head_dim), heads.q_norm_H, heads.norm_eps).view(q_TNH.shape)
    if heads.k_norm_H is not None:
        k_TKH = rms_norm(k_TKH.reshape(-1, heads.head_dim), heads.k_norm_H, heads.norm_eps).view(k_TKH.shape)
    if cos_TR is not None and sin_TR is not None:
        q_TNH, k_TKH = apply_rope(q_TNH, k_TKH, cos_TR, sin_TR)
    if not heads.shares_cache:
        store_kv(k_TKH.to(v_TKH), v_TKH, cache.keys, cache.values, rows.of(cache).slot_mapping_T, cache.scales)
    return q_TNH


# ---- paged_attention: Causal attention of a step's tokens over the paged cache, prefill and decode rows alike.
# Shapes: T tokens of the step, S sequences, N heads, K kv heads, G = N / K heads that share one, H head dim, B blocks
# of the longest table, C positions of a context, Q rows of one sequence that are computed together.


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
    slopes_N: Tensor | None = None,
    bias_TNE: Tensor | None = None,
) -> Tensor:
    """Attend from every row to the positions of its sequence up to its own; a new tensor [T, N, H] of q's dtype.

    With a ``window`` a row sees at most that many positions, its own included; with a ``softcap`` scores become
    ``softcap * tanh(scores / softcap)``; with ``slopes`` (float32) each then loses its head's slope times the distance
    of its key, or gains a row's ``bias`` for that distance; ``sinks`` (float32) add a logit per head, or per
    row and head [T, N], to the softmax's denominator.

    Caches are as those of a ``LayerCache`` and hold this step's keys and values already, divided by the ``scales`` if
    given. Rows ``cu_seqlens_q[s]`` to ``cu_seqlens_q[s + 1]`` (int32 [S + 1]) are the last positions of
    sequence s, whose context, these rows included, is ``seq_lens[s]`` long: row i of q rows sits at position
    ``seq_len - q + i``.
    Nothing is read beyond a context: neither table entries past its last block nor slots past its last position.
    Contents before every row's window may be arbitrary, NaN of other sequences included: they change no result.
    Sums are computed in float32 at least.
    """
    sinks = None if sinks_N is None else sinks_N.expand(q_TNH.shape[:2]).t()
    bias = None if bias_TNE is None else bias_TNE.transpose(0, 1)
    rule = Rule(scale, window, softcap, sinks, scales, slopes_N, bias)
    out_TNH = torch.empty_like(q_TNH)
    starts, seq_lens = cu_seqlens_q.tolist(), seq_lens_S.tolist()
    single: list[int] = []
    for s, seq_len in enumerate(seq_lens):
        rows = slice(starts[s], starts[s + 1])
        if rows.stop - rows.start == 1:
            single.append(s)
        elif rows.stop > rows.start:
            seen_from = max(0, seq_len - (rows.stop - rows.start) - window + 1) if window else 0
            keys, values = context(k_cache, v_cache, block_tables_SB[s], seen_from, seq_len, q_TNH.shape[2])
            _attend(q_TNH[rows], keys, values, rule.of(rows), out_TNH[rows])
    single.sort(key=lambda s: seq_lens[s])
    while single:  # from the longest, as many as fit into one batch
        room = max(1, MAX_SCRATCH // (seq_lens[single[-1]] * k_cache.shape[1] * q_TNH.shape[2]))
        group, single = single[-room:], single[:-room]
        group_S = torch.tensor(group, device=q_TNH.device)
        rows_S = cu_seqlens_q[group_S].long()
        tables, lens_S = block_tables_SB[group_S], seq_lens_S[group_S]
        out_TNH[rows_S] = _attend_single(q_TNH[rows_S], k_cache, v_cache, tables, lens_S, rule.of(rows_S))
    return out_TNH


class Rule(NamedTuple):
    """How scores become weights, and what the cache holds becomes keys and values."""

    scale: float
    window: int
    softcap: float
    sinks: Tensor | None
    """[..., N, rows], or [N, 1] for all rows"""
    scales: KVScales | None
    slopes_N: Tensor | None = None
    bias: Tensor | None = None
    """[..., N, rows, E]: what is added to scores by the distance of a key."""

    def of(self, rows: slice | Tensor) -> Rule:
        """That of some rows of a sequence, or of single ones, each of a sequence."""
        bias, sinks = (None if x is None else x[:, rows] for x in (self.bias, self.sinks))
        if isinstance(rows, Tensor):
            bias, sinks = (None if x is None else x.transpose(0, 1).unsqueeze(2) for x in (bias, sinks))
        return self._replace(bias=bias, sinks=sinks)

    def scaled(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [..., K, C, H] of what the cache holds."""
        if self.scales is None:
            return keys, values
        keys, values = (x * scale_K[:, None, None] for x, scale_K in zip((keys, values), self.scales, strict=True))
        return keys, values

    def weights(self, products: Tensor, is_hidden: Tensor, distance: Tensor | None = None) -> Tensor:
        """Softmax over the last axis of ``products`` [..., N, rows, C], which is overwritten; ``distance`` is that of
        each key to its row, for slopes."""
        scores = self.scores(products, is_hidden, distance)
        if self.sinks is None:
            return scores.softmax(dim=-1)
        sinks = self.sinks.to(scores.dtype).unsqueeze(-1).expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]

    def scores(self, products: Tensor, is_hidden: Tensor, distance: Tensor | None = None) -> Tensor:
        """What the softmax is of, without sinks; -inf where keys are hidden."""
        scores = products.mul_(self.scale)
        if self.softcap:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.slopes_N is not None and distance is not None:
            scores = scores.sub_(self.slopes_N[:, None, None] * distance)
        if self.bias is not None and distance is not None:
            places = distance.clamp(0, self.bias.shape[-1] - 1).expand(scores.shape)
            scores = scores.add_(self.bias.gather(-1, places).masked_fill_(distance != places, 0.0))
        return scores.masked_fill_(is_hidden, float("-inf"))


def context(
    k_cache: Tensor, v_cache: Tensor, table_B: Tensor, begin: int, end: int, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of positions ``begin`` to ``end`` of one sequence, copied together: two of [K, C, H]."""
    block_size = k_cache.shape[2]
    first = begin // block_size
    blocks = table_B[first : -(-end // block_size)]
    chosen = slice(begin - first * block_size, end - first * block_size)
    rows = (cache[blocks].transpose(0, 1).flatten(1, 2)[:, chosen] for cache in (k_cache, v_cache))
    keys, values = (unpack_rows(part, head_dim) for part in rows)
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
        start, end = seq_len - num_rows + first, seq_len - num_rows + first + Q
        q_KGQH = q.view(Q, K, N // K, H).permute(1, 2, 0, 3)
        products = (q_KGQH.reshape(K, -1, H) @ k_KCH[:, :end].mT).view(N, Q, end)
        positions_C = torch.arange(end, device=q.device)
        distance_QC = positions_C[start:].unsqueeze(1) - positions_C
        is_hidden_QC = distance_QC < 0
        if rule.window:
            is_hidden_QC |= distance_QC >= rule.window
        weights = rule.of(slice(first, first + Q)).weights(products, is_hidden_QC, distance_QC)
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
    found = (cache[tables].transpose(1, 2).flatten(2, 3) for cache in (k_cache, v_cache))
    keys, values = (unpack_rows(part, H).to(dtype) for part in found)
    k_SKCH, v_SKCH = rule.scaled(keys, values)
    positions = torch.arange(num_blocks * block_size, device=q_SNH.device)
    distance_SC = seq_lens_S.unsqueeze(1) - 1 - positions
    is_hidden_SC = distance_SC < 0
    if rule.window:
        is_hidden_SC |= distance_SC >= rule.window
    v_SKCH.masked_fill_(is_hidden_SC[:, None, :, None], 0)  # a weight of 0 would not undo a NaN left in a free slot
    products = (q_SNH.to(dtype).view(S, K, N // K, H) @ k_SKCH.mT).view(S, N, 1, -1)
    weights = rule.weights(products, is_hidden_SC[:, None, None, :], distance_SC[:, None, None, :])
    return (weights.view(S, K, N // K, -1) @ v_SKCH).view(S, N, H).to(q_SNH.dtype)


# ---- encoder_attention: Bidirectional attention within each text, without a cache. Shapes: T tokens of several
# texts, N heads, K kv heads, H head dim, L tokens of one text, Q rows of it that are computed together, M the largest
# distance that has a bias of its own.


@op
def encoder_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    ends: Sequence[int],
    scale: float,
    window: int = 0,
    bias_NM: Tensor | None = None,
) -> Tensor:
    """Softmax attention within each text; a new tensor [T, N, H] of q's dtype.

    Text i has the rows from ``ends[i - 1]`` to ``ends[i]``, the first from 0. With a ``window`` a row attends to that
    many rows before it and behind it at most. ``bias`` (float32 [N, 2 M + 1]) is added to the scaled scores: that of
    the key's position less the query's, where longer distances than M count as M. Sums are computed in float32 at
    least, and a text's rows do not depend on the other texts.
    """
    wide = torch.promote_types(q_TNH.dtype, torch.float32)
    out_TNH = torch.empty_like(q_TNH)
    is_grouped = q_TNH.shape[1] != k_TKH.shape[1]
    start = 0
    for end in ends:
        q_NLH, k_KLH, v_KLH = (x[start:end].to(wide).transpose(0, 1) for x in (q_TNH, k_TKH, v_TKH))
        if is_grouped:
            k_KLH, v_KLH = (x.repeat_interleave(len(q_NLH) // len(k_KLH), dim=0) for x in (k_KLH, v_KLH))
        L = end - start
        reach = window if 0 < window < L - 1 else 0
        is_plain = bias_NM is None and not reach
        chunk = L if is_plain else max(reach, 1, MAX_SCRATCH // (len(q_NLH) * L))
        for first in range(0, L, chunk):
            last = min(L, first + chunk)
            begin, stop = (max(0, first - reach), min(L, last + reach)) if reach else (0, L)
            mask = None if is_plain else _mask((first, last), (begin, stop), reach, bias_NM, q_NLH)
            attended_NQH = functional.scaled_dot_product_attention(
                q_NLH[:, first:last], k_KLH[:, begin:stop], v_KLH[:, begin:stop], mask, scale=scale
            )
            out_TNH[start + first : start + last] = attended_NQH.transpose(0, 1)
        start = end
    return out_TNH


def _mask(rows: tuple[int, int], seen: tuple[int, int], window: int, bias_NM: Tensor | None, like: Tensor) -> Tensor:
    """What is added to the scores of rows of a text with the positions that they may see, [N or 1, Q, L]."""
    distance_QL = torch.arange(*seen, device=like.device) - torch.arange(*rows, device=like.device).unsqueeze(1)
    if bias_NM is None:
        mask = like.new_zeros(1, *distance_QL.shape)
    else:
        most = bias_NM.shape[1] // 2
        mask = bias_NM.to(like.dtype)[:, distance_QL.clamp(-most, most) + most]
    return mask.masked_fill_(distance_QL.abs() > window, float("-inf")) if window else mask


# ---- apply_rope: Rotary position embedding (Su et al., arXiv 2104.09864), in the half-split layout of Hugging Face
# checkpoints. Shapes: T tokens, N heads, K kv heads, H head dim, R rotated pairs (at most H / 2).


@op
def apply_rope(q_TNH: Tensor, k_TKH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys; new tensors of their own dtypes. ``cos`` and ``sin`` are float32.

    Elements i and R + i of a head are a pair, rotated by the token's angle i; elements from 2R on are unchanged.
    """
    cos, sin = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    return _rotate(q_TNH, cos, sin), _rotate(k_TKH, cos, sin)


def _rotate(x_TNH: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    R = cos_T1R.shape[-1]
    first, second, rest = x_TNH[..., :R], x_TNH[..., R : 2 * R], x_TNH[..., 2 * R :]
    turned = first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R
    return torch.cat((*turned, rest), dim=-1).to(x_TNH.dtype)


# ---- rotary_angles: Cosines and sines of a step's positions, shared by all layers. Shapes: T tokens, R rotated
# pairs, A axes.


class RopeSet(NamedTuple):
    """Which of several sets of frequencies, one after the other, each row has."""

    sets_T: Tensor
    """int64"""
    factors: Tensor
    """float32: the factor of each set, in place of ``factor``."""


@op_of_ids
def rotary_angles(
    positions_T: Tensor, frequencies_R: Tensor, factor: float, chosen: RopeSet | None = None
) -> tuple[Tensor, Tensor]:
    """``factor`` times the cosine and the sine of position (int64) times frequency (float32); two float32 [T, R]."""
    positions_T1 = positions_T.unsqueeze(-1).float()
    if chosen is None:
        angles_TR = positions_T1 * frequencies_R
        return angles_TR.cos().mul_(factor), angles_TR.sin().mul_(factor)
    angles_TR = positions_T1 * frequencies_R.view(len(chosen.factors), -1)[chosen.sets_T]
    factors_T1 = chosen.factors[chosen.sets_T].unsqueeze(-1)
    return angles_TR.cos().mul_(factors_T1), angles_TR.sin().mul_(factors_T1)


@op_of_ids
def axis_angles(
    positions_T: Tensor, shifts_AT: Tensor, axes_R: Tensor, frequencies_R: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    """As ``rotary_angles``, where a row has a position on each axis (int64): its own plus a shift. ``axes`` (int64) has
    the axis of each pair."""
    of_pair_TR = (positions_T + shifts_AT)[axes_R].T
    angles_TR = of_pair_TR.float() * frequencies_R
    return angles_TR.cos().mul_(factor), angles_TR.sin().mul_(factor)


# ---- store_kv: Stores the keys and values of a step in the paged cache. Shapes: T tokens, K kv heads, H head dim. A
# layer's caches are those of ``LayerCache``.


FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max


class KVScales(NamedTuple):
    """What the numbers in a layer's cache are multiplied by to give keys and values: positive, float32 [K]."""

    keys_K: Tensor
    values_K: Tensor


@op
def store_kv(
    k_TKH: Tensor,
    v_TKH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping_T: Tensor,
    scales: KVScales | None = None,
) -> None:
    """Store row t in slot ``slot_mapping[t]`` = block * block_size + offset (int64, distinct).

    Keys and values are divided by the scales, if given. Numbers that a float8 cache cannot hold become the nearest
    that it can. Rows with a negative slot are padding and are not stored.
    """
    block_size = k_cache.shape[2]
    is_row_T = slot_mapping_T >= 0
    slots = slot_mapping_T[is_row_T]
    for x_TKH, cache, scale_K in zip((k_TKH, v_TKH), (k_cache, v_cache), scales or (None, None), strict=True):
        x_RKH = x_TKH[is_row_T] if scale_K is None else x_TKH[is_row_T] / scale_K[:, None]
        if cache.dtype == torch.float8_e4m3fn:
            x_RKH = x_RKH.clamp(-FLOAT8_MAX, FLOAT8_MAX)
        is_packed = cache.dtype in STORED.values()
        stored = pack_rows(x_RKH, cache.dtype) if is_packed else x_RKH.to(cache.dtype)
        cache[slots // block_size, :, slots % block_size] = stored


# ---- store_keys: What ``attention`` does with keys and values, without attending: for rows whose output nobody
# needs. Shapes: T tokens of the step, K kv heads, H head dim, W = (N + 2 K) H for any number N of query heads, R
# rotated pairs.


@op
def store_keys(
    qkv_TW: Tensor, heads: HeadLayout, cos_TR: Tensor, sin_TR: Tensor, cache: LayerCache, slot_mapping_T: Tensor
) -> None:
    """Norm and rotate keys, store keys and values, as ``attention`` does.

    A row of ``qkv`` ends with K key heads, then K value heads; queries before them, as many as there are, are skipped.
    """
    T, H = len(qkv_TW), heads.head_dim
    k_TKH, v_TKH = qkv_TW[:, -2 * heads.num_kv_heads * H :].reshape(T, 2, -1, H).unbind(1)
    if heads.k_norm_H is not None:
        k_TKH = rms_norm(k_TKH.reshape(-1, H), heads.k_norm_H, heads.norm_eps).view(k_TKH.shape)
    _, k_TKH = apply_rope(k_TKH[:, :1], k_TKH, cos_TR, sin_TR)
    store_kv(k_TKH, v_TKH, cache.keys, cache.values, slot_mapping_T, cache.scales)
