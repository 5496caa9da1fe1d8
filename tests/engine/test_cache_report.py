"""Views of the cache agree with its blocks, and are bounded."""

from __future__ import annotations

from octavo.config import EngineConfig
from octavo.engine import cache_report
from octavo.engine.engine import Engine
from octavo.sampling_params import SamplingParams
from octavo.telemetry.cache_view import CACHED, FREE, SHARED, CacheView
from octavo.types import Request
from octavo_fleet.backends import toy

PREFIX = list(b"these words are the same")


def make_engine(num_blocks: int, **more: int) -> Engine:
    settings = {"model": "toy", "backend": "toy", "block_size": 4, "num_kv_blocks": num_blocks}
    return toy.build(EngineConfig.from_flat({**settings, **more}))[0]


def request(number: int, length: int) -> Request:
    own = [32 + (number * 37 + index * 11) % 90 for index in range(length - len(PREFIX))]
    return Request(number, [*PREFIX, *own], SamplingParams(), max_tokens=12, arrival=1.0)


def cells(view: CacheView) -> list[int]:
    pairs = zip(view.owners[::2], view.owners[1::2], strict=True)
    return [owner for owner, number in pairs for _ in range(number)]


def owners(engine: Engine) -> list[int]:
    """The owner of each block, one block at a time."""
    group = engine.scheduler.cache.groups[0]
    holders = {
        block: seq.id for seq in engine.scheduler.running.values() for block in seq.groups[0].block_table
    }  # without a sliding window
    return [
        SHARED if group.pool.refs[block] > 1 else holders.get(block, CACHED if block in group.tree.node_of else FREE)
        for block in range(group.num_blocks)
    ]


def test_cells_have_the_owners_of_their_blocks_after_every_step() -> None:
    engine = make_engine(96, max_num_seqs=3)
    seen: set[int] = set()
    for number in range(1, 8):
        engine.add(request(number, 24 + 5 * number))
    while engine.has_work:
        view = engine.cache_view()
        assert view.blocks_per_cell == 1
        assert cells(view) == owners(engine)
        seen.update(view.owners[::2])
        engine.step()
    assert {FREE, CACHED, SHARED, *range(1, 8)} <= seen
    assert set(cells(engine.cache_view())) == {FREE, CACHED}


def test_the_prefix_tree_is_shown_as_chains() -> None:
    engine = make_engine(96)
    for number in (1, 2):
        engine.add(request(number, 40))
        while engine.has_work:
            engine.step()
    first, *others = engine.cache_view().prefixes
    assert (first.parent, first.blocks, first.held) == (-1, len(PREFIX) // 4, 0)
    assert [each.parent for each in others] == [0, 0]
    assert sum(each.blocks for each in (first, *others)) == engine.stats().num_cached_blocks


def test_the_size_is_bounded() -> None:
    engine = make_engine(10_000, max_num_seqs=300, max_num_batched_tokens=100_000)
    for number in range(1, 1000):
        engine.add(request(number, 24 + number % 60))
    engine.step()
    view = engine.cache_view()
    assert len(cells(view)) == 1000
    assert view.blocks_per_cell == 10
    assert len(view.prefixes) <= cache_report.MAX_PREFIXES
    assert view.seconds > 0
