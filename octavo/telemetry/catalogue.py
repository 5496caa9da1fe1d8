"""Every metric of the server: its name, its definition, and how its value is read.

Names with the prefix ``vllm:`` are those of vLLM, known to dashboards, autoscalers and routers, with the same
meaning; names with the prefix ``octavo_`` are Octavo's. Counters are listed without their suffix ``_total``.
Names with the prefix ``inferengine_`` are those of the project inferengine, for its dashboards.
Times are in seconds. "Arrival" is when the server accepted a request; a client's request with ``n=4``
counts as four requests.
"""

from __future__ import annotations

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
    """Shared blocks are full, so empty positions are only in blocks held by a single request."""
    num_positions = counts.stats.num_used_blocks * (0 if counts.info is None else counts.info.block_size)
    return counts.stats.num_empty_slots / num_positions if num_positions else 0.0


GAUGES: list[tuple[str, str, Reader]] = [
    ("vllm:num_requests_running", "Requests in the running batch after the last step.", lambda c: c.stats.num_running),
    ("vllm:num_requests_waiting", "Accepted requests that are not in the running batch.", _waiting),
    ("vllm:kv_cache_usage_perc", "Fraction of KV cache blocks held by requests, 0 to 1.", _cache_usage),
    ("vllm:gpu_cache_usage_perc", "Deprecated name of vllm:kv_cache_usage_perc.", _cache_usage),
    (
        "octavo_kv_cache_window_usage_perc",
        "Fraction of blocks in use in the sliding-window KV groups after the first group; 0 without such groups.",
        _window_usage,
    ),
    (
        "octavo_kv_cache_idle_blocks",
        "KV cache blocks held by no request and kept by the prefix cache for reuse.",
        lambda c: c.stats.num_cached_blocks,
    ),
    (
        "octavo_kv_cache_pinned_blocks",
        "KV cache blocks that are evicted only after those that no request pins.",
        lambda c: c.stats.num_pinned_blocks,
    ),
    ("octavo_sessions", "Sessions of which the prefix cache knows a turn.", lambda c: c.stats.num_sessions),
    (
        "octavo_kv_cache_fragmentation",
        "Fraction of token positions in held KV cache blocks that are empty, 0 to 1.",
        _fragmentation,
    ),
    (
        "octavo_kv_offload_memory_bytes",
        "Host memory in use for evicted KV cache blocks.",
        lambda c: c.stats.offload_memory_bytes,
    ),
    (
        "octavo_kv_offload_disk_bytes",
        "Bytes of files with evicted KV cache blocks.",
        lambda c: c.stats.offload_disk_bytes,
    ),
    (
        "octavo_kv_transfer_held_blocks",
        "KV cache blocks that a prefill server keeps for decode servers.",
        lambda c: c.stats.num_transfer_held,
    ),
    ("octavo_kv_transfer_held_bytes", "Host memory in use for them.", lambda c: c.stats.transfer_held_bytes),
    (
        "octavo_recurrent_state_slots",
        "Slots for recurrent states, of running requests and of snapshots; 0 for models without recurrent state.",
        lambda c: c.stats.num_state_slots,
    ),
    (
        "octavo_recurrent_state_used_slots",
        "Of octavo_recurrent_state_slots, those held by requests.",
        lambda c: c.stats.num_used_states,
    ),
    (
        "octavo_recurrent_state_snapshots",
        "Of octavo_recurrent_state_slots, snapshots that the prefix cache keeps.",
        lambda c: c.stats.num_snapshots,
    ),
    (
        "octavo_expert_imbalance",
        "Rows of experts on the busiest rank over the mean of the ranks, when --enable-eplb last looked; 0 without it.",
        lambda c: c.stats.expert_imbalance,
    ),
    ("octavo_requests_live", "Requests accepted and not yet ended.", lambda c: c.condition().num_live),
    (
        "octavo_engine_ready",
        "1 when the engine can run a request accepted now, else 0.",
        lambda c: c.condition().is_ready,
    ),
    ("inferengine_batch_size", "The same as vllm:num_requests_running.", lambda c: c.stats.num_running),
    ("inferengine_active_requests", "The same as vllm:num_requests_running.", lambda c: c.stats.num_running),
    ("inferengine_waiting_requests", "The same as vllm:num_requests_waiting.", _waiting),
    ("inferengine_kv_used_pages", "KV cache blocks held by requests.", lambda c: c.stats.num_used_blocks),
    ("inferengine_kv_pressure_events", "The same as vllm:num_preemptions_total.", lambda c: c.stats.num_preemptions),
    (
        "octavo_seconds_since_progress",
        "Time since the engine process last finished a step or, while idle, responded.",
        lambda c: c.condition().seconds_since_progress,
    ),
]

