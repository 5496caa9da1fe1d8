"""What a start spends its time on."""

from __future__ import annotations

import logging
import time


class Phases:
    """Logs each part of a start with its seconds when it is over, so that a slow start explains itself."""

    def __init__(self) -> None:
        self._logger = logging.getLogger("octavo.start")
        self._began = time.perf_counter()

    def done(self, name: str) -> None:
        """The part since the last call, or since this was made, is over."""
        now = time.perf_counter()
        self._logger.info("%s: %.2f s", name, now - self._began)
        self._began = now


def log_to_stderr(level: str) -> None:
    """Let this process log what is of ``level`` or above."""
    logging.basicConfig(format="%(asctime)s %(levelname).1s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("octavo").setLevel(level.upper())
