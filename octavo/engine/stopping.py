"""When a sequence ends: at an end-of-text or stop token, at a repeated pattern, or at ``max_tokens``.

Stop strings are not tokens; the detokenizer's side looks for them and aborts the request.
"""

from __future__ import annotations

from octavo.types import REPETITION, FinishReason, Sequence, StopReason


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
