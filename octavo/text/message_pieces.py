"""The pieces of a model's message: content, reasoning and tool calls."""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple

Kind = Literal["content", "reasoning"]


class Text(NamedTuple):
    """Further text of one kind."""

    kind: Kind
    text: str


class CallProgress(NamedTuple):
    """Further text of the arguments of a call that is being written; its ``Call`` follows.

    The texts of a call's progress are together the ``arguments`` of its ``Call``. A call that became certain at once
    has none.
    """

    name: str
    text: str
    kind: Literal["call"] = "call"


class Call(NamedTuple):
    """A tool call. ``arguments`` is the text of a JSON object, as far as the model wrote valid JSON."""

    name: str
    arguments: str
    is_cut: bool = False
    """Whether the arguments are no JSON: the message ended within them, so that they are a prefix, possibly empty, or
    the model wrote something else in their brackets."""


Piece = Text | Call | CallProgress


def joined(pieces: list[Piece]) -> list[Piece]:
    """``pieces`` with neighbouring texts of one kind, or of one call's progress, as one."""
    result: list[Piece] = []
    for _, group in itertools.groupby(pieces, lambda piece: piece if isinstance(piece, Call) else piece.kind):
        parts = list(group)
        first = parts[0]
        if isinstance(first, Call):
            result += parts
        else:
            result.append(first._replace(text="".join(part.text for part in parts if not isinstance(part, Call))))
    return result
