"""`octavo bench serve`: what is sent, when, and what is made of the answers."""

from __future__ import annotations

import asyncio
import csv
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main
from octavo.errors import ConfigError
from octavo_bench.records.report import keep
from octavo_bench.records.report_tables import render
from octavo_bench.serving.http_client import HttpClient, TimedAnswer
from octavo_bench.serving.serve_figures import errors, figures, parse_goodput
from octavo_bench.serving.serve_load import FIRST_TOKEN, MAX_LOADS, WORDS, Load, Prompts, ServeWork, apply, next_load
from octavo_fleet.sim.jobs import Job
from tests.server.conftest import Served
from tests.server.in_process import InProcessEngine, byte_tokenizer


def answer(*times: float, sent: float = 0.0, num_output: int = 0, error: str | None = None) -> TimedAnswer:
    made = TimedAnswer()
    made.sent, made.times, made.error = sent, list(times), error
    made.num_prompt, made.num_output = 10, num_output or len(times)
    return made


def test_figures() -> None:
    answers = [answer(0.1, 0.12, 0.14), answer(1.3, 1.5, sent=1.0, num_output=5), answer(error="no")]
    found = figures(answers, 2.0, [50, 100], {"ttft": 200, "itl": 25})
    assert (found["completed"], found["failed"], found["requests_s"]) == (2, 1, 1.0)
    assert (found["output_tok_s"], found["total_tok_s"]) == (4.0, 14.0)
    assert (found["ttft_p50_ms"], found["ttft_p100_ms"]) == (200.0, 300.0)
    assert (found["itl_p50_ms"], found["itl_mean_ms"]) == (20.0, 80.0)
    assert (found["tpot_mean_ms"], found["tpot_p100_ms"]) == (35.0, 50.0)
    assert found["e2el_p100_ms"] == 500.0
    assert (found["goodput_requests_s"], found["goodput_share"]) == (0.5, 0.3333)
    assert errors(answers) == {"no": 1}


def test_an_answer_in_one_piece_has_no_time_between_tokens() -> None:
    found = figures([answer(0.5, num_output=8)], 1.0, [50])
    assert found["ttft_p50_ms"] == found["e2el_p50_ms"] == 500.0
    assert not any(name.startswith(("itl", "tpot")) for name in found)


@pytest.mark.parametrize("text", ["ttft", "ttft:fast", "latency:30", "itl:0"])
def test_goodput_targets_are_checked(text: str) -> None:
    with pytest.raises(ConfigError, match="goodput: "):
        parse_goodput(["tpot:30", text])


def test_a_sweep_ends_where_throughput_does() -> None:
    loads, throughputs = [Load(rate=0.5)], [10.0]
    for throughput in (20.0, 38.0, 39.0):
        following = next_load(loads, throughputs, 8)
        assert following == Load(rate=2 * (loads[-1].rate or 0))
        loads.append(following)
        throughputs.append(throughput)
    assert next_load(loads, throughputs, 8) is None
    assert next_load([Load(8)], [1.0], 8) is None, "there are no 16 prompts"
    assert next_load([Load(4)] * MAX_LOADS, [2.0**n for n in range(MAX_LOADS)], 1000) is None


def run_load(work: ServeWork, load: Load, reply: Callable[[Job], Awaitable[TimedAnswer]]) -> tuple[list[Job], int]:
    """The jobs that were sent, and how many were under way at most."""
    sent: list[Job] = []
    answered: set[int] = set()
    live = most = 0

    async def send(job: Job, told: dict[int, TimedAnswer]) -> TimedAnswer:
        nonlocal live, most
        sent.append(job)
        assert {number for number, _ in job.prompt} & answered <= set(told), "a turn before the answer that it repeats"
        live, most = live + 1, max(most, live + 1)
        try:
            return await reply(job)
        finally:
            live -= 1
            answered.add(job.output_token)

    answers, _ = asyncio.run(apply(load, work.jobs(load), send))
    assert len(answers) == len(sent)
    return sent, most


@pytest.mark.parametrize("workload", ["fixed", "multi-turn", "W1"])
def test_a_closed_loop_keeps_each_client_busy(workload: str) -> None:
    async def reply(job: Job) -> TimedAnswer:
        await asyncio.sleep(0.001)
        return answer(0.1)

    sent, most = run_load(ServeWork(workload, 120), Load(4), reply)
    assert (len(sent), most) == (120, 4)


def test_arrivals_do_not_wait_for_answers() -> None:
    num_asked, all_asked = 0, asyncio.Event()

    async def reply(job: Job) -> TimedAnswer:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 30:
            all_asked.set()
        await asyncio.wait_for(all_asked.wait(), 30)
        return answer(0.1)

    sent, most = run_load(ServeWork("fixed", 30), Load(rate=1000.0), reply)
    assert (len(sent), most) == (30, 30)


