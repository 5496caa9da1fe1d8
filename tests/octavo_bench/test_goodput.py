"""The search for the highest rate at which requests are answered in time."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.cli import main
from octavo.errors import ConfigError
from octavo_bench.serving.goodput import PRECISION, bisect
from octavo_bench.serving.http_client import TimedAnswer
from octavo_bench.serving.probe import FILL_SHARE, Probe, ProbeClient, arrivals, profile_of
from octavo_bench.serving.serve_load import ServeWork, Target
from tests.server.conftest import Served
from tests.server.in_process import InProcessEngine, byte_tokenizer


@pytest.mark.parametrize("first", [0.3, 8.0, 22.9, 1000.0])
def test_the_highest_rate_is_found(first: float) -> None:
    tried: list[float] = []

    def passes(rate: float) -> bool:
        tried.append(rate)
        return rate <= 23.0

    bisect(passes, first, lambda: True)
    best, failed = max(r for r in tried if r <= 23), min(r for r in tried if r > 23)
    assert failed < PRECISION * best
    assert len(tried) == len(set(tried)) <= 6 + abs(math.log2(23 / first))


def test_a_search_ends_when_its_time_is_over() -> None:
    tried: list[float] = []
    bisect(lambda rate: tried.append(rate) is None, 1.0, lambda: len(tried) < 3)
    assert tried == [1.0, 2.0, 4.0]


def probe(rate: float = 50.0, **changes: object) -> Probe:
    given = {
        "target": Target("http://127.0.0.1:1", vocab_size=200),
        "model": "m",
        "work": ServeWork("assistant", 0, seed=3),
        "backlog": 12,
        "rate": rate,
        "lead": 3.0,
        "seconds": 4.0,
        "grace": 1.0,
        "limits": {"ttft": 300.0, "tpot": 25.0},
        "max_late": 2,
        "salt": "s",
        "first_text": 0,
    }
    return Probe(**{**given, **changes})  # type: ignore[arg-type]


def test_arrivals_are_as_many_as_the_rate_says() -> None:
    made = list(arrivals(probe()))
    backlog, arriving = made[:12], made[12:]
    assert len(arriving) == 50 * 8
    assert all(0 <= due.at < 3 * FILL_SHARE and not due.is_judged for due in backlog)
    assert [due.at for due in arriving] == sorted(due.at for due in arriving)
    assert 0 < arriving[0].at < arriving[-1].at < 8
    assert {due.is_judged for due in arriving if 3 <= due.at < 7} == {True}
    assert not any(due.is_judged for due in arriving if not 3 <= due.at < 7)
    gaps = [after.at - before.at for before, after in itertools.pairwise(arriving)]
    mean = sum(gaps) / len(gaps)
    assert 0.8 < math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean < 1.2, "exponential"
    shared = {due.job.prompt[0] for due in made}
    assert shared == {(1, 512)}, "one system prompt"
    texts = {due.job.prompt[1][0] for due in made}
    assert len(texts) == len(made)
    assert not texts & {due.job.prompt[1][0] for due in arrivals(probe(first_text=1_000_000))}


def test_requests_without_an_end_are_judged_by_what_they_got() -> None:
    client = ProbeClient(probe())
    now = time.perf_counter()
    fast = TimedAnswer(sent=now - 1, times=[now - 0.9 + 0.02 * n for n in range(40)])
    slow = TimedAnswer(sent=now - 1, times=[now - 0.9 + 0.05 * n for n in range(18)])
    waits, new = TimedAnswer(sent=now - 0.4), TimedAnswer(sent=now - 0.1)
    client.judged = [fast, slow, waits, new]
    assert [client._is_late(one, now) for one in client.judged] == [False, False, True, False]
    found = client._probed(now - 5, now)
    assert found.answers == [fast, slow, waits]
    assert (fast.num_output, slow.num_output) == (40, 18)
    assert fast.tpot == pytest.approx(0.02)
    assert waits.error == "no token within 400 ms"


@pytest.mark.parametrize("workload", ["multi-turn", "W1"])
def test_workloads_that_have_no_rate_are_refused(workload: str) -> None:
    with pytest.raises(ConfigError, match="the search needs another, such as assistant"):
        profile_of(ServeWork(workload, 0))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = Served(InProcessEngine(max_num_seqs=8), byte_tokenizer(), {})
    yield server
    server.stop()


def test_a_server_is_searched(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo_bench.serving.goodput.LEAD_SECONDS", 0.2)
    output = tmp_path / "record.json"
    sizes = ["--workload", "fixed", "--input-len", "20", "--output-len", "4", "--vocab-size", "200"]
    limits = ["--goodput", "ttft:900", "tpot:900", "--search-seconds", "0.1", "--probe-seconds", "0.2"]
    assert main(["bench", "serve", served.url, "--search", *sizes, *limits, "--output", str(output)]) == 0
    result = json.loads(output.read_text())["result"]
    assert "passed, 100.0 % of" in capsys.readouterr().err
    (row,) = result["rows"]
    assert (row["passed"], row["failed"], row["goodput_share"]) == (True, 0, 1.0)
    assert result["highest"] == [{"workload": "fixed", "goodput_requests_s": row["rate"]}]
