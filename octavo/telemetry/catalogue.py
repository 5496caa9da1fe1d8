"""Every metric of the server: its name, what exactly it measures, and where the number comes from.

Names beginning with ``vllm:`` are those that dashboards, autoscalers and routers already know, with the same
meaning; names beginning with ``octavo_`` are our own. Counters are named here without their ``_total``.
All times are in seconds. "Arrival" is when the server accepted a request; a client's request with ``n=4``
counts as four requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from octavo.telemetry.counts import Counts

Reader = Callable[[Counts], float]


def _waiting(counts: Counts) -> float:
    return max(0, counts.condition().num_live - counts.stats.num_running)


def _cache_usage(counts: Counts) -> float:
    stats = counts.stats
    return stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0


def _window_usage(counts: Counts) -> float:
    groups = counts.stats.kv_groups[1:]
    num_blocks = sum(group.num_blocks for group in groups)
    return sum(group.num_used_blocks for group in groups) / num_blocks if num_blocks else 0.0


def _fragmentation(counts: Counts) -> float:
    """Shared blocks are full, so every empty position is in a block that one request holds."""
    num_positions = counts.stats.num_used_blocks * (0 if counts.info is None else counts.info.block_size)
    return counts.stats.num_empty_slots / num_positions if num_positions else 0.0


GAUGES: list[tuple[str, str, Reader]] = [
    ("vllm:num_requests_running", "Requests in the running batch after the last step.", lambda c: c.stats.num_running),
    ("vllm:num_requests_waiting", "Accepted requests that are not in the running batch.", _waiting),
    ("vllm:kv_cache_usage_perc", "Share of KV cache blocks that a request holds, 0 to 1.", _cache_usage),
    (
        "octavo_kv_cache_window_usage_perc",
        "The same of the KV groups with sliding windows behind the first group; 0 where there are none.",
        _window_usage,
    ),
    (
        "octavo_kv_cache_idle_blocks",
        "KV cache blocks that no request holds and the prefix cache keeps for reuse.",
        lambda c: c.stats.num_cached_blocks,
    ),
    (
        "octavo_kv_cache_fragmentation",
        "Share of the token positions in held KV cache blocks that hold nothing, 0 to 1.",
        _fragmentation,
    ),
    (
        "octavo_kv_offload_memory_bytes",
        "Host memory that holds KV cache blocks given up by the pool.",
        lambda c: c.stats.offload_memory_bytes,
    ),
    (
        "octavo_kv_offload_disk_bytes",
        "Bytes of files that hold KV cache blocks.",
        lambda c: c.stats.offload_disk_bytes,
    ),
    ("octavo_requests_live", "Requests accepted and not yet ended.", lambda c: c.condition().num_live),
    (
        "octavo_engine_ready",
        "1 when a request accepted now would be computed at once, else 0.",
        lambda c: c.condition().is_ready,
    ),
    (
        "octavo_seconds_since_progress",
        "Age of the last sign of life of the engine process: a finished step, or an answer while idle.",
        lambda c: c.condition().seconds_since_progress,
    ),
]

COUNTERS: list[tuple[str, str, Reader]] = [
    ("vllm:prompt_tokens", "Prompt tokens of the requests that got a first token.", lambda c: c.prompt_tokens),
    (
        "vllm:prompt_tokens_cached",
        "Of vllm:prompt_tokens, those found in the prefix cache.",
        lambda c: c.cached_tokens,
    ),
    ("vllm:generation_tokens", "Output tokens delivered.", lambda c: c.output_tokens),
    (
        "vllm:num_preemptions",
        "Times that a running request gave back its KV cache blocks.",
        lambda c: c.stats.num_preemptions,
    ),
    (
        "octavo_prefix_cache_evictions",
        "KV cache blocks that the prefix cache gave up to make room.",
        lambda c: c.stats.num_evictions,
    ),
    ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda c: c.stats.prefix_queries),
    ("vllm:prefix_cache_hits", "Of vllm:prefix_cache_queries, tokens found.", lambda c: c.stats.prefix_hits),
    (
        "octavo_prefix_tokens_copied",
        "Tokens whose keys and values were copied out of a block that begins alike, in place of being computed.",
        lambda c: c.stats.num_copied_tokens,
    ),
    ("vllm:spec_decode_num_draft_tokens", "Guessed tokens that were verified.", lambda c: c.stats.num_drafts),
    (
        "vllm:spec_decode_num_accepted_tokens",
        "Of vllm:spec_decode_num_draft_tokens, right ones.",
        lambda c: c.stats.num_accepted_drafts,
    ),
    (
        "octavo_kv_offload_saved_blocks",
        "KV cache blocks given up by the pool that went to host memory.",
        lambda c: c.stats.num_offload_saved,
    ),
    (
        "octavo_kv_offload_dropped_blocks",
        "KV cache blocks given up by the pool and lost, because too many were on their way.",
        lambda c: c.stats.num_offload_dropped,
    ),
    (
        "octavo_kv_offload_prefetched_blocks",
        "KV cache blocks read from the disk ahead of the request that wants them.",
        lambda c: c.stats.num_offload_prefetched,
    ),
    (
        "octavo_kv_offload_restored_blocks",
        "KV cache blocks that came back to the pool in place of being computed.",
        lambda c: c.stats.num_offload_restored,
    ),
    (
        "octavo_kv_offload_bad_files",
        "Files of KV cache blocks that were missing, damaged, or could not be written or read.",
        lambda c: c.stats.num_offload_bad_files,
    ),
    (
        "octavo_prompt_tokens_computed",
        "Prompt tokens computed, recomputation after preemption and restart included.",
        lambda c: c.stats.num_prompt_tokens,
    ),
    ("octavo_steps", "Engine steps finished.", lambda c: c.stats.num_steps),
    ("octavo_step_seconds", "Wall time spent in the steps that were reported.", lambda c: c.step_seconds),
    ("octavo_faults", "Forward passes that failed and were isolated.", lambda c: c.stats.num_faults),
    ("octavo_engine_restarts", "Engine processes started in place of one that died or hung.", lambda c: c.restarts),
    ("octavo_engine_hangs", "Engine processes killed because no step finished in time.", lambda c: c.hangs),
    (
        "octavo_requests_replayed",
        "Requests sent again, with their output so far, to a restarted engine.",
        lambda c: c.replays,
    ),
    (
        "octavo_requests_convicted",
        "Requests ended with an error because the engine dies whenever it runs them.",
        lambda c: c.convictions,
    ),
    ("octavo_front_cpu_seconds", "CPU time of the front process, user and system.", lambda _: time.process_time()),
]

HISTOGRAMS: list[tuple[str, str, str]] = [
    (
        "vllm:time_to_first_token_seconds",
        "Arrival of a request to its first output token, queueing included.",
        "time_to_first_token",
    ),
    (
        "vllm:inter_token_latency_seconds",
        "Gap between consecutive deliveries of a request, pooled over requests; several tokens may share one.",
        "inter_token_latency",
    ),
    (
        "vllm:request_time_per_output_token_seconds",
        "Per request: (end-to-end latency - time to first token) / (output tokens - 1).",
        "time_per_output_token",
    ),
    ("vllm:e2e_request_latency_seconds", "Arrival of a request to its last token.", "end_to_end"),
    ("vllm:request_queue_time_seconds", "Arrival of a request to the first step that computes it.", "queue_time"),
    (
        "vllm:request_prefill_time_seconds",
        "First step that computes a request to its first output token.",
        "prefill_time",
    ),
    ("vllm:request_decode_time_seconds", "First output token of a request to its last.", "decode_time"),
    (
        "vllm:request_inference_time_seconds",
        "First step that computes a request to its last token.",
        "inference_time",
    ),
    ("vllm:request_prompt_tokens", "Prompt tokens of each finished request.", "request_prompt_tokens"),
    ("vllm:request_generation_tokens", "Output tokens of each finished request.", "request_output_tokens"),
    (
        "vllm:request_max_num_generation_tokens",
        "Most output tokens of any continuation; each continuation is a request here, so its own output tokens.",
        "request_output_tokens",
    ),
    (
        "vllm:request_params_max_tokens",
        "Limit of output tokens of each finished request, as resolved against the context.",
        "request_max_tokens",
    ),
    ("vllm:iteration_tokens_total", "Tokens computed by each step.", "step_tokens"),
]
