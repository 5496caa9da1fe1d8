"""The tokenizer of engines without a model: a token for each byte, and one for each word that they say."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from octavo.text.tokenizer import Tokenizer
from octavo.text.tokenizers.token_bytes import byte_level_alphabet
from octavo.text.tokenizers.tokenizer_parts import TokenizerParts
from octavo_fleet.backends.toy_models import WORDS

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_BYTES = 256
FIRST_WORD = NUM_BYTES + len(SPECIAL)
VOCAB_SIZE = FIRST_WORD + len(WORDS)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PIECES = [
    *(bytes([byte]) for byte in range(NUM_BYTES)),
    *(text.encode() for text in SPECIAL),
    *(f" {word}".encode() for word in WORDS),
]
"""The bytes of each token of ``word_tokenizer``."""


def byte_tokenizer(
    chat_template: str | None = TEMPLATE, more_special: tuple[str, ...] = (), words: tuple[str, ...] = ()
) -> Tokenizer:
    """A tokenizer with tokens 0 to 255 for the bytes, then special tokens, then ``words``, which only decode."""
    special = (*SPECIAL, *more_special)
    # U+0120 stands for a space. Without merges, no text is encoded as a word.
    further = [*special, *(f"\u0120{word}" for word in words)]
    vocab = byte_level_alphabet() | {text: NUM_BYTES + index for index, text in enumerate(further)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in special])
    names = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}
    return Tokenizer(TokenizerParts(Path("bytes"), backend, names, (NUM_BYTES + 2,), chat_template))


def word_tokenizer() -> Tokenizer:
    """The tokenizer of the backends toy and instant."""
    return byte_tokenizer(words=WORDS)


def prompt_text(tokens: list[int]) -> str:
    """The text that ``tokens`` of ``word_tokenizer`` stand for."""
    return b"".join(map(_PIECES.__getitem__, tokens)).decode("utf-8", "replace")
