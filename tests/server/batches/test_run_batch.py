"""``octavo run-batch``: results in the order of the requests, errors a line, and what a killed run leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest

from octavo.cli import main
from octavo_server.cli import run_batch
from octavo_server.engines import async_engine
from tests.models.encoder_families import make_encoder
from tests.server.forked_engine import THREADED

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


def texts(path: Path) -> list[tuple[str, str]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [(each["custom_id"], each["response"]["body"]["choices"][0]["text"]) for each in found]


KILLED = """
import contextlib, os, signal, sys
from octavo.cli import main
from octavo_server.cli.run_batch import BatchResults

appending = BatchResults.appending

@contextlib.contextmanager
def appending_five(results):
    with appending(results) as append:
        def keep(*result):
            append(*result)
            if len(results._kept) == 5:
                os.kill(os.getpid(), signal.SIGKILL)
        yield keep

BatchResults.appending = appending_five
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_run_that_was_killed_computes_the_rest(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its results are those of a run that nothing stopped, and none that was written is computed again."""
    source, target, whole = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    write(source, *((COMPLETIONS, {"prompt": f"{i} and", "max_tokens": 80, "seed": i}) for i in range(60)))
    command = ["run-batch", str(source), str(target), "--backend", "toy", "--max-num-seqs", "4"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *command], stderr=subprocess.DEVNULL, check=False)
    assert killed.returncode == -signal.SIGKILL
    done = partial.read_bytes().splitlines(keepends=True)
    assert len(done) == 5
    assert not target.exists()
    assert main(command) == 0
    assert f"{len(done)} of 60 requests have a result of an earlier run" in capfd.readouterr().err
    assert set(done) <= set(target.read_bytes().splitlines(keepends=True))
    assert main(["run-batch", str(source), str(whole), *command[3:]]) == 0
    assert texts(target) == texts(whole)
    assert [name for name, _ in texts(target)] == [f"row {i}" for i in range(60)]
    assert not partial.exists()


@pytest.mark.slow
def test_vectors_and_scores_and_the_errors_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of any kind that fsspec knows; each wrong line has an error of its own."""
    monkeypatch.setattr(async_engine, "ENGINE_ARGV", THREADED)
    make_encoder(tmp_path / "model", "Bert/Model")
    source, target = tmp_path / "in.jsonl", f"memory:/{tmp_path}/out.jsonl"
    write(
        source,
        ("/v1/embeddings", {"input": ["A bird sings", "in the old tree"]}),
        ("/v1/score", {"text_1": "A bird sings", "text_2": ["the birds sing", "nobody"]}),
        ("/v1/rerank", {"query": "A bird", "documents": ["nobody hears it", "A bird"], "top_n": 1}),
        ("/v1/embeddings", {"input": []}),
        ("/v1/embeddings", {"input": "a", "model": "another"}),
        (COMPLETIONS, {"prompt": "A bird"}),
        ("/v1/score", {"text_1": "A bird"}),
    )
    files = fsspec.filesystem("memory")
    files.pipe("/in.jsonl", source.read_bytes())
    own = ["--model", str(tmp_path / "model"), "--device", "cpu", "--dtype", "float32"]
    assert main(["run-batch", "memory://in.jsonl", target, *own]) == 0
    lines = [json.loads(line) for line in files.cat(target).splitlines()]
    assert [line["custom_id"] for line in lines] == [f"row {i}" for i in range(7)]
    assert [line["response"]["status_code"] for line in lines] == [200, 200, 200, 400, 404, 400, 400]
    vectors, scores, ranked, *wrong = [line["response"]["body"] for line in lines]
    assert [len(each["embedding"]) for each in vectors["data"]] == [32, 32]
    assert [each["index"] for each in scores["data"]] == [0, 1]
    assert [each["index"] for each in ranked["results"]] == [1]
    assert [each["error"]["param"] for each in wrong[:2]] == ["input", "model"]
    assert wrong[3]["error"]["param"] == "text_2"
    files.rm(str(tmp_path), recursive=True)


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