COUNTERS: list[tuple[str, str, Reader]] = [
    ("vllm:prompt_tokens", "Prompt tokens of requests that produced a first token.", lambda c: c.prompt_tokens),
    ("vllm:prompt_tokens_cached", "Of vllm:prompt_tokens, those found in the prefix cache.", lambda c: c.cached_tokens),
    ("vllm:generation_tokens", "Output tokens delivered.", lambda c: c.output_tokens),
    (
        "vllm:num_preemptions",
        "Preemptions: running requests that lost their KV cache blocks.",
        lambda c: c.stats.num_preemptions,
    ),
    (
        "octavo_prefix_cache_evictions",
        "KV cache blocks evicted from the prefix cache.",
        lambda c: c.stats.num_evictions,
    ),
    (
        "octavo_recurrent_state_hits",
        "Times that a request began with a snapshot of a recurrent state.",
        lambda c: c.stats.num_snapshot_hits,
    ),
    (
        "octavo_recurrent_state_evictions",
        "Snapshots of recurrent states evicted from the prefix cache.",
        lambda c: c.stats.num_snapshot_evictions,
    ),
    ("octavo_moved_experts", "Experts copied to another rank by --enable-eplb.", lambda c: c.stats.num_moved_experts),
    ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda c: c.stats.prefix_queries),
    ("vllm:prefix_cache_hits", "Of vllm:prefix_cache_queries, tokens found.", lambda c: c.stats.prefix_hits),
    (
        "octavo_session_queries",
        "Tokens of turns before that the next turn of their session could repeat.",
        lambda c: c.stats.session_queries,
    ),
    (
        "octavo_session_hits",
        "Of octavo_session_queries, tokens found in the prefix cache.",
        lambda c: c.stats.session_hits,
    ),
    (
        "vllm:gpu_prefix_cache_queries",
        "Deprecated name of vllm:prefix_cache_queries.",
        lambda c: c.stats.prefix_queries,
    ),
    ("vllm:gpu_prefix_cache_hits", "Deprecated name of vllm:prefix_cache_hits.", lambda c: c.stats.prefix_hits),
    (
        "octavo_prefix_tokens_copied",
        "Tokens whose keys and values were copied from a partly matching block instead of computed.",
        lambda c: c.stats.num_copied_tokens,
    ),
    (
        "vllm:spec_decode_num_drafts",
        "Speculations: sequences with drafts, summed over the steps that verified them.",
        lambda c: c.stats.num_speculations,
    ),
    ("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", lambda c: c.stats.num_drafts),
    (
        "vllm:spec_decode_num_accepted_tokens",
        "Of vllm:spec_decode_num_draft_tokens, accepted ones.",
        lambda c: c.stats.num_accepted_drafts,
    ),
    (
        "octavo_kv_offload_saved_blocks",
        "Evicted KV cache blocks saved to host memory.",
        lambda c: c.stats.num_offload_saved,
    ),
    (
        "octavo_kv_offload_dropped_blocks",
        "Evicted KV cache blocks dropped because too many transfers were pending.",
        lambda c: c.stats.num_offload_dropped,
    ),
    (
        "octavo_kv_offload_prefetched_blocks",
        "KV cache blocks read from disk ahead of the request that needs them.",
        lambda c: c.stats.num_offload_prefetched,
    ),
    (
        "octavo_kv_offload_restored_blocks",
        "KV cache blocks restored to the pool instead of recomputed.",
        lambda c: c.stats.num_offload_restored,
    ),
    (
        "octavo_kv_offload_bad_files",
        "KV cache block files that were missing, damaged, or failed to be read or written.",
        lambda c: c.stats.num_offload_bad_files,
    ),
    (
        "octavo_kv_transfer_expired_prompts",
        "Prompts whose KV cache blocks no decode server fetched in time.",
        lambda c: c.stats.num_transfer_expired,
    ),
    (
        "octavo_kv_transfer_received_blocks",
        "KV cache blocks that a decode server has fetched.",
        lambda c: c.stats.num_transfer_received,
    ),
    (
        "octavo_kv_transfer_failures",
        "Prompts that a decode server could not fetch, or not as a whole, and computed.",
        lambda c: c.stats.num_transfer_failures,
    ),
    (
        "octavo_prompt_tokens_computed",
        "Prompt tokens computed, recomputation after preemption and restart included.",
        lambda c: c.stats.num_prompt_tokens,
    ),
    ("octavo_steps", "Engine steps finished.", lambda c: c.stats.num_steps),
    ("inferengine_decode_steps", "The same as octavo_steps_total.", lambda c: c.stats.num_steps),
    ("inferengine_tokens_generated", "The same as vllm:generation_tokens_total.", lambda c: c.output_tokens),
    ("octavo_step_seconds", "Wall time of the reported steps.", lambda c: c.step_seconds),
    ("octavo_faults", "Forward passes that failed and were isolated.", lambda c: c.stats.num_faults),
    ("octavo_engine_restarts", "Engine processes started in place of one that died or hung.", lambda c: c.restarts),
    ("octavo_engine_hangs", "Engine processes killed because no step finished in time.", lambda c: c.hangs),
    (
        "octavo_requests_replayed",
        "Requests resubmitted, with their output so far, to a restarted engine.",
        lambda c: c.replays,
    ),
    (
        "octavo_poison_requests",
        "Requests failed because the engine process crashed each time it ran them.",
        lambda c: c.poison_requests,
    ),
]

