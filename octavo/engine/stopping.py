"""When a sequence ends: at an end-of-text or stop token, or at ``max_tokens``.

Stop strings are not tokens; the detokenizer's side looks for them and aborts the request.
"""

from __future__ import annotations

from octavo.types import FinishReason, Sequence


def cut(seq: Sequence, position: int, tokens: list[int]) -> tuple[list[int], FinishReason | None]:
    """Truncate ``tokens``, sampled for ``position`` and after, behind the first that ends ``seq``.

    The stop token itself is kept: it was generated. ``min_tokens`` is not checked here, since the sampler masks every
    stop token until that many were generated.
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
    """The token that ended ``seq`` if it is in the client's ``stop_token_ids``; ``None`` if it is end-of-text."""
    last = tokens[-1]
    return last if last in seq.request.params.stop_token_ids else None
