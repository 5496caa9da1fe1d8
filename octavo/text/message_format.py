"""A model's message format: reasoning and tool calls.

Chosen once, from settings or from signs in the chat template; it then provides a reader for each message, and the
grammar of a constrained message.
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
"""In order of precedence: of several whose signs a template shows, the first is chosen."""
FALLBACK = HERMES
"""The format described in the prompt when the chat template describes none."""
THINK_NAMES = ("deepseek_r1", "qwen3")
HARMONY_NAME = "openai_gptoss"
AUTO = "auto"


class Tool(NamedTuple):
    """A function that the client offers."""

    name: str
    parameters: Mapping[str, Any] | None
    """JSON schema of its arguments; ``None`` when it has none."""
    is_strict: bool = False
    """Whether the arguments must match the schema even if calling the tool is optional."""


@dataclass(frozen=True)
class MessageConstraints:
    """Constraints on a message."""

    form: forms.Form | None = None
    """Grammar of the content; ``None`` for unconstrained content, if calls are not required."""
    tools: Sequence[Tool] = ()
    """Tools of which the message must call one, or may call one instead of having content."""
    is_parallel: bool = False
    """Whether the message may have several calls."""
    allows_text: bool = False
    """Whether the message may be, or begin with, unconstrained content."""


@dataclass(frozen=True)
class MessageFormat:
    """The format of one model's messages."""

    tools: ToolFormat | None
    """Format of tool calls; ``None`` when calls are not parsed."""
    thinks: bool
    """Whether a message may begin with reasoning."""
    marks: Marks
    write_calls: WriteCalls | None = None
    """Writes calls as text of the conversation; ``None`` when the chat template renders tools."""

    @property
    def is_harmony(self) -> bool:
        return self.tools is HARMONY

    @property
    def can_reason(self) -> bool:
        return self.thinks or self.is_harmony

    @property
    def is_parallel(self) -> bool:
        """Default for several calls in a message; off without a tool template, since untrained models repeat calls."""
        return self.write_calls is None

    @property
    def new_id(self) -> Callable[[], str]:
        """Generator of call ids."""
        return (self.tools or LLAMA3).new_id

    @property
    def shown_ids(self) -> frozenset[int]:
        """Special tokens that are decoded to text for the reader although special tokens are skipped otherwise."""
        thinking = (reasoning.OPENS, reasoning.CLOSES) if self.thinks else ()
        return self.marks.ids((*thinking, *(self.tools or LLAMA3).marks))

    def reader(self, tool_names: frozenset[str] | None, prompt: str) -> Format | None:
        """The reader of a message that follows ``prompt``; ``None`` when every message is plain content.

        ``tool_names`` are the functions that may be called, ``None`` for a request without tools.
        """
        if self.is_harmony:
            return HARMONY.read(tool_names or frozenset())
        following = None if tool_names is None else (self.tools or LLAMA3).read(tool_names)
        if not self.thinks:
            return following
        return reasoning.after_thinking(following or reasoning.content_only, reasoning.begins_inside(prompt))

    def grammar(self, wanted: MessageConstraints, prompt: str) -> str:
        """The grammar of a message that follows ``prompt``. Raises ``FormError`` about the schema of a tool."""
        lead, rules = self._lead(prompt)
        parts: dict[str, forms.Part] = {}
        bodies = []
        if wanted.tools:
            names = [tool.name for tool in wanted.tools]
            rules += (self.tools or LLAMA3).rules(names, self.marks, wanted.is_parallel)
            bodies = ["calls"]
            parts = {f"t{i}": _arguments(tool, wanted.allows_text) for i, tool in enumerate(wanted.tools)}
        if wanted.allows_text and self.is_harmony:
            bodies.append(harmony.answer_rule(self.marks, forms.TEXT))
        elif wanted.allows_text:
            rules += talk_rule(self.tools or LLAMA3, self.marks)
            bodies = ["talk"]
        if wanted.form is not None:
            rules += wanted.form.rules
            start = wanted.form.start
            bodies.append(harmony.answer_rule(self.marks, start) if self.is_harmony else start)
            parts |= wanted.form.parts
        return forms.grammar_text(forms.Form(f"{lead} ({' | '.join(bodies)})", rules, parts))

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
    """Grammar of the arguments; where calling is optional (``is_free``), only strict tools enforce their schema."""
    if tool.parameters is None or (is_free and not tool.is_strict):
        return forms.json_object()
    return forms.json_schema(tool.parameters)


def find_format(
    tool_setting: str, reasoning_setting: str, template: str | None, special_ids: Mapping[str, int]
) -> MessageFormat:
    """The format named in the settings; with ``auto``, the one that ``template`` shows signs of, else ``FALLBACK``.

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
