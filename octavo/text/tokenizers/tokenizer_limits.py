"""Bounds of what a tokenizer makes of a text; it comes from a checkpoint, which is not trusted.

Every step before the vocabulary can make a text at most so many times as long, in bytes. The factors of the normal
forms are those of UTF-8 (https://unicode.org/faq/normalization.html). A text that the product of all factors could make
too long is normalised in pieces, and refused if they are too long together.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import tokenizers

from octavo.errors import CheckpointError, InvalidParameter

MAX_TEXT_BYTES = 64 << 20
"""Bytes of a text behind all steps. The library takes some 17 times as much memory."""
MAX_GROWTH = 1 << 16
MAX_STEPS = 256
MAX_SPECIAL_TOKENS = 1024
"""Special tokens that are put around a text."""
MAX_AFFIX = 64
"""Characters of what marks that a piece continues or ends a word."""
MAX_WORD = 1000
"""Characters of a word that WordPiece divides, in time that grows with their square; BERT has 100."""
MAX_ADDED_TOKENS = 1 << 17
GROWTH = {
    **dict.fromkeys(("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Nmt", "Punctuation"), 1),
    **dict.fromkeys(("Split", "Strip", "StripAccents", "UnicodeScripts", "Whitespace", "WhitespaceSplit"), 1),
    **dict.fromkeys(("NFC", "NFD"), 3),
    **dict.fromkeys(("NFKC", "NFKD"), 11),
    "Lowercase": 2,
    "BertNormalizer": 16,  # spaces around some characters, a normal form, lower case
    "Metaspace": 6,  # a mark before each piece, and in place of each space
}
"""The factors of steps by their type; those of the others depend on their settings."""


class TextLimits:
    """The limits of one tokenizer. Raises ``CheckpointError``, naming ``origin``, if it has none."""

    def __init__(self, backend: tokenizers.Tokenizer, origin: object) -> None:
        self._normalizer = backend.normalizer
        self._growth = _growth(backend.normalizer, f"{origin}: normalizer")
        self._cut_growth = _growth(backend.pre_tokenizer, f"{origin}: pre_tokenizer")
        self.harmless_characters = MAX_TEXT_BYTES // (4 * self._growth * self._cut_growth)
        """A text of up to so many, of four bytes each at most, need not be checked."""
        _check_special_tokens(backend, f"{origin}: post_processor")
        _check_model(backend, f"{origin}: model")

    def check(self, text: str) -> None:
        """Raise ``InvalidParameter`` for a text that would become too long."""
        most, size = MAX_TEXT_BYTES // self._cut_growth, len(text.encode())
        if size * self._growth <= most:
            return
        if self._normalizer is not None and size <= most:
            size = 0
            length = max(1, most // (4 * self._growth))  # characters, of up to 4 bytes each
            for start in range(0, len(text), length):
                size += len(self._normalizer.normalize_str(text[start : start + length]).encode())
                if size > most:
                    break
        if size > most:
            message = f"The text is too long for the model's tokenizer, which takes {most} bytes, normalised."
            raise InvalidParameter("prompt", message)


def _growth(component: Any, where: str) -> int:
    """How many times as long a normalizer or pre-tokenizer can make a text. Raises ``CheckpointError``."""
    product = 1
    for number, step in enumerate(_steps(component), 1):
        if number > MAX_STEPS:
            raise CheckpointError(f"{where}: has more than {MAX_STEPS} steps")
        product *= _factor(step, where)
        if product > MAX_GROWTH:
            raise CheckpointError(f"{where}: can make a text more than {MAX_GROWTH} times as long")
    return product


def _steps(component: Any) -> Iterator[dict[str, Any]]:
    """The steps of a component as tokenizer.json spells them, those of sequences one by one."""
    if component is None:
        return
    left = [json.loads(component.__getstate__())]
    while left:
        step = left.pop()
        inner = step.get("normalizers") or step.get("pretokenizers") or step.get("processors")
        if step["type"] == "Sequence":
            left += reversed(inner or [])
        else:
            yield step


def _factor(step: dict[str, Any], where: str) -> int:
    kind = step["type"]
    match kind:
        case "Replace":
            content, pattern = len(step["content"].encode()), step["pattern"].get("String")
            # A regular expression can match between any two characters.
            return max(1, -(-content // len(pattern.encode()))) if pattern else 1 + content
        case "ByteLevel":  # two bytes for each, and perhaps a space before each piece
            return 4 if step.get("add_prefix_space") else 2
        case "Prepend":
            return 1 + len(step["prepend"].encode())
        case "Precompiled":
            return _longest_replacement(base64.b64decode(step["precompiled_charsmap"]))
        case _:
            if kind not in GROWTH:
                raise CheckpointError(f"{where}: the step {kind} is not known")
            return GROWTH[kind]


def _longest_replacement(charsmap: bytes) -> int:
    """Bytes of the longest text that replaces another: behind a trie of so many bytes, each ends with a zero."""
    start = 4 + int.from_bytes(charsmap[:4], "little")
    return max(1, *map(len, charsmap[start:].split(b"\0")))


def _check_special_tokens(backend: tokenizers.Tokenizer, where: str) -> None:
    for is_pair in (False, True):
        if (count := backend.num_special_tokens_to_add(is_pair)) > MAX_SPECIAL_TOKENS:
            raise CheckpointError(f"{where}: puts {count} special tokens around a text; at most {MAX_SPECIAL_TOKENS}")
    for step in _steps(backend.post_processor):
        for name in ("single", "pair"):
            texts = [piece["Sequence"]["id"] for piece in step.get(name, ()) if "Sequence" in piece]
            if len(set(texts)) < len(texts):
                raise CheckpointError(f"{where}: {name}: contains a text more than once")


def _check_model(backend: tokenizers.Tokenizer, where: str) -> None:
    model = backend.model
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(getattr(model, name, None) or "") > MAX_AFFIX:
            raise CheckpointError(f"{where}.{name}: has more than {MAX_AFFIX} characters")
    if (longest := getattr(model, "max_input_chars_per_word", 0)) > MAX_WORD:
        raise CheckpointError(f"{where}.max_input_chars_per_word: is {longest}; at most {MAX_WORD}")
    if (count := len(backend.get_added_tokens_decoder())) > MAX_ADDED_TOKENS:
        raise CheckpointError(f"{where}: there are {count} added tokens; at most {MAX_ADDED_TOKENS}")
