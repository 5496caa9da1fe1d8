"""Files kept open so that an engine process can be started when connections have taken all other descriptors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

NUM_RESERVED = 8
"""To start a process takes a pair of sockets and two pipes' ends."""


class DescriptorReserve:
    """File descriptors that connections cannot take."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def fill(self) -> None:
        """Take back what is missing, as far as there are descriptors."""
        with contextlib.suppress(OSError):
            while len(self._held) < NUM_RESERVED:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        while self._held:
            os.close(self._held.pop())

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """A block, without another task's turn in it, that may use the reserve."""
        self.close()
        try:
            yield
        finally:
            self.fill()
