"""A model of random logits that writes whatever a grammar allows, in a hurry to come to the end."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
from llguidance import LLTokenizer

from octavo.grammar import forms
from octavo.grammar.matchers import compile_matcher, fill_mask, make_tokenizer, new_mask, normalised
from octavo.grammar.vocabulary import Vocabulary

WORDS = [
    "true",
    "false",
    "null",
    '"name"',
    '": "',
    '", "',
    "hello",
    " world",
    "}, {",
    "12",
    "3.5",
    "},",
    "\u00e9\u00e8",
    "{}",
]
TOKENS = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS] + [b"<eos>", b"<other>"]
EOS = 256 + len(WORDS)
OTHER = EOS + 1
VOCABULARY = Vocabulary(TOKENS, [EOS, OTHER], [EOS])
HURRY = {EOS: 40.0, ord('"'): 12.0, ord("}"): 8.0, ord("]"): 8.0, ord(","): 0.5, ord("\\"): 0.2, ord("e"): 0.3}
BLANKS = frozenset(b" \t\r\n")


@cache
def tokenizer() -> LLTokenizer:
    return make_tokenizer(VOCABULARY)


def allowed(mask: np.ndarray) -> list[int]:
    tokens: list[int] = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
    return tokens


def write(part: forms.Part, rng: random.Random, max_tokens: int = 600) -> bytes | None:
    """A random text of the grammar; ``None`` when there is no end to it in time."""
    matcher = compile_matcher(normalised(forms.grammar_text(part)), tokenizer())
    mask = new_mask(tokenizer())
    data = b""
    for _ in range(max_tokens):
        fill_mask(matcher, mask)
        tokens = allowed(mask)
        assert tokens, matcher.get_error()
        weights = [HURRY.get(token, 0.05 if token in BLANKS else 1.0) for token in tokens]
        (token,) = rng.choices(tokens, weights)
        if token == EOS:
            return data
        assert token != OTHER, "a special token was allowed"
        data += TOKENS[token]
        assert matcher.consume_token(token), matcher.get_error()
    return None
