"""Reasoning that is ended after so many tokens: which token is forced, and which is not allowed, when."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.engine.runner.step_encoder import masks_of
from octavo.engine.thinking_progress import ThinkingProgress
from octavo.sampling_params import SamplingParams
from octavo.text.message_format import MessageFormat, find_format
from octavo.text.reasoning import mark_of
from octavo.types import Request, Scheduled, Sequence, ThinkingBudget

OPENS, CLOSES, THEN, BLANK = ((7,),), ((8,),), (9,), 6


def after(budget: ThinkingBudget, output: list[int]) -> ThinkingProgress:
    """The progress behind ``output``, which it was asked about token by token."""
    progress = ThinkingProgress(budget)
    for end in range(len(output) + 1):
        progress.at(output[:end])
    return progress


@pytest.mark.parametrize(
    ("is_inside", "output", "token"),
    [
        (True, [1, 2], None),
        (True, [1, 2, 3], 8),
        (True, [1, 2, 3, 8], 9),
        (True, [1, 2, 3, 8, 9], None),
        (True, [1, 8, 3], None),  # closed by itself
        (True, [1, 2, 8], None),
        (False, [7, 1, 2], None),
        (False, [7, 1, 2, 3], 8),
        (False, [7, 1, 2, 3, 8], 9),
        (False, [1, 2, 3, 4], None),  # an answer without reasoning
        (False, [], None),
        (False, [BLANK, BLANK, 7, 1, 2, 3], 8),
        (False, [1, 7, 1, 2, 3], None),  # the mark in an answer
        (True, [1, 8, 1, 7, 2, 3], None),
        (True, [1, 2, 3, 4], 8),  # a grammar did not allow the mark inside a character
        (True, [1, 2, 3, 4, 8], 9),
        (True, [1, 2, 3, 8, 4], None),  # nor what comes behind it
        (True, [1, 8, BLANK, 7, 2], None),  # reasoning in two parts
        (True, [1, 8, BLANK, 7, 2, 3], 8),
    ],
)
def test_the_mark_is_forced_when_the_budget_is_used_up(is_inside: bool, output: list[int], token: int | None) -> None:
    budget = ThinkingBudget(3, OPENS, CLOSES, THEN, (BLANK,), is_inside)
    assert after(budget, output).forced(output) == token
    assert ThinkingProgress(budget).forced(output) == token  # as of a request that is sent again


def test_without_a_budget_reasoning_ends_at_once() -> None:
    budget = ThinkingBudget(0, OPENS, CLOSES, is_inside=True)
    assert after(budget, []).forced([]) == 8
    assert after(budget, [8]).forced([8]) is None
    budget = ThinkingBudget(0, OPENS, CLOSES)
    assert after(budget, []).barred([]) == []
    assert after(budget, [7]).forced([7]) == 8


def test_used_up_reasoning_is_not_opened_again() -> None:
    budget = ThinkingBudget(2, ((7,), (5, 7)), CLOSES, gap=(BLANK,), is_inside=True)
    for output, barred in (
        ([1, 2, 8], [7]),
        ([1, 2, 8, BLANK], [7]),
        ([1, 2, 8, 5], [7]),
        ([1, 2, 8, BLANK, 5], [7]),
        ([1, 2, 8, BLANK, 1], []),
        ([1, 8], []),
    ):
        assert after(budget, output).barred(output) == barred


def test_marks_of_several_tokens_are_found() -> None:
    budget = ThinkingBudget(4, OPENS, ((5, 6), (4, 4)), is_inside=True)
    for output, token in (([1, 5, 6, 2], None), ([1, 4, 4, 2], None), ([1, 5, 2, 6], 5), ([1, 2, 3, 5], 6)):
        assert after(budget, output).forced(output) == token


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_a_mark_may_share_tokens_with_what_is_around_it() -> None:
    merged = {b".</": 300, b">\n\n": 301, b"</": 302}

    def merging(text: str) -> list[int]:
        data, tokens = text.encode(), list[int]()
        while data:
            longest = next((piece for piece in merged if data.startswith(piece)), data[:1])
            tokens.append(merged.get(longest, data[0]))
            data = data[len(longest) :]
        return tokens

    think = list(b"think")
    found = mark_of("</think>", merging)
    assert found[0] == (302, *think, ord(">"))
    assert set(found[1:]) == {(300, *think, ord(">")), (302, *think, 301), (300, *think, 301)} | {
        (300, *think, ord(">"), *merging(more)) for more in ("\n", " ", ".")
    }
    assert mark_of("</think>", encode) == (tuple(b"</think>"),)


def test_a_draft_does_not_count_before_it_is_accepted() -> None:
    budget = ThinkingBudget(3, OPENS, CLOSES, is_inside=True)
    seq = Sequence(Request(1, [2], SamplingParams(max_tokens=9), 9, thinking=budget, output_tokens=[1, 1]))

    def allowed(drafts: tuple[int, ...]) -> list[int]:
        """How many tokens each position allows."""
        start = len(seq.tokens) - 1
        item = Scheduled(seq, start, (seq.tokens[-1],), drafts, True, 0)
        return [int(np.unpackbits(mask).sum()) for mask in masks_of(item, {}, 16)]

    assert allowed((8, 3)) == [16, 16, 16]
    assert allowed((3, 8)) == [16, 1, 15]
    assert allowed(()) == [16]


def budget_of(format: MessageFormat, prompt: str) -> ThinkingBudget | None:
    return format.thinking_budget(5, prompt, encode)


def test_budgets_have_the_marks_of_the_family() -> None:
    qwen = find_format("auto", "auto", "<think> </think>", {})
    marks = (tuple(b"<think>"),), (tuple(b"</think>"),)
    for prompt, is_inside in (("Hi<think>\n", True), ("Hi", False)):
        budget = budget_of(qwen, prompt)
        assert budget is not None
        assert set(budget.gap) == set(b"\r\n\t ")
        assert budget == ThinkingBudget(5, *marks, (), budget.gap, is_inside)
    harmony = budget_of(find_format("openai", "auto", "", {}), "Hi")
    assert harmony is not None
    assert bytes(harmony.closes[0] + harmony.then) == b"<|end|><|start|>assistant<|channel|>final<|message|>"
    assert budget_of(find_format("auto", "auto", "", {}), "Hi") is None


def test_any_budget_and_any_text_are_read_alike_at_once_and_token_by_token() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        budget = ThinkingBudget(
            int(rng.integers(6)), ((7,), (6, 7)), ((8,), (5, 8)), (9, 3), (5,), bool(rng.integers(2))
        )
        output = [int(token) for token in rng.integers(5, 10, size=12)]
        progress = ThinkingProgress(budget)
        for end in range(13):
            told, barred = progress.at(output[:end]), ThinkingProgress(budget).at(output[:end])
            assert told.forced(output[:end]) == barred.forced(output[:end])
            assert told.barred(output[:end]) == barred.barred(output[:end])
