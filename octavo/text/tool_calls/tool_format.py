"""``ToolFormat``: how tool calls are parsed and written, and the grammar that constrains them."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from octavo.grammar.forms import TEXT, Part, literal
from octavo.text.message_parser import Call, Format, Steps, TextReader
from octavo.text.tool_calls.values import Functions

MAX_PARALLEL_CALLS = 16
"""Limit in a message whose calls are constrained by a grammar; unconstrained messages have none."""
_LETTERS = string.ascii_letters + string.digits


class Marks:
    """The marks of a format, and which of them are special tokens of the vocabulary."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        self._parts: dict[str, list[str]] = {}

    def has(self, mark: str) -> bool:
        """Whether ``mark`` is a special token."""
        return mark in self._special_ids

    def lark(self, mark: str) -> str:
        """``mark`` as a part of a Lark rule: a special token if it is or has one, else a string."""
        return " ".join(
            f"<[{self._special_ids[part]}]>" if self.has(part) else literal(part) for part in self.parts(mark)
        )

    def parts(self, mark: str) -> list[str]:
        """``mark`` divided at special tokens that are parts of it."""
        if self.has(mark):
            return [mark]
        if mark not in self._parts:
            inner = sorted((token for token in self._special_ids if token and token in mark), key=len, reverse=True)
            parts = re.split(f"({'|'.join(map(re.escape, inner))})", mark) if inner else [mark]
            self._parts[mark] = [part for part in parts if part]
        return self._parts[mark]

    def up_to(self, rule: str, mark: str, times: str = "*") -> str:
        """Lark of ``rule``: ``times`` any character and ``mark``, at its first place if they may be any number."""
        first, *rest = self.parts(mark)
        if self.has(first):  # a token, which text does not have
            return f"{rule}: /(.|\\n){times}/ {self.lark(mark)}\n"
        if not rest and times == "*":
            return f"{rule}[lazy]: {TEXT} {literal(mark)}\n"
        # One expression, since a longer match of the text would take the beginning of the mark.
        last = re.escape(first).replace("\\\n", "\\n").replace("/", "\\/")
        return f"{rule}: /(.|\\n){times}{last}/ {' '.join(map(self.lark, rest))}\n"

    def ids(self, marks: Sequence[str]) -> frozenset[int]:
        """Ids of the special tokens that are or begin or end one of ``marks``, which a reader must see."""
        return frozenset(self._special_ids[part] for mark in marks for part in self.parts(mark) if self.has(part))


Rules = Callable[[Sequence[str], Marks, bool], str]
"""Lark with a rule ``calls``: one call of the functions of these names or, if the flag is set, several. The arguments
of function i are ``@t{i}``. If the format has a mark, the rule ``rest`` is what follows the first mark."""
ReadMessage = Callable[[Functions], Callable[[TextReader], Steps[None]]]
"""A reader of messages for these functions."""
ReadCalls = Callable[[TextReader, Functions, str], Steps[None]]
"""Reads the calls behind a mark, which is given."""
ArgumentRules = Callable[[int, Part, Marks], tuple[str, dict[str, Part]]]
"""Lark with a rule ``a{i}`` for the arguments of function i, which match a part, and the parts that it refers to."""


def long_id() -> str:
    """A call id in OpenAI's form."""
    return "call_" + secrets.token_hex(12)


def short_id() -> str:
    """A call id of nine letters or digits, the only form that Mistral's chat templates accept."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """A format of tool calls."""

    name: str
    """Value of ``tool_call_parser``, as in vLLM."""
    also: tuple[str, ...] = ()
    """Other values that mean this format."""
    models: str
    """Families that write it."""
    message: ReadMessage
    rules: Rules
    opens: str
    """What calls begin with: a mark or, without one, a bracket, with which constrained content may not begin."""
    has_mark: bool = True
    more_opens: tuple[str, ...] = ()
    """Marks with which models that leave the first one out begin a call."""
    marks: tuple[str, ...] = ()
    """Strings that may be special tokens, which have to be decoded for the reader."""
    signs: tuple[tuple[str, ...], ...] = ()
    """Strings that occur in the chat templates of models that use this format: all of one of these groups."""
    others: tuple[str, ...] = ()
    """Strings that identify another format with the same signs."""
    new_id: Callable[[], str] = long_id
    write: Callable[[Sequence[Call]], str]
    """Writes calls as text."""
    is_plain: bool = False
    """Whether a model that does not know the format can be told of it in its prompt."""
    argument_rules: ArgumentRules | None = None
    """Replaces ``@t{i}`` by ``a{i}`` in a format whose arguments are no JSON object."""

    def read(self, functions: Functions) -> Format:
        """A reader of messages that may call ``functions``."""
        return Format(self.message(functions), (self.opens, *self.more_opens) if self.has_mark else ())

    def is_shown(self, template: str) -> bool:
        """Whether a chat template is one of models that use this format."""
        if any(sign in template for sign in self.others):
            return False
        return any(all(sign in template for sign in group) for group in self.signs)


def marked(read_calls: ReadCalls, *opens: str) -> ReadMessage:
    """A reader of messages of text, and of calls behind the marks ``opens``."""

    def read_message(functions: Functions) -> Callable[[TextReader], Steps[None]]:
        def read(reader: TextReader) -> Steps[None]:
            while (mark := (yield from reader.text_until(opens))) is not None:
                yield from reader.attempt(read_calls(reader, functions, mark), mark)

        return read

    return read_message


def section(read_call: Callable[[TextReader], Steps[None]], opens: str, begins: str, closes: str) -> ReadMessage:
    """A reader of messages whose calls stand between the marks ``opens`` and ``closes``, each behind ``begins``.

    The mark of the section may be missing. ``read_call`` reads one call with its marks, or nothing.
    """

    def read_calls(reader: TextReader, functions: Functions, mark: str) -> Steps[None]:
        if mark == begins:
            reader.step_back(mark)
        while (yield from reader.maybe(read_call(reader))):
            pass
        yield from reader.closing(closes)

    return marked(read_calls, opens, begins)


def repeated(rule: str, separator: str, parallel: bool) -> str:
    """``rule`` once or, with ``parallel``, up to ``MAX_PARALLEL_CALLS`` times."""
    return f"{rule} ({separator} {rule}){{0,{MAX_PARALLEL_CALLS - 1}}}" if parallel else rule


def talk_rule(format: ToolFormat, marks: Marks) -> str:
    """Lark with a rule ``talk``: content, calls, or content followed by calls; all calls must be valid."""
    if not format.has_mark:
        return f"talk: calls | /([^\\{format.opens}\\s](.|\\n)*)?/\n"
    if marks.has(format.opens):
        return f"talk: {TEXT} calls?\n"
    return f"talk: opened rest | free\nfree: {TEXT}\n{marks.up_to('opened', format.opens)}"


def one_of(heads: Sequence[str], tail: str, arguments: str = "@t") -> str:
    """A Lark rule body: one of the ``heads``, each a part of a rule, followed by its arguments and ``tail``."""
    return " | ".join(f"{head} {arguments}{index} {tail}".strip() for index, head in enumerate(heads))
