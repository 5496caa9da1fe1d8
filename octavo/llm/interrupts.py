"""Ctrl-C that does not stop the engine half way through a step."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Within this block SIGINT is only noted; it takes effect at the end of the block.

    An exception between any two instructions of a step would leave the engine's bookkeeping half done. A
    second Ctrl-C is not held back, for a step that hangs. Only the main thread gets signals; others run as usual.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    is_noted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal is_noted
        is_noted = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if is_noted:
            signal.raise_signal(signal.SIGINT)
