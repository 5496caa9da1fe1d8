"""Incremental detokenization that never emits an incomplete character."""

from __future__ import annotations

import codecs

from octavo.text.tokenizer import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns a growing list of tokens into growing text.

    However the tokens are split over calls, the concatenated ``push`` and ``flush`` results equal
    ``Tokenizer.decode`` of all tokens. The bytes of an incomplete character are held back; invalid bytes are
    emitted as U+FFFD as soon as that is certain.
    """

    __slots__ = ("_complete_texts", "_decoder", "_is_inside_character", "_skipped", "_token_bytes")

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
    ) -> None:
        """``shown`` are special tokens to decode to text although others are skipped."""
        self._complete_texts = tokenizer.complete_texts
        self._skipped: frozenset[int] = frozenset()
        if skip_special_tokens:
            self._complete_texts = tokenizer.complete_texts_showing(shown)
            self._skipped = tokenizer.special_token_ids - shown
        self._token_bytes = tokenizer.token_bytes
        self._decoder = _new_decoder("replace")
        self._is_inside_character = False

    def push(self, tokens: list[int]) -> str:
        """The text that ``tokens`` complete."""
        if len(tokens) == 1 and not self._is_inside_character:
            # By far the most common call: one token that decodes to complete characters.
            text = self._complete_texts.get(tokens[0])
            if text is not None:
                return text
        data = b"".join([self._token_bytes(token) for token in tokens if token not in self._skipped])
        text = self._decoder.decode(data)
        self._is_inside_character = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """The remainder at the end: U+FFFD for an incomplete character, else empty."""
        self._is_inside_character = False
        return self._decoder.decode(b"", final=True)
