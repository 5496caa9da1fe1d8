"""The attention of one layer, from the projected queries, keys and values to the heads' outputs.

Shapes: T tokens of the step, S sequences, N heads, K kv heads, H head dim, W = (N + 2 K) H, R rotated pairs,
B blocks of the longest table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.apply_rope import apply_rope
from octavo.ops.dispatch import op
from octavo.ops.embedding import embedding
from octavo.ops.paged_attention import paged_attention
from octavo.ops.recurrence import StateRows
from octavo.ops.rms_norm import rms_norm
from octavo.ops.store_kv import KVScales, store_kv


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
    """float32: an additional logit per head in the denominator of the softmax."""
    shares_cache: bool = False
    """Whether another layer has stored this layer's keys and values: rows of ``qkv`` then hold queries only."""

    @property
    def sizes(self) -> list[int]:
        """Number of columns of queries, keys and values in a row."""
        num_stored = 0 if self.shares_cache else self.num_kv_heads
        return [heads * self.head_dim for heads in (self.num_heads, num_stored, num_stored)]


class LayerCache(NamedTuple):
    """One layer's keys and values, each ``[num_blocks, K, block_size, H]``."""

    keys: Tensor
    values: Tensor
    group: int = 0
    """The KV group whose block tables and slots refer to this cache."""
    scales: KVScales | None = None
    """Keys and values are divided by these when stored; ``None``: stored as they are."""
    states: tuple[Tensor, ...] = ()
    """Of a layer with recurrent state, which has no keys and values: each tensor of it, ``[slots, ...]``."""


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
    rope_shifts_AT: Tensor | None = None
    """int64: rotary positions less positions, for each axis; ``None``: they are the same."""
    images: ImageRows | None = None
    """Rows that are embeddings of images, if there are any."""
    state_slots_S: Tensor | None = None
    """int32: the slot of each sequence's recurrent state, -1 for padding; ``None`` for models without."""

    @property
    def states(self) -> StateRows:
        """Where ops with recurrent state find it."""
        assert self.state_slots_S is not None, "the rows have no slots of recurrent state"
        return StateRows(self.cu_seqlens_q, self.seq_lens_S, self.state_slots_S, self.max_query_len)

    def of(self, cache: LayerCache) -> GroupRows:
        """Slots and block tables in the KV group of ``cache``."""
        return self.groups[cache.group]

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
    T, (slot_mapping_T, block_tables_SB) = qkv_TW.shape[0], rows.of(cache)
    parts = qkv_TW.split_with_sizes(heads.sizes, dim=-1)
    q_TNH, k_TKH, v_TKH = (part.view(T, -1, heads.head_dim) for part in parts)
    if heads.q_norm_H is not None:
        q_TNH = rms_norm(q_TNH.reshape(-1, heads.head_dim), heads.q_norm_H, heads.norm_eps).view(q_TNH.shape)
    if heads.k_norm_H is not None:
        k_TKH = rms_norm(k_TKH.reshape(-1, heads.head_dim), heads.k_norm_H, heads.norm_eps).view(k_TKH.shape)
    if cos_TR is not None and sin_TR is not None:
        q_TNH, k_TKH = apply_rope(q_TNH, k_TKH, cos_TR, sin_TR)
    if not heads.shares_cache:
        store_kv(k_TKH, v_TKH, cache.keys, cache.values, slot_mapping_T, cache.scales)
    out_TNH = paged_attention(
        q_TNH,
        cache.keys,
        cache.values,
        block_tables_SB,
        rows.cu_seqlens_q,
        rows.seq_lens_S,
        heads.scale,
        heads.window,
        heads.softcap,
        heads.sinks_N,
        cache.scales,
    )
    return out_TNH.view(T, -1)
