"""Bad words in tokens, and restrictions that leave nothing."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import InvalidParameter
from octavo.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORDS,
    SamplingParams,
)
from octavo.text.tokenizer import Tokenizer, banned_sequences, check_something_is_left


def test_a_word_is_banned_alone_and_behind_a_space(small_tokenizer: Tokenizer) -> None:
    encode = small_tokenizer.encode
    assert len(encode(" the", False)) == 1
    found = banned_sequences(["the", "  the", "thé", "\n"], small_tokenizer)
    spelled = ["the", " the", "thé", " thé", "\n", " \n"]
    assert found == tuple(tuple(encode(text, False)) for text in spelled)


def test_a_real_vocabulary_has_tokens_of_their_own_for_words_behind_a_space(smollm_tokenizer: Tokenizer) -> None:
    alone, behind = banned_sequences(["cat"], smollm_tokenizer)
    assert [smollm_tokenizer.decode(tokens) for tokens in (alone, behind)] == ["cat", " cat"]
    assert len(behind) == 1
    assert not smollm_tokenizer.special_token_ids.intersection((*alone, *behind))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["x"] * (MAX_BAD_WORDS + 1), f"at most {MAX_BAD_WORDS} strings"),
        (["x" * (MAX_BAD_WORD_BYTES + 1)], f"1 to {MAX_BAD_WORD_BYTES} bytes"),
        (["é" * (MAX_BAD_WORD_BYTES // 2 + 1)], f"1 to {MAX_BAD_WORD_BYTES} bytes"),
        ([""], "not all of them spaces"),
        (["  "], "not all of them spaces"),
        (["\ud800"], "must be text"),
        ([5], "must be text"),
        ("word", "must be a list"),
    ],
)
def test_bad_words_that_cannot_be_banned(words: Any, says: str) -> None:
    with pytest.raises(InvalidParameter, match=says) as caught:
        SamplingParams(bad_words=words)
    assert caught.value.param == "bad_words"


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([], f"1 to {MAX_ALLOWED_TOKEN_IDS} token ids, not 0"),
        ([1] * (MAX_ALLOWED_TOKEN_IDS + 1), f"1 to {MAX_ALLOWED_TOKEN_IDS} token ids"),
        ([-1], "-1 is not a token id"),
        ([True], "True is not a token id"),
        (["1"], "'1' is not a token id"),
        ([2**31], "is not a token id"),
        ({1: 2}, "must be a list"),
    ],
)
def test_ids_that_cannot_be_allowed(ids: Any, says: str) -> None:
    with pytest.raises(InvalidParameter, match=says) as caught:
        SamplingParams(allowed_token_ids=ids)
    assert caught.value.param == "allowed_token_ids"


def test_what_leaves_nothing_is_refused() -> None:
    banned = ((3,), (4, 5))
    for params, is_fine in (
        (SamplingParams(), True),
        (SamplingParams(allowed_token_ids=(3, 4)), True),
        (SamplingParams(allowed_token_ids=(3,)), False),
        (SamplingParams(allowed_token_ids=(3, 9)), True),
        (SamplingParams(allowed_token_ids=(3, 9), min_tokens=1), False),
    ):
        if is_fine:
            check_something_is_left(params, banned, {9})
        else:
            with pytest.raises(InvalidParameter, match="'bad_words' or 'min_tokens'"):
                check_something_is_left(params, banned, {9})
