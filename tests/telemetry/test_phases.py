"""Each phase of startup is logged with its duration."""

from __future__ import annotations

import logging
import re
import time

import pytest

from octavo.telemetry.phases import Phases


def test_each_part_has_its_own_seconds(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "octavo")
    monkeypatch.setattr(time, "perf_counter", iter([100.0, 100.25, 100.75]).__next__)
    phases = Phases()
    phases.done("weights")
    phases.done("graphs")
    found = [re.fullmatch(r"(\w+): (\d+\.\d\d) s", message) for message in caplog.messages]
    assert [match and match[1] for match in found] == ["weights", "graphs"]
    assert [float(match[2]) for match in found if match] == [0.25, 0.5]
