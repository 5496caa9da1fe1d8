"""Results of the clients, made of the JSON of ``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import RequestFailed


@dataclass(frozen=True)
class Choice:
    """One of the ``n`` continuations."""

    index: int
    text: str
    finish_reason: str | None
    raw: Mapping[str, Any]
    """Its JSON object, which also has log-probabilities, tool calls and reasoning."""


@dataclass(frozen=True)
class Completion:
    """The answer to a request."""

    choices: list[Choice]
    num_prompt_tokens: int
    num_output_tokens: int
    raw: Mapping[str, Any]
    """The whole JSON body."""

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True)
class Piece:
    """New text of one choice; the last piece of a choice has its ``finish_reason``."""

    index: int
    text: str
    finish_reason: str | None
    raw: Mapping[str, Any]
    """The JSON object of this choice in its event."""


def completion_of(body: Any) -> Completion:
    """The answer in a response's body; raises ``RequestFailed`` if there is none."""
    try:
        usage = body.get("usage") or {}
        choices = [
            Choice(_index(choice["index"]), _text(choice, "message"), choice.get("finish_reason"), choice)
            for choice in body["choices"]
        ]
        return Completion(choices, _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"), body)
    except (AttributeError, LookupError, TypeError):
        raise RequestFailed("the server's answer is not a completion.") from None


def pieces_of(event: Mapping[str, Any]) -> Iterator[Piece]:
    """The pieces in an event of a stream; raises ``RequestFailed`` for one of another form."""
    try:
        for choice in event.get("choices") or ():
            yield Piece(_index(choice.get("index", 0)), _text(choice, "delta"), choice.get("finish_reason"), choice)
    except (AttributeError, TypeError):
        raise RequestFailed("the server sent an event that is no piece of a completion.") from None


def _index(value: Any) -> int:
    if type(value) is not int:
        raise TypeError
    return value


def _count(usage: Mapping[str, Any], name: str) -> int:
    """A number of tokens; 0 for anything else."""
    value = usage.get(name)
    return value if type(value) is int and value >= 0 else 0


def _text(choice: Mapping[str, Any], key: str) -> str:
    """The text of a choice of a completion, or that under ``key`` of a chat completion."""
    text = choice["text"] if "text" in choice else (choice.get(key) or {}).get("content")
    if not isinstance(text, str | None):
        raise TypeError
    return text or ""
