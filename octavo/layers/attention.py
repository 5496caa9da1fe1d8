"""Attention over the paged cache.

Shapes: T tokens of the step, S sequences, N heads, K kv heads, H head dim, B blocks of the longest table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from octavo import ops


class LayerCache(NamedTuple):
    """One layer's keys and values, each ``[num_blocks, K, block_size, H]``."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where the rows of a step belong: whose they are, and where their keys and values are kept."""

    slot_mapping_T: Tensor
    """int64: the slot of each row, block * block_size + offset."""
    block_tables_SB: Tensor
    """int32, padded with 0."""
    cu_seqlens_q: Tensor
    """int32 [S + 1]: rows ``cu_seqlens_q[s]`` to ``cu_seqlens_q[s + 1]`` are those of sequence s."""
    seq_lens_S: Tensor
    """int32: length of each context, the rows of this step included."""


def attend(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cache: LayerCache, rows: PagedRows, scale: float) -> Tensor:
    """Store the keys and values of these rows, then attend from each row to its context; [T, N, H]."""
    ops.store_kv(k_TKH, v_TKH, cache.keys, cache.values, rows.slot_mapping_T)
    return ops.paged_attention(
        q_TNH, cache.keys, cache.values, rows.block_tables_SB, rows.cu_seqlens_q, rows.seq_lens_S, scale
    )
