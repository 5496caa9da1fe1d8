"""A model's message format: reasoning and tool calls.

Chosen once, from settings or from signs in the chat template; it then provides a reader for each message, and the
grammar of a constrained message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from octavo.errors import ConfigError
from octavo.grammar import forms
from octavo.text import reasoning
from octavo.text.chat_messages import WriteCalls
from octavo.text.message_parser import Format
from octavo.text.reasoning import BLANKS, AnswerMarks, Thinking, mark_of
from octavo.text.tool_calls import harmony
from octavo.text.tool_calls.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from octavo.text.tool_calls.gemma import FUNCTION_GEMMA, GEMMA4
from octavo.text.tool_calls.harmony import HARMONY
from octavo.text.tool_calls.hermes import HERMES
from octavo.text.tool_calls.kimi import KIMI
from octavo.text.tool_calls.llama3 import LLAMA3
from octavo.text.tool_calls.marked_json import COHERE, GRANITE, GRANITE_20B, HUNYUAN, INTERNLM, LONGCAT, NEMOTRON, PHI4
from octavo.text.tool_calls.mistral import MISTRAL
from octavo.text.tool_calls.pythonic import LFM2, OLMO3, PYTHONIC
from octavo.text.tool_calls.tool_format import Marks, ToolFormat, talk_rule
from octavo.text.tool_calls.values import Functions
from octavo.text.tool_calls.xml_formats import DEEPSEEK_V4, DEEPSEEK_V32, GLM, MINIMAX_M2, QWEN3_CODER, SEED_OSS
from octavo.types import ThinkingBudget

TOOL_FORMATS = (
    *(HERMES, LLAMA3, MISTRAL, DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32, DEEPSEEK_V4, HARMONY, PYTHONIC, QWEN3_CODER),
    *(GLM, MINIMAX_M2, KIMI, SEED_OSS, GRANITE, PHI4, OLMO3, LFM2, GEMMA4, FUNCTION_GEMMA, HUNYUAN, NEMOTRON, COHERE),
    *(INTERNLM, GRANITE_20B, LONGCAT),
)
"""In order of precedence: of several whose signs a template shows, the first is chosen."""
FALLBACK = HERMES
"""The format described in the prompt when the chat template describes none."""
HARMONY_NAME = "openai_gptoss"
AUTO = "auto"


class Tool(NamedTuple):
    """A function that the client offers."""

    name: str
    parameters: Mapping[str, Any] | None
    """JSON schema of its arguments, an object; ``None`` when it has none."""
    is_strict: bool = False
    """Whether the arguments must match the schema even if calling the tool is optional."""
    place: str = ""
    """Where ``parameters`` are in the client's request."""
    is_custom: bool = False
    """Whether it takes text: clients get the member ``input`` of the arguments."""
    text: forms.Part | None = None
    """Grammar of that text, if it has one."""


