"""Scheduling policies, one file each: the order of admission and of preemption. ``policy.py`` defines the interface."""

from __future__ import annotations

from octavo.config import DEFAULT_POLICY
from octavo.engine.policies.deadline import Deadline
from octavo.engine.policies.fair import Fair
from octavo.engine.policies.fcfs import FirstCome
from octavo.engine.policies.longest_prefix import LongestPrefix
from octavo.engine.policies.policy import Policy, PolicyContext
from octavo.engine.policies.priority import Priority
from octavo.engine.policies.round_robin import RoundRobin
from octavo.engine.policies.shortest_first import ShortestFirst
from octavo.engine.policies.static import Static
from octavo.errors import ConfigError

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (FirstCome, Priority, ShortestFirst, LongestPrefix, Deadline, Fair, RoundRobin, Static)
}


def make_policy(context: PolicyContext) -> Policy:
    """The policy named by the settings; raises ``ConfigError`` for an unknown name."""
    name = context.settings.scheduling_policy or DEFAULT_POLICY
    if name not in POLICIES:
        raise ConfigError(f"scheduling_policy: {name!r} is not one of {', '.join(POLICIES)}")
    return POLICIES[name](context)
