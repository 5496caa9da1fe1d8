"""What a result means for its sequence, and what there is to tell of it."""

from __future__ import annotations

from octavo.cache.kv_cache import KVCache
from octavo.engine import stopping
from octavo.telemetry.events import EventLog
from octavo.types import EngineStats, FinishReason, Output, Sampled, Scheduled, Sequence


def take_in(item: Scheduled, result: Sampled, cache: KVCache, stats: EngineStats, events: EventLog) -> Output | None:
    """Put the sampled tokens in place of the pending one, and publish the blocks that are now full.

    Returns what there is to tell, if anything; with a ``finish_reason`` if the sequence is to end.
    """
    seq = item.seq
    num_committed = item.start + len(item.tokens)
    if item.start < seq.num_prompt_tokens:
        num_prompt_tokens = min(num_committed, seq.num_prompt_tokens) - item.start
        stats.num_prompt_tokens += num_prompt_tokens
        events.note(seq.id, "chunk", start=item.start, tokens=num_prompt_tokens)
    tokens: list[int] = []
    reason: FinishReason | None = None
    if item.samples:
        position = num_committed
        tokens, reason = stopping.cut(seq, position, result.tokens)
        seq.tokens[position : position + 1] = tokens
        stats.num_output_tokens += len(tokens)
        if item.drafts:
            num_rejected = 1 + len(item.drafts) - len(result.tokens)
            stats.num_drafts += len(item.drafts)
            stats.num_accepted_drafts += len(result.tokens) - 1
            cache.truncate(seq, seq.num_computed_tokens - num_rejected)
            num_committed += len(tokens) - 1
    block_size = cache.block_size
    if num_committed // block_size > item.start // block_size:
        cache.publish(seq, num_committed)
    if cache.window:
        cache.slide(seq, num_committed)
    if not tokens and reason is None and not result.prompt_logprobs:
        return None
    return Output(
        seq.request.id,
        tokens,
        reason,
        stopping.stop_token_id(seq, tokens) if reason == "stop" else None,
        seq.num_cached_tokens,
        seq.first_scheduled,
        result.logprobs and result.logprobs[: len(tokens)],
        result.prompt_logprobs,
        item.start + 1 if result.prompt_logprobs else 0,
        values=result.values,
    )


def error_output(seq: Sequence, error: str) -> Output:
    """The last news of a sequence that ends with ``error``."""
    return Output(
        seq.id,
        [],
        "error",
        num_cached_tokens=seq.num_cached_tokens,
        first_scheduled=seq.first_scheduled,
        error=error,
    )
