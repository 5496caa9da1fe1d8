"""Comparing servers: what is asked of the client, how runs become ratios, and what happens when something fails."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo_bench.cli.results import finish
from octavo_bench.serving.peer_process import Clients, PeerProcess, share, together
from octavo_bench.serving.served_peer import (
    FIGURES,
    ServedComparison,
    client_arguments,
    compare,
    named_workloads,
    parse_visits,
)
from octavo_bench.serving.server_process import Server, ServerProcess, free_port
from octavo_fleet.sim.closed_loops import WORKLOADS, warm_up

CLIENT = """
import json, sys
print(json.dumps({"engine": "stand-in"}), flush=True)
for line in sys.stdin:
    arguments = json.loads(line)["arguments"]
    prompts = int(arguments[arguments.index("--num-prompts") + 1])
    figures = dict.fromkeys(%r, 2.0)
    print(json.dumps({**figures, "completed": prompts, "duration": 0.5, "first_errors": []} | %s), flush=True)
"""
SERVER = """
import http.server, sys
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Ready).serve_forever()
"""


SAMPLES = """{
    "ttfts": [0.5] * prompts, "gaps": [0.01, 0.03] * prompts, "tpots": [0.02] * prompts, "began": 5.0, "chunks": 3,
    "ended": 7.0, "total_input_tokens": 30, "total_output_tokens": 10 * prompts, "arguments": arguments,
} if json.loads(line)["samples"] else {}"""


def stand_in(more: str = "{}", count: int = 1) -> Clients:
    return Clients([partial(PeerProcess, [sys.executable, "-c", CLIENT % (list(FIGURES.values()), more)])] * count)


def comparison(tmp_path: Path, client: Clients, server: str = SERVER, seconds: float = 60) -> ServedComparison:
    servers = dict.fromkeys(("octavo", "vllm"), Server((sys.executable, "-c", server), "/ready"))
    kept: list[dict[str, Any]] = []
    return ServedComparison(
        servers, client, Path("/models/tiny"), ["S1", "W2"], tmp_path, time.monotonic() + seconds, kept.append
    )


def run(engine: str, workload: str, **figures: float) -> dict[str, Any]:
    client = {key: figures.get(name, 1.0) for name, key in FIGURES.items()}
    return {"engine": engine, "workload": workload, "client": client}


def test_medians_and_ratios() -> None:
    runs = [run("octavo", "W1", output_tok_s=speed, ttft_p50_ms=ms) for speed, ms in ((90, 5), (120, 4), (500, 40))]
    runs += [run("vllm", "W1", output_tok_s=speed, ttft_p50_ms=ms) for speed, ms in ((60, 10), (10, 10), (70, 20))]
    runs += [run("octavo", "W2")]
    rows = {(row["workload"], row["figure"]): row for row in compare(runs, ["W1", "W2"])}
    speed = rows["W1", "output_tok_s"]
    assert speed["octavo"] == {"median": 120, "all": [90, 120, 500]}
    assert speed["times_better"] == 2
    assert rows["W1", "ttft_p50_ms"]["times_better"] == 2, "of times, the smaller is the better"
    assert "vllm" not in rows["W2", "itl_p50_ms"]
    assert "times_better" not in rows["W2", "itl_p50_ms"]


def test_goodput_is_compared_where_it_was_searched() -> None:
    runs = [
        {"engine": engine, "workload": "goodput", "client": {"goodput_requests_s": rate, "duration": 60.0}, "gpu": {}}
        for engine, rate in (("octavo", 30.0), ("octavo", 33.0), ("octavo", 36.0), ("vllm", 22.0))
    ]
    (row,) = compare(runs, ["goodput"])
    assert (row["figure"], row["octavo"]["median"], row["times_better"]) == ("goodput_requests_s", 33.0, 1.5)


def test_energy_is_reported_of_runs_that_are_long_enough() -> None:
    def lasting(engine: str, watts: float, seconds: float) -> dict[str, Any]:
        one = run(engine, "W3")
        client = {**one["client"], "duration": seconds, "total_output_tokens": 1000}
        return {**one, "client": client, "gpu": {"power_w_median": watts} if watts else {}}

    runs = [lasting("octavo", 700, 10), lasting("vllm", 350, 40), lasting("vllm", 350, 5), lasting("vllm", 0, 40)]
    row = next(row for row in compare(runs, ["W3"]) if row["figure"] == "mj_per_token")
    assert (row["octavo"]["all"], row["vllm"]["all"]) == ([7000.0], [14000.0])
    assert row["times_better"] == 2, "of energy, the smaller is the better"


def test_visits_take_turns_and_rounds_of_both_have_the_same_seeds(tmp_path: Path) -> None:
    client = stand_in()
    found = comparison(tmp_path, client)
    for engine, rounds in parse_visits("octavo:2,vllm:3,octavo:1"):
        found.visit(engine, rounds)
    client.close()
    result = found.result()
    assert [visit["engine"] for visit in result["visits"]] == ["octavo", "vllm", "octavo"]
    assert all("error" not in visit and visit["ready_s"] > 0 for visit in result["visits"])
    for engine in ("octavo", "vllm"):
        for workload in ("S1", "W2"):
            mine = [r for r in result["runs"] if (r["engine"], r["workload"]) == (engine, workload)]
            assert [r["round"] for r in mine] == [0, 1, 2]
    assert {row["times_better"] for row in result["rows"]} == {1}


def test_servers_that_are_up_at_once_take_turns_in_every_round(tmp_path: Path) -> None:
    client = stand_in()
    found = comparison(tmp_path, client)
    found.alternate(["vllm", "octavo"], 2)
    client.close()
    order = [(run["engine"], run["round"]) for run in found.result()["runs"]]
    assert list(dict.fromkeys(order)) == [("vllm", 0), ("octavo", 0), ("vllm", 1), ("octavo", 1)]
    assert [visit["engine"] for visit in found.visits] == ["vllm", "octavo"]


def test_a_server_that_does_not_start_is_reported_and_the_next_visit_goes_on(tmp_path: Path) -> None:
    client = stand_in()
    found = comparison(tmp_path, client)
    found.servers = {**found.servers, "vllm": Server((sys.executable, "-c", "raise SystemExit('no such GPU')"), "/")}
    for engine in ("vllm", "octavo"):
        found.visit(engine, 1)
    client.close()
    failed, fine = found.visits
    assert "ended with 1" in failed["error"]
    assert "no such GPU" in failed["error"]
    assert "error" not in fine
    assert found.result()["not_measured"] == ["vllm"]


@pytest.mark.parametrize(("missing", "code"), [([], 0), (["vllm"], 1)])
def test_a_comparison_without_one_of_the_engines_is_an_error(
    missing: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = argparse.Namespace(
        gpu_watch=None, kind="peer", output=tmp_path / "peer.json", plot=None, evidence=None, fail_under=None
    )
    assert finish(args, {"rows": [], "not_measured": missing}) == code
    assert ("nothing was measured of vllm" in capsys.readouterr().err) == bool(missing)
    assert args.output.exists()


def test_requests_that_fail_are_not_a_measurement(tmp_path: Path) -> None:
    client = stand_in("{'completed': 1, 'first_errors': ['it broke']}")
    found = comparison(tmp_path, client)
    found.visit("octavo", 1)
    client.close()
    assert "1 of 2 requests were served: ['it broke']" in found.visits[0]["error"]
    assert found.runs == []


def test_several_clients_share_a_load_and_their_requests_are_taken_together(tmp_path: Path) -> None:
    clients = stand_in(SAMPLES, count=2)
    found = comparison(tmp_path, clients)
    found.workloads = ["S1"]
    found.visit("octavo", 2)
    clients.close()
    assert found.result()["clients"] == 2
    assert "error" not in found.visits[0]
    for run in found.runs:
        client = run["client"]
        assert client["completed"] == 4
        assert client["duration"] == 2.0
        assert client["output_throughput"] == 20.0
        assert client["total_token_throughput"] == 50.0
        assert (client["median_ttft_ms"], client["p99_tpot_ms"]) == (500.0, 20.0)
        assert client["median_itl_ms"] == pytest.approx(20.0)


def test_what_clients_saw_is_from_the_first_start_to_the_last_end() -> None:
    one = {"ttfts": [0.1], "gaps": [0.01] * 99, "tpots": [0.01], "began": 3.0, "ended": 5.0, "chunks": 100}
    sums = {"completed": 1, "total_input_tokens": 5, "total_output_tokens": 100, "first_errors": ["a", "b"]}
    two = {**one, "began": 2.5, "ended": 4.5, "gaps": [0.01] * 97 + [0.5] * 2, "total_output_tokens": 150}
    found = together([{**one, **sums}, {**sums, **two}])
    assert (found["duration"], found["output_throughput"], found["completed"]) == (2.5, 100.0, 2)
    assert found["median_itl_ms"] == pytest.approx(10)
    assert found["p99_itl_ms"] == pytest.approx(24.7), "between the two nearest ranks"
    assert len(found["first_errors"]) == 3


def test_loads_that_clients_cannot_share_evenly_are_refused() -> None:
    assert share(WORKLOADS["W4"], 4)[:5] == (128, 512, 256, 0.0, 64)
    assert share(WORKLOADS["W2"], 1) == WORKLOADS["W2"]
    for name, count in (("W2", 2), ("W1", 16)):
        with pytest.raises(ConfigError, match=f"clients: {count} cannot share"):
            share(WORKLOADS[name], count)


def test_nothing_is_started_after_the_deadline(tmp_path: Path) -> None:
    client = stand_in("{'duration': 1000.0}")
    late = comparison(tmp_path, client, seconds=1)
    late.visit("octavo", 1)
    assert late.visits[0]["error"] == "no time was left"
    found = comparison(tmp_path, client)
    found.visit("octavo", 2)
    client.close()
    assert found.visits[0]["error"] == "no time was left for S1"
    assert [r["workload"] for r in found.runs] == ["S1", "W2"], "the first round had time"


def test_a_server_and_its_children_are_gone_afterwards(tmp_path: Path) -> None:
    stubborn = (
        "import signal, subprocess, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit())\n"
        "child = subprocess.Popen(['sleep', '1000'])\nprint(child.pid, flush=True)\n" + SERVER
    )
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-c", stubborn, "--port", str(port)]
    with ServerProcess(command, f"http://127.0.0.1:{port}", log=log) as server:
        server.wait_ready(30)
        child = int(log.read_text().split()[0])
        assert Path(f"/proc/{child}").exists()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and " Z " not in Path(f"/proc/{child}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_client_that_takes_too_long_is_ended() -> None:
    peer = PeerProcess([sys.executable, "-c", "import time; print('{}', flush=True); time.sleep(1000)"])
    start = time.monotonic()
    with pytest.raises(ConfigError, match="did not end in the 0 s that were left"):
        peer.run({}, seconds=0.2)
    assert time.monotonic() - start < 60
    peer.close()


def test_a_client_that_ends_by_itself_is_told_from_one_that_takes_too_long() -> None:
    peer = PeerProcess([sys.executable, "-c", "print('{}', flush=True); input()"])
    with pytest.raises(ConfigError, match="ended without an answer"):
        peer.run({}, seconds=60)
    peer.close()


def test_arguments_of_the_client() -> None:
    arguments = client_arguments(WORKLOADS["W1"], "http://127.0.0.1:1", Path("/models/tiny"), seed=7)
    given = dict(zip(arguments[:-2:2], arguments[1:-2:2], strict=True))
    assert given["--random-input-len"] == "256"
    assert given["--random-range-ratio"] == "0.5"
    assert given["--served-model-name"] == "tiny"
    assert given["--seed"] == "7"
    assert arguments[-2:] == ["--ignore-eos", "--disable-tqdm"]


def test_names() -> None:
    assert warm_up(WORKLOADS["W4"])._asdict() == {**WORKLOADS["W4"]._asdict(), "prompts": 256, "output_len": 32}
    assert warm_up(WORKLOADS["W2"]).prompts == 2
    assert named_workloads("W1,goodput,S1") == ["W1", "goodput", "S1"]
    with pytest.raises(ConfigError, match="workloads: 'W9' is not one of W1"):
        named_workloads("W1,W9")
    for bad in ("octavo", "octavo:0", "other:1", "vllm:x", ""):
        with pytest.raises(ConfigError, match="visits"):
            parse_visits(bad)
