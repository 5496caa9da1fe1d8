"""Recorded traces, read from the forms in which they are published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo_fleet.sim.jobs import Job
from octavo_fleet.sim.traces import Trace


def jobs_of(path: Path, num_requests: int | None = None) -> list[Job]:
    trace, jobs = Trace(path, num_requests), []
    while (job := trace.next_job()) is not None:
        jobs.append(job)
    return jobs


def test_mooncake_prompts_share_what_their_hashes_share(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000, "input_length": 1200, "output_length": 52, "hash_ids": [0, 1, 2]},
        {"timestamp": 3500, "input_length": 1030, "output_length": 0, "hash_ids": [0, 1, 7]},
        {"timestamp": 3500, "input_length": 10, "output_length": 3},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second, third = jobs_of(path)
    assert (first.arrival, second.arrival, first.output_len, second.output_len) == (0.0, 2.5, 52, 1)
    one, two = first.tokens(), second.tokens()
    assert (len(one), len(two), len(third.tokens())) == (1200, 1030, 10)
    assert one[:1024] == two[:1024]
    assert one[1024] != two[1024]
    assert not set(third.tokens()) & set(one)
    assert len(jobs_of(path, num_requests=2)) == 2


def test_azure_and_burst_tables(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = jobs_of(azure)
    assert second.arrival == pytest.approx(4.314579, abs=1e-6)
    assert (len(first.tokens()), first.output_len, second.output_len) == (374, 44, 109)
    assert first.tokens()[0] != second.tokens()[0]
    burst = tmp_path / "burst.csv"
    burst.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,1087,230,1317,Conversation log\n"
    )
    assert [(job.arrival, len(job.tokens()), job.output_len) for job in jobs_of(burst)] == [
        (0, 472, 18),
        (40, 1087, 230),
    ]


def test_results_of_a_bench(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    result = {"request_rate": "inf", "input_lens": [10, 20], "output_lens": [3, 4], "start_times": [7.5, 7.0]}
    path.write_text(json.dumps(result, indent=1))
    assert [(job.arrival, len(job.tokens())) for job in jobs_of(path)] == [(0.0, 20), (0.5, 10)]
    path.write_text(json.dumps({**result, "start_times": None, "request_rate": 4.0}))
    assert [job.arrival for job in jobs_of(path)] == [0.0, 0.25]


@pytest.mark.parametrize("text", ["a,b\n1,2\n", '{"hash_ids": [1], "timestamp": "soon"}\n', '{"x": 1}'])
def test_what_is_no_trace_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match="entry 1 of"):
        jobs_of(path)
    with pytest.raises(ConfigError, match="cannot read"):
        jobs_of(tmp_path / "none")
