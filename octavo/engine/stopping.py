"""The result of a sequence's share of a step is applied to its tokens: drafts are accepted, and the sequence may end.

Stop strings are not tokens; the detokenizer's side looks for them and aborts the request.
"""

from __future__ import annotations

from octavo.cache.kv_cache import KVCache
from octavo.telemetry.request_events import EventLog
from octavo.types import REPETITION, EngineStats, FinishReason, Output, Sampled, Scheduled, Sequence, StopReason


def apply_result(
    item: Scheduled, result: Sampled, cache: KVCache, stats: EngineStats, events: EventLog
) -> Output | None:
    """Replace the pending tokens by the sampled ones, and publish the blocks that are now full.

    Returns the output, if there is any, with a ``finish_reason`` if the sequence must be ended.
    """
    seq, start, num_drafts = item.seq, item.settled_start, len(item.drafts)
    num_committed = start + len(item.tokens)
    if start < seq.num_prompt_tokens:
        num_prompt_tokens = min(num_committed, seq.num_prompt_tokens) - start
        stats.num_prompt_tokens += num_prompt_tokens
        events.note(seq.id, "chunk", start=start, tokens=num_prompt_tokens)
    tokens = result.tokens
    reason: FinishReason | None = None
    if not item.samples:
        tokens = []
    elif (  # nothing that ``cut`` looks for can be there: most shares of a step take this way
        not num_drafts
        and num_committed + 1 < seq.max_computed_tokens
        and tokens[0] not in seq.stop_token_ids
        and seq.repetition is None
    ):
        seq.tokens[num_committed] = tokens[0]
    else:
        tokens, reason = cut(seq, num_committed, tokens)
        seq.tokens[num_committed : num_committed + 1 + num_drafts] = tokens
    seq.device_drafts = result.drafts
    if num_drafts:
        num_rejected = 1 + num_drafts - len(result.tokens)
        note_drafts(stats, num_drafts, num_drafts - num_rejected)
        seq.num_drafts += num_drafts
        seq.num_rejected += num_rejected
        if num_rejected and cache.states is not None:
            cache.roll_back(seq, start)
            num_committed = start
        else:
            cache.truncate(seq, seq.num_computed_tokens - num_rejected)
            num_committed += len(tokens) - 1
    if num_committed % cache.block_size < num_committed - start:  # at least one block is newly full
        cache.publish(seq, num_committed)
    if cache.has_windows:
        cache.slide(seq, num_committed)
    if not tokens and reason is None and not result.prompt_logprobs:
        return None
    return Output(
        seq.request.id,
        tokens,
        reason,
        stop_reason(seq, tokens) if reason == "stop" else None,
        seq.num_cached_tokens,
        seq.first_scheduled,
        result.logprobs and result.logprobs[: len(tokens)],
        result.prompt_logprobs,
        start + 1 if result.prompt_logprobs else 0,
        None,
        result.values,  # positional arguments: faster, and this is made for every token
        num_drafts,
        num_drafts and len(result.tokens) - 1,
    )


def note_drafts(stats: EngineStats, num_drafts: int, num_accepted: int) -> None:
    """Count the drafts of one sequence in one step."""
    stats.num_speculations += 1
    stats.num_drafts += num_drafts
    stats.num_accepted_drafts += num_accepted
    by_position = stats.accepted_by_position
    if len(by_position) < num_accepted:
        by_position += [0] * (num_accepted - len(by_position))
    for position in range(num_accepted):
        by_position[position] += 1


def error_output(seq: Sequence, error: str) -> Output:
    """The last output of a sequence that ends with ``error``, or with that of its grammar or of a logits processor."""
    if seq.processors is not None:
        error = seq.processors.error or error
    reason = None if seq.grammar is None else seq.grammar.error
    return Output(
        seq.id,
        [],
        "error",
        num_cached_tokens=seq.num_cached_tokens,
        first_scheduled=seq.first_scheduled,
        error=error if reason is None else f"the grammar failed: {reason}",
    )


def cut(seq: Sequence, position: int, tokens: list[int]) -> tuple[list[int], FinishReason | None]:
    """Truncate ``tokens``, sampled for ``position`` and after, behind the first that ends ``seq``.

    The stop token itself is kept: it was generated. ``min_tokens`` is not checked for stop tokens, since the sampler
    masks all of them until that many were generated.
    """
    room = seq.num_prompt_tokens + seq.request.max_tokens - position
    if len(tokens) < room and seq.stop_token_ids.isdisjoint(tokens) and seq.repetition is None:
        return tokens, None
    if room <= 0:
        return [], "length"
    for count, token in enumerate(tokens, 1):
        if token in seq.stop_token_ids or (seq.repetition is not None and _repeats(seq, position, tokens[:count])):
            return tokens[:count], "stop"
        if count == room:
            return tokens[:count], "length"
    return tokens, None


def stop_reason(seq: Sequence, tokens: list[int]) -> StopReason | None:
    """What ended ``seq``, whose last output is ``tokens``: a token of the client's ``stop_token_ids``, or a repetition.

    ``None`` if it is end-of-text.
    """
    last = tokens[-1]
    if last not in seq.stop_token_ids:
        return REPETITION
    return last if last in seq.request.params.stop_token_ids else None


def _repeats(seq: Sequence, position: int, tokens: list[int]) -> bool:
    """Whether the output repeats itself at the end of ``tokens``, which follow the tokens before ``position``."""
    repetition = seq.repetition
    assert repetition is not None
    if position + len(tokens) - seq.num_prompt_tokens < seq.request.params.min_tokens:
        return False
    start = max(seq.num_prompt_tokens, position - repetition.num_compared)
    return repetition.found_in([token for token in [*seq.tokens[start:position], *tokens] if token is not None])
