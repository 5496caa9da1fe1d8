"""One choice's text: stop strings by token, minimum lengths, ends of text, no tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.sampling_params import SamplingParams
from octavo.text.reasoning import THINK, answer_start, thinking_named
from octavo.text.text_stream import TextDelta, TextStream
from octavo.text.tool_calls import harmony

from .conftest import build, byte_level_metadata

SMALL = build(byte_level_metadata())


def tokens_of(text: str) -> list[int]:
    """One token for each byte, so that tests can count."""
    return [3 + byte for byte in text.encode()]


def stream(**params: Any) -> TextStream:
    return TextStream(SMALL, SamplingParams(**params))


def test_without_stop_strings_text_flows() -> None:
    choice = stream()
    assert choice.push(tokens_of("ab")) == TextDelta("ab", None, 2)
    assert choice.push(tokens_of("é")[:1]) == TextDelta("", None, 1)
    assert choice.push(tokens_of("é")[1:]) == TextDelta("é", None, 1)
    assert choice.push(tokens_of("c"), "length") == TextDelta("c", None, 1)


def test_the_end_shows_what_was_held_back() -> None:
    assert stream().push(tokens_of("é")[:1], "length") == TextDelta("\ufffd", None, 1)
    choice = stream(stop=("abc",))
    assert choice.push(tokens_of("xab")) == TextDelta("x", None, 3)
    assert choice.push([], "length") == TextDelta("ab", None, 0)


def test_a_stop_string_ends_the_text_after_the_token_that_completes_it() -> None:
    choice = stream(stop=("cd", "zz"))
    assert choice.push(tokens_of("abcdef")) == TextDelta("ab", "cd", 4)
    assert choice.push(tokens_of("more"), "length") == TextDelta("", "cd", 0)


def test_a_stop_string_may_be_included() -> None:
    choice = stream(stop=("cd",), include_stop_str_in_output=True)
    assert choice.push(tokens_of("abc")) == TextDelta("abc", None, 3)
    assert choice.push(tokens_of("def")) == TextDelta("d", "cd", 1)


def test_the_stop_token_is_not_shown_but_counts() -> None:
    tokens = tokens_of("ab!")
    assert stream().push(tokens, "stop") == TextDelta("ab", None, 3)
    assert stream(include_stop_str_in_output=True).push(tokens, "stop") == TextDelta("ab!", None, 3)
    assert stream().push(tokens, "length") == TextDelta("ab!", None, 3)
    assert stream(stop=("x",)).push(tokens, "stop") == TextDelta("ab", None, 3)
    # An end of text is hidden also when special tokens are shown.
    assert stream(skip_special_tokens=False).push([*tokens, 2], "stop") == TextDelta("ab!", None, 4)


def test_a_stop_string_of_the_hidden_stop_token_does_not_count() -> None:
    assert stream(stop=("b!",)).push(tokens_of("ab!"), "stop") == TextDelta("ab", None, 3)


def test_a_stop_string_in_the_last_tokens_wins_over_the_engines_reason() -> None:
    assert stream(stop=("b",)).push(tokens_of("abc"), "length") == TextDelta("a", "b", 2)


def test_stop_strings_do_not_count_in_the_first_min_tokens() -> None:
    choice = stream(stop=(".",), min_tokens=3, max_tokens=50)
    assert choice.push(tokens_of("a..")) == TextDelta("a..", None, 3)
    assert choice.push(tokens_of("b.c")) == TextDelta("b", ".", 2)
    # One that begins before and ends after counts.
    assert stream(stop=("bcd",), min_tokens=3, max_tokens=50).push(tokens_of("abcde")) == TextDelta("a", "bcd", 4)


def test_without_a_tokenizer_text_is_empty() -> None:
    choice = TextStream(None, SamplingParams())
    assert choice.push([1, 2, 3]) == TextDelta("", None, 3)
    assert choice.push([4], "stop") == TextDelta("", None, 1)


def thinking(prompt: str, marks: Any = THINK.answer_marks, **params: Any) -> TextStream:
    return TextStream(SMALL, SamplingParams(**params), answer=answer_start(marks, prompt))


@pytest.mark.parametrize(
    ("prompt", "text", "shown"),
    [
        ("", "<think>a.b</think>\n\nc.d", "<think>a.b</think>\n\nc"),
        ("", "\n<think>a.b</think>c.d", "\n<think>a.b</think>c"),
        ("", "c.<think>", "c"),
        ("", "<thi.", "<thi"),
        ("", ".", ""),
        ("<think>\n", "a.b</think>c.d", "a.b</think>c"),
        ("<think>", "<think>a.</think>c.", "<think>a.</think>c"),
        ("<think>", "a.</think>\n</think>\n<think>b.</think>c.", "a.</think>\n</think>\n<think>b.</think>c"),
        ("<think></think>", "a.", "a"),
    ],
)
def test_stop_strings_count_in_the_answer_only(prompt: str, text: str, shown: str) -> None:
    for stop in (".", ".d") if text.endswith(".d") else (".",):
        for max_size in (1, 100):
            tokens = tokens_of(text)
            choice = thinking(prompt, stop=(stop,))
            deltas = [choice.push(tokens[at : at + max_size]) for at in range(0, len(tokens), max_size)]
            deltas.append(choice.push([], "length"))
            assert ("".join(delta.text for delta in deltas), deltas[-1].stop) == (shown, stop)


@pytest.mark.parametrize("stop", ["\n", "\n\n", "</think>", ">\n", "k>c", " "])
def test_marks_of_reasoning_and_blanks_behind_them_are_no_part_of_a_stop_string(stop: str) -> None:
    text = "<think>a</think>\n\nc"
    assert thinking("", stop=(stop,)).push(tokens_of(text), "length") == TextDelta(text, None, len(text))


def test_a_mark_of_the_answer_is_no_part_of_it() -> None:
    hunyuan = thinking_named("hunyuan_a13b")
    assert hunyuan is not None
    text = "<think>a</think>\n<answer>\nb\n</answer>"
    assert thinking("", hunyuan.answer_marks, stop=("\n",)).push(tokens_of(text)).text == text[:-10]


def test_reasoning_that_never_ends_has_no_stop() -> None:
    choice = thinking("<think>", stop=("a",), include_stop_str_in_output=True)
    assert choice.push(tokens_of("aaa</thin")).text == "aaa"
    assert choice.push([], "length") == TextDelta("</thin", None, 0)


def test_in_gpt_oss_stop_strings_count_in_the_final_channel() -> None:
    text = "<|channel|>analysis<|message|>a.<|end|><|start|>assistant<|channel|>final<|message|>b"
    asked = "<|start|>assistant<|channel|>final<|message|>x<|end|><|start|>assistant"
    for prompt in ("", asked):
        assert thinking(prompt, harmony.ANSWER, stop=(".",)).push(tokens_of(f"{text}.")).text == text
    assert thinking(asked[:50], harmony.ANSWER, stop=(".",)).push(tokens_of("b.")) == TextDelta("b", ".", 2)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab.é😀", max_size=25),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    stops=st.lists(st.sampled_from((".", "ab", "é", "b.a", "😀😀", "\ufffd")), max_size=3),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
    reason=st.sampled_from(("stop", "length")),
    prompt=st.sampled_from((None, "", "<think>")),
    marks=st.lists(st.tuples(st.integers(0, 25), st.sampled_from(("<think>", "</think>", "\n"))), max_size=3),
)
def test_text_and_count_do_not_depend_on_the_cuts(
    text: str,
    cuts: list[int],
    stops: list[str],
    min_tokens: int,
    include: bool,
    reason: Any,
    prompt: str | None,
    marks: list[tuple[int, str]],
) -> None:
    for place, mark in marks:
        text = text[:place] + mark + text[place:]
    tokens = tokens_of(text)[:-1] if len(cuts) % 2 else tokens_of(text)
    params = {"stop": tuple(stops), "min_tokens": min_tokens, "include_stop_str_in_output": include, "max_tokens": 99}

    def run(parts: list[list[int]]) -> tuple[str, str | None, int]:
        choice = stream(**params) if prompt is None else thinking(prompt, **params)
        deltas = [choice.push(part, reason if i == len(parts) - 1 else None) for i, part in enumerate(parts)]
        return "".join(d.text for d in deltas), deltas[-1].stop, sum(d.num_tokens for d in deltas)

    # The engine names the reason with the last token, so the last part has it.
    places = sorted(min(cut, max(len(tokens) - 1, 0)) for cut in cuts)
    parts = [tokens[a:b] for a, b in zip([0, *places], [*places, len(tokens)], strict=True)]
    assert run(parts) == run([tokens])
