"""Answers on a terminal: each block of Markdown is rendered when it is complete, and is plain text until then."""

from __future__ import annotations

import re
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from octavo.cli.terminal import without_control

_FENCE = re.compile(r"^ {0,3}(```|~~~)", re.MULTILINE)


class MarkdownWriter:
    """Prints the text that it gets; blocks end at empty lines outside of fenced code."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live = Live(console=self._console, transient=True, refresh_per_second=12)
        self._open = ""

    def __enter__(self) -> MarkdownWriter:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.update("")
        self._live.stop()
        self._print(self._open)

    def write(self, piece: str) -> None:
        """Add a piece of the answer, whose control characters are dropped."""
        self._open += without_control(piece)
        blocks, self._open = split_blocks(self._open)
        for block in blocks:
            self._print(block)
        height = max(1, self._console.height - 2)
        self._live.update(Text("\n".join(self._open.splitlines()[-height:])))

    def _print(self, block: str) -> None:
        if block.strip():
            self._console.print(Markdown(block, hyperlinks=False))  # a link must show where it leads
            self._console.print()


def split_blocks(text: str) -> tuple[list[str], str]:
    """The complete blocks at the start of a text, and what follows them."""
    blocks, rest, start = [], text, 0
    while (end := rest.find("\n\n", start)) >= 0:
        block = rest[:end]
        if len(_FENCE.findall(block)) % 2:
            start = end + 2
            continue
        blocks.append(block)
        rest, start = rest[end + 2 :], 0
    return blocks, rest
