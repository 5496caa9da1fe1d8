"""The commands of the Makefile together run every test, and each finds its own ones."""

from __future__ import annotations

import functools
import itertools
import operator
import re
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tests.tiers import LABORATORY, MARKED, NOT_UNIT, TIERS, UNIT, tier_of

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()
FILES = [path.relative_to(ROOT / "tests") for path in sorted((ROOT / "tests").rglob("test_*.py"))]


def tiers_of(target: str) -> set[str]:
    """The tiers that a target of the Makefile runs, by its expression of marks."""
    recipe = re.search(rf"^{target}:(?! export).*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe is not None, target
    expression = re.search(r'-m pytest .*-m (\w+|"[^"]+")', recipe[1])
    assert expression is not None, recipe[1]
    compiled = Expression.compile(expression[1].strip('"'))
    return {tier for tier in TIERS if compiled.evaluate(functools.partial(operator.eq, tier))}


def test_every_tier_has_a_command() -> None:
    assert tiers_of("check") == {"unit"}
    assert tiers_of("test-lab") == {"lab"}
    assert tiers_of("test") == {"unit", "system", "lab"}
    assert tiers_of("nightly") == {"nightly"}
    assert tiers_of("timing") == {"timing"}
    assert set(TIERS) - {"unit", "system", "lab", "nightly", "timing"} == {"clients"}  # a folder of their own
    assert "pytest tests/clients " in MAKEFILE


@pytest.mark.parametrize(("target", "folders"), [("check", UNIT), ("test-lab", LABORATORY)])
def test_a_command_of_some_folders_looks_through_all_of_its_tier(target: str, folders: tuple[str, ...]) -> None:
    named = re.search(rf"^{target.upper().replace('-', '_')}_IN := (.*)$", MAKEFILE, re.MULTILINE)
    assert named is not None
    assert named[1].split() == [f"tests/{folder}" for folder in folders]


def test_every_test_has_one_tier() -> None:
    own = (*NOT_UNIT, *MARKED)
    sets = [set(itertools.compress(own, chosen)) for chosen in itertools.product((False, True), repeat=len(own))]
    for path in FILES:
        found = {tier_of(path, marks) for marks in sets}
        assert found <= set(TIERS), path
        assert path.parts[0] == "clients" or {"nightly", "timing"} <= found


def test_the_mark_is_that_of_the_tier(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        marks = [mark.name for mark in item.iter_markers()]
        path = item.path.relative_to(ROOT / "tests")
        assert [name for name in TIERS if name in marks] == [tier_of(path, marks)], item.nodeid
