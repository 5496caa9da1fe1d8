"""Which policies there are, and how each one orders."""

from __future__ import annotations

import pytest

from octavo.config import EngineConfig, settings
from octavo.engine.policies import POLICIES, find_policy
from octavo.errors import ConfigError
from tests.engine.making import make_request


def test_every_choice_exists_and_every_policy_can_be_chosen() -> None:
    (choices,) = [item.choices for item in settings(EngineConfig) if item.name == "scheduling_policy"]
    assert set(POLICIES) == set(choices) == {"fcfs", "priority"}


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="'fairest' is not one of fcfs, priority"):
        find_policy("fairest")


def test_orders() -> None:
    late_but_urgent, early = make_request(0, priority=-1), make_request(1, priority=5)
    assert find_policy("fcfs")(early, 0) < find_policy("fcfs")(late_but_urgent, 1)
    assert find_policy("priority")(late_but_urgent, 1) < find_policy("priority")(early, 0)
    assert find_policy("priority")(early, 0) < find_policy("priority")(early, 1)
