"""Reasoning that is ended after so many tokens: which token is forced when."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.text.message_format import MessageFormat, find_format
from octavo.types import ThinkingBudget

OPENS, CLOSES, FORCED = (7,), (8,), (8, 9)


@pytest.mark.parametrize(
    ("opens", "output", "token"),
    [
        ((), [1, 2], None),
        ((), [1, 2, 3], 8),
        ((), [1, 2, 3, 8], 9),
        ((), [1, 2, 3, 8, 9], None),
        ((), [1, 8, 3], None),  # closed by itself
        ((), [1, 2, 8], None),
        (OPENS, [7, 1, 2], None),
        (OPENS, [7, 1, 2, 3], 8),
        (OPENS, [7, 1, 2, 3, 8], 9),
        (OPENS, [1, 2, 3, 4], None),  # an answer without reasoning
        (OPENS, [], None),
    ],
)
def test_the_mark_is_forced_when_the_budget_is_used_up(opens: Any, output: list[int], token: int | None) -> None:
    assert ThinkingBudget(3, opens, CLOSES, FORCED).next_token(output) == token


def test_without_a_budget_reasoning_ends_at_once() -> None:
    budget = ThinkingBudget(0, (), CLOSES, CLOSES)
    assert budget.next_token([]) == 8
    assert budget.next_token([8]) is None


def test_marks_of_several_tokens_are_found() -> None:
    budget = ThinkingBudget(4, (), (5, 6), (5, 6))
    assert budget.next_token([1, 5, 6, 2]) is None
    assert budget.next_token([1, 5, 2, 6]) == 5


def encode(text: str) -> list[int]:
    return list(text.encode())


def budget_of(format: MessageFormat, prompt: str) -> ThinkingBudget | None:
    return format.thinking_budget(5, prompt, encode)


def test_budgets_have_the_marks_of_the_family() -> None:
    qwen = find_format("auto", "auto", "<think> </think>", {})
    assert budget_of(qwen, "Hi<think>\n") == ThinkingBudget(5, (), tuple(b"</think>"), tuple(b"</think>"))
    assert budget_of(qwen, "Hi") == ThinkingBudget(5, tuple(b"<think>"), tuple(b"</think>"), tuple(b"</think>"))
    harmony = budget_of(find_format("openai", "auto", "", {}), "Hi")
    assert harmony is not None
    assert bytes(harmony.forced).endswith(b"<|channel|>final<|message|>")
    assert budget_of(find_format("auto", "auto", "", {}), "Hi") is None
