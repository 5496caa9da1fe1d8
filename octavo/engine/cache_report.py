"""What is reported of the KV cache: gauges for metrics, and views of the first KV group for the console."""

from __future__ import annotations

import time
from collections.abc import Collection
from collections.abc import Sequence as Several
from typing import Any

import msgspec
import numpy as np

from octavo.cache.group_cache import GroupCache
from octavo.cache.kv_cache import KVCache
from octavo.telemetry.cache_view import CACHED, FREE, SHARED, CacheView, PrefixView
from octavo.types import EngineStats, KVGroupStats, Sequence

MAX_CELLS = 1024
MAX_PREFIXES = 64
MAX_SESSIONS = 16
MAX_PREFIX_BLOCKS = 4096
"""Blocks of the prefix tree that are visited."""

Owners = np.ndarray[Any, np.dtype[np.int64]]


def view_of(cache: KVCache, holders: Collection[Sequence]) -> CacheView:
    """The state between two steps, given all sequences that hold blocks. Costs O(blocks), in numpy."""
    started = time.perf_counter()
    firsts = [groups[0] for groups in cache.ranks]
    blocks_per_cell = max(1, -(-cache.num_blocks // MAX_CELLS))
    owners = _runs(_owners(firsts, holders), blocks_per_cell)
    prefixes, has_more = _prefixes(firsts)
    sessions = cache.sessions.views(None, MAX_SESSIONS)
    return CacheView(blocks_per_cell, owners, prefixes, has_more, round(time.perf_counter() - started, 6), sessions)


def _owners(firsts: Several[GroupCache], holders: Collection[Sequence]) -> Owners:
    """The owner of each block of all ranks: [num_blocks]."""
    refs = np.array([refs for group in firsts for refs in group.pool.refs[group.pool.blocks.start :]])
    owners = np.full(len(refs), FREE, np.int64)
    for group in firsts:
        owners[np.fromiter((block for block in group.tree.node_of if block >= 0), np.int64)] = CACHED
    for seq in holders:
        held = seq.groups[0]
        owners[held.block_table[held.first_block :]] = seq.id
    owners[refs > 1] = SHARED
    return owners


def _runs(owners: Owners, blocks_per_cell: int) -> list[int]:
    """``CacheView.owners``: the greatest owner in each cell, run-length encoded."""
    cells = np.maximum.reduceat(owners, np.arange(0, len(owners), blocks_per_cell))
    starts = np.flatnonzero(np.concatenate(([True], cells[1:] != cells[:-1])))
    lengths = np.diff(np.append(starts, len(cells)))
    runs: list[int] = np.stack((cells[starts], lengths), axis=1).ravel().tolist()
    return runs


def _prefixes(firsts: Several[GroupCache]) -> tuple[list[PrefixView], bool]:
    """The first chains of the prefix trees, newest first below each, and whether there are more."""
    chains, num_left = list[PrefixView](), MAX_PREFIX_BLOCKS
    pending = [(-1, child) for group in firsts for child in group.tree.root.children.values()]
    while pending and len(chains) < MAX_PREFIXES and num_left > 0:
        parent, node = pending.pop()
        num_blocks = num_held = 0
        while True:
            num_blocks += 1
            num_held += node.block >= 0 and not node.is_idle
            num_left -= 1
            if len(node.children) != 1 or num_left <= 0:
                break
            (node,) = node.children.values()
        pending += [(len(chains), child) for child in node.children.values()]
        chains.append(PrefixView(parent, num_blocks, num_held))
    return chains, bool(pending)


def snapshot(counters: EngineStats, cache: KVCache, num_running: int, num_waiting: int) -> EngineStats:
    """``counters`` with the current gauges; O(1), since every gauge is updated incrementally."""
    firsts = [groups[0] for groups in cache.ranks]
    stats = msgspec.structs.replace(
        counters,
        accepted_by_position=list(counters.accepted_by_position),
        num_running=num_running,
        num_waiting=num_waiting,
        num_used_blocks=sum([first.num_used for first in firsts]),
        num_empty_slots=cache.num_empty_slots,
        num_cached_blocks=sum([first.num_cached for first in firsts]),
        num_copied_tokens=cache.num_copied,
        num_evictions=sum([group.num_evicted for groups in cache.ranks for group in groups]),
        num_sessions=len(cache.sessions),
        num_pinned_blocks=sum([first.num_pinned for first in firsts]),
        session_queries=cache.sessions.num_queries,
        session_hits=cache.sessions.num_hits,
    )
    if len(cache.groups) > 1:
        stats.kv_groups = [
            KVGroupStats(
                of_ranks[0].window,
                sum([group.num_blocks for group in of_ranks]),
                sum([group.num_used for group in of_ranks]),
                sum([group.num_cached for group in of_ranks]),
            )
            for of_ranks in zip(*cache.ranks, strict=True)
        ]
    if (states := cache.states) is not None:
        stats.num_state_slots, stats.num_used_states = states.size.num_slots, states.num_used
        stats.num_snapshots, stats.num_snapshot_hits = states.num_snapshots, states.num_hits
        stats.num_snapshot_evictions = states.num_evicted
    offload = cache.offload
    if offload is not None:
        stats.num_offload_saved = offload.stats.num_saved
        stats.num_offload_dropped = offload.stats.num_dropped
        stats.num_offload_prefetched = offload.stats.num_prefetched
        stats.num_offload_restored = offload.stats.num_restored
        stats.offload_memory_bytes = offload.host.num_bytes
        stats.num_transfer_received, stats.num_transfer_failures = (
            offload.stats.num_received,
            offload.stats.num_failures,
        )
        if offload.held is not None:
            held, _ = offload.held
            stats.num_transfer_held, stats.transfer_held_bytes = len(held), held.num_bytes
            stats.num_transfer_expired = held.num_expired
        if offload.disk is not None:
            stats.num_offload_bad_files = offload.disk.num_bad
            stats.offload_disk_bytes = offload.disk.num_bytes
    return stats
