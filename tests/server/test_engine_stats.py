"""Figures of several engine processes as one."""

from __future__ import annotations

from octavo.types import EngineStats, KVGroupStats
from octavo_server.engines.engine_stats import COUNTER_FIELDS, GAUGE_FIELDS, OTHER_FIELDS, TotalStats, summed


def test_it_is_known_of_every_figure_how_it_adds_up() -> None:
    assert sorted((*COUNTER_FIELDS, *GAUGE_FIELDS, *OTHER_FIELDS)) == sorted(EngineStats.__struct_fields__)


def test_counters_go_on_over_restarts_and_gauges_do_not() -> None:
    total = TotalStats()
    total.settle(EngineStats(num_steps=5, num_moved_experts=3, num_running=2, accepted_by_position=[1]))
    stats = total.total(EngineStats(num_steps=1, num_moved_experts=1, num_running=1, accepted_by_position=[2, 1]))
    assert (stats.num_steps, stats.num_moved_experts, stats.num_running) == (6, 4, 1)
    assert stats.accepted_by_position == [3, 1]


def test_replicas_add_up() -> None:
    groups = [
        [KVGroupStats(0, 9, 4, 1), KVGroupStats(64, 5, 2, 0)],
        [KVGroupStats(0, 9, 1, 2), KVGroupStats(64, 5, 1, 1)],
    ]
    one, two = (EngineStats(num_running=2, num_moved_experts=3, kv_groups=part) for part in groups)
    one.expert_imbalance, two.expert_imbalance = 1.5, 1.25
    stats = summed([one, EngineStats(), two])
    assert (stats.num_running, stats.num_moved_experts, stats.expert_imbalance) == (4, 6, 1.5)
    assert stats.kv_groups == [KVGroupStats(0, 18, 5, 3), KVGroupStats(64, 10, 3, 1)]
