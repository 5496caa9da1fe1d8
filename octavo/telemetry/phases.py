"""Duration of the phases of startup."""

from __future__ import annotations

import logging
import time


class Phases:
    """Logs the duration of each phase of startup, to show why a start is slow."""

    def __init__(self) -> None:
        self._logger = logging.getLogger("octavo.start")
        self._began = time.perf_counter()

    def done(self, name: str) -> None:
        """End the phase that began with the last call or with this object."""
        now = time.perf_counter()
        self._logger.info("%s: %.2f s", name, now - self._began)
        self._began = now
