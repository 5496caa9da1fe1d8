"""What a format of tool calls is: how it is read, and how a model is made to write it."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from octavo.grammar.forms import TEXT, literal
from octavo.text.reader import Call, Format

MAX_PARALLEL_CALLS = 16
"""In one message whose calls are asked for; a model that is free may make as many as it likes."""
_LETTERS = string.ascii_letters + string.digits


class Marks:
    """Strings that stand for something in a format, and which of them are special tokens of a vocabulary."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids

    def has(self, mark: str) -> bool:
        """Whether ``mark`` is a special token."""
        return mark in self._special_ids

    def lark(self, mark: str) -> str:
        """``mark`` as a part of a Lark rule: a token where it is one, else its characters."""
        return f"<[{self._special_ids[mark]}]>" if self.has(mark) else literal(mark)

    def ids(self, marks: Sequence[str]) -> frozenset[int]:
        """The special tokens among ``marks``, which a reader of the format must see."""
        return frozenset(self._special_ids[mark] for mark in marks if self.has(mark))


Rules = Callable[[Sequence[str], Marks, bool], str]
"""Lark with a rule ``calls``: one call of the functions of these names, or, if the flag says so, several. The arguments
of function number i are ``@t{i}``. If the format has a mark, ``rest`` is what follows the first one."""


def long_id() -> str:
    """An id of a call as OpenAI makes them."""
    return "call_" + secrets.token_hex(12)


def short_id() -> str:
    """Nine letters or digits, the only form that Mistral's chat templates take."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """One way to write calls."""

    name: str
    """What a setting calls it, as in vLLM."""
    read: Callable[[frozenset[str]], Format]
    """A reader of messages for tools of these names."""
    rules: Rules
    opens: str
    """What calls begin with: a mark, or, if there is none, the bracket with which no content may begin then."""
    has_mark: bool = True
    marks: tuple[str, ...] = ()
    """Strings that may be special tokens, which are no text otherwise."""
    signs: tuple[str, ...] = ()
    """A chat template with all of these is for a model that writes this format."""
    others: tuple[str, ...] = ()
    """Signs of another format that has the same marks."""
    new_id: Callable[[], str] = long_id
    write: Callable[[Sequence[Call]], str] | None = None
    """Calls as text that any tokenizer takes; ``None`` for a format that only its own chat templates write."""


def repeated(rule: str, separator: str, parallel: bool) -> str:
    """``rule`` once or, with ``parallel``, up to as often as is allowed."""
    return f"{rule} ({separator} {rule}){{0,{MAX_PARALLEL_CALLS - 1}}}" if parallel else rule


def talk_rule(format: ToolFormat, marks: Marks) -> str:
    """Lark with a rule ``talk``: content, or calls, or calls behind content; but no calls that are not valid."""
    if not format.has_mark:
        return f"talk: calls | /([^\\{format.opens}\\s](.|\\n)*)?/\n"
    if marks.has(format.opens):
        return f"talk: {TEXT} calls?\n"
    return f"talk: opened rest | free\nfree: TEXT\nTEXT: {TEXT}\nopened[lazy]: TEXT {literal(format.opens)}\n"


def one_of(heads: Sequence[str], tail: str) -> str:
    """A Lark rule body: one of the ``heads``, each a part of a rule, with its arguments and ``tail``."""
    return " | ".join(f"{head} @t{index} {tail}".strip() for index, head in enumerate(heads))
