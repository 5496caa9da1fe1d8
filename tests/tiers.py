"""Which command runs a test: each belongs to one tier, and has its name as a mark.

| tier | what | command |
|---|---|---|
| unit | all that decides and serves, without tensors, a model or processes that take seconds | `make check` |
| system | everything else of the engine and the server | `make test`, with those of `unit` and `lab` |
| lab | benchmarks, simulations, fuzzers, mutations | `make test-lab`, `make test` |
| nightly | further shapes and longer runs of what `system` has in short | `make nightly` |
| timing | comparisons of times | `make timing` |
| clients | other projects' clients, which have environments of their own | `make test-clients` |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

TIERS = ("unit", "system", "lab", "nightly", "timing", "clients")
UNIT = ("test_architecture.py", "test_budget.py", "test_tiers.py", "cache", "engine", "grammar", "text", "server")
LABORATORY = ("fuzz", "mutation", "octavo_bench", "sim")
NOT_UNIT = ("slow", "model")
MARKED = ("nightly", "timing")
"""Tiers that a test is in because of a mark of its own."""


def tier_of(path: Path, marks: Container[str]) -> str:
    """The tier of a test in the file ``path``, relative to tests/, with these marks."""
    first = path.parts[0]
    if first == "clients":
        return "clients"
    for mark in MARKED:
        if mark in marks:
            return mark
    if first in UNIT and not any(mark in marks for mark in NOT_UNIT):
        return "unit"
    return "lab" if first in LABORATORY else "system"


def nightly(*values: Any) -> Any:
    """Values of parameters for `make nightly` alone."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def one_in(count: int) -> pytest.MarkDecorator:
    """One in ``count`` cases of a test, evenly spread over the combinations of its parameters, runs each time; all run
    in `make nightly`. ``count`` should have no factor in common with the number of values of a parameter."""
    return pytest.mark.one_in(count)


def leave_to_nightly(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that ``one_in`` leaves out."""
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is not None and item.get_closest_marker("nightly") is None:
            name = item.nodeid.partition("[")[0]
            if seen[name] % mark.args[0]:
                item.add_marker("nightly")
            seen[name] += 1


def search_again(count: int) -> pytest.MarkDecorator:
    """A search by random examples runs once each time, and ``count`` times more in `make nightly`; ``run`` is which."""
    return pytest.mark.parametrize("run", nightly_after(1, range(1 + count)))


def nightly_after(count: int, values: Iterable[Any]) -> list[Any]:
    """Values of a parameter, or tuples of several, all but the first ``count`` for `make nightly` alone."""
    rest = iter(values)
    later = (value if type(value) is tuple else (value,) for value in rest)  # no named tuple
    return [*islice(rest, count), *(nightly(*value) for value in later)]
