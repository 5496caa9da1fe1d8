"""Each phase of startup is logged with its duration."""

from __future__ import annotations

import logging
import re
import time

import pytest

from octavo.telemetry.phases import Phases


def test_each_part_has_its_own_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo")
    phases = Phases()
    time.sleep(0.05)
    phases.done("weights")
    phases.done("graphs")
    found = [re.fullmatch(r"(\w+): (\d+\.\d\d) s", message) for message in caplog.messages]
    assert [match and match[1] for match in found] == ["weights", "graphs"]
    first, second = (float(match[2]) for match in found if match)
    assert first >= 0.05
    assert second < 0.05
