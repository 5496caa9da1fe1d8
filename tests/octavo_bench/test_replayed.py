"""The times of a recorded run, repeated."""

from __future__ import annotations

import pytest

from octavo_bench.fidelity import Replayed
from octavo_fleet.sim.costs.fitted import fit
from tests.sim.test_cost_model import random_steps


def test_a_replay_gives_a_run_its_own_times_back() -> None:
    fitted = fit(*random_steps(2000, 1))
    works, seconds = random_steps(500, 2)
    replayed = Replayed(fitted, works, seconds)
    assert [replayed.seconds(work) for work in works] == pytest.approx(seconds)
    assert replayed.seconds(works[-1]) == pytest.approx(seconds[-1]), "past the end, the last of it goes on"
