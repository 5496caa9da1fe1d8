"""What the deciding half tells of itself after a step."""

from __future__ import annotations

import msgspec

from octavo.cache.kv_cache import KVCache
from octavo.types import EngineStats


def snapshot(counters: EngineStats, cache: KVCache, num_running: int, num_waiting: int) -> EngineStats:
    """``counters`` with the gauges as of now; O(1), for all of them are kept as they change."""
    stats = msgspec.structs.replace(
        counters,
        num_running=num_running,
        num_waiting=num_waiting,
        num_used_blocks=cache.whole.num_used,
        num_empty_slots=cache.whole.num_empty_slots,
        num_cached_blocks=cache.whole.num_cached,
        num_copied_tokens=cache.num_copied,
        num_evictions=cache.num_evicted,
    )
    if cache.whole is not cache:
        stats.num_evictions += cache.whole.num_evicted
        stats.num_window_blocks = cache.num_blocks
        stats.num_used_window_blocks = cache.num_used
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
