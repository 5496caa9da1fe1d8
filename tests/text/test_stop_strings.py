"""Stop strings: the same answer for every cut of the text, nothing leaked, nothing held back needlessly."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.text.text_stream import StopStrings

words = st.text("ab", min_size=1, max_size=5)
stop_lists = st.lists(words, min_size=1, max_size=4)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The rule by its definition: the first to be complete; of those complete together, the longest."""
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def run(parts: list[str], stops: list[str], include: bool) -> tuple[list[str], str | None]:
    watcher = StopStrings(stops, include)
    out = [watcher.push(part) for part in parts]
    return [*out, watcher.flush()], watcher.found


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(parts=st.lists(st.text("abc", max_size=6), max_size=8), stops=stop_lists, include=st.booleans())
@example(parts=["a", "b", "c"], stops=["abd", "bc"], include=False)
@example(parts=["aab"], stops=["ab", "aab", "b"], include=False)
def test_any_cut_gives_the_answer_of_the_definition(parts: list[str], stops: list[str], include: bool) -> None:
    text = "".join(parts)
    answer = expected(text, stops, include)
    for cut in (parts, list(text), [text]):
        out, found = run(cut, stops, include)
        assert ("".join(out), found) == answer


@settings(max_examples=300, deadline=None)
@given(text=st.text("abc", max_size=30), stops=stop_lists)
def test_exactly_what_may_still_become_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    watcher = StopStrings(stops, include=False)
    shown = ""
    for end, character in enumerate(text, 1):
        shown += watcher.push(character)
        if watcher.found is not None:
            break
        beginnings = [stop[:n] for stop in stops for n in range(len(stop))]
        held = max((b for b in beginnings if text[:end].endswith(b)), key=len)
        assert shown == text[: end - len(held)]


@settings(max_examples=200, deadline=None)
@given(before=st.text("ab", max_size=10), after=st.text("ab", max_size=10), stops=stop_lists)
def test_a_stop_counts_when_it_ends_after_the_text_passed_over(before: str, after: str, stops: list[str]) -> None:
    watcher = StopStrings(stops, include=False)
    out = watcher.pass_over(before) + watcher.push(after) + watcher.flush()
    text = before + after
    for end in range(len(before) + 1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            assert (out, watcher.found) == (text[: end - len(longest)], longest)
            return
    assert (out, watcher.found) == (text, None)


@pytest.mark.parametrize(
    ("stops", "text", "shown", "found"),
    [
        (["\n\n"], "one\ntwo\n\nthree", "one\ntwo", "\n\n"),
        (["END", "\n"], "a\nEND", "a", "\n"),
        (["é", "日本"], "caf日本", "caf", "日本"),
        (["<|im_end|>"], "a <|im_e", "a <|im_e", None),
        (["aaab"], "aaaab", "a", "aaab"),
        (["STOP", "STOP"], "x STOP y", "x ", "STOP"),
    ],
)
def test_examples(stops: list[str], text: str, shown: str, found: str | None) -> None:
    out, match = run(list(text), stops, include=False)
    assert ("".join(out), match) == (shown, found)


def test_nothing_comes_after_a_stop() -> None:
    watcher = StopStrings(["."], include=True)
    assert watcher.push("a.b") == "a."
    assert watcher.push("more") == ""
    assert watcher.flush() == ""
    assert watcher.found == "."


@pytest.mark.timing
@pytest.mark.parametrize("stop", ["a" * 255 + "b", "ab" * 127 + "c"])
def test_time_is_linear_on_text_made_to_be_slow(stop: str) -> None:
    """Text of almost-matches, which makes a naive search look at each character 255 times."""

    def seconds(count: int) -> float:
        watcher = StopStrings([stop[i:] for i in range(16)], include=False)
        parts = [(stop[:-1] * count)[i : i + 5] for i in range(0, 255 * count, 5)]
        start = time.process_time()
        for part in parts:
            watcher.push(part)
        assert watcher.found is None
        return time.process_time() - start

    seconds(10)
    short, long = (min(seconds(count) for _ in range(3)) for count in (40, 400))
    assert long < 25 * short + 0.01
    assert long < 1.0  # 102,000 characters; 255 looks at each would take many times that
