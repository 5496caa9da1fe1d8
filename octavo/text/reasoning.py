"""Reasoning between ``<think>`` and ``</think>``, as DeepSeek-R1, Qwen3 and their followers write it."""

from __future__ import annotations

from octavo.text.reader import Format, Reader, Steps

OPENS = "<think>"
CLOSES = "</think>"


def begins_inside(prompt: str) -> bool:
    """Whether a prompt ends inside the reasoning: some chat templates open it for the model."""
    return prompt.rstrip().endswith(OPENS)


def after_thinking(following: Format, is_inside: bool) -> Format:
    """A message that may begin with reasoning; ``following`` reads what comes after it.

    ``is_inside`` says that the prompt has opened the reasoning already. A model may open it once more.
    """

    def read(reader: Reader) -> Steps[None]:
        is_open = yield from reader.leading(OPENS)
        if is_open or is_inside:
            yield from reader.text_until((CLOSES,), "reasoning")
            yield from reader.blanks()
        yield from following(reader)

    return read


def content_only(reader: Reader) -> Steps[None]:
    """A message that is nothing but text."""
    yield from reader.rest()
