"""Writing generated text to a terminal, where it must not be able to do harm."""

from __future__ import annotations

import sys

_CONTROL = {code: None for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\n\t"}


def write(text: str) -> None:
    """Print a piece of generated text at once.

    A model's output is not to be trusted: on a terminal, control characters are left out, for they could
    move the cursor, change the title or answer for the user. A file or a pipe gets the text as it is.
    """
    sys.stdout.write(text.translate(_CONTROL) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Tell the user something about the work, apart from its result."""
    print(f"octavo: {text}", file=sys.stderr, flush=True)
