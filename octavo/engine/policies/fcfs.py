"""First come, first served."""

from __future__ import annotations

from octavo.engine.policies.policy import Policy


class FirstCome(Policy):
    name = "fcfs"
    overtakes = True