HISTOGRAMS: list[tuple[str, str, str]] = [
    (
        "vllm:time_to_first_token_seconds",
        "TTFT: arrival of a request to its first output token, queueing included.",
        "time_to_first_token",
    ),
    (
        "vllm:inter_token_latency_seconds",
        "ITL: gap between consecutive deliveries of a request, pooled over requests; one may hold several tokens.",
        "inter_token_latency",
    ),
    (
        "vllm:time_per_output_token_seconds",
        "Deprecated name of vllm:inter_token_latency_seconds.",
        "inter_token_latency",
    ),
    (
        "vllm:request_time_per_output_token_seconds",
        "TPOT, per request: (end-to-end latency - time to first token) / (output tokens - 1).",
        "time_per_output_token",
    ),
    ("vllm:e2e_request_latency_seconds", "Arrival of a request to its last token.", "end_to_end"),
    ("inferengine_request_latency_seconds", "The same as vllm:e2e_request_latency_seconds.", "end_to_end"),
    ("vllm:request_queue_time_seconds", "Arrival of a request to the first step that computes it.", "queue_time"),
    (
        "vllm:request_prefill_time_seconds",
        "First step that computes a request to its first output token.",
        "prefill_time",
    ),
    ("vllm:request_decode_time_seconds", "First output token of a request to its last.", "decode_time"),
    ("vllm:request_inference_time_seconds", "First step that computes a request to its last token.", "inference_time"),
    ("vllm:request_prompt_tokens", "Prompt tokens of each finished request.", "request_prompt_tokens"),
    (
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens of each request that were not found in the prefix cache.",
        "request_computed_tokens",
    ),
    ("vllm:request_generation_tokens", "Output tokens of each finished request.", "request_output_tokens"),
    (
        "vllm:request_max_num_generation_tokens",
        "Maximum output tokens over the continuations; each continuation counts as a request, so its output tokens.",
        "request_output_tokens",
    ),
    (
        "vllm:request_params_max_tokens",
        "Maximum output tokens of each finished request, after resolving against the context length.",
        "request_max_tokens",
    ),
    ("vllm:iteration_tokens_total", "Tokens computed by each step.", "step_tokens"),
]
