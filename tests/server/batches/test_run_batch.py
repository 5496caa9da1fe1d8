"""``octavo run-batch``: results in the order of the requests, errors a line, and what a killed run leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main
from octavo_server.cli import run_batch

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def write(path: Path, *bodies: tuple[str, dict[str, Any]]) -> None:
    lines = (
        json.dumps({"custom_id": f"row {i}", "method": "POST", "url": url, "body": body})
        for i, (url, body) in enumerate(bodies)
    )
    path.write_text("\n".join(lines))


def results(path: Path) -> list[tuple[str, int]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [(each["custom_id"], each["response"]["status_code"]) for each in found]


def result(number: int, status: int = 200) -> str:
    kept = {"id": "x", "custom_id": f"row {number}", "response": {"status_code": status, "body": "kept"}}
    return json.dumps(kept)


@pytest.mark.slow
def test_a_run_goes_on_where_a_killed_one_was(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, target, partial = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    hello = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    prompt = {"prompt": "z", "max_tokens": 4}
    wrong = {"prompt": "a", "temperature": "hot"}
    write(source, (COMPLETIONS, prompt), (CHAT, hello), (COMPLETIONS, wrong), (CHAT, hello), (COMPLETIONS, prompt))
    partial.write_text("\n".join([result(3), result(4, 500), result(1)[:20]]))
    assert main(["run-batch", str(source), "-o", str(target), "--backend", "toy"]) == 0
    assert results(target) == [("row 0", 200), ("row 1", 200), ("row 2", 400), ("row 3", 200), ("row 4", 200)]
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["response"]["body"] == "kept" for line in lines] == [False, False, False, True, False]
    assert "'temperature'" in lines[2]["response"]["body"]["error"]["message"]
    assert not partial.exists()
    assert "1 of 5 requests have a result of an earlier run" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "Line 2 must be an object with 'custom_id'"),
        ('{"custom_id": "row 0", "method": "POST", "url": "/v1/completions", "body": {}}', "that an earlier line has"),
        ('{"custom_id": "b", "method": "POST", "url": "/v1/files", "body": {}}', "and the url /v1/chat/completions or"),
    ],
)
def test_a_bad_line_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    source = tmp_path / "in.jsonl"
    write(source, (COMPLETIONS, {"prompt": "z"}))
    source.write_text(f"{source.read_text()}\n{line}")
    assert main(["run-batch", str(source), str(tmp_path / "out.jsonl"), "--backend", "toy"]) == 2
    assert "octavo: error: input: Line 2 " in (error := capsys.readouterr().err)
    assert message in error


def test_an_existing_output_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, (COMPLETIONS, {"prompt": "z"}))
    target.write_text("mine")
    assert main(["run-batch", str(source), str(target), "--backend", "toy"]) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err
    assert target.read_text() == "mine"


def test_requests_with_a_common_beginning_follow_each_other(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    bodies = [{"temperature": i, "prompt": f"{'first' if i % 2 else 'second'} {i}"} for i in range(6)]
    write(source, *((COMPLETIONS, body) for body in bodies))
    with source.open("rb") as lines:
        found = sorted(run_batch.read_requests(lines))
    assert [each.prompt[:6] for each in found] == [b'"first'] * 3 + [b'"secon'] * 3
