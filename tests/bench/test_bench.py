"""The measuring harness measures: small runs of each kind, checked for plausibility and for where they come from."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.overhead import build_instant_engine, decode_step_milliseconds
from octavo.cli import main

Measure = Callable[..., dict[str, Any]]


@pytest.fixture
def measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Run `octavo bench` with these arguments and return its record."""
    return functools.partial(_measured, capsys, monkeypatch)


def _measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["octavo", "bench", *arguments])
    assert main(["bench", *arguments]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert record["command"].startswith("octavo bench ")
    assert not re.search(r" /", record["command"]), "a path of this machine"
    assert record["machine"]["versions"]["octavo"] != "not installed"
    return record


def test_overhead(measured: Measure, tmp_path: Path) -> None:
    output = tmp_path / "kept" / "overhead.json"
    record = measured("overhead", "--sequences", "1,8", "--steps", "20", "--output", str(output))
    assert json.loads(output.read_text()) == record
    small, large = record["result"]["rows"]
    assert 0 < small["step_ms"]["median"] <= large["step_ms"]["max"]


def test_every_timed_step_decodes_every_sequence() -> None:
    assert len(decode_step_milliseconds(4, prompt=40, steps=10)) == 10
    engine = build_instant_engine(2, tokens=64)
    assert not engine.has_work


@pytest.mark.model
def test_front(measured: Measure) -> None:
    record = measured("front", "--streams", "4", "--tokens", "50", "--step-ms", "2")
    (row,) = record["result"]["rows"]
    assert row["tokens"] == 200
    assert row["frames_per_token"] >= 0.5
    assert row["front_cpu_us_per_token"] >= 0


@pytest.mark.model
def test_offline(measured: Measure) -> None:
    record = measured("offline", "--sequences", "1,2", "--prompt", "16", "--decode", "4", "--rounds", "1")
    for row in record["result"]["rows"]:
        assert row["prefill_tok_s"]["median"] > 0
        assert row["decode_tok_s"]["median"] > 0


@pytest.mark.model
def test_peer_in_turns(measured: Measure, tmp_path: Path) -> None:
    """A stand-in peer that answers at once with known figures; the ratio must be the quotient of the medians."""
    peer = tmp_path / "peer"
    peer.write_text(
        f"#!{sys.executable}\nimport json, sys\nprint(json.dumps({{'engine': 'stand-in'}}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    print(json.dumps({'prefill_tok_s': 10.0, 'decode_tok_s': 2.0}), flush=True)\n"
    )
    peer.chmod(0o755)
    arguments = ("--sequences", "1", "--prompt", "16", "--decode", "4", "--rounds", "1")
    record = measured("peer", "--python", str(peer), *arguments)
    (row,) = record["result"]["rows"]
    assert record["result"]["peer"] == {"engine": "stand-in"}
    assert row["decode_tok_s"]["peer"] == 2.0
    assert row["decode_tok_s"]["ratio"] == pytest.approx(row["decode_tok_s"]["octavo"] / 2.0, rel=0.01)
