"""When experts are computed with overlapping copies, and in which tiles; results are tested on GPUs."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.moe import GroupedExperts, join_experts
from octavo_kernels.hopper import pipelined_moe
from octavo_kernels.hopper.pipelined_configs import LEAST_ROWS
from octavo_kernels.hopper.pipelined_moe import MAX_ROWS, ROOM, expert_configs
from octavo_kernels.triton.experts.expert_tiles import sort_into_tiles, tile_rows
from octavo_kernels.triton.launch import invariant
from tests.ops.triton.on_hopper import as_on_hopper
from tests.ops.triton.test_grouped_linear import random_groups
from tests.triton_interpreter import DEVICE

X, S, D, F = 8, 2, 128, 64


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_hopper(monkeypatch)


def experts_of(number: str, group: int = 0) -> GroupedExperts:
    def joined(N: int, K: int) -> object:
        return join_experts([random_groups(DEVICE, number, N, K, group) for _ in range(X)])

    return GroupedExperts(X, joined(2 * F, D), joined(D, F))  # type: ignore[arg-type]


def inputs(T: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(X)[:S] for _ in range(T)])
    return torch.zeros(T, D, dtype=dtype, device=DEVICE), ids.to(DEVICE)


@pytest.mark.parametrize("T", [3, 16, 51, 52, 100, 102, 103, 500])
def test_tilings_are_for_the_tiles_that_are_made(T: int) -> None:
    x, ids = inputs(T)
    configs = expert_configs(x, ids, experts_of("e2m1", 32))
    assert configs is not None
    tiles = sort_into_tiles(ids, X, tile_rows(T * S, X, MAX_ROWS, ROOM, LEAST_ROWS))
    assert {config.block_t for config in configs} == {tiles.block}
    assert tiles.used[0] == (tiles.rows > 0).sum()
    assert tiles.block >= min(MAX_ROWS, T * S / X), "the mean of an expert's rows fits into a tile"


def test_few_tokens_and_other_numbers_go_to_other_kernels() -> None:
    packed = experts_of("int4", 32)
    for some in (packed, experts_of("e2m1", 16), experts_of("int8")):
        assert expert_configs(*inputs(1), some) is None
        assert expert_configs(*inputs(3), some) is not None, "pairs that share experts"
    assert expert_configs(*inputs(40, torch.float16), packed) is None
    with invariant():
        assert expert_configs(*inputs(40), packed) is None


@pytest.mark.parametrize(
    ("number", "group", "share"), [("int4", 32, 1), ("int8", 0, 1), ("e2m1", 16, 2), ("uint4", 32, 2)]
)
def test_pairs_that_read_little_have_programs_of_their_own(
    number: str, group: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = experts_of(number, group)._replace(num_routed=64)
    monkeypatch.setattr(pipelined_moe, "MOST_ENTRIES", 8 * S * 3 * D * F * share)
    assert [T for T in range(1, 12) if expert_configs(*inputs(T), experts) is None] == list(range(1, 9))
    monkeypatch.setattr(pipelined_moe, "MOST_ENTRIES", 0)
    few = 1 if share == 2 else 2
    assert [T for T in range(1, 12) if expert_configs(*inputs(T), experts) is None] == list(range(1, few + 1))
