"""The kernel whose copies overlap its products, without a GPU: how programs share the work, and how it is called."""

from __future__ import annotations

import random

import pytest

from octavo.ops.triton.pipelined_end import programs_of, steps_of


@pytest.mark.parametrize("seed", range(100))
def test_every_step_is_taken_once_and_shares_have_places_of_their_own(seed: int) -> None:
    chance = random.Random(seed)
    tiles, units = chance.randint(1, 200), chance.randint(1, 40)
    count = tiles * units
    programs = min(count, chance.choice([1, 2, 3, 132, 264, tiles, 2 * tiles, chance.randint(1, 500)]))
    takers: list[list[int]] = [[] for _ in range(tiles)]
    next_step = 0
    for program in range(programs):
        begin, end = steps_of.fn(program, programs, count)
        assert begin == next_step < end
        assert end - begin in (count // programs, -(-count // programs))
        next_step = end
        for tile in range(begin // units, (end - 1) // units + 1):
            takers[tile].append(program)
    assert next_step == count
    places, counters = set(), set()
    for tile, takes in enumerate(takers):
        begun_by, ended_by = programs_of.fn(tile * units, units, programs, count)
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
