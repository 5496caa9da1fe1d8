"""The rows of ranks that have sequences of their own: together they give the attention of all rows on one device."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.layers.attention import masked_rank_rows, rank_rows
from octavo.layers.image_attention import attention_with_images
from octavo.ops.attention.attention import GroupRows, HeadLayout, ImageRows, LayerCache, PagedRows, SingleRows, Span

W, BLOCK, COUNTS = 3, 4, (15, 12)
"""Ranks, positions of a block, and blocks of each rank in each KV group."""
WINDOW = 4
"""In the second group."""
HEADS = HeadLayout(4, 2, 8, 0.3)


def make_rows(rng: random.Random, num_seqs: int) -> PagedRows:
    """Rows of random sequences, each with blocks of one rank, whose first are behind a window in the second group."""
    starts, lens = [0], list[int]()
    slots: tuple[list[int], list[int]] = ([], [])
    tables: tuple[list[list[int]], list[list[int]]] = ([], [])
    free: list[list[list[int]]] = [[list(range(rank * n, (rank + 1) * n)) for rank in range(W)] for n in COUNTS]
    for _ in range(num_seqs):
        count, rank, length = rng.choice([1, 1, 5]), rng.randrange(W), rng.randrange(5, 9)
        for own, found, table in zip(free, slots, tables, strict=True):
            blocks = [own[rank].pop(rng.randrange(len(own[rank]))) for _ in range(2)] + [0]
            found += [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(length - count, length)]
            has_passed = table is tables[1] and length - count - WINDOW + 1 >= BLOCK
            table.append([0, *blocks[1:]] if has_passed else blocks)
        starts.append(starts[-1] + count)
        lens.append(length)
    groups = [
        GroupRows(torch.tensor(own), torch.tensor(table, dtype=torch.int32))
        for own, table in zip(slots, tables, strict=True)
    ]
    seqs = torch.arange(num_seqs).repeat_interleave(torch.tensor(starts).diff())
    positions = torch.cat([torch.arange(n - (b - a), n) for a, b, n in zip(starts, starts[1:], lens, strict=False)])
    cu_seqlens, seq_lens = (torch.tensor(values, dtype=torch.int32) for values in (starts, lens))
    single = SingleRows(seqs.to(torch.int32), positions)
    return PagedRows(tuple(groups), cu_seqlens, seq_lens, 5, single=single, rope_shifts_AT=positions[None] * 3)


def caches(width: int) -> list[LayerCache]:
    """A layer of full attention and one with a window, with room for ``width`` ranks."""
    zeros = [torch.zeros(2, width * count, HEADS.num_kv_heads, BLOCK, HEADS.head_dim) for count in COUNTS]
    return [LayerCache(both[0], both[1], group) for group, both in enumerate(zeros)]


def with_spans(rows: PagedRows) -> PagedRows:
    """With an image in each sequence of several rows."""
    several = [s for s, count in enumerate(rows.cu_seqlens_q.diff().tolist()) if count > 1]
    spans = []
    for s in several:
        first, length = int(rows.cu_seqlens_q[s]), int(rows.seq_lens_S[s])
        spans.append(Span(first + 2, 3, s, length - 3, length))
    T = len(rows.groups[0].slot_mapping_T)
    return replace(rows, images=ImageRows(torch.full((T,), -1), torch.zeros(1, 8), tuple(spans)))


@pytest.mark.parametrize("seed", range(6))
def test_ranks_together_give_the_attention_of_one_device(seed: int) -> None:
    rng = random.Random(seed)
    rows = with_spans(make_rows(rng, 6))
    T = len(rows.groups[0].slot_mapping_T)
    qkv_TW, (cos_TR, sin_TR) = torch.randn(T, sum(HEADS.sizes)), torch.randn(2, T, 4)
    logits_R = torch.tensor(rng.sample(range(T), 4))
    for group, window in enumerate((0, WINDOW)):
        heads: Any = HEADS._replace(window=window)
        whole = attention_with_images(qkv_TW.clone(), heads, (cos_TR, sin_TR), caches(W)[group], rows)
        found_TX, picked_RX, seen = torch.zeros_like(whole), torch.zeros(4, whole.shape[1]), []
        for rank in range(W):
            ranked = rank_rows(rows, SimpleNamespace(rank=rank, size=W), COUNTS, BLOCK)
            own_n, own = ranked.own_n, ranked.own
            assert own.single is not None
            assert own.rope_shifts_AT is not None
            seen += own_n.tolist()
            if not len(own_n):
                continue
            angles = cos_TR[own_n], sin_TR[own_n]
            attended_nX = attention_with_images(qkv_TW[own_n].clone(), heads, angles, caches(1)[group], own)
            assert torch.equal(own.rope_shifts_AT[0], 3 * own.single.positions_T)
            assert torch.equal(own.seq_lens_S[own.single.seqs_T.long()] > own.single.positions_T, own_n >= 0)
            for picking, target in ((ranked, found_TX), (replace(ranked, logits_indices_R=logits_R), picked_RX)):
                chosen_r, places_r = picking.places
                target[places_r] = attended_nX[chosen_r]
        assert sorted(seen) == list(range(T))
        assert torch.equal(found_TX, whole)
        assert torch.equal(picked_RX, whole[logits_R])


@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_compute_all_rows_give_the_attention_of_one_device(seed: int) -> None:
    """They store nothing for rows that are others'."""
    rng = random.Random(seed)
    rows = with_spans(make_rows(rng, 6))
    T = len(rows.groups[0].slot_mapping_T)
    qkv_TW, angles = torch.randn(T, sum(HEADS.sizes)), torch.randn(2, T, 4).unbind()
    logits_R = torch.tensor(rng.sample(range(T), 4))
    for group, window in enumerate((0, WINDOW)):
        heads: Any = HEADS._replace(window=window)
        whole = attention_with_images(qkv_TW.clone(), heads, angles, caches(W)[group], rows)
        found_TX, picked_RX = torch.zeros_like(whole), torch.zeros(4, whole.shape[1])
        for rank in range(W):
            cache = caches(1)[group]
            masked = masked_rank_rows(rows, SimpleNamespace(rank=rank, size=W), COUNTS, BLOCK)

            def mix(x_TW: Tensor, own: PagedRows, heads: Any = heads, cache: LayerCache = cache) -> Tensor:
                return attention_with_images(x_TW.clone(), heads, angles, cache, own)

            found_TX += masked.part(qkv_TW, mix, torch.clone)
            picked_RX += replace(masked, logits_indices_R=logits_R).part(qkv_TW, mix, torch.clone)
            assert int(cache.keys.any(dim=3).any(dim=1).sum()) == int(masked.is_own_T.sum())
        assert torch.equal(found_TX, whole)
        assert torch.equal(picked_RX, whole[logits_R])


def test_rows_of_padding_belong_to_no_rank() -> None:
    rows = make_rows(random.Random(2), 3)
    slots = torch.cat((rows.groups[0].slot_mapping_T, torch.full((2,), -1)))
    padded = replace(
        rows,
        groups=(GroupRows(slots, torch.nn.functional.pad(rows.groups[0].block_tables_SB, (0, 0, 0, 2))),),
        cu_seqlens_q=torch.nn.functional.pad(rows.cu_seqlens_q, (0, 2), value=int(rows.cu_seqlens_q[-1])),
        seq_lens_S=torch.nn.functional.pad(rows.seq_lens_S, (0, 2)),
        single=None,
        rope_shifts_AT=None,
    )
    ranks = [rank_rows(padded, SimpleNamespace(rank=rank, size=W), COUNTS[:1], BLOCK) for rank in range(W)]
    assert sum(len(ranked.own_n) for ranked in ranks) == len(slots) - 2
    assert sum(len(ranked.own.seq_lens_S) for ranked in ranks) == 3
    assert all((ranked.own.seq_lens_S > 0).all() for ranked in ranks)
