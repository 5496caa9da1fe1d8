"""Masks of allowed tokens, from grammars, ``allowed_token_ids``, ``bad_words``, ``min_tokens``, logits processors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from octavo.types import Masks, Scheduled
from octavo.types import Sequence as Text

Mask = npt.NDArray[np.uint8]


def masks_of(item: Scheduled, grammar_masks: Masks, vocab_size: int) -> Iterator[Mask]:
    """A mask for each position that ``item`` samples: one for each draft, then one for the bonus token.

    All earlier tokens must be known. Where the grammar is complete and allows only tokens that end the text, the other
    restrictions are ignored.
    """
    seq = item.seq
    end, drafts = item.settled_start + len(item.tokens), item.known_drafts
    tokens = [*seq.tokens[seq.num_prompt_tokens : end], *drafts]
    assert None not in tokens, "a token is sampled before those in front of it are known"
    given = grammar_masks.get(seq.id) if seq.request.params.grammar is not None else None
    for i in range(1 + len(drafts)):
        output = tokens[: len(tokens) - len(drafts) + i]
        mask = _everything(vocab_size) if given is None else _of_width(given[i], vocab_size)
        if (forced := _forced(seq, output, mask)) is not None:
            yield forced
            continue
        if given is None or not _must_stop(mask, seq.stop_token_ids):
            mask = _restricted(mask, seq, output)
            if seq.processors is not None:
                known = [token for token in output if token is not None]
                mask = mask & np.packbits(seq.processors.allowed(known, vocab_size), bitorder="little")
        yield mask


def _forced(seq: Text, output: Sequence[int | None], mask: Mask) -> Mask | None:
    """The mask of the one token that ends reasoning whose budget is used up, if ``mask`` allows it."""
    token = None if seq.request.thinking is None else seq.request.thinking.next_token(output)
    if token is None:
        return None
    forced = mask & _only((token,), len(mask))
    return forced if forced.any() else None


def _restricted(mask: Mask, seq: Text, output: Sequence[int | None]) -> Mask:
    """``mask`` without the tokens that the request bans after ``output``."""
    params = seq.request.params
    if params.allowed_token_ids is not None:
        mask = mask & _only(params.allowed_token_ids, len(mask))
    banned = list(_completing(output, seq.request.banned_sequences))
    if len(output) < params.min_tokens:
        banned += seq.stop_token_ids
    return mask & ~_only(banned, len(mask))


def _completing(output: Sequence[int | None], banned_sequences: Iterable[tuple[int, ...]]) -> Iterator[int]:
    """The tokens that would complete a banned sequence after ``output``."""
    for sequence in banned_sequences:
        start = len(output) - len(sequence) + 1
        if start >= 0 and tuple(output[start:]) == sequence[:-1]:
            yield sequence[-1]


def _must_stop(mask: Mask, stop_token_ids: Iterable[int]) -> bool:
    return not (mask & ~_only(stop_token_ids, len(mask))).any()


def _of_width(mask: Mask, vocab_size: int) -> Mask:
    """``mask`` padded or cut to the vocabulary's size; added tokens are not allowed."""
    width = -(-vocab_size // 8)
    return np.pad(mask, (0, width - len(mask))) if len(mask) < width else mask[:width]


def _everything(vocab_size: int) -> Mask:
    return np.full(-(-vocab_size // 8), 0xFF, dtype=np.uint8)


def _only(token_ids: Iterable[int], width: int) -> Mask:
    """Bit mask, ``width`` bytes, of these tokens; ids outside it are ignored."""
    bits = np.zeros(8 * width, dtype=np.bool_)
    bits[[token for token in token_ids if 0 <= token < 8 * width]] = True
    return np.packbits(bits, bitorder="little")
