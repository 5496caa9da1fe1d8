"""What must hold of a request before it is taken, and in the scheduler between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.cache.kv_cache import KVCache
from octavo.errors import ContextLengthExceeded, InvalidParameter
from octavo.types import Sequence, Status

if TYPE_CHECKING:
    from octavo.engine.scheduler import Scheduler


def check_servable(seq: Sequence, cache: KVCache, max_step_tokens: int) -> None:
    """Raise ``RequestError`` if ``seq`` could never be served by steps of so many tokens at most."""
    request = seq.request
    if not request.prompt_tokens:
        raise InvalidParameter("prompt", "The prompt must have at least one token.")
    if request.output_tokens and len(request.output_tokens) >= request.max_tokens:
        raise InvalidParameter(
            "output_tokens",
            f"Nothing is left to generate: {len(request.output_tokens)} of {request.max_tokens} tokens are there.",
        )
    if not cache.could_hold(seq.max_computed_tokens, max_step_tokens):
        raise ContextLengthExceeded(
            f"The prompt has {seq.num_prompt_tokens} tokens and 'max_tokens' is {request.max_tokens}, "
            f"but the KV cache has room for {cache.num_blocks * cache.block_size} tokens.",
            param="max_tokens",
        )


def may_share(seq: Sequence) -> bool:
    """Whether ``seq`` can start from cached blocks.

    What was computed at a cached position is gone, so whoever wants it for the prompt computes all of it.
    """
    return seq.request.params.prompt_logprobs is None and seq.request.task == "generate"


def check_scheduler(scheduler: Scheduler) -> None:
    """Assert it. Costs O(pool)."""
    scheduler.cache.check([*scheduler.running.values(), *scheduler.leaving])
    scheduler.waiting.check()
    orders = [seq.order for seq in scheduler.running.values()]
    assert orders == sorted(orders), "running sequences are out of order"
    assert len(scheduler.running) + len(scheduler.leaving) <= scheduler.max_num_seqs, "too many sequences are running"
    for request_id, seq in scheduler.running.items():
        assert seq.id == request_id, "a running sequence is filed under another id"
        assert request_id not in scheduler.waiting, "a sequence is running and waiting"
        assert seq.status in (Status.RUNNING, Status.YIELDING), "a running sequence has another status"
        assert seq.status is Status.RUNNING or seq is scheduler.yielding, "a running sequence yields to nobody"
        assert seq.num_computed_tokens <= seq.capacity, "a computed position has no block"
        is_complete = seq.num_computed_tokens == seq.max_computed_tokens
        assert is_complete or len(seq.tokens) <= seq.max_computed_tokens, "more is planned than is ever needed"
        assert seq.num_computed_tokens <= seq.max_computed_tokens, "more is computed than is ever needed"
        num_pending = seq.tokens.count(None)
        assert num_pending <= seq.num_in_flight, "a pending token will never be sampled"
        assert None not in seq.tokens[: len(seq.tokens) - num_pending], "a token follows a pending one"
    for seq in scheduler.leaving:
        assert seq.status is Status.FINISHED, "a leaving sequence has not ended"
        assert seq.num_in_flight, "a finished sequence keeps its blocks"
