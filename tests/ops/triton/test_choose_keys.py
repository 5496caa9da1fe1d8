"""Choosing positions, and attending to them: against sorting in Python and the reference, in tiles cut anywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.ops.attention.attention import GroupRows
from octavo.ops.attention.choose_keys import ChosenKeys, choose_keys
from octavo.ops.attention.latent_attention import latent_attention
from octavo_kernels.triton.attention import choose_keys as module
from octavo_kernels.triton.attention import latent_attention as latent
from octavo_kernels.triton.attention.choose_keys import choose_keys_triton
from octavo_kernels.triton.attention.latent_attention import attend_single_rows, latent_attention_triton
from octavo_kernels.triton.launch import invariant
from tests.ops.test_choose_keys import SHAPES, Step, chosen_slots, inputs
from tests.triton_interpreter import quick_first

CASES = [(True, False, False), (True, True, True), (True, True, False), (False, True, False), (False, True, True)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a context is several of everything."""
    monkeypatch.setattr(module, "TILE", 16)
    monkeypatch.setattr(module, "RUN", 32)
    monkeypatch.setattr(module, "MOST_SCORES", 1000)


@pytest.mark.parametrize(
    ("shape", "block_size", "dtype", "cache_dtype"),
    quick_first(
        4,
        [
            ("a decode", 16, torch.bfloat16, torch.bfloat16),
            ("a prompt", 4, torch.float32, torch.float32),
            ("chunks and decodes", 16, torch.bfloat16, torch.float8_e4m3fn),
            ("chunks and decodes", 1, torch.float16, torch.float16),
            ("a prompt", 16, torch.bfloat16, torch.bfloat16),
            ("a decode", 4, torch.float32, torch.float32),
        ],
    ),
)
@pytest.mark.parametrize("count", [11, 64])
def test_the_highest_scores_are_chosen_and_of_equal_ones_the_lowest_positions(
    shape: str, block_size: int, dtype: torch.dtype, cache_dtype: torch.dtype, count: int, device: str
) -> None:
    step = Step(SHAPES[shape], block_size, cache_dtype).to(device, dtype)
    chosen = choose_keys_triton(step.q_TNW, step.weights_TN, step.cache, step.rows, count)
    assert chosen_slots(chosen, step) == step.expected(count)
    reference: ChosenKeys = choose_keys.reference(step.q_TNW, step.weights_TN, step.cache, step.rows, count)
    assert torch.equal(chosen.starts, reference.starts)


def test_a_step_of_more_rows_than_a_launch_has_along_an_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of CUDA's three axes only the first takes 65,536 programs or more. Nothing is computed."""
    grids: list[tuple[int, ...]] = []
    for own in (module, latent):
        monkeypatch.setattr(own, "launch", lambda kernel, grid, *args, **options: grids.append(grid))
    monkeypatch.setattr(module, "MOST_SCORES", 2**25)
    T, step = 70_000, Step(SHAPES["a prompt"])
    queries, narrow = torch.empty(T, 1, step.index.shape[3]), torch.zeros(1, 4, dtype=torch.int32)
    rows = replace(step.rows, groups=(GroupRows(torch.zeros(T, dtype=torch.int64), narrow),))
    chosen = choose_keys_triton(queries, torch.empty(T, 1), step.cache, rows, 11)
    cache, rows = chosen.of(step.cache, rows)
    attend_single_rows(torch.empty(T, 2, 24), 8, cache, rows, 1.0, torch.empty(T, 2, 16))
    assert max(grid[0] for grid in grids) >= T
    assert all(axis < 2**16 for grid in grids for axis in grid[1:])


def test_scores_of_all_sizes_and_signs_are_told_apart(device: str) -> None:
    """Floats between whole numbers: neighbours, denormal ones, infinities and both zeros."""
    step = Step(SHAPES["a prompt"], 16).to(device, torch.float32)
    step.index.zero_()
    values = torch.tensor([1.0, 1.0 + 2**-23, -1.0, 1e-42, -1e-42, 0.0, -0.0, 3e38, -3e38, float("inf")])
    keys = values[torch.randint(0, len(values), (50,))]
    step.index.flatten(0, 2)[step.slots[0], 0] = keys.to(device)
    step.q_TNW.zero_()
    step.q_TNW[:, :2, 0] = torch.tensor([1.0, -1.0], device=device)
    step.weights_TN[:, :2] = torch.tensor([1.0, -1.0], device=device)
    for count in (3, 20, 49):
        chosen = choose_keys_triton(step.q_TNW, step.weights_TN, step.cache, step.rows, count)
        for t, slots in enumerate(chosen_slots(chosen, step)):
            best = sorted(range(t + 1), key=lambda p: (-float(keys[p]), p))[:count]
            assert slots == step.slots[0][sorted(best)].tolist()


@pytest.mark.parametrize(("chooses", "has_sinks", "is_invariant"), CASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_attend_to_what_is_chosen(
    shape: str, chooses: bool, has_sinks: bool, is_invariant: bool, device: str
) -> None:
    step = Step(SHAPES[shape]).to(device, torch.float32)
    given: Any = list(inputs(step))
    if has_sinks:
        given[2] = given[2]._replace(sinks_N=torch.randn(3).to(device))
    chosen = choose_keys.reference(step.q_TNW, step.weights_TN, step.cache, step.rows, 11) if chooses else None
    expected = latent_attention.reference(*given, chosen)[: step.num_rows]
    if is_invariant:
        with invariant():
            found = latent_attention_triton(*given, chosen)[: step.num_rows]
    else:
        found = latent_attention_triton(*given, chosen)[: step.num_rows]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
