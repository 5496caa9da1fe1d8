"""The measuring harness measures: small runs of each kind, checked for plausibility and for where they come from."""

from __future__ import annotations

import functools
import gc
import json
import re
import shlex
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.types import Masks, Plan, Sampled
from octavo_bench.dummy_models import write_model
from octavo_bench.offline import build_prepared, random_requests, time_decode, time_prefill
from octavo_bench.overhead import InstantStep, build_instant_engine, step_milliseconds
from octavo_bench.records.report import beside
from tests.models.encoder_families import make_encoder

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
    assert len(step_milliseconds(4, prompt=40, steps=10)) == 10
    engine = build_instant_engine(2, tokens=64)
    assert not engine.has_work


def test_front(measured: Measure) -> None:
    record = measured("front", "--streams", "4", "--seconds", "0.5", "--steps-ms", "10", "--schemas", "20", "--proxy")
    rows, runs = record["result"]["rows"], record["result"]["runs"]
    cases = [(row["engine"], row["load"]) for row in rows]
    assert cases == [(engine, load) for load in ("none", "schemas") for engine in ("octavo", "proxy")]
    assert all(run["tokens"] == 200 and run["gap_ms"]["max"] >= run["gap_ms"]["p99"] > 0 for run in runs)
    assert all(0.5 <= row["events_per_token"] <= 1.02 and row["front_cpu_us_per_token"] > 0 for row in rows)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Arguments that name a model of random weights, on the CPU."""
    folder = write_model("tiny", tmp_path_factory.mktemp("shape"))
    return (str(folder), "--load-format", "dummy", "--device", "cpu")


def test_offline(measured: Measure, tiny: tuple[str, ...]) -> None:
    work = ("--sequences", "1,2", "--prompt", "16", "--decode", "4", "--rounds", "1")
    record = measured("offline", *tiny, *work, "--temperature", "0.8", "--top-p", "0.95")
    assert record["result"]["sampling"] == {"temperature": 0.8, "top_k": 0, "top_p": 0.95}
    for row in record["result"]["rows"]:
        assert row["prefill_tok_s"]["median"] > 0
        assert row["decode_tok_s"]["median"] > 0


@pytest.mark.nightly
def test_full_collections_leave_out_an_engine_until_the_next_one(tiny: tuple[str, ...]) -> None:
    config = EngineConfig.from_flat({"model": tiny[0], "load_format": "dummy", "device": "cpu"})
    try:
        engine = build_prepared(config)[0]
        assert all(known is not engine for known in gc.get_objects()), "a full collection looks at it"
        first = weakref.ref(engine)
        del engine
        build_prepared(config)
        assert first() is None, "frozen for good"
    finally:
        gc.unfreeze()


@pytest.mark.nightly
def test_runs_that_would_wait_for_room_are_refused(tiny: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--max-model-len", "64", "--num-kv-blocks", "3", "--block-size", "32")
    for work, said in (("--prompt=40", "need 4 blocks"), ("--prompt=70", "max_model_len")):
        assert main(["bench", "offline", *tiny, *sizes, "--sequences", "2", work, "--decode", "4"]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("timed", [time_prefill, functools.partial(time_decode, steps=2)])
def test_a_request_that_fails_ends_the_measurement(timed: Callable[..., float]) -> None:
    """For want of memory, say: it would be waited for without an end."""

    class Failing(InstantStep):
        def sample(self, masks: Masks) -> list[Sampled]:
            return [Sampled([], error="no memory") for _ in self.plan]

    class Runner:
        def submit(self, plan: Plan) -> Failing:
            return Failing(plan)

    engine = build_instant_engine(2, tokens=64, runner=Runner())
    with pytest.raises(ConfigError, match="a request failed: no memory"):
        timed(engine, random_requests(2, 8, 8, 1000, 1, seed=1))


def test_throughput(measured: Measure, tiny: tuple[str, ...]) -> None:
    work = ("--num-prompts", "6", "--input-len", "12", "--output-len", "5", "--max-num-seqs", "4")
    result = measured("throughput", *tiny, *work, "--rounds", "2")["result"]
    assert result["steps"]["min"] >= 10, "six requests of five tokens, four at a time"
    assert result["output_tok_s"]["median"] == pytest.approx(5 * result["requests_s"]["median"], rel=0.01)
    assert result["total_tok_s"]["median"] == pytest.approx(17 * result["requests_s"]["median"], rel=0.01)
    assert result["output_tok_s"]["runs"] == 2
    assert result["prefix_hits"]["max"] == 0, "a round finds nothing of those before it"
    assert result["gflop_s"]["median"] > 0
    assert result["peak_tflops"] is None, "of a CPU nothing is known"
    assert "mfu_percent" not in result


def test_profile(measured: Measure, tiny: tuple[str, ...], tmp_path: Path) -> None:
    work = ("--batches", "1,3", "--context", "20", "--steps", "4", "--prefill", "30")
    result = measured("profile", *tiny, *work, "--traces", str(tmp_path))["result"]
    kinds = [(row["kind"], row["batch"], row["context"]) for row in result["rows"]]
    assert kinds == [("decode", 1, 20), ("decode", 3, 20), ("prefill", 1, 30)]
    for row in result["rows"]:
        assert 0 < row["busy_us"] <= row["profiled_step_ms"] * 1e3
        assert sum(row["us_by_class"].values()) == pytest.approx(row["busy_us"], abs=0.1)
        assert row["us_by_class"]["matmul"] > 0
        assert row["us_by_class"]["attention"] > 0
        assert row["bytes"] > 4 * (256 * 16_384), "the head alone, in float32"
    names = {kernel["name"] for kernel in result["rows"][0]["kernels"]}
    assert {"linear", "attention"} <= names, "operations in numba show under their own names"
    assert json.loads((tmp_path / "decode_3x20.json").read_text())["traceEvents"]


def test_tools_print(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "shape", "tiny", str(tmp_path / "made")]) == 0
    assert (tmp_path / "made" / "config.json").is_file()
    capsys.readouterr()
    assert main(["bench", "report", str(tmp_path / "none.json")]) == 2
    assert "not a record" in capsys.readouterr().err


@pytest.mark.model
def test_embeddings_in_turns(measured: Measure, tmp_path: Path) -> None:
    """A stand-in peer with known times."""
    folder, program, peer = tmp_path / "model", tmp_path / "peer.py", tmp_path / "peer"
    model = make_encoder(folder, "Bert/Model")
    program.write_text(
        "import json, sys\nprint(json.dumps({'engine': 'stand-in'}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    assert len(json.loads(line)['texts']) == 3\n"
        "    answer = {'finish_s': 1e3, 'cpu_s': 1e3, 'first': [1] * SIZE}\n"
        "    print(json.dumps(answer), flush=True)\n".replace("SIZE", str(model.config.hidden_size))
    )
    peer.write_text(f"#!/bin/sh\nexec {shlex.join([sys.executable, str(program)])}\n")
    peer.chmod(0o755)
    record = measured("embeddings", str(folder), "--python", str(peer), "--texts", "3", "--rounds", "2")
    (row,) = record["result"]["rows"]
    assert -1 <= row["cosine"] <= 1
    assert [b for _, b in row["finish_s"]["pairs"]] == [1e3, 1e3]
    assert row["cpu_s"]["ratio"] > 1


@pytest.mark.model
def test_peer_in_turns(measured: Measure, tmp_path: Path) -> None:
    """A stand-in peer that answers at once with known figures; the ratio must be the quotient of the medians."""
    program, peer = tmp_path / "peer.py", tmp_path / "peer"
    program.write_text(
        "import json, sys\nprint(json.dumps({'engine': 'stand-in'}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    print(json.dumps({'prefill_tok_s': 10.0, 'decode_tok_s': 2.0}), flush=True)\n"
    )
    # A line `#!` that names an interpreter has room for neither spaces nor 128 characters.
    peer.write_text(f"#!/bin/sh\nexec {shlex.join([sys.executable, str(program)])}\n")
    peer.chmod(0o755)
    arguments = ("--sequences", "1", "--prompt", "16", "--decode", "4", "--rounds", "1")
    record = measured("peer", "--python", str(peer), *arguments)
    (row,) = record["result"]["rows"]
    assert record["result"]["peer"] == {"engine": "stand-in"}
    assert row["decode_tok_s"]["peer"] == 2.0
    assert row["decode_tok_s"]["ratio"] == pytest.approx(row["decode_tok_s"]["octavo"] / 2.0, rel=0.01)


def test_a_peer_is_beaten_by_more_tokens_and_by_less_time() -> None:
    assert beside([(30.0, 10.0), (10.0, 10.0), (40.0, 20.0)], 1)["ratio"] == 2.0
    assert beside([(1.0, 4.0)], 3, "less") == {"octavo": 1.0, "peer": 4.0, "ratio": 4.0, "pairs": [[1.0, 4.0]]}
