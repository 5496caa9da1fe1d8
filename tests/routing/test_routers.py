"""Routers, over replicas that say what they are told to say."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from octavo.errors import ConfigError
from octavo_fleet.routing.prefixes import PromptQuery
from octavo_fleet.routing.routers import ROUTERS, SLACK, PrefixAware, make_router


@dataclass
class Replica:
    name: str
    num_live: int = 0
    cached: int = 0
    tenants: dict[str, int] = field(default_factory=dict)

    def num_live_of(self, tenant: str) -> int:
        return self.tenants.get(tenant, 0)

    def num_cached_blocks(self, query: PromptQuery) -> int:
        return self.cached


QUERY = PromptQuery([1, 2, 3], tenant="a")


def test_the_longest_cached_prefix_wins_within_the_slack() -> None:
    cold, warm = Replica("cold", 0, 1), Replica("warm", SLACK, 2)
    assert PrefixAware().choose(QUERY, [cold, warm]) is warm
    warm.num_live += 1
    assert PrefixAware().choose(QUERY, [cold, warm]) is cold


def test_a_tenant_is_spread_where_load_and_prefix_are_equal() -> None:
    own, others = Replica("own", 3, 0, {"a": 3}), Replica("others", 3, 0, {"b": 3})
    assert PrefixAware().choose(QUERY, [own, others]) is others
    assert PrefixAware().choose(PromptQuery([1], tenant="b"), [own, others]) is own
    others.num_live += 1
    assert PrefixAware().choose(QUERY, [own, others]) is own


def test_sessions_stay_and_are_spread() -> None:
    replicas = [Replica(str(number)) for number in range(4)]
    router = make_router("session")
    chosen = {name: router.choose(PromptQuery([1], session=name), replicas) for name in map(str, range(64))}
    assert {replica.name for replica in chosen.values()} == {"0", "1", "2", "3"}
    for name, replica in chosen.items():
        assert router.choose(PromptQuery([2], session=name), replicas) is replica


def test_each_in_turn_and_the_least_loaded() -> None:
    replicas = [Replica("a", 5), Replica("b", 2), Replica("c", 9)]
    router = make_router("round-robin")
    assert [router.choose(QUERY, replicas).name for _ in range(5)] == ["a", "b", "c", "a", "b"]
    assert make_router("least-loaded").choose(QUERY, replicas).name == "b"


def test_an_unknown_router_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=", ".join(ROUTERS)):
        make_router("best")
