"""The targets of ``make fuzz``: their seeds, and a few changes of them, do no harm."""

from __future__ import annotations

import logging
import random

import pytest

from tests.fuzz import targets
from tests.fuzz.target import Fault
from tests.fuzz.template import in_child

NUM_SEEDS, NUM_CHANGED = 6, 10


@pytest.mark.parametrize("name", targets.NAMES)
def test_target(name: str) -> None:
    target, rng = targets.load(name), random.Random(name)
    try:
        for seed in rng.sample(target.seeds, min(NUM_SEEDS, len(target.seeds))):
            target.read(seed)
        for _ in range(NUM_CHANGED):
            target.read(target.mutate(rng.choice(target.seeds), rng))
    finally:
        target.close()
    assert logging.getLogger("octavo").propagate
    assert logging.getLogger("octavo.server").level == logging.NOTSET


def test_what_a_child_may_do() -> None:
    in_child(lambda: True)
    in_child(lambda: bytearray(1 << 40) == b"")  # too much memory is refused, as in a child of the server
    for broken in (lambda: False, lambda: bool(1 // 0)):
        with pytest.raises(Fault):
            in_child(broken)
