"""``ToolFormat``: how tool calls are parsed, and the grammar that constrains them."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from octavo.grammar.forms import TEXT, literal
from octavo.text.reader import Call, Format

MAX_PARALLEL_CALLS = 16
"""Limit in a message whose calls are constrained by a grammar; unconstrained messages have none."""
_LETTERS = string.ascii_letters + string.digits


class Marks:
    """The marks of a format, and which of them are special tokens of the vocabulary."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids

    def has(self, mark: str) -> bool:
        """Whether ``mark`` is a special token."""
        return mark in self._special_ids

    def lark(self, mark: str) -> str:
        """``mark`` as a part of a Lark rule: a special token if it is one, else a string."""
        return f"<[{self._special_ids[mark]}]>" if self.has(mark) else literal(mark)

    def ids(self, marks: Sequence[str]) -> frozenset[int]:
        """Ids of the special tokens among ``marks``, which a reader of the format must see."""
        return frozenset(self._special_ids[mark] for mark in marks if self.has(mark))


Rules = Callable[[Sequence[str], Marks, bool], str]
"""Lark with a rule ``calls``: one call of the functions of these names or, if the flag is set, several. The arguments
of function i are ``@t{i}``. If the format has a mark, the rule ``rest`` is what follows the first mark."""


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
    read: Callable[[frozenset[str]], Format]
    """A reader of messages for tools of these names."""
    rules: Rules
    opens: str
    """What calls begin with: a mark or, without one, a bracket, with which constrained content may not begin."""
    has_mark: bool = True
    marks: tuple[str, ...] = ()
    """Strings that may be special tokens, which have to be decoded for the reader."""
    signs: tuple[str, ...] = ()
    """Strings that all occur in the chat templates of models that use this format."""
    others: tuple[str, ...] = ()
    """Strings that identify another format with the same signs."""
    new_id: Callable[[], str] = long_id
    write: Callable[[Sequence[Call]], str] | None = None
    """Writes calls as plain text; ``None`` for a format that only its own chat templates write."""


def repeated(rule: str, separator: str, parallel: bool) -> str:
    """``rule`` once or, with ``parallel``, up to ``MAX_PARALLEL_CALLS`` times."""
    return f"{rule} ({separator} {rule}){{0,{MAX_PARALLEL_CALLS - 1}}}" if parallel else rule


def talk_rule(format: ToolFormat, marks: Marks) -> str:
    """Lark with a rule ``talk``: content, calls, or content followed by calls; all calls must be valid."""
    if not format.has_mark:
        return f"talk: calls | /([^\\{format.opens}\\s](.|\\n)*)?/\n"
    if marks.has(format.opens):
        return f"talk: {TEXT} calls?\n"
    return f"talk: opened rest | free\nfree: TEXT\nTEXT: {TEXT}\nopened[lazy]: TEXT {literal(format.opens)}\n"


def one_of(heads: Sequence[str], tail: str) -> str:
    """A Lark rule body: one of the ``heads``, each a part of a rule, followed by its arguments and ``tail``."""
    return " | ".join(f"{head} @t{index} {tail}".strip() for index, head in enumerate(heads))
