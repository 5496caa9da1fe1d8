"""How a model writes its messages, as far as a server has to know: reasoning, and calls of functions.

Settled once, from settings or from the signs in the chat template; then it makes a reader for each message, and the
grammar of a message that must be something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from octavo.errors import ConfigError
from octavo.grammar import forms
from octavo.text import reasoning
from octavo.text.reader import Format
from octavo.text.tool_calls import harmony
from octavo.text.tool_calls.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from octavo.text.tool_calls.harmony import HARMONY
from octavo.text.tool_calls.hermes import HERMES
from octavo.text.tool_calls.llama3 import LLAMA3
from octavo.text.tool_calls.mistral import MISTRAL
from octavo.text.tool_calls.pythonic import PYTHONIC
from octavo.text.tool_calls.tool_format import Marks, ToolFormat, talk_rule
from octavo.text.tools_in_text import WriteCalls

TOOL_FORMATS = (HERMES, LLAMA3, MISTRAL, DEEPSEEK_V3, DEEPSEEK_V31, HARMONY, PYTHONIC)
"""Of two whose signs a template has, the first one is meant."""
FALLBACK = HERMES
"""The format that a model is told to write when its chat template tells none."""
THINK_NAMES = ("deepseek_r1", "qwen3")
HARMONY_NAME = "openai_gptoss"
AUTO = "auto"


class Tool(NamedTuple):
    """A function that the client offers."""

    name: str
    parameters: Mapping[str, Any] | None
    """JSON schema of its arguments; ``None`` when it has none."""
    is_strict: bool = False
    """Whether the arguments must be valid even if the model is free to call or not."""


@dataclass(frozen=True)
class Wanted:
    """What a message must be."""

    form: forms.Form | None = None
    """The grammar of its content; ``None`` is anything, if there need not be calls."""
    tools: Sequence[Tool] = ()
    """Functions of which it must call one, or may call one instead of having content."""
    is_parallel: bool = False
    """Whether it may have several calls."""
    may_talk: bool = False
    """Whether it may be, or begin with, any content at all."""


@dataclass(frozen=True)
class MessageFormat:
    """The format of one model's messages."""

    tools: ToolFormat | None
    """How it writes calls; ``None`` when calls are not read."""
    thinks: bool
    """Whether it may begin with reasoning."""
    marks: Marks
    write_calls: WriteCalls | None = None
    """Form of tools in the text of a conversation; ``None`` when the chat template has a place for them."""

    @property
    def is_harmony(self) -> bool:
        return self.tools is HARMONY

    @property
    def can_reason(self) -> bool:
        return self.thinks or self.is_harmony

    @property
    def is_parallel(self) -> bool:
        """Whether messages may have several calls where the client does not say: without training for calls, models
        repeat them."""
        return self.write_calls is None

    @property
    def new_id(self) -> Callable[[], str]:
        """How calls are given their ids."""
        return (self.tools or LLAMA3).new_id

    @property
    def shown_ids(self) -> frozenset[int]:
        """Special tokens that a reader must see, although they are no text."""
        thinking = (reasoning.OPENS, reasoning.CLOSES) if self.thinks else ()
        return self.marks.ids((*thinking, *(self.tools or LLAMA3).marks))

    def reader(self, tool_names: frozenset[str] | None, prompt: str) -> Format | None:
        """The reader of a message that follows ``prompt``; ``None`` when every message is plain content.

        ``tool_names`` are those of the functions that may be called, ``None`` when there are none.
        """
        if self.is_harmony:
            return HARMONY.read(tool_names or frozenset())
        following = None if tool_names is None else (self.tools or LLAMA3).read(tool_names)
        if not self.thinks:
            return following
        return reasoning.after_thinking(following or reasoning.content_only, reasoning.begins_inside(prompt))

    def grammar(self, wanted: Wanted, prompt: str) -> str:
        """The grammar of a message that follows ``prompt``. Raises ``FormError`` about the schema of a tool."""
        lead, rules = self._lead(prompt)
        parts: dict[str, forms.Part] = {}
        bodies = []
        if wanted.tools:
            names = [tool.name for tool in wanted.tools]
            rules += (self.tools or LLAMA3).rules(names, self.marks, wanted.is_parallel)
            bodies = ["calls"]
            parts = {f"t{i}": _arguments(tool, wanted.may_talk) for i, tool in enumerate(wanted.tools)}
        if wanted.may_talk and self.is_harmony:
            bodies.append(harmony.answer_rule(self.marks, forms.TEXT))
        elif wanted.may_talk:
            rules += talk_rule(self.tools or LLAMA3, self.marks)
            bodies = ["talk"]
        if wanted.form is not None:
            rules += wanted.form.rules
            start = wanted.form.start
            bodies.append(harmony.answer_rule(self.marks, start) if self.is_harmony else start)
            parts |= wanted.form.parts
        return forms.whole(forms.Form(f"{lead} ({' | '.join(bodies)})", rules, parts))

    def _lead(self, prompt: str) -> tuple[str, str]:
        """Lark of the reasoning before a message, and its rules."""
        if self.is_harmony:
            return "thinking?", f"thinking: {harmony.thinking_rule(self.marks)}\n"
        if not self.thinks:
            return "", ""
        opens, closes = self.marks.lark(reasoning.OPENS), self.marks.lark(reasoning.CLOSES)
        if self.marks.has(reasoning.CLOSES):
            rules = f"thoughts: {forms.TEXT} {closes} {forms.SPACES}\n"
        else:
            rules = f"thoughts: until_end {forms.SPACES}\nuntil_end[lazy]: {forms.TEXT} {closes}\n"
        if reasoning.begins_inside(prompt):
            return "thoughts", rules
        return "thinking?", f"thinking: {opens} thoughts\n{rules}"


def _arguments(tool: Tool, is_free: bool) -> forms.Part:
    """What the arguments must be; where the model is free to call or not, only strict tools ask for more than JSON."""
    if tool.parameters is None or (is_free and not tool.is_strict):
        return forms.json_object()
    return forms.json_schema(tool.parameters)


def find_format(
    tool_setting: str, reasoning_setting: str, template: str | None, special_ids: Mapping[str, int]
) -> MessageFormat:
    """The format that settings name, or, for ``auto``, that ``template`` shows signs of, or else ``FALLBACK``.

    Raises ``ConfigError`` for a combination that no model writes.
    """
    named = next((format for format in TOOL_FORMATS if tool_setting == format.name), None)
    tools = named or (_shown_in(template or "") if tool_setting == AUTO else None)
    is_harmony = tools is HARMONY or reasoning_setting == HARMONY_NAME
    if is_harmony and (tools not in (None, HARMONY) or reasoning_setting in THINK_NAMES):
        raise ConfigError(
            f"tool_call_parser {tool_setting} and reasoning_parser {reasoning_setting} do not go together: "
            "gpt-oss writes reasoning and calls in one format of its own"
        )
    shows_thinking = reasoning_setting == AUTO and reasoning.CLOSES in (template or "")
    thinks = reasoning_setting in THINK_NAMES or shows_thinking
    if is_harmony:
        return MessageFormat(HARMONY, False, Marks(special_ids))
    takes_tools = tools is not None and "tools" in (template or "")
    tools = tools or (FALLBACK if tool_setting == AUTO else None)
    in_text = None if takes_tools or tools is None else tools.write
    return MessageFormat(tools, thinks, Marks(special_ids), in_text)


def _shown_in(template: str) -> ToolFormat | None:
    for format in TOOL_FORMATS:
        has_others = any(sign in template for sign in format.others)
        if format.signs and not has_others and all(sign in template for sign in format.signs):
            return format
    return None
