"""Orders of admission, one file each.

A policy gives every request a place among the others when it arrives: a tuple, smaller goes first, different
for each. The place never changes. It decides who is admitted next and, backwards, who is preempted first.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.engine.policies import fcfs, priority
from octavo.errors import ConfigError
from octavo.types import Request

Order = Callable[[Request, int], tuple[int, ...]]

POLICIES: dict[str, Order] = {policy.name: policy.order for policy in (fcfs, priority)}


def find_policy(name: str) -> Order:
    """The order of the policy called ``name``; raises ``ConfigError`` when there is none."""
    if name not in POLICIES:
        raise ConfigError(f"scheduling_policy: {name!r} is not one of {', '.join(POLICIES)}")
    return POLICIES[name]
