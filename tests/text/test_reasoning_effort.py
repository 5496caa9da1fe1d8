"""Efforts become what the chat templates of families read, or a bound on reasoning."""

from __future__ import annotations

import time
from typing import Any

import pytest

from octavo.text.reasoning_effort import BUDGETS, EFFORTS, Effort, effort_of, thinking_switch

from .family_templates import FAMILIES

HAS_SWITCH = "{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
TEMPLATES = {
    "gpt-oss": FAMILIES["gpt-oss"],
    "qwen 3": FAMILIES["qwen 3"],
    "deepseek": FAMILIES["deepseek"],
    "qwen 3.8": HAS_SWITCH
    + "{% set e = reasoning_effort | default('xhigh') %}"
    + "{% if e not in ('xhigh', 'medium', 'low') %}{{ fail() }}{% endif %}",
    "glm 5": "{% set e = 'high' if reasoning_effort is defined and reasoning_effort == \"high\" else 'max' %}",
    "kimi k3": "{% if thinking_effort is undefined %}{% set thinking_effort = 'max' %}{% endif %}"
    "{% if thinking_effort in ['none', 'low', 'high'] %}{{ thinking_effort }}{% endif %}",
    "hunyuan 3": "{% if reasoning_effort not in ['high', 'low', 'no_think'] %}{{ fail() }}{% endif %}",
    "seed-oss": "{%- if not thinking_budget is defined %}{%- set thinking_budget = -1 -%}{% endif %}</seed:think>",
    "nemotron 3": "{% set low_effort = low_effort if low_effort is defined else False %}" + HAS_SWITCH,
    "granite 3": "{% if thinking %}Respond to every user query in a comprehensive way.{% endif %}",
    "command a": "{% if reasoning is defined and not reasoning %}<|START_THINKING|><|END_THINKING|>{% endif %}",
    "macros of its own": "{# {% if thinking %}, enable_thinking #}{% macro think(text, reasoning=none) %}"
    "{% if reasoning is defined and reasoning %}{{ text }}{% endif %}{% endmacro %}"
    "{% for role, thinking in parts %}{{ thinking }}{% endfor %}",
    "none of it": "{% for m in messages %}{% set thinking = m.thinking %}{% if thinking %}{{ m['reasoning'] }}"
    "{% endif %}{{ write(reasoning='enable_thinking', n=1) }}{% endfor %} the thinking reasoning_effort </think>",
}
ALL: dict[str, list[Any]] = {
    "gpt-oss": ["low", "low", "low", "medium", "high", "high", "high"],
    "qwen 3.8": ["low", "low", "low", "medium", "xhigh", "xhigh", "xhigh"],
    "glm 5": ["high", "high", "high", "high", "high", "max", "max"],
    "kimi k3": ["none", "low", "low", "high", "high", "max", "max"],
    "hunyuan 3": ["no_think", "low", "low", "high", "high", "high", "high"],
    "seed-oss": [0, 512, 2048, 8192, 16384, -1, -1],
    "nemotron 3": [False, True, True, False, False, False, False],
    "qwen 3": [False, True, True, True, True, True, True],
    "deepseek": [False, True, True, True, True, True, True],
    "granite 3": [False, True, True, True, True, True, True],
    "command a": [False, True, True, True, True, True, True],
}
"""The value of the first variable for each of ``EFFORTS``."""
VARIABLES = {
    "kimi k3": ["thinking_effort"],
    "seed-oss": ["thinking_budget"],
    "nemotron 3": ["low_effort", "enable_thinking"],
    "qwen 3": ["enable_thinking"],
    "qwen 3.8": ["reasoning_effort", "enable_thinking"],
    "deepseek": ["thinking"],
    "granite 3": ["thinking"],
    "command a": ["reasoning"],
    "none of it": [],
}
WITH_BUDGETS = ("qwen 3", "deepseek", "granite 3", "command a")


@pytest.mark.parametrize("name", ALL)
def test_a_template_gets_what_it_reads(name: str) -> None:
    for requested, value in zip(EFFORTS, ALL[name], strict=True):
        found = effort_of(requested, TEMPLATES[name], can_reason=True)
        assert found is not None
        names = VARIABLES.get(name, ["reasoning_effort"])
        assert sorted(found.variables) == sorted(names)
        assert found.variables[names[0]] == value
        assert found.variables.get("enable_thinking", requested != "none") is (requested != "none")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_model_without_degrees_has_a_bound(name: str) -> None:
    found = {requested: effort_of(requested, TEMPLATES[name], can_reason=True) for requested in EFFORTS}
    budgets = {requested: effort and effort.budget for requested, effort in found.items()}
    expected = {**dict.fromkeys(EFFORTS), **BUDGETS}
    if name in WITH_BUDGETS:
        assert budgets == {**expected, "none": None}, "the template turns it off"
    elif name in ("none of it", "macros of its own"):
        assert budgets == expected
    else:
        assert budgets == {**dict.fromkeys(EFFORTS), "none": 0 if name in ("gpt-oss", "glm 5") else None}


def test_a_model_that_does_not_reason_has_no_effort() -> None:
    assert effort_of("none", "", can_reason=False) == Effort({})
    assert effort_of("low", "", can_reason=False) is None


def test_other_words_are_for_templates_that_read_words() -> None:
    assert effort_of("utmost", TEMPLATES["gpt-oss"], can_reason=True) == Effort({"reasoning_effort": "utmost"})
    assert effort_of("utmost", TEMPLATES["qwen 3"], can_reason=True) is None


def test_switches_of_a_template() -> None:
    assert thinking_switch(True, TEMPLATES["deepseek"]) == {"thinking": True}
    assert thinking_switch(False, TEMPLATES["nemotron 3"]) == {"enable_thinking": False}
    assert thinking_switch(True, TEMPLATES["gpt-oss"]) == {}


@pytest.mark.parametrize(
    "piece", ["{%", "{% '", "'\\'", '{{ "\\', "{% reasoning ", "set thinking ", "{#", "macro a(b ", "set a, "]
)
def test_what_is_no_template_is_read_in_no_time(piece: str) -> None:
    start = time.thread_time()
    effort_of("low", "{% " + piece * 30_000, can_reason=True)
    assert time.thread_time() - start < 2
