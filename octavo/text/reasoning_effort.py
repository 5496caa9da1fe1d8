"""How hard a model is asked to reason: from the efforts of APIs to what its chat template reads, or to a bound.

Templates know of reasoning by variables of their own. Which they read, and which words, is found in their source.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Words of APIs for efforts, in order."""
BUDGETS = {"none": 0, "minimal": 512, "low": 2048, "medium": 8192, "high": 16384}
"""Most tokens of reasoning, for models that know no degrees; greater efforts have no bound."""
DEGREES = ("reasoning_effort", "thinking_effort", "reasoning_strength")
"""Variables with the word: of gpt-oss, GLM-5, Qwen3.8, DeepSeek-V4 and Mistral; of Kimi K3; of Muse Glimmer."""
OFF = ("none", "no_think", "off")
"""Words for no reasoning at all, the last two of Hunyuan 3 and others."""
LEAST_WORDS = ("low", "medium", "high")
"""What a template knows that compares the word with none, as that of gpt-oss, which writes it into the prompt."""
BUDGET = "thinking_budget"
"""Variable of Seed-OSS with the number of tokens, -1 for no bound."""
LOW = "low_effort"
"""Variable of Nemotron 3 Super and Granite 4: true or false."""
SWITCHES = ("enable_thinking", "thinking", "reasoning")
"""Variables that turn reasoning on or off: of Qwen3, GLM-4.5, Hunyuan, Gemma 4 and others; of DeepSeek-V3.1, Kimi K2.5
and Granite 3; of Command A Reasoning."""

_TAG = re.compile(r"\{#.*?(?:#\}|\Z)|\{[%{](.*?)(?:[%}]\}|\Z)", re.DOTALL)
"""A comment, or a tag with its content, likewise up to the end if it is not closed."""
_STRING = re.compile(r"'((?:[^'\\]|\\.)*+)(?:'|\\?\Z)|\"((?:[^\"\\]|\\.)*+)(?:\"|\\?\Z)", re.DOTALL)
"""A string, or all up to the end: a source that is no template takes no longer to read."""


class Effort(NamedTuple):
    """What an effort comes to with one model."""

    variables: dict[str, Any]
    """Of the chat template."""
    budget: int | None = None
    """Most tokens of reasoning."""


@functools.lru_cache(maxsize=32)
def known_to(template: str) -> tuple[frozenset[str], frozenset[str]]:
    """The variables named above that ``template``, the source of a chat template, reads; and strings in its tags."""
    tags = [tag[1] for tag in _TAG.finditer(template) if tag[1] is not None]
    code = "\n".join(_STRING.sub("''", tag) for tag in tags)
    words = (single or double for tag in tags for single, double in _STRING.findall(tag))
    names = (*DEGREES, BUDGET, LOW, *SWITCHES)
    return frozenset(name for name in names if _reads(code, name)), frozenset(words)


def effort_of(requested: str, template: str, can_reason: bool) -> Effort | None:
    """What ``requested`` comes to; ``None`` if it has no meaning for this model."""
    known, words = known_to(template)
    degrees = [name for name in DEGREES if name in known]
    if requested not in EFFORTS:
        return Effort(dict.fromkeys(degrees, requested)) if degrees else None
    word = _nearest(requested, words)
    variables: dict[str, Any] = dict.fromkeys(degrees, word) | thinking_switch(requested != "none", template)
    if BUDGET in known:
        variables[BUDGET] = BUDGETS.get(requested, -1)
    if LOW in known:
        variables[LOW] = requested in ("minimal", "low")
    tell = (*(DEGREES if word in OFF else ()), *SWITCHES, BUDGET) if requested == "none" else (*DEGREES, BUDGET, LOW)
    if not variables and not can_reason and requested != "none":
        return None
    return Effort(variables, BUDGETS.get(requested) if can_reason and known.isdisjoint(tell) else None)


def thinking_switch(is_on: bool, template: str) -> dict[str, Any]:
    """Variables that turn reasoning on or off; empty if ``template`` reads none."""
    return {name: is_on for name in SWITCHES if name in known_to(template)[0]}


def _nearest(requested: str, words: frozenset[str]) -> str:
    """The word for ``requested`` of those that a template knows: the least that is no less, or else the greatest."""
    if requested == "none" and (off := [word for word in OFF if word in words]):
        return off[0]
    named = [word for word in EFFORTS[1:] if word in words]
    if not named or (len(named) == 1 and words.isdisjoint(OFF)):
        named = list(LEAST_WORDS)
    return next((word for word in named if EFFORTS.index(word) >= EFFORTS.index(requested)), named[-1])


def _reads(code: str, name: str) -> bool:
    """Whether ``code``, without the content of its strings, reads a variable that the caller gives: no parameter of a
    macro, and none that the template sets."""
    code = re.sub(rf"\bmacro\s+\w+\s*\([^()]*?\b{name}\b.*?(?:\bendmacro\b|\Z)", "", code, flags=re.DOTALL)
    if re.search(rf"(?<![\w.]){name}\s*(?:is\s+(?:not\s+)?(?:un)?defined|\|\s*default)\b", code):
        return True
    is_own = re.search(rf"\b(?:set|for)\s+(?:\w+\s*,\s*)*{name}\b", code)
    return not is_own and re.search(rf"(?<![\w.]){name}\b(?!\s*=(?!=))", code) is not None
