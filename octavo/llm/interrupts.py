"""Defer Ctrl-C until the engine has finished its step."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Within this block SIGINT is recorded; it is raised at the end of the block.

    An exception in the middle of a step would leave the engine's state inconsistent. A second Ctrl-C is not
    deferred, so a step that hangs can be interrupted. Only the main thread receives signals; in others this has no
    effect.
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
