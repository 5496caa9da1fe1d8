"""Output of commands: generated text without control characters, notes to the user, and tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_CONTROL = {code: None for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\n\t"}


def write(text: str) -> None:
    """Print a piece of generated text and flush.

    Model output is untrusted: on a terminal, control characters are dropped, because they could move the cursor,
    change the title or inject input. A file or a pipe gets the text unchanged.
    """
    sys.stdout.write(without_control(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def without_control(text: str) -> str:
    """A text without control characters other than line feeds and tabs."""
    return text.translate(_CONTROL)


def note(text: str) -> None:
    """Print a message for the user to standard error, apart from the output."""
    print(f"octavo: {text}", file=sys.stderr, flush=True)


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Rows of cells in aligned columns; the columns ``right`` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def size_text(num_bytes: float) -> str:
    """A number of bytes for people, such as ``93.8 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} GiB"
