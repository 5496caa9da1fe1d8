"""Text in pieces is the text at once, whatever the tokens and the cuts."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.text.text_stream import Detokenizer
from octavo.text.tokenizer import Tokenizer

from .conftest import build, byte_level_metadata

SMALL = build(byte_level_metadata())
tokens_of_text = st.text(max_size=12).map(SMALL.encode)
any_tokens = st.lists(st.integers(0, SMALL.vocab_size + 3), max_size=24)
pieces = st.lists(st.one_of(any_tokens, tokens_of_text), max_size=8)


def in_pieces(tokenizer: Tokenizer, parts: list[list[int]], skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    return [*(detokenizer.push(part) for part in parts), detokenizer.flush()]


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(parts=pieces, skip=st.booleans())
def test_any_cut_gives_the_same_text(parts: list[list[int]], skip: bool) -> None:
    whole = [token for part in parts for token in part]
    expected = SMALL.decode(whole, skip)
    assert "".join(in_pieces(SMALL, parts, skip)) == expected
    assert "".join(in_pieces(SMALL, [[token] for token in whole], skip)) == expected


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=40), skip=st.booleans())
def test_valid_text_never_shows_half_a_character(text: str, skip: bool) -> None:
    deltas = in_pieces(SMALL, [[token] for token in SMALL.encode(text)], skip=False)
    assert "".join(deltas) == text
    shown = ""
    for delta in deltas:
        shown += delta
        assert text.startswith(shown)


def test_a_character_waits_for_its_last_byte() -> None:
    smile = SMALL.encode("😀")
    assert len(smile) == 3
    detokenizer = Detokenizer(SMALL)
    assert [detokenizer.push([token]) for token in smile] == ["", "", "😀"]
    assert detokenizer.flush() == ""


def test_bytes_that_cannot_become_a_character_come_out_as_soon_as_that_is_certain() -> None:
    first, letter = SMALL.encode("😀")[0], SMALL.encode("t")[0]
    detokenizer = Detokenizer(SMALL)
    assert detokenizer.push([first]) == ""
    assert detokenizer.push([letter]) == "\ufffdt"
    assert detokenizer.push([first]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_special_tokens_are_skipped_or_shown() -> None:
    tokens = [SMALL.encode("t")[0], 2, SMALL.encode("h")[0]]
    assert in_pieces(SMALL, [[t] for t in tokens], skip=True) == ["t", "", "h", ""]
    assert in_pieces(SMALL, [tokens], skip=False) == ["t<|im_end|>h", ""]


@pytest.mark.model
def test_200_random_sequences_of_the_real_vocabulary(smollm_tokenizer: Tokenizer) -> None:
    """Random tokens, byte tokens and special tokens mixed: pieces equal the whole, and no half characters."""
    rng = random.Random(20)
    tokenizer = smollm_tokenizer
    bits = [t for t in range(tokenizer.vocab_size) if t not in tokenizer.complete_texts]
    special = sorted(tokenizer.special_token_ids)
    assert bits
    assert special
    for number in range(200):
        text = tokenizer.encode("".join(rng.choices("añ日😀👩‍👩‍👧é\u0301 \n0", k=30)))
        noise = [
            rng.choice((rng.randrange(tokenizer.vocab_size), rng.choice(bits), rng.choice(special))) for _ in range(60)
        ]
        tokens = text + noise if number % 2 else [token for pair in zip(text, noise, strict=False) for token in pair]
        cuts = sorted(rng.choices(range(len(tokens) + 1), k=9))
        parts = [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
        for skip in (True, False):
            expected = tokenizer.decode(tokens, skip)
            assert "".join(in_pieces(tokenizer, parts, skip)) == expected
            single = in_pieces(tokenizer, [[token] for token in tokens], skip)
            assert "".join(single) == expected
            # A replacement character appears only where the text as a whole has one.
            assert sum(delta.count("\ufffd") for delta in single) == expected.count("\ufffd")


@pytest.mark.model
def test_emoji_and_chinese_never_show_a_replacement_character(smollm_tokenizer: Tokenizer) -> None:
    text = "龘靐齉 👩🏽‍🚀🇨🇭 Ω≈ç√ नमस्ते 안녕"
    deltas = in_pieces(smollm_tokenizer, [[token] for token in smollm_tokenizer.encode(text)], skip=True)
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.timing
@pytest.mark.model
def test_time_is_linear_in_the_number_of_tokens(smollm_tokenizer: Tokenizer) -> None:
    tokens = smollm_tokenizer.encode("Grüße, 世界! 😀 " * 400)

    def seconds(count: int) -> float:
        detokenizer = Detokenizer(smollm_tokenizer)
        start = time.process_time()
        for token in (tokens * count)[: len(tokens) * count]:
            detokenizer.push([token])
        return time.process_time() - start

    seconds(1)
    assert min(seconds(10) for _ in range(3)) < 25 * min(seconds(1) for _ in range(3)) + 0.01
