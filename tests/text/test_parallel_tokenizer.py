"""Long texts are tokenised in several threads, to the token ids of the unsplit text."""

from __future__ import annotations

import random
import string
from functools import partial
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from octavo.text import tokenizer as tokenizing
from octavo.text.tokenizer import MIN_CHUNK, ParallelTokenizer, Tokenizer, encode_texts
from octavo.text.tokenizers.gguf_tokenizer import WORD_RULES, parts_from_metadata
from tests.text.conftest import SPECIAL, byte_level_metadata

WORDS = (*"abthe TM12 \n\t'.,", " the", "  ", "don't ", "и", "中文", "e\u0301", "😀", " naïve ", *SPECIAL)

RULES = {rule.patterns: name for name, rule in sorted(WORD_RULES.items())}.values()
"""A name of each rule."""


def letters(*merges: tuple[str, str], space: str = "▁") -> tokenizers.Tokenizer:
    """All letters of ASCII and the space, with these merges, and without words."""
    tokens = [*string.ascii_letters, space, *(left + right for left, right in merges)]
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, list(merges)))
    backend.normalizer = normalizers.Replace(" ", space)
    return backend


def texts_of(backend: tokenizers.Tokenizer) -> list[bytes]:
    return [token.replace("▁", " ").encode() for token in backend.get_vocab()]


def can_split(backend: tokenizers.Tokenizer, tokens: list[bytes]) -> bool:
    return tokenizing.can_split(backend, tokens, partial(encode_texts, backend))


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))


@pytest.mark.slow
@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("rule", RULES)
def test_token_ids_are_those_of_the_unsplit_text(rule: str) -> None:
    rng = random.Random(rule)
    metadata = byte_level_metadata(pre=rule, add_bos_token=True)
    plain, prepared = (Tokenizer(parts) for _ in range(2) if (parts := parts_from_metadata(metadata, Path("t"))))
    prepared.prepare_to_encode()
    assert prepared._parallel is not None, "no text is split"
    for size, adds_special in ((2 * MIN_CHUNK, False), (3 * MIN_CHUNK + 17, True)):
        text = "".join(rng.choices(WORDS, k=size))[:size]
        assert prepared.encode(text, adds_special) == plain.encode(text, adds_special)
    unsplittable = "中文" * (2 * MIN_CHUNK)
    assert prepared.encode(unsplittable, True) == plain.encode(unsplittable, True)
    several = [unsplittable, "the", text, ""]
    assert prepared.encode_all(several) == [plain.encode(each) for each in several]


@pytest.mark.usefixtures("four_threads")
def test_text_without_pre_tokenizer_is_split_if_no_token_has_a_space_behind_a_letter() -> None:
    backend = letters(("a", "b"), ("▁", "ab"), ("▁", "▁"), ("▁ab", "c"))
    assert can_split(backend, texts_of(backend))
    backend.post_processor = processors.TemplateProcessing(
        single="a:0 b:0 $A:0 c:0", special_tokens=[("a", 0), ("b", 1), ("c", 2)]
    )
    rng = random.Random(0)
    text = "".join(rng.choices("aabc  ", k=4 * MIN_CHUNK))
    assert ParallelTokenizer(backend, partial(encode_texts, backend)).encode(text, True) == backend.encode(text).ids
    assert (
        ParallelTokenizer(backend, partial(encode_texts, backend)).encode(text, False)
        == backend.encode(text, add_special_tokens=False).ids
    )


def test_a_vocabulary_without_letters_is_left_alone() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"1": 0, " ": 1}, []))
    assert backend.encode("a 1").tokens == [" ", "1"]
    assert not can_split(backend, texts_of(backend))


def test_a_token_across_a_boundary_forbids_it() -> None:
    backend = letters(("a", "▁"), ("a▁", "b"))
    assert not can_split(backend, texts_of(backend))
    assert backend.encode("a b").tokens == ["a▁b"]


def test_a_mark_before_each_text_forbids_it() -> None:
    """As in Llama 2, whose space marks would be doubled at every chunk."""
    backend = letters(("▁", "▁"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    assert not can_split(backend, texts_of(backend))


def test_an_added_token_that_takes_the_space_behind_it_forbids_it() -> None:
    backend = letters()
    backend.add_special_tokens([AddedToken("<a>", rstrip=True)])
    assert can_split(backend, texts_of(backend))
    backend.add_special_tokens([AddedToken("ab", rstrip=True)])
    assert not can_split(backend, texts_of(backend))


def test_a_pre_tokenizer_that_looks_across_a_boundary_forbids_it() -> None:
    backend = letters(("▁", "a"), ("b", "c"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("▁a(?=b)|(?<=a)▁"), behavior="removed")
    assert not can_split(backend, texts_of(backend))


def test_models_that_draw_at_random_or_choose_among_all_pieces_are_left_alone() -> None:
    backend = letters()
    assert isinstance(backend.model, models.BPE)
    backend.model.dropout = 0.5
    assert not can_split(backend, [])
    assert not can_split(tokenizers.Tokenizer(models.Unigram([("a", -1.0)], 0, False)), [])


def test_short_texts_and_single_cores_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))
    assert not ParallelTokenizer(letters(), partial(encode_texts, letters())).takes("a" * (2 * MIN_CHUNK - 1))
    assert ParallelTokenizer(letters(), partial(encode_texts, letters())).takes("a" * (2 * MIN_CHUNK))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(1))
    assert not ParallelTokenizer(letters(), partial(encode_texts, letters())).takes("a" * (2 * MIN_CHUNK))