def test_a_conversation_ends_with_a_failure() -> None:
    async def reply(job: Job) -> TimedAnswer:
        return answer(error="no")

    sent, _ = run_load(ServeWork("multi-turn", 40, seed=1), Load(2), reply)
    assert 0 < len(sent) < 40
    assert len({job.session for job in sent}) == len(sent)


def test_lengths() -> None:
    load = Load(rate=5.0)
    made = ServeWork("sharegpt", 200).jobs(load)
    jobs = [job for _ in range(200) if (job := made.next_job()) is not None]
    mean = sum(len(job.tokens()) for job in jobs) / len(jobs)
    assert 120 < mean < 210
    assert len({job.output_len for job in jobs}) > 50
    fixed = ServeWork("fixed", 3, input_len=40, output_len=7).jobs(Load(1)).next_job()
    assert fixed is not None
    assert (len(fixed.tokens()), fixed.output_len) == (40, 7)
    assert ServeWork("fixed", 3, max_model_len=100).jobs(Load(1)).next_job() is None
    with pytest.raises(ConfigError, match="closed loop"):
        ServeWork("W1", 3).jobs(load)
    with pytest.raises(ConfigError, match="'none' is not one of"):
        ServeWork("none", 3).jobs(load)


def test_prompts_share_what_the_workload_shares() -> None:
    jobs = ServeWork("shared-prefix", 40).jobs(Load(1))
    made = [job for _ in range(40) if (job := jobs.next_job()) is not None]
    prompts = Prompts("completions", "tiny", 5000, {"top_k": 1}, "salt")
    first = [prompts.body(job, {}) for job in made]
    prefixes = {tuple(body["prompt"][:1024]) for body in first}
    assert len(prefixes) == 4
    assert len({tuple(body["prompt"]) for body in first}) == 40
    assert all(FIRST_TOKEN <= token < 5000 for body in first for token in body["prompt"])
    assert (first[0]["ignore_eos"], first[0]["top_k"], first[0]["max_tokens"]) == (True, 1, 128)
    others = Prompts("completions", "tiny", 5000, {}, "other").body(made[0], {})
    assert others["prompt"] != first[0]["prompt"]


@pytest.mark.parametrize("tokens", [[], [7, 8, 9]])
def test_a_later_turn_repeats_the_conversation(tokens: list[int]) -> None:
    jobs = ServeWork("multi-turn", 40, output_len=3).jobs(Load(1))
    job = jobs.next_job()
    while job is not None and not job.turns_left:
        job = jobs.next_job()
    assert job is not None
    later = jobs.after(job, 1.0)
    assert later is not None
    said = answer(0.1, 0.2, 0.3)
    said.token_ids, said.pieces = tokens, ["I", " see"]
    completions = Prompts("completions", "tiny", 5000, {}, "salt")
    before, after = completions.body(job, {}), completions.body(later, {job.output_token: said})
    assert before["return_token_ids"] is True
    assert after["prompt"][: len(before["prompt"])] == before["prompt"]
    assert len(after["prompt"]) == len(before["prompt"]) + 3 + 64
    assert not tokens or after["prompt"][len(before["prompt"]) :][:3] == tokens
    messages = Prompts("chat", "tiny", 5000, {}, "salt").body(later, {job.output_token: said})["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"] == "I see"
    assert set(messages[0]["content"].split()) <= set(WORDS)
    assert len(messages[0]["content"].split()) == 256


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\r\n\r\n"


