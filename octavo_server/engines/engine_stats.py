"""Sums of engine statistics: over the engine processes of one replica, one after another, and over replicas."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec

from octavo.types import EngineStats, KVGroupStats

COUNTER_FIELDS = (
    *("num_steps", "num_scheduled_seqs", "num_prompt_tokens", "num_output_tokens", "num_preemptions"),
    *("prefix_queries", "prefix_hits", "num_copied_tokens", "num_faults", "num_speculations", "num_drafts"),
    *("num_accepted_drafts", "num_moved_experts"),
    *("num_offload_saved", "num_offload_dropped", "num_offload_prefetched", "num_offload_restored"),
    *("num_offload_bad_files", "num_evictions", "num_snapshot_hits", "num_snapshot_evictions"),
    *("session_queries", "session_hits"),
    *("num_transfer_expired", "num_transfer_received", "num_transfer_failures"),
)
"""Cumulative fields of ``EngineStats``; each engine process counts them from 0."""
GAUGE_FIELDS = (
    *("num_running", "num_waiting", "num_blocks", "num_used_blocks", "num_empty_slots", "num_cached_blocks"),
    *("offload_memory_bytes", "offload_disk_bytes", "num_state_slots", "num_used_states", "num_snapshots"),
    *("num_transfer_held", "transfer_held_bytes", "num_sessions", "num_pinned_blocks"),
)
OTHER_FIELDS = ("kv_groups", "accepted_by_position", "expert_imbalance", "step_tokens", "step_seconds")
"""Fields that ``summed`` combines in ways of their own, or that are of one step and have no sum."""


class TotalStats:
    """Makes counters accumulate over engine restarts."""

    def __init__(self) -> None:
        self._earlier = EngineStats()
        """Sum of the counters of all ended engine processes."""

    def total(self, stats: EngineStats) -> EngineStats:
        """``stats``, modified in place to include the counters of earlier engine processes."""
        if self._earlier.num_steps:
            for name in COUNTER_FIELDS:
                setattr(stats, name, getattr(stats, name) + getattr(self._earlier, name))
            stats.accepted_by_position = _added(stats.accepted_by_position, self._earlier.accepted_by_position)
        return stats

    def settle(self, stats: EngineStats) -> EngineStats:
        """The engine process ended with these totals: return them with gauges reset, but for the number of blocks."""
        kept = {name: getattr(stats, name) for name in (*COUNTER_FIELDS, "accepted_by_position")}
        self._earlier = msgspec.structs.replace(EngineStats(num_blocks=stats.num_blocks), **kept)
        return self._earlier


def summed(parts: Iterable[EngineStats]) -> EngineStats:
    """Counters and gauges of several replicas of a model, added; of imbalances the largest."""
    total = EngineStats()
    for part in parts:
        for name in (*COUNTER_FIELDS, *GAUGE_FIELDS):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        total.accepted_by_position = _added(total.accepted_by_position, part.accepted_by_position)
        total.expert_imbalance = max(total.expert_imbalance, part.expert_imbalance)
        total.kv_groups = [_joined(*groups) for groups in zip(total.kv_groups, part.kv_groups, strict=False)] or (
            total.kv_groups or part.kv_groups  # one has none while its engine process starts again
        )
    return total


def _joined(group: KVGroupStats, other: KVGroupStats) -> KVGroupStats:
    """A group of layers in two replicas."""
    return KVGroupStats(
        group.window,
        group.num_blocks + other.num_blocks,
        group.num_used_blocks + other.num_used_blocks,
        group.num_cached_blocks + other.num_cached_blocks,
    )


def _added(these: list[int], others: list[int]) -> list[int]:
    """Sums by position of lists of any length."""
    return [one + other for one, other in itertools.zip_longest(these, others, fillvalue=0)]