@dataclass(frozen=True)
class MessageConstraints:
    """Constraints on a message."""

    form: forms.GrammarSource | None = None
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
    thinking: Thinking | None
    """Marks of the reasoning with which a message may begin; ``None`` when it has none."""
    marks: Marks
    write_calls: WriteCalls | None = None
    """Writes calls as text of the conversation; ``None`` when the chat template renders tools."""

    @property
    def is_harmony(self) -> bool:
        return self.tools is HARMONY

    @property
    def can_reason(self) -> bool:
        return self.thinking is not None or self.is_harmony

    @property
    def is_parallel(self) -> bool:
        """Default for several calls in a message; off without a tool template, since untrained models repeat calls."""
        return self.write_calls is None

    @property
    def new_id(self) -> Callable[[], str]:
        """Generator of call ids."""
        return (self.tools or LLAMA3).new_id

    @cached_property
    def shown_ids(self) -> frozenset[int]:
        """Special tokens that are decoded to text for the reader although special tokens are skipped otherwise."""
        thinking = () if self.thinking is None else self.thinking.marks
        return self.marks.ids((*thinking, *(self.tools or LLAMA3).marks))

    def thinking_budget(
        self, num_tokens: int, prompt: str, encode: Callable[[str], Sequence[int]], is_begun: bool = False
    ) -> ThinkingBudget | None:
        """A bound on the reasoning in a message that follows ``prompt``; ``None`` if there are no marks of it.

        ``encode`` gives the tokens of marks.
        """
        is_inside, before = False, BLANKS
        if self.is_harmony:
            (opens, closes, then), before = harmony.REASONING, (harmony.HEADER,)
        elif self.thinking is not None:
            is_inside = reasoning.begins_inside(prompt, self.thinking, is_begun)
            opens, closes, then = self.thinking.opens, self.thinking.closes, ""
        else:
            return None
        gap = tuple({token for text in before for token in encode(text)})
        marks = mark_of(opens, encode), mark_of(closes, encode)
        return ThinkingBudget(num_tokens, *marks, tuple(encode(then)), gap, is_inside)

    def answer_marks(self, is_begun: bool = False) -> AnswerMarks | None:
        """Marks of the answer, in which alone stop strings count; ``None`` when all of a message is the answer."""
        if self.is_harmony:
            return harmony.ANSWER
        return None if self.thinking is None else self.thinking.answer_marks._replace(is_begun=is_begun)

    def reader(self, functions: Functions | None, prompt: str, is_begun: bool = False) -> Format | None:
        """The reader of a message that follows ``prompt``; ``None`` when every message is plain content.

        ``functions`` are those that may be called, ``None`` for a request without tools. With ``is_begun`` the prompt
        ends with the beginning of the message.
        """
        if self.is_harmony:
            return HARMONY.read(functions or frozenset())
        following = None if functions is None else (self.tools or LLAMA3).read(functions)
        if self.thinking is None:
            return following
        is_inside = reasoning.begins_inside(prompt, self.thinking, is_begun)
        return reasoning.after_thinking(following or reasoning.content_only, is_inside, self.thinking)

    def grammar(self, wanted: MessageConstraints, prompt: str, is_begun: bool = False) -> str:
        """The grammar of a message that follows ``prompt``. Raises ``FormError`` about the schema of a tool."""
        lead, rules = self._lead(prompt, is_begun)
        parts: dict[str, forms.Part] = {}
        bodies = []
        if wanted.tools:
            names = [tool.name for tool in wanted.tools]
            rules += (self.tools or LLAMA3).rules(names, self.marks, wanted.is_parallel)
            bodies = ["calls"]
            more, parts = self._argument_rules([_arguments(tool, wanted.allows_text) for tool in wanted.tools])
            rules += more
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
        return forms.grammar_text(forms.GrammarSource(f"{lead} ({' | '.join(bodies)})", rules, parts))

    def _argument_rules(self, arguments: Sequence[forms.Part]) -> tuple[str, dict[str, forms.Part]]:
        """Rules of the functions' arguments, and their parts."""
        make = (self.tools or LLAMA3).argument_rules
        if make is None:
            return "", {f"t{i}": part for i, part in enumerate(arguments)}
        made = [make(i, part, self.marks) for i, part in enumerate(arguments)]
        return "".join(rules for rules, _ in made), {name: part for _, parts in made for name, part in parts.items()}

    def _lead(self, prompt: str, is_begun: bool) -> tuple[str, str]:
        """Lark of the reasoning before a message, and its rules."""
        if self.is_harmony:
            return "thinking?", f"thinking: {harmony.thinking_rule(self.marks)}\n"
        if self.thinking is None:
            return "", ""
        opens, closes = self.marks.lark(self.thinking.opens), self.marks.lark(self.thinking.closes)
        if self.marks.has(self.thinking.closes):
            rules = f"thoughts: {forms.TEXT} {closes} {forms.SPACES}\n"
        else:
            rules = f"thoughts: until_end {forms.SPACES}\nuntil_end[lazy]: {forms.TEXT} {closes}\n"
        if reasoning.begins_inside(prompt, self.thinking, is_begun):
            return "thoughts", rules
        return "thinking?", f"thinking: {opens} thoughts\n{rules}"


def _arguments(tool: Tool, is_free: bool) -> forms.Part:
    """Grammar of the arguments; where calling is optional (``is_free``), only strict tools enforce their schema."""
    if tool.parameters and is_free and not tool.is_strict:
        return forms.json_object()
    return forms.arguments(tool.parameters, tool.place, tool.is_strict)


def find_format(
    tool_setting: str, reasoning_setting: str, template: str | None, special_ids: Mapping[str, int]
) -> MessageFormat:
    """The format named in the settings; with ``auto``, the one that ``template`` shows signs of, else ``FALLBACK``.

    Raises ``ConfigError`` for a combination that no model writes.
    """
    named = next((format for format in TOOL_FORMATS if tool_setting in (format.name, *format.also)), None)
    shown = (format for format in TOOL_FORMATS if tool_setting == AUTO and format.is_shown(template or ""))
    tools = named or next(shown, None)
    thinking = reasoning.thinking_named(reasoning_setting)
    is_harmony = tools is HARMONY or reasoning_setting == HARMONY_NAME
    if is_harmony and (tools not in (None, HARMONY) or thinking is not None):
        raise ConfigError(
            f"tool_call_parser {tool_setting} and reasoning_parser {reasoning_setting} do not go together: "
            "gpt-oss writes reasoning and calls in one format of its own"
        )
    if is_harmony:
        return MessageFormat(HARMONY, None, Marks(special_ids))
    if reasoning_setting == AUTO:
        thinking = reasoning.thinking_shown(template or "")
    takes_tools = tools is not None and "tools" in (template or "")
    tools = tools or (FALLBACK if tool_setting == AUTO else None)
    in_text = None if takes_tools or tools is None or not tools.is_plain else tools.write
    return MessageFormat(tools, thinking, Marks(special_ids), in_text)