def ask(*parts: bytes, status: str = "200 OK", length: int | None = None, timeout: float = 5.0) -> TimedAnswer:
    """What the client makes of an answer in these parts, which come 20 ms after each other."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        size = sum(map(len, parts)) if length is None else length
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n\r\n".encode())
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.02)
        writer.close()

    async def run() -> TimedAnswer:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            client = HttpClient(f"http://127.0.0.1:{port}/v1/", "completions", None, timeout)
            found = await client.ask({"prompt": [1], "seed": None})
            client.close()
            return found

    return asyncio.run(run())


def test_a_stream_is_read() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 5}
    whole = event(choices=[{"text": "lo"}])
    last = event(choices=[], usage=usage) + b"data: [DONE]\n\n"
    found = ask(
        b": comment\n\n" + event(choices=[{"text": ""}]), event(choices=[{"text": "Hel"}]), whole[:9], whole[9:] + last
    )
    assert (found.error, found.text, found.num_prompt, found.num_output) == (None, "Hello", 9, 5)
    assert len(found.times) == 2
    assert found.ttft > 0.015, "an event without text is not the first token"
    assert 0.035 < found.gaps[0] < 0.5, "an event arrives with its last byte"
    chat = ask(event(choices=[{"delta": {"content": "a"}}]), event(choices=[{"delta": {"reasoning_content": "b"}}]))
    assert (chat.error, chat.text, chat.num_output) == (None, "ab", 2)


@pytest.mark.parametrize(
    ("parts", "options", "error"),
    [
        ((b"too many",), {"status": "429 Too Many Requests"}, "status 429: too many"),
        ((event(choices=[{"text": "a"}]), event(error={"message": "dead"})), {}, "{'message': 'dead'}"),
        ((event(choices=[{"text": "a"}]),), {"length": 1000}, "the connection was closed"),
        ((b"data: [DONE]\n\n",), {}, "the stream had no text"),
        ((b"data: {]\n\n",), {}, "an event is not as expected: .*"),
        ((b": wait\n\n",) * 20, {"timeout": 0.1}, "no end after 0.1 s"),
    ],
    ids=["status", "error event", "cut off", "no text", "no JSON", "timeout"],
)
def test_a_failure_is_kept(parts: tuple[bytes, ...], options: dict[str, Any], error: str) -> None:
    found = ask(*parts, **options)
    assert found.error is not None
    assert re.fullmatch(error, found.error)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = Served(InProcessEngine(max_num_seqs=8), byte_tokenizer(), {})
    yield server
    server.stop()


@pytest.mark.parametrize(("endpoint", "workload"), [("completions", "multi-turn"), ("chat", "fixed")])
def test_a_server_is_measured(
    endpoint: str, workload: str, served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, table = tmp_path / "record.json", tmp_path / "rows.csv"
    work = ["--workload", workload, "--input-len", "20", "--output-len", "6", "--vocab-size", "200"]
    work += ["--num-prompts", "12", "--concurrency", "2,4", "--extra-body", '{"stop": null}']
    arguments = ["bench", "serve", served.url, "--endpoint", endpoint, *work, "--goodput", "ttft:10000", "itl:10000"]
    assert main([*arguments, "--output", str(output), "--csv", str(table)]) == 0
    shown = capsys.readouterr()
    assert "12 requests for each load" in shown.err.splitlines()[0]
    record = json.loads(output.read_text())
    assert json.loads(shown.out)["result"] == record["result"]
    assert (record["benchmark"], record["result"]["model"]) == ("serve", "test")
    rows = record["result"]["rows"]
    assert [row["load"] for row in rows] == ["concurrency 2", "concurrency 4"]
    for row in rows:
        assert row["failed"] == 0
        assert 5 < row["completed"] <= 12, "conversations end where the context does"
        assert row["output_tokens"] == 6 * row["completed"] > 0
        assert row["goodput_requests_s"] == row["requests_s"] > 0
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"] <= row["e2el_p99_ms"]
    with table.open() as file:
        assert [line["output_tokens"] for line in csv.DictReader(file)] == [str(row["output_tokens"]) for row in rows]


def test_a_sweep_doubles_the_load(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    throughputs = iter([10.0, 20.0, 20.5])
    monkeypatch.setattr(
        "octavo_bench.serving.serve.figures",
        lambda *_: {"output_tok_s": next(throughputs), "completed": 1, "failed": 0},
    )
    output = tmp_path / "record.json"
    sizes = ["--num-prompts", "8", "--input-len", "4", "--output-len", "2", "--vocab-size", "200"]
    assert (
        main(["bench", "serve", served.url, "--sweep", "--request-rate", "100", *sizes, "--output", str(output)]) == 0
    )
    rows = json.loads(output.read_text())["result"]["rows"]
    assert [row["load"] for row in rows] == ["100 req/s", "200 req/s", "400 req/s"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["URL", "--model", "other"], "no request succeeded: status 404"),
        (["URL", "--workload", "W1", "--request-rate", "2"], "W1 is a closed loop"),
        (["127.0.0.1:80"], "must begin with http://"),
        (["http://127.0.0.1:1"], "cannot be reached"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_mistakes_are_named(
    arguments: list[str], said: str, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *[served.url if part == "URL" else part for part in arguments]]) == 2
    assert said in capsys.readouterr().err


def test_the_report_has_a_row_for_each_load(tmp_path: Path) -> None:
    found = {**figures([answer(0.1, 0.12)], 1.0), "load": "2 req/s"}
    file = tmp_path / "record.json"
    keep("serve", {"rows": [found]}, file)
    header, _, line = render(file).splitlines()[-3:]
    cells = dict(zip(header.split(" | "), line.split(" | "), strict=True))
    assert (cells["| load"], cells["TTFT p50 ms"], cells["ITL p99 ms"]) == ("| 2 req/s", "100", "20")
