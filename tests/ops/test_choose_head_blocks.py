"""Which blocks an indexer chooses, and attention to them, against plain sorting and attention over these positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import ops
from octavo.ops.attention.attention import GroupRows, HeadLayout, LayerCache, PagedRows, store_kv
from octavo.ops.attention.choose_head_blocks import HeadBlocks, attend_to_head_blocks
from tests.ops.test_choose_keys import SHAPES, Step

K, GROUP, H = 2, 3, 8
RULES = {
    "blocks of the cache's size": (4, HeadBlocks(4, 3, 1)),
    "blocks of several of the cache's": (4, HeadBlocks(16, 2, 1)),
    "blocks smaller than the cache's": (16, HeadBlocks(4, 5, 2)),
    "neither divides the other": (6, HeadBlocks(4, 3, 1)),
    "none of its own": (4, HeadBlocks(8, 2, 0)),
}
"""Positions of a block of the cache, and how blocks are chosen."""


def make(shape: str, block_size: int, dtype: torch.dtype = torch.float32) -> tuple[Step, Tensor]:
    """A step, and queries [T, K, I] of small whole numbers, of which many products are equal."""
    step = Step(SHAPES[shape], block_size, dtype)
    return step, torch.randint(-2, 3, (len(step.q_TNW), K, step.q_TNW.shape[2])).float()


def expected(step: Step, q_TKI: Tensor, rule: HeadBlocks) -> list[list[list[int]]]:
    """By sorting in Python."""
    found, t = [], 0
    for keys, length, count in zip(step.keys, step.lengths, step.counts, strict=True):
        for position in range(length - count, length):
            own, of_heads = position // rule.size, []
            for products in (q_TKI[t] @ keys[: position + 1].mT).tolist():
                worth = {c: max(products[c * rule.size : (c + 1) * rule.size]) for c in range(own + 1)}
                worth |= {c: float("inf") for c in range(max(0, own - rule.local + 1), own + 1)}
                of_heads.append(sorted(sorted(worth, key=lambda c: (-worth[c], c))[: rule.most]))
            found.append(of_heads)
            t += 1
    return found


def listed(ids_TKB: Tensor) -> list[list[list[int]]]:
    return [[[c for c in ids if c >= 0] for ids in row] for row in ids_TKB.tolist()]


@pytest.mark.parametrize("run", [ops.choose_head_blocks, ops.choose_head_blocks.reference])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_that_are_worth_most_are_chosen_and_of_equal_ones_the_first(shape: str, name: str, run: Any) -> None:
    block_size, rule = RULES[name]
    for dtype in (torch.float32, torch.float8_e4m3fn):
        step, q_TKI = make(shape, block_size, dtype)
        ids_TKB = run(q_TKI, step.cache, step.rows, rule)
        assert listed(ids_TKB)[: step.num_rows] == expected(step, q_TKI, rule)
        assert (ids_TKB.masked_fill(ids_TKB < 0, 10**6).diff(dim=-1) >= 0).all(), "behind the last there are more"


def test_numbers_that_are_none_are_worth_least() -> None:
    step, q_TKI = make("a prompt", 4)
    rule = HeadBlocks(4, 50, 1)
    q_TKI[:, 0, 0] = float("nan")
    q_TKI[:, 1, 0] = float("inf")
    assert listed(ops.choose_head_blocks(q_TKI, step.cache, step.rows, rule))[step.num_rows - 1] == [[*range(13)]] * 2


def stored(step: Step) -> tuple[LayerCache, Tensor]:
    """Its cache with random keys and values of all contexts and nothing but NaN elsewhere; and queries [T, N H]."""
    torch.manual_seed(3)
    shape = step.index.shape[0], K, step.block_size, H
    cache = step.cache._replace(keys=torch.full(shape, float("nan")), values=torch.full(shape, float("nan")))
    for slots in step.slots:
        store_kv(torch.randn(len(slots), K, H), torch.randn(len(slots), K, H), cache.keys, cache.values, slots)
    return cache, torch.randn(len(step.q_TNW), K * GROUP * H)


LAYOUT = HeadLayout(K * GROUP, K, H, 0.3, shares_cache=True)


def attend(cache: LayerCache, q_TW: Tensor, rows: PagedRows, ids_TKB: Tensor, rule: HeadBlocks) -> Tensor:
    unturned: Any = (None, None)
    return attend_to_head_blocks(q_TW, LAYOUT, unturned, cache, rows, ids_TKB, rule.size)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_attend_to_the_blocks_that_are_chosen(shape: str, name: str) -> None:
    block_size, rule = RULES[name]
    step, q_TKI = make(shape, block_size)
    cache, q_TW = stored(step)
    ids_TKB = ops.choose_head_blocks(q_TKI, cache, step.rows, rule)
    found_TW, t = attend(cache, q_TW, step.rows, ids_TKB, rule), 0
    for slots, length, count in zip(step.slots, step.lengths, step.counts, strict=True):
        for position in range(length - count, length):
            for k, ids in enumerate(listed(ids_TKB)[t]):
                seen = [p for p in range(position + 1) if p // rule.size in ids]
                at = slots[seen]
                keys, values = (x[at // block_size, k, at % block_size] for x in (cache.keys, cache.values))
                q_GH = q_TW[t].view(K, GROUP, H)[k]
                wanted_GH = (q_GH @ keys.mT * 0.3).softmax(-1) @ values
                torch.testing.assert_close(found_TW[t].view(K, GROUP, H)[k], wanted_GH, atol=1e-5, rtol=1e-5)
            t += 1


def test_choosing_all_blocks_is_attention_to_the_bit() -> None:
    step, q_TKI = make("chunks and decodes", 4)
    cache, q_TW = stored(step)
    rule = HeadBlocks(8, 50, 1)
    found_TW = attend(cache, q_TW, step.rows, ops.choose_head_blocks(q_TKI, cache, step.rows, rule), rule)
    assert torch.equal(
        found_TW[: step.num_rows], ops.attention(q_TW, LAYOUT, None, None, cache, step.rows)[: step.num_rows]
    )


def test_a_row_chooses_the_same_whatever_else_is_in_the_step() -> None:
    step, q_TKI = make("chunks and decodes", 4)
    q_TKI, rule, t = torch.randn_like(q_TKI), HeadBlocks(4, 3, 1), 0
    every = ops.choose_head_blocks(q_TKI, step.cache, step.rows, rule)
    for s, (length, count) in enumerate(zip(step.lengths, step.counts, strict=True)):
        for position in range(length - count, length):
            group = GroupRows(step.slots[s][position : position + 1], step.rows.groups[0].block_tables_SB[s : s + 1])
            ends = torch.tensor([0, 1]).int(), torch.tensor([position + 1]).int()
            alone = ops.choose_head_blocks(q_TKI[t : t + 1], step.cache, PagedRows((group,), *ends, 1), rule)
            assert torch.equal(alone[0], every[t])
            t += 1
