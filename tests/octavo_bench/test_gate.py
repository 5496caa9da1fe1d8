"""`--fail-under`: figures of a record against those of a baseline or of another engine, with an exit code."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import build_parser, main
from octavo.errors import ConfigError
from octavo_bench.records.gate import compare, read_record
from octavo_bench.records.record_figures import figures

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def record(*rows: dict[str, Any], benchmark: str = "offline") -> dict[str, Any]:
    return {"benchmark": benchmark, "machine": {"cores": 2}, "result": {"rows": list(rows)}}


def row(sequences: int, tok_s: float, step_ms: float = 1.0) -> dict[str, Any]:
    spread = {"median": tok_s, "min": tok_s - 1, "max": tok_s + 1, "runs": 3}
    return {"sequences": sequences, "decode_tok_s": spread, "step_ms": step_ms, "same": True}


def test_figures_have_a_case_and_an_engine() -> None:
    rows = (
        {"workload": "W1", "figure": "tok_s", "octavo": {"median": 4.0, "all": [3.0, 5.0]}, "vllm": {"median": 2.0}},
    )
    found = figures(record(*rows))
    assert [(figure.key, figure.value, figure.low, figure.high) for figure in found] == [
        (("W1", "tok_s", "octavo"), 4.0, 3.0, 5.0),
        (("W1", "tok_s", "vllm"), 2.0, 2.0, 2.0),
    ]
    plain = figures(record(row(4, 10.0), row(4, 11.0)))
    assert [str(figure) for figure in plain] == [
        "sequences 4, decode_tok_s",
        "sequences 4, step_ms",
        "sequences 4 #2, decode_tok_s",
        "sequences 4 #2, step_ms",
    ]
    assert [figure.is_higher_better for figure in plain[:2]] == [True, False]


@pytest.mark.parametrize(
    "name", ["ablation_cpu", "cpu_peer_llama_cpp", "engine_overhead", "fairness", "front_cpu", "gpu/gpt2_suites"]
)
def test_records_have_figures_with_names_of_their_own(name: str) -> None:
    found = figures(read_record(RESULTS / f"{name}.json"))
    assert len({figure.key for figure in found}) == len(found) > 1


@pytest.mark.parametrize(
    ("names", "shares"),
    [
        ((), {"sequences 1, decode_tok_s": 0.9, "sequences 4, decode_tok_s": 1.1}),
        (("step_ms",), {"sequences 1, step_ms": 0.8, "sequences 4, step_ms": 2.0}),
    ],
)
def test_a_share_below_one_is_worse(names: tuple[str, ...], shares: dict[str, float]) -> None:
    baseline = record(row(1, 100.0, 1.0), row(4, 200.0, 1.0))
    found = compare(record(row(1, 90.0, 1.25), row(4, 220.0, 0.5)), baseline, names)
    assert {one.name: one.share for one in found} == pytest.approx(shares)
    assert [one.is_good(0.85) for one in found] == [share >= 0.85 for share in shares.values()]


def test_what_was_not_measured_fails() -> None:
    one, missing = compare(record(row(1, 90.0)), record(row(1, 90.0), row(4, 200.0)))
    assert one.is_good(1.0)
    assert not missing.is_good(0.01)
    assert missing.line(0.01) == "sequences 4, decode_tok_s: missing (baseline 200): FAILED"


def test_what_cannot_be_compared_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'served', and not of 'offline'"):
        compare(record(row(1, 1.0)), record(row(1, 1.0), benchmark="served"))
    with pytest.raises(ConfigError, match="these can: decode_tok_s, step_ms"):
        compare(record(row(1, 1.0)), record(row(1, 1.0)), ["ttft"])
    with pytest.raises(ConfigError, match="needs --baseline"):
        compare(record(row(1, 1.0)), None)


@pytest.mark.parametrize(("least", "code"), [("0.91", 0), ("1.2", 1)])
def test_another_engine_is_a_baseline(least: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The recorded runs next to vLLM: 1.16, 1.34, 1.10 and 1.12 times its throughput."""
    file = str(RESULTS / "gpu/peer_qwen3-8b.json")
    assert main(["bench", "report", file, "--fail-under", least, "--gate", "output_tok_s"]) == code
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[-1] for line in lines] == [
        "passed" if code == 0 or "1.344" in line else "FAILED" for line in lines
    ]
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("name", "count"), [("served_cpu", 3), ("cpu_peer_llama_cpp", 6), ("gpu/gpt2_suites", 10), ("startup", 0)]
)
def test_a_record_that_compares_needs_no_baseline(name: str, count: int) -> None:
    found = read_record(RESULTS / f"{name}.json")
    if not count:
        with pytest.raises(ConfigError, match="no ratio"):
            compare(found, None)
        return
    assert len(compare(found, None)) == count


