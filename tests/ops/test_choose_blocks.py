"""Which blocks an indexer chooses, and attention to them, against plain sorting and attention with a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo import ops
from octavo.ops.attention.attention import HeadLayout, KVScales, LayerCache, store_kv
from octavo.ops.attention.choose_blocks import attend_to_blocks, chosen_keys
from tests.ops.test_choose_keys import HEADS, SHAPES, WIDTH, Shape, Step

COUNT = 3
RUNS: dict[str, Any] = {"reference": ops.choose_blocks.reference, "dispatched": ops.choose_blocks}


def expected(step: Step, size: int, is_weighted: bool = False) -> list[list[int]]:
    """The blocks of each row, by sorting scores and numbers in Python; keys are those of the blocks' last positions."""
    found, t = [], 0
    for keys, length, count in zip(step.keys, step.lengths, step.counts, strict=True):
        for position in range(length - count, length):
            blocks = range((position + 1) // size)
            weights = step.weights_TN[t] if is_weighted else torch.ones(HEADS)
            scores = [((step.q_TNW[t] @ keys[b * size + size - 1]).relu() @ weights).item() for b in blocks]
            found.append(sorted(sorted(blocks, key=lambda b: (-scores[b], b))[:COUNT]))
            t += 1
    return found


def test_positions_of_chosen_blocks_and_those_behind_them(shape: Shape) -> None:
    step, size = Step(shape), 6
    chosen_TC = ops.choose_blocks(step.q_TNW, step.cache, step.rows, size, COUNT)
    keys, t = chosen_keys(chosen_TC, step.cache, step.rows, size, len(step.q_TNW)), 0
    for slots, length, count in zip(step.slots, step.lengths, step.counts, strict=True):
        for position in range(length - count, length):
            blocks = complete(step, chosen_TC, size)[t]
            seen = [p for p in range(position + 1) if p // size in (*blocks, (position + 1) // size)]
            assert keys.slots_TK[t, : keys.counts_T[t]].tolist() == slots[seen].tolist()
            t += 1
    assert not keys.counts_T[t:].any()
    assert keys.starts.tolist() == [min(i, t) for i in range(len(step.q_TNW) + 1)]


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Numbers of the largest tensor of int64 that is made."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype == torch.int64 and found.untyped_storage().nbytes():
            self.numbers = max(self.numbers, found.untyped_storage().nbytes() // 8)
        return found


def test_no_tensor_of_long_integers_has_each_position_of_chosen_blocks() -> None:
    """Where blocks of the cache are as long: rows have thousands of positions each."""
    step = Step(SHAPES["a prompt"], 16)
    chosen_TC = ops.choose_blocks(step.q_TNW, step.cache, step.rows, 16, COUNT)
    with Largest() as largest:  # type: ignore[no-untyped-call]
        keys = chosen_keys(chosen_TC, step.cache, step.rows, 16, len(step.q_TNW))
    assert largest.numbers <= len(step.q_TNW) * (COUNT + 1) < keys.slots_TK.numel()


def complete(step: Step, chosen_TC: torch.Tensor, size: int) -> list[list[int]]:
    """Of the numbers that are told for rows, those of complete blocks."""
    positions = [p for n, count in zip(step.lengths, step.counts, strict=True) for p in range(n - count, n)]
    return [
        [b for b in row if b < (position + 1) // size]
        for row, position in zip(chosen_TC.tolist(), positions, strict=False)
    ]


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("block_size", "size"), [(16, 4), (4, 16), (1, 5), (4, 6)])
def test_the_highest_scores_are_chosen_and_of_equal_ones_the_lowest_numbers(
    run: str, shape: Shape, block_size: int, size: int
) -> None:
    step = Step(shape, block_size)
    chosen_TC = RUNS[run](step.q_TNW, step.cache, step.rows, size, COUNT)
    assert complete(step, chosen_TC, size) == expected(step, size)
    weighted_TC = RUNS[run](step.q_TNW, step.cache, step.rows, size, COUNT, step.weights_TN)
    assert complete(step, weighted_TC, size) == expected(step, size, is_weighted=True)
    assert all(row == sorted(row) for row in chosen_TC.tolist())


@pytest.mark.parametrize(("block_size", "size"), [(16, 4), (4, 16), (4, 6)])
@pytest.mark.parametrize("scales", [None, (0.5, 2.0)])
def test_rows_attend_to_chosen_blocks_and_what_is_behind_them(
    shape: Shape, block_size: int, size: int, scales: tuple[float, float] | None
) -> None:
    step, N, K, H = Step(shape, block_size), 4, 2, 8
    T, real = len(step.q_TNW), int(step.rows.cu_seqlens_q[-1])
    k_cache, v_cache = (torch.full((len(step.index), K, block_size, H), float("nan")) for _ in range(2))
    of_heads = None if scales is None else KVScales(*(torch.tensor(scales) for _ in range(2)))
    cache = LayerCache(k_cache, v_cache, index_keys=step.index, scales=of_heads)
    every = [[torch.randn(n, K, H) for n in step.lengths] for _ in range(2)]
    for keys, values, slots in zip(*every, step.slots, strict=True):
        store_kv(keys, values, k_cache, v_cache, slots, of_heads)
    own = [
        torch.cat([x[n - count :] for x, n, count in zip(xs, step.lengths, step.counts, strict=True)]) for xs in every
    ]
    q_TNH, padding = torch.randn(T, N, H), torch.zeros(T - real, K * H)
    qkv_TW = torch.cat((q_TNH.flatten(1), *[torch.cat((x.flatten(1), padding)) for x in own]), dim=1)
    chosen_TC = ops.choose_blocks(step.q_TNW, step.cache, step.rows, size, COUNT)
    unturned = torch.ones(T, 2), torch.zeros(T, 2)
    found = attend_to_blocks(qkv_TW, HeadLayout(N, K, H, 0.4), unturned, cache, step.rows, chosen_TC, size)
    t = 0
    for s, (length, count) in enumerate(zip(step.lengths, step.counts, strict=True)):
        for position in range(length - count, length):
            blocks = [*expected(step, size)[t], (position + 1) // size]
            seen = [p for b in blocks for p in range(b * size, (b + 1) * size) if p <= position]
            keys, values = (xs[s][seen].repeat_interleave(N // K, dim=1) for xs in every)
            weights_NC = (torch.einsum("nh,cnh->nc", q_TNH[t], keys) * 0.4).softmax(dim=-1)
            torch.testing.assert_close(found[t].view(N, H), torch.einsum("nc,cnh->nh", weights_NC, values))
            t += 1
    assert t == real


def test_a_choice_does_not_depend_on_the_other_rows() -> None:
    step = Step(SHAPES["a prompt"])
    torch.manual_seed(1)
    q_TNW = torch.randn(len(step.q_TNW), HEADS, WIDTH)
    every = ops.choose_blocks(q_TNW, step.cache, step.rows, 4, COUNT)
    for count in (1, 7, 20):
        part = Step(((50,), (count,)))
        first = 50 - count
        found = ops.choose_blocks(q_TNW[first : first + count + 2], part.cache, part.rows, 4, COUNT)
        assert complete(part, found, 4) == complete(step, every, 4)[first:]
