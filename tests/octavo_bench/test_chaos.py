"""Faults against a real server with a journal: no answer may be lost, changed or come twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli import main
from octavo_bench.chaos.faults import FAULTS
from octavo_bench.chaos.traffic import LIMITS, make_requests

pytestmark = pytest.mark.slow


@pytest.mark.nightly
def test_no_answer_is_lost_or_changed(tmp_path: Path) -> None:
    output = tmp_path / "chaos.json"
    command = ["bench", "chaos", "--seed", "3", "--num-faults", "5", "--clients", "4", "--num-requests", "20"]
    faults = ["--faults", "kill_engine,kill_front,full_disk,poison,storm"]
    status = main([*command, *faults, "--logs", str(tmp_path / "logs"), "--output", str(output)])
    result = json.loads(output.read_text())["result"]
    assert result["findings"] == []
    assert status == 0
    assert sum(result["right_answers"].values()) > 20
    assert sum(result["faults"].values()) == 5


@pytest.mark.nightly
def test_a_supervised_server_loses_nothing(tmp_path: Path) -> None:
    output = tmp_path / "chaos.json"
    command = ["bench", "chaos", "--seed", "1", "--num-faults", "3", "--clients", "4", "--num-requests", "20"]
    flags = ["--server-args=--supervise 1", "--faults", "kill_child,hang_child", "--output", str(output)]
    assert main([*command, *flags]) == 0
    result = json.loads(output.read_text())["result"]
    assert sum(result["faults"].values()) == result["kills"]["front"] == 3
    assert result["server_starts"] == 1


def test_unknown_faults_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "chaos", "--faults", "earthquake"]) == 2
    assert f"earthquake: not among {', '.join(FAULTS)}" in capsys.readouterr().err


def test_answers_can_be_short_and_a_third_of_the_requests_has_a_grammar() -> None:
    made = make_requests(240, 0, has_adapter=True, most_tokens=32)
    bodies = [body for asked in made for body in (asked.body, *asked.body.get("lines", ()))]
    assert max(body.get(name, 0) for body in bodies for name in LIMITS) == 32
    forms = ("tools", "response_format", "structured_outputs")
    assert sum(any(name in asked.body for name in forms) for asked in made) >= 80
