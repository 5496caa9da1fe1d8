"""The kernel whose copies overlap its products, without a GPU: how programs share the work, and how it is called."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from octavo.ops.linear.linear import PLAIN, Fused
from octavo_kernels.hopper import pipelined_gemm
from octavo_kernels.hopper.pipelined_configs import PipelinedConfig
from octavo_kernels.hopper.pipelined_tiles import grain_of, programs_of, steps_of
from octavo_kernels.triton.grouped.grouped_linear import run_grouped
from octavo_kernels.triton.norms import rms_norm_triton
from tests.ops.triton.test_grouped_linear import random_groups
from tests.triton_interpreter import DEVICE


@pytest.mark.parametrize("seed", range(100))
def test_every_step_is_taken_once_and_shares_have_places_of_their_own(seed: int) -> None:
    chance = random.Random(seed)
    tiles, units = chance.randint(1, 200), chance.randint(1, 40)
    grain = chance.choice([1, units])
    count = tiles * units // grain
    programs = min(count, chance.choice([1, 2, 3, 132, 264, tiles, 2 * tiles, chance.randint(1, 500)]))
    takers: list[list[int]] = [[] for _ in range(tiles)]
    next_step = 0
    for program in range(programs):
        begin, end = steps_of.fn(program, programs, count, grain)
        assert begin == next_step < end
        assert (end - begin) // grain in (count // programs, -(-count // programs))
        next_step = end
        for tile in range(begin // units, (end - 1) // units + 1):
            takers[tile].append(program)
    assert next_step == tiles * units
    places, counters = set(), set()
    for tile, takes in enumerate(takers):
        begun_by, ended_by = programs_of.fn(tile * units, units, grain, programs, count)
        assert takes == list(range(begun_by, ended_by + 1))
        if begun_by < ended_by:
            assert begun_by not in counters
            counters.add(begun_by)
            own = {2 * program + (program == begun_by) for program in takes}
            assert len(own) == len(takes)
            assert own.isdisjoint(places)
            places |= own
    assert all(place < 2 * programs for place in places)
    if programs % tiles == 0:
        assert all(len(takes) == programs // tiles for takes in takers)
    if grain == units:
        assert all(len(takes) == 1 for takes in takers)


def test_tiles_stay_whole_where_that_leaves_few_programs_idle() -> None:
    for tiles, programs, is_whole in ((96, 384, False), (132, 132, True), (133, 132, False), (390, 132, True)):
        assert grain_of.fn(tiles, 16, programs) == (16 if is_whole else 1)
    assert grain_of.fn(12 * 132 - 66, 16, 132) == 16, "half of them are idle for 16 steps"
    assert grain_of.fn(12 * 132 - 66, 32, 132) == 1


@pytest.mark.parametrize("first", [0, 1, 8])
def test_rows_are_copied_where_their_address_is_not_one_for_the_copies(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, so that 8 are 16 bytes."""
    given: list[Any] = []
    monkeypatch.setattr(pipelined_gemm, "launch", lambda kernel, grid, *args, **options: given.append(args[0].base))
    packed = random_groups("cpu", "int4", 64, 1024, 128)
    flat = torch.randn(5 * 1024 + first).bfloat16()
    x_TK = flat[first:].view(5, 1024)
    config = PipelinedConfig(64, 16, warps=4, stages=4, programs=2, registers=128)
    assert run_grouped(x_TK, packed, PLAIN, config).shape == (5, 64)
    assert torch.equal(given[0], x_TK)
    assert given[0].data_ptr() % 16 == 0
    assert (given[0].data_ptr() == x_TK.data_ptr()) == (first % 8 == 0)


def test_rows_are_normed_and_put_in_order_before(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(pipelined_gemm, "launch", lambda kernel, grid, *args, **options: given.append(args[0].base))
    packed = random_groups(DEVICE, "int4", 64, 1024, 128, order=True)
    x_TK, norm_K = torch.randn(9, 1024, device=DEVICE).bfloat16(), torch.rand(1024, device=DEVICE).bfloat16()
    config = PipelinedConfig(64, 16, warps=4, stages=4, programs=2, registers=128)
    run_grouped(x_TK, packed, Fused(norm_K=norm_K, eps=1e-6), config)
    assert packed.order_K is not None
    assert torch.equal(given[0], rms_norm_triton(x_TK, norm_K, 1e-6)[:, packed.order_K])
