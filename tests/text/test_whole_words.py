"""Looking words up before merging them: done where it changes no token, and only there."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from octavo.text.tokenizer import Tokenizer, look_up_whole_words
from octavo.text.tokenizers.gguf_tokenizer import parts_from_metadata
from tests.text.conftest import byte_level_metadata

TEXTS = ["the other 12 thethe  theth\n", "Там 🎲 the <|im_end|>the", "<|im_start|>", "", "ththe 1212"]


def byte_level_backend() -> tokenizers.Tokenizer:
    parts = parts_from_metadata(byte_level_metadata(), Path("test.gguf"))
    assert parts is not None
    return parts.backend


def letters_backend(*merges: tuple[str, str], extra: tuple[str, ...] = ()) -> tokenizers.Tokenizer:
    """Words of a, b, c and d, with these merges in this order, and tokens to which nothing is merged."""
    tokens = ["a", "b", "c", "d", *(left + right for left, right in merges), *extra]
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def looks_up(backend: tokenizers.Tokenizer) -> bool:
    assert isinstance(backend.model, models.BPE)
    return backend.model.ignore_merges


def test_tokens_stay_what_they_are() -> None:
    rng = random.Random(0)
    texts = [*TEXTS, *("".join(rng.choices("the 12аð\n", k=20)) for _ in range(200))]
    plain, backend = byte_level_backend(), byte_level_backend()
    assert look_up_whole_words(backend)
    assert looks_up(backend)
    assert not looks_up(plain)
    for text in texts:
        assert backend.encode(text).ids == plain.encode(text).ids


def test_a_token_that_merges_do_not_lead_to_forbids_it() -> None:
    backend = letters_backend(("a", "b"), ("c", "d"), extra=("abc",))
    assert not look_up_whole_words(backend)
    assert not looks_up(backend)
    assert backend.encode("abc").tokens == ["ab", "c"]


def test_a_token_that_merges_pass_by_forbids_it() -> None:
    """An earlier merge takes the middle of the word, so the later one that would make it never comes."""
    backend = letters_backend(("b", "c"), ("a", "b"), ("ab", "c"))
    assert not look_up_whole_words(backend)
    assert backend.encode("abc").tokens == ["a", "bc"]


@pytest.mark.parametrize(("single_word", "tokens"), [(False, ["a", "dad", "dad"]), (True, ["a", "d", "a", "d", "dad"])])
def test_only_added_tokens_that_no_word_can_be_are_left_out(single_word: bool, tokens: list[str]) -> None:
    """The first word would be one token if it could be looked up as a whole."""
    backend = letters_backend(("a", "b"), extra=("dad", "adad") if single_word else ("dad",))
    backend.add_tokens([AddedToken("dad", single_word=single_word, normalized=False)])
    assert look_up_whole_words(backend) is not single_word
    assert backend.encode("adad dad").tokens == tokens


def test_what_draws_at_random_or_merges_nothing_is_left_alone() -> None:
    backend = letters_backend(("a", "b"))
    assert isinstance(backend.model, models.BPE)
    backend.model.dropout = 0.5
    assert not look_up_whole_words(backend)
    assert not looks_up(backend)
    assert not look_up_whole_words(tokenizers.Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")))


def test_a_tokenizer_that_was_prepared_gives_the_same_tokens() -> None:
    plain, prepared = (
        Tokenizer(parts) for _ in range(2) if (parts := parts_from_metadata(byte_level_metadata(), Path("t")))
    )
    prepared.prepare_to_encode()
    for text in TEXTS:
        assert prepared.encode(text) == plain.encode(text)
