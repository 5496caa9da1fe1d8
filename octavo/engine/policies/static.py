"""Batches that stay as they are until all their members have ended."""

from __future__ import annotations

from octavo.engine.policies.policy import Policy
from octavo.types import Sequence


class Static(Policy):
    """Admits only into an empty batch: what serving was before continuous batching, to compare with."""

    name = "static"

    def is_closed(self, running: dict[int, Sequence]) -> bool:
        return bool(running)
