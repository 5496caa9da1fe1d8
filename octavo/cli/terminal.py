"""Write generated text to a terminal, without control characters."""

from __future__ import annotations

import sys

_CONTROL = {code: None for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\n\t"}


def write(text: str) -> None:
    """Print a piece of generated text and flush.

    Model output is untrusted: on a terminal, control characters are dropped, because they could move the cursor,
    change the title or inject input. A file or a pipe gets the text unchanged.
    """
    sys.stdout.write(text.translate(_CONTROL) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Print a message for the user to standard error, apart from the output."""
    print(f"octavo: {text}", file=sys.stderr, flush=True)
