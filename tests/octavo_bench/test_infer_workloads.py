"""The five workloads of another project, by name: numbers, arrivals and lengths."""

from __future__ import annotations

import pytest

from octavo.cli import main
from octavo_bench.serving.serve_load import SERVING, Arrivals
from octavo_fleet.sim.jobs import Job
from octavo_fleet.sim.workloads import PROFILES, SessionWorkload


def jobs_of(name: str, num_requests: int = 0) -> list[Job]:
    arrivals = Arrivals(SERVING[name], num_requests or None, seed=1)
    found = []
    while (job := arrivals.next_job()) is not None:
        found.append(job)
    return found


def test_each_has_the_numbers_of_its_page() -> None:
    assert {name: (len(jobs_of(name)), str(SERVING[name].load)) for name in SERVING} == {
        "baseline": (10, "concurrency 1"),
        "continuous_batching": (32, "4 req/s"),
        "paged_attention": (48, "all at once"),
        "chunked_prefill": (48, "6 req/s"),
        "prefix_caching": (48, "8 req/s"),
    }
    assert {job.arrival for job in jobs_of("paged_attention")} == {0.0}
    assert [job.arrival for job in jobs_of("continuous_batching", 3)] == [0.0, 0.25, 0.5]


def test_three_quarters_of_the_prompts_are_long() -> None:
    lengths = [sum(count for _, count in job.prompt) for job in jobs_of("chunked_prefill", 2000)]
    assert 0.72 < sum(length >= 1024 for length in lengths) / len(lengths) < 0.78
    assert max(lengths) <= 2048
    assert {job.prompt[0] for job in jobs_of("prefix_caching")} == {(1, 1024)}


def test_a_load_of_its_own_is_not_given_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "http://127.0.0.1:9", "--workload", "all", "--concurrency", "4"]) == 2
    assert "workload: all has a load of its own" in capsys.readouterr().err


def test_a_rate_without_end_is_a_burst_and_a_steady_one_holds_from_the_start() -> None:
    burst = SessionWorkload(PROFILES["single"], float("inf"), 5)
    assert {job.arrival for job in iter(burst.next_job, None)} == {0.0}
    steady = SessionWorkload(PROFILES["chat"], 50.0, 2000, is_steady=True)
    arrivals = []
    for job in iter(steady.next_job, None):
        if not job.is_past:
            arrivals.append(job.arrival)
        following: Job | None = job
        while following is not None:
            following = steady.after(following, following.arrival)
            arrivals += [following.arrival] if following is not None else []
    parts = [sum(start <= arrival < start + 10 for arrival in arrivals) / 10 for start in (0, 10, 20, 30)]
    assert all(42 < part < 58 for part in parts), parts
