"""``bad_words`` and ``allowed_token_ids`` over a model of random weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM, InvalidParameter, SamplingParams
from tests.llm.tiny import SETTINGS, write_checkpoint

LETTERS = tuple(b"abcd")


def texts(llm: LLM, **more: object) -> list[str]:
    params = SamplingParams(n=4, seed=5, max_tokens=60, allowed_token_ids=LETTERS, **more)  # type: ignore[arg-type]
    return [output.text for output in llm.generate("x", params)[0].outputs]


def test_texts_are_of_what_is_allowed_and_without_what_is_banned(llm: LLM) -> None:
    free = texts(llm)
    assert all(len(text) == 60 and set(text) <= set("abcd") for text in free)
    assert all(any(word in text for text in free) for word in ("d", "ab", "aaa"))
    bound = texts(llm, bad_words=("d", "ab", "aaa"))
    assert len(set(bound)) == 4
    assert all(word not in text for text in bound for word in ("d", "ab", "aaa"))
    assert all("a" in text for text in bound)


def test_the_prompt_is_no_part_of_a_bad_word(llm: LLM) -> None:
    params = SamplingParams(temperature=0, allowed_token_ids=(98,), max_tokens=1, bad_words=("ab",))
    assert llm.generate("a", params)[0].outputs[0].text == "b"


def test_what_cannot_be_is_refused_by_name(llm: LLM, tmp_path: Path) -> None:
    for params, field in (
        (SamplingParams(allowed_token_ids=(264,)), "allowed_token_ids"),
        (SamplingParams(allowed_token_ids=(97,), bad_words=("a",)), "allowed_token_ids"),
    ):
        with pytest.raises(InvalidParameter) as caught:
            llm.generate("x", params)
        assert caught.value.param == field
    with LLM(write_checkpoint(tmp_path, with_tokenizer=False), **SETTINGS) as wordless:
        with pytest.raises(InvalidParameter) as caught:
            wordless.generate([1, 2], SamplingParams(bad_words=("a",)))
        assert caught.value.param == "bad_words"
        (result,) = wordless.generate([1, 2], SamplingParams(allowed_token_ids=(7,), max_tokens=3))
        assert result.outputs[0].token_ids == [7, 7, 7]
