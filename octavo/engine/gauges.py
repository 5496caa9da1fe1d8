"""Statistics of the scheduler and the KV cache."""

from __future__ import annotations

import msgspec

from octavo.cache.kv_cache import KVCache
from octavo.types import EngineStats, KVGroupStats


def snapshot(counters: EngineStats, cache: KVCache, num_running: int, num_waiting: int) -> EngineStats:
    """``counters`` with the current gauges; O(1), since every gauge is updated incrementally."""
    first = cache.groups[0]
    stats = msgspec.structs.replace(
        counters,
        accepted_by_position=list(counters.accepted_by_position),
        num_running=num_running,
        num_waiting=num_waiting,
        num_used_blocks=first.num_used,
        num_empty_slots=cache.num_empty_slots,
        num_cached_blocks=first.num_cached,
        num_copied_tokens=cache.num_copied,
        num_evictions=sum(group.num_evicted for group in cache.groups),
    )
    if len(cache.groups) > 1:
        stats.kv_groups = [
            KVGroupStats(group.window, group.num_blocks, group.num_used, group.num_cached) for group in cache.groups
        ]
    offload = cache.offload
    if offload is not None:
        stats.num_offload_saved = offload.stats.num_saved
        stats.num_offload_dropped = offload.stats.num_dropped
        stats.num_offload_prefetched = offload.stats.num_prefetched
        stats.num_offload_restored = offload.stats.num_restored
        stats.offload_memory_bytes = offload.host.num_bytes
        if offload.disk is not None:
            stats.num_offload_bad_files = offload.disk.num_bad
            stats.offload_disk_bytes = offload.disk.num_bytes
    return stats
