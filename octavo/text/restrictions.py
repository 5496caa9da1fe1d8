"""Token restrictions of a request: bad words and allowed tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from octavo.errors import InvalidParameter
from octavo.sampling_params import SamplingParams
from octavo.text.tokenizer import Tokenizer

Sequences = tuple[tuple[int, ...], ...]


def banned_sequences(words: Iterable[str], tokenizer: Tokenizer) -> Sequences:
    """Token ids of each bad word, without and with a leading space, since vocabularies encode a word differently at
    the beginning of a text; duplicates are removed.

    These are the encodings that vLLM's ``bad_words`` bans; other encodings of the same text are not banned.
    """
    spellings = (space + word.lstrip(" ") for word in words for space in ("", " "))
    found = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in spellings)
    return tuple(dict.fromkeys(sequence for sequence in found if sequence))


def check_something_is_left(params: SamplingParams, banned: Sequences, stop_token_ids: Collection[int]) -> None:
    """Raise ``InvalidParameter`` if no first token is allowed. Tokens in ``stop_token_ids`` are banned before
    ``min_tokens``."""
    if params.allowed_token_ids is None:
        return
    out = {sequence[0] for sequence in banned if len(sequence) == 1}.union(stop_token_ids if params.min_tokens else ())
    if out.issuperset(params.allowed_token_ids):
        message = "'allowed_token_ids' has only tokens that 'bad_words' or 'min_tokens' keep out."
        raise InvalidParameter("allowed_token_ids", message)
