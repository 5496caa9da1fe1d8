"""Reserved file descriptors, so that an engine process can start after connections used up all others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

NUM_RESERVED = 8
"""Starting a process takes a socket pair and the ends of two pipes."""


class DescriptorReserve:
    """File descriptors held open so that connections cannot use them."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def fill(self) -> None:
        """Reopen missing descriptors, as far as available."""
        with contextlib.suppress(OSError):
            while len(self._held) < NUM_RESERVED:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        while self._held:
            os.close(self._held.pop())

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Free the reserve within a block. The block must not await, or another task could take the descriptors."""
        self.close()
        try:
            yield
        finally:
            self.fill()