def test_a_measurement_ends_with_the_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baseline, output = tmp_path / "baseline.json", tmp_path / "new.json"
    arguments = ["bench", "overhead", "--sequences", "2", "--steps", "5"]
    assert main([*arguments, "--output", str(baseline)]) == 0
    gate = ["--baseline", str(baseline), "--gate", "step_ms"]
    assert main([*arguments, *gate, "--fail-under", "0.0001", "--output", str(output)]) == 0
    assert "sequences 2, prompt 256, fcfs, waiting 0, seen 0, step_ms" in capsys.readouterr().err
    doctored = json.loads(baseline.read_text())
    doctored["result"]["rows"][0]["step_ms"]["median"] = 1e-9
    doctored["machine"]["cores"] = 4711
    baseline.write_text(json.dumps(doctored))
    assert main([*arguments, *gate, "--fail-under", "0.9"]) == 1
    said = capsys.readouterr().err
    assert "FAILED" in said
    assert "measured with cores 4711" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--baseline", "none.json", "--fail-under", "1"], "none.json: not a record"),
        (["--baseline", str(RESULTS / "startup.json")], "baseline: needs --fail-under"),
        (["--fail-under", "0"], "fail_under: must be above 0"),
        (["--gate", "tok_s"], "gate: needs --fail-under"),
        (["--plot", "plot.pdf"], "'plot.pdf' must end with .svg or .png"),
    ],
    ids=lambda value: "",
)
def test_mistakes_are_found_before_the_measurement(
    flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("octavo_bench.overhead.measure", lambda **given: pytest.fail("measured"))
    assert main(["bench", "overhead", *flags]) == 2
    assert said in capsys.readouterr().err


NOT_MEASURED = {"shape", "report", "architectures"}
"""What makes or shows something else than a record."""


def test_every_measurement_can_be_drawn_kept_traced_and_gated() -> None:
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    (kinds,) = (
        action for action in commands.choices["bench"]._actions if isinstance(action, argparse._SubParsersAction)
    )
    assert len(kinds.choices) > 20
    for kind, parser in kinds.choices.items():
        has = {"--plot", "--evidence", "--gpu-trace", "--fail-under"} <= parser._option_string_actions.keys()
        assert has == (kind not in NOT_MEASURED), kind


def test_each_name_of_a_gate_must_mean_a_figure() -> None:
    two = record(row(1, 1.0))
    with pytest.raises(ConfigError, match="'ttft' means no figure"):
        compare(two, two, ["tok_s", "ttft"])
    with pytest.raises(ConfigError, match="'s' means no figure"):
        compare(record(), record({"duration_ms_of": "x", "ttft_ms": 1.0}), ["s"])


def test_fewer_answers_are_not_faster() -> None:
    """By default failures and wrong tokens count besides throughput."""

    def served(failed: int, same: bool) -> dict[str, Any]:
        return record({"load": "concurrency 4", "output_tok_s": 9.0, "failed": failed, "same_tokens": same})

    good = served(0, True)
    assert all(one.is_good(0.9) for one in compare(good, good))
    assert [one.is_good(0.9) for one in compare(served(1, True), good)] == [True, False, True]
    assert [one.is_good(0.9) for one in compare(served(0, False), good)] == [True, True, False]


def test_less_work_is_no_baseline() -> None:
    less, more = record(row(1, 1.0)), record(row(1, 1.0))
    less["result"]["input_len"], more["result"]["input_len"] = 16, 512
    with pytest.raises(ConfigError, match="was measured with input_len 512, and this with 16"):
        compare(less, more)
