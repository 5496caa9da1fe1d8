"""When a sequence ends by itself: an end-of-text or stop token, or its ``max_tokens``.

Stop strings are not tokens; whoever turns tokens into text looks for them, and aborts.
"""

from __future__ import annotations

from octavo.types import FinishReason, Sequence


def cut(seq: Sequence, position: int, tokens: list[int]) -> tuple[list[int], FinishReason | None]:
    """Keep of ``tokens``, sampled for ``position`` and after, those up to the first that ends ``seq``.

    The token that stops a text is kept: it was generated. ``min_tokens`` needs no look here, since the
    sampler masks every stop token until that many were generated.
    """
    room = seq.num_prompt_tokens + seq.request.max_tokens - position
    if len(tokens) < room and seq.stop_token_ids.isdisjoint(tokens):
        return tokens, None
    if room <= 0:
        return [], "length"
    for count, token in enumerate(tokens, 1):
        if token in seq.stop_token_ids:
            return tokens[:count], "stop"
        if count == room:
            return tokens[:count], "length"
    return tokens, None


def stop_token_id(seq: Sequence, tokens: list[int]) -> int | None:
    """The token that ended ``seq``, if the client named it; ``None`` when it is the model's end-of-text."""
    last = tokens[-1]
    return last if last in seq.request.params.stop_token_ids else None
