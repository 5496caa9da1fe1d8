"""Static batching: a batch runs until all its sequences have ended."""

from __future__ import annotations

from octavo.engine.policies.fcfs import FirstCome
from octavo.types import Sequence


class Static(FirstCome):
    """Admits only into an empty batch; a baseline to compare continuous batching with."""

    name = "static"
    overtakes = False

    def is_closed(self, running: dict[int, Sequence]) -> bool:
        return bool(running)
