"""Rules that cut text into words, against known cuts."""

from __future__ import annotations

import re
import unicodedata

import pytest

from octavo.errors import CheckpointError
from octavo.text.tokenizers.gguf_tokenizer import _CASED, WORD_RULES, word_rule

TEXT = "I'll  PAY 1234 for\n\n 5 ABCdef, don't!"


def cut(name: str, text: str) -> list[str]:
    return [piece for piece, _ in word_rule(name, "here").pre_tokenizer(False).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt-2", "I 'll Ġ ĠPAY Ġ1234 Ġfor ĊĊ Ġ5 ĠABCdef , Ġdon 't !"),
        ("smollm", "I 'll Ġ ĠPAY Ġ 1 2 3 4 Ġfor ĊĊĠ 5 ĠABCdef , Ġdon 't !"),
        ("llama-bpe", "I 'll Ġ ĠPAY Ġ 123 4 Ġfor ĊĊ Ġ 5 ĠABCdef , Ġdon 't !"),
        ("qwen2", "I 'll Ġ ĠPAY Ġ 1 2 3 4 Ġfor ĊĊ Ġ 5 ĠABCdef , Ġdon 't !"),
        ("tekken", "I 'll Ġ ĠPAY Ġ 1 2 3 4 Ġfor ĊĊ Ġ 5 ĠABCdef , Ġdon 't !"),
        ("gpt-4o", "I'll Ġ ĠPAY Ġ 123 4 Ġfor ĊĊ Ġ 5 ĠABCdef , Ġdon't !"),
        ("glm4", "I 'll Ġ ĠPAY Ġ 123 4 Ġfor ĊĊ Ġ 5 ĠABCdef , Ġdon 't !"),
        ("deepseek-llm", "I ' ll Ġ ĠPAY Ġ 1 2 3 4 Ġfor Ċ Ċ Ġ 5 ĠABCdef , Ġdon ' t !"),
        ("deepseek-coder", "I ' ll Ġ ĠPAY Ġ 1 2 3 4 Ġfor Ċ Ċ Ġ 5 ĠABCdef , Ġdon ' t !"),
        ("deepseek-v3", "I 'll Ġ ĠPAY Ġ 123 4 Ġfor ĊĊ Ġ 5 ĠABCdef , Ġdon 't !"),
        ("afmoe", "I 'll Ġ ĠPAY Ġ 1 234 Ġfor ĊĊ Ġ 5 ĠABCdef , Ġdon 't !"),
        ("default", "I ' ll Ġ ĠPAY Ġ 123 4 Ġfor ĊĊ Ġ 5 ĠABCdef , Ġdon ' t !"),
    ],
)
def test_known_cuts(name: str, pieces: str) -> None:
    assert " ".join(cut(name, TEXT)) == pieces


def test_digits_are_grouped_from_the_end_of_a_number() -> None:
    assert " ".join(cut("afmoe", "7 88 12345 1234567 123456")) == "7 Ġ 88 Ġ 12 345 Ġ 1 234 567 Ġ 123 456"
    assert [len(piece) for piece in cut("afmoe", "ab日本カナ한국xy")] == [2, 18, 2]


def test_every_rule_keeps_every_byte() -> None:
    text = "Añ 日本語 😀👍🏽 e\u0301 ½ \t\r\n\u00a0\u2028x_y= ===\u0000"
    for name in WORD_RULES:
        assert len("".join(cut(name, text))) == len(text.encode())


def test_unknown_names_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"a\.gguf: tokenizer\.ggml\.pre is 'nobody'; known are .*llama-bpe"):
        word_rule("nobody", "a.gguf")


@pytest.mark.slow
def test_the_listed_letters_have_cases() -> None:
    """Editors normalise some of them away, after which the ranges are other ones."""
    letters = [chr(code) for code in range(0x110000) if re.fullmatch(f"[{_CASED}]", chr(code))]
    assert {unicodedata.category(letter) for letter in letters} == {"Lu", "Ll", "Lt"}
    assert {"\u212a", "\u2126", "\u1fbe", "\u1f7d"} < set(letters)
