"""Reasoning between ``<think>`` and ``</think>``, as DeepSeek-R1, Qwen3 and their followers write it."""

from __future__ import annotations

from octavo.text.reader import Format, Reader, Steps

OPENS = "<think>"
CLOSES = "</think>"


def begins_inside(prompt: str) -> bool:
    """Whether a prompt ends inside reasoning: some chat templates append ``<think>``."""
    return prompt.rstrip().endswith(OPENS)


def after_thinking(following: Format, is_inside: bool) -> Format:
    """A message that may begin with reasoning; ``following`` reads the rest.

    ``is_inside``: the prompt has opened the reasoning already. The model may open it again.
    """

    def read(reader: Reader) -> Steps[None]:
        is_open = yield from reader.leading(OPENS)
        if is_open or is_inside:
            yield from reader.text_until((CLOSES,), "reasoning")
            yield from reader.blanks()
        yield from following(reader)

    return read


def content_only(reader: Reader) -> Steps[None]:
    """A message of content only."""
    yield from reader.rest()
