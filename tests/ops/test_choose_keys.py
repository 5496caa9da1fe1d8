"""Which positions an indexer chooses, and attention to them, against plain sorting and attention over whole rows."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from octavo import ops
from octavo.ops.attention.attention import GroupRows, LayerCache, PagedRows, store_kv
from octavo.ops.attention.cached_rows import INT4, STORED, row_length
from octavo.ops.attention.choose_keys import ChosenKeys, sees_all
from octavo.ops.attention.latent_attention import LatentHeads

WIDTH, HEADS, LATENT, TURNED = 20, 5, 16, 4
Shape = tuple[tuple[int, ...], tuple[int, ...]]
SHAPES: dict[str, Shape] = {
    "a decode": ((40, 7, 25), (1, 1, 1)),
    "a prompt": ((50,), (50,)),
    "chunks and decodes": ((33, 64, 9, 26, 70), (5, 1, 9, 0, 20)),
}
"""Lengths of contexts, and the rows of each that are of the step."""


class Step:
    """Rows of a step with caches of an indexer and of latents, of which nothing but the contexts is a number."""

    def __init__(self, shape: Shape, block_size: int = 4, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        lengths, counts = shape
        S, width = len(lengths), -(-max(lengths) // block_size) + 1
        blocks = random.Random(1).sample(range(S * width + 3), S * width)
        self.tables_SB = torch.tensor(blocks, dtype=torch.int32).view(S, width)
        self.lengths, self.counts, self.block_size = lengths, counts, block_size
        stored = STORED.get(dtype, dtype)
        blocks_of = S * width + 3, 1, block_size
        caches = [torch.empty(*blocks_of, row_length(stored, H), dtype=stored) for H in (WIDTH, 2 * TURNED + LATENT)]
        for cache in caches:
            cache.fill_(float("nan") if cache.is_floating_point() else -1)
        self.index, self.latents = caches
        self.slots = [
            self.tables_SB[s, torch.arange(n) // block_size].long() * block_size + torch.arange(n) % block_size
            for s, n in enumerate(lengths)
        ]
        own = [slots[n - count :] for slots, n, count in zip(self.slots, lengths, counts, strict=True) if count]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        padding = torch.full((0 if max(counts) == 1 else 2,), -1)
        self.rows = PagedRows(
            (GroupRows(torch.cat((*own, padding)), self.tables_SB),),
            starts,
            torch.tensor(lengths, dtype=torch.int32) * (torch.tensor(counts) > 0),
            max(counts),
        )
        self.cache = LayerCache(self.latents, self.latents, index_keys=self.index)
        # Small whole numbers: every order of sums gives the same, and many scores are equal.
        self.keys = [torch.randint(-2, 3, (n, WIDTH)).float() for n in lengths]
        for keys, slots in zip(self.keys, self.slots, strict=True):
            store_kv(keys[:, None], keys[:, None], self.index, self.index, slots)
        self.num_rows, T = int(starts[-1]), int(starts[-1]) + len(padding)
        self.q_TNW = torch.randint(-2, 3, (T, HEADS, WIDTH)).float()
        self.weights_TN = torch.randint(-3, 4, (T, HEADS)).float()

    def to(self, device: str, dtype: torch.dtype) -> Step:
        """The same on a device, with queries of a type, which holds these whole numbers."""
        self.index, self.latents, self.weights_TN = (x.to(device) for x in (self.index, self.latents, self.weights_TN))
        rows, (group,) = self.rows, self.rows.groups
        self.q_TNW = self.q_TNW.to(device, dtype)
        self.rows = replace(
            rows,
            groups=(GroupRows(group.slot_mapping_T.to(device), group.block_tables_SB.to(device)),),
            cu_seqlens_q=rows.cu_seqlens_q.to(device),
            seq_lens_S=rows.seq_lens_S.to(device),
        )
        self.cache = LayerCache(self.latents, self.latents, index_keys=self.index)
        return self

    def expected(self, most: int) -> list[list[int]]:
        """The slots of each row, in order of their positions, by sorting scores and positions in Python."""
        found, t = [], 0
        for keys, slots, length, count in zip(self.keys, self.slots, self.lengths, self.counts, strict=True):
            for position in range(length - count, length):
                products = (self.q_TNW[t].float().cpu() @ keys[: position + 1].mT).relu()
                scores = (self.weights_TN[t].cpu() @ products).tolist()
                best = sorted(range(position + 1), key=lambda p: (-scores[p], p))[:most]
                found.append(slots[sorted(best)].tolist())
                t += 1
        return found


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


def chosen_slots(chosen: ChosenKeys, step: Step) -> list[list[int]]:
    """Those of each row; padding has none."""
    counts = chosen.counts_T.tolist()
    assert not any(counts[step.num_rows :])
    return [slots[:n].tolist() for slots, n in zip(chosen.slots_TK, counts[: step.num_rows], strict=False)]


RUNS: dict[str, Any] = {"reference": ops.choose_keys.reference, "dispatched": ops.choose_keys}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("block_size", "dtype"), [(16, torch.float32), (1, torch.bfloat16), (4, torch.float8_e4m3fn)])
def test_the_highest_scores_are_chosen_and_of_equal_ones_the_lowest_positions(
    run: str, shape: Shape, block_size: int, dtype: torch.dtype
) -> None:
    step = Step(shape, block_size, dtype)
    chosen: ChosenKeys = RUNS[run](step.q_TNW, step.weights_TN, step.cache, step.rows, 11)
    assert chosen_slots(chosen, step) == step.expected(11)
    num_padding = len(step.q_TNW) - step.num_rows
    assert chosen.starts.tolist() == [*range(step.num_rows + 1), *[step.num_rows] * num_padding]


@pytest.mark.parametrize("dtype", [torch.int8, INT4])
def test_keys_of_few_bits_are_read(dtype: torch.dtype) -> None:
    """But for rounding, which moves a score in a thousand past another."""
    torch.manual_seed(5)
    step = Step(SHAPES["a prompt"], 4, dtype)
    for keys, slots in zip(step.keys, step.slots, strict=True):
        store_kv(torch.randn_like(keys)[:, None], keys[:, None], step.index, step.index.clone(), slots)
    given = torch.randn_like(step.q_TNW), torch.randn_like(step.weights_TN), step.cache, step.rows, 11
    rows = zip(*(chosen_slots(run(*given), step) for run in RUNS.values()), strict=True)
    alike = [len({*first} & {*second}) / len(first) for first, second in rows]
    assert sum(alike) / len(alike) > 0.99


def latent_heads(device: torch.device) -> LatentHeads:
    maps = (torch.randn(3, LATENT, 6), torch.randn(3, 5, LATENT), torch.rand(LATENT))
    return LatentHeads(*(x.to(device) for x in maps), 1e-6, 0.3)


def inputs(step: Step) -> tuple[Any, ...]:
    """What attention takes before the cache; earlier latents are stored."""
    torch.manual_seed(3)
    T, device = len(step.q_TNW), step.latents.device
    for slots in step.slots:
        latents = torch.randn(len(slots), 1, 2 * TURNED + LATENT).to(device)
        store_kv(latents, latents, step.latents, step.latents, slots.to(device))
    widths = 3 * (6 + 2 * TURNED), LATENT + 2 * TURNED, TURNED, TURNED
    q_TW, kv_TC, cos_TR, sin_TR = (torch.randn(T, width).to(device) for width in widths)
    return q_TW, kv_TC, latent_heads(device), cos_TR, sin_TR, step.cache, step.rows


@pytest.mark.parametrize("run", [ops.latent_attention, ops.latent_attention.reference])
def test_rows_attend_to_what_is_chosen(run: Any, shape: Shape) -> None:
    """As attention over these latents alone, written out; all else in the cache is no number."""
    step = Step(shape)
    given = inputs(step)
    chosen = ops.choose_keys(step.q_TNW, step.weights_TN, step.cache, step.rows, 11)
    found_TNV = run(*given, chosen)
    heads: LatentHeads = given[2]
    q_TNH = cast(Any, ops.store_latents)(*given)
    for t, row in enumerate(chosen_slots(chosen, step)):
        keys_CH = step.latents.flatten(0, 2)[row]
        weights_NC = (q_TNH[t] @ keys_CH.mT * heads.scale).softmax(-1)
        expected_NV = torch.einsum("nc,cl,nvl->nv", weights_NC, keys_CH[:, 2 * TURNED :], heads.value_map_NVL)
        torch.testing.assert_close(found_TNV[t], expected_NV, atol=1e-4, rtol=1e-4)


def test_choosing_all_positions_is_attention_to_the_bit(shape: Shape) -> None:
    step = Step(shape)
    every = ops.choose_keys(step.q_TNW, step.weights_TN, step.cache, step.rows, 200)
    given, attend, n = inputs(step), cast(Any, ops.latent_attention), step.num_rows
    assert torch.equal(attend(*given, every)[:n], attend(*given)[:n])


def test_a_row_chooses_the_same_whatever_else_is_in_the_step() -> None:
    torch.manual_seed(0)
    lengths, counts = SHAPES["chunks and decodes"]
    step = Step((lengths, counts))
    step.q_TNW, step.weights_TN = torch.randn_like(step.q_TNW), torch.randn_like(step.weights_TN)
    every = chosen_slots(ops.choose_keys(step.q_TNW, step.weights_TN, step.cache, step.rows, 11), step)
    t = 0
    for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for position in range(length - count, length):
            rows = PagedRows(
                (GroupRows(step.slots[s][position : position + 1], step.tables_SB[s : s + 1]),),
                torch.tensor([0, 1], dtype=torch.int32),
                torch.tensor([position + 1], dtype=torch.int32),
                1,
            )
            row = slice(t, t + 1)
            alone = ops.choose_keys(step.q_TNW[row], step.weights_TN[row], step.cache, rows, 11)
            assert alone.slots_TK[0, : int(alone.counts_T)].tolist() == every[t]
            t += 1


def test_short_contexts_need_no_choice() -> None:
    step = Step(((9, 12), (9, 1)))
    assert sees_all(step.cache, step.rows, 12)
    assert not sees_all(step.cache, step.rows, 11)
    elsewhere = replace(step.rows, seq_lens_S=step.rows.seq_lens_S.to("meta"))  # which the host cannot read
    assert not sees_all(step.cache, elsewhere, 12)
    assert sees_all(step.cache, replace(elsewhere, most_context=12), 12)
    assert not sees_all(step.cache, replace(elsewhere, most_context=12), 11)
