"""Files and batches: the unmodified openai client, what is refused, cancelling, and other processes."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo_server.dialects.batches import batches as batches_module
from octavo_server.durable import background_jobs
from octavo_server.durable import store as store_module
from tests.server.conftest import Served, execute, fill, make_room
from tests.server.in_process import ANSWER, InProcessEngine, byte_tokenizer
from tests.server.openai.test_client import options

URL = "/v1/completions"


def lines(count: int, url: str = URL, **body: Any) -> bytes:
    rows = [
        {"custom_id": f"row {i}", "method": "POST", "url": url, "body": {"prompt": f"{i}", "max_tokens": 3, **body}}
        for i in range(count)
    ]
    return b"\n".join(json.dumps(row).encode() for row in rows)


def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(**options(served))


def begin(served: Served, content: bytes, url: Any = URL) -> Any:
    api = client(served)
    file = api.files.create(file=("in.jsonl", content), purpose="batch")
    return api.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h", metadata={"a": "b"})


def until_done(served: Served, name: str) -> Any:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        batch = client(served).batches.retrieve(name)
        if batch.status not in ("validating", "in_progress", "finalizing", "cancelling"):
            return batch
        time.sleep(0.01)
    raise AssertionError("it does not end")


def results(served: Served, name: str | None) -> dict[str, Any]:
    assert name is not None
    rows = [json.loads(line) for line in client(served).files.content(name).text.splitlines()]
    return {row["custom_id"]: row["response"] for row in rows}


def test_files(server: Served) -> None:
    api = client(server)
    content = bytes(range(256)) * 100
    file = api.files.create(file=("bytes.bin", content), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(content), "bytes.bin", "batch")
    assert api.files.retrieve(file.id) == file
    assert api.files.content(file.id).content == content
    assert file.id in [each.id for each in api.files.list()]
    assert api.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        api.files.retrieve(file.id)
    with pytest.raises(openai.NotFoundError):
        api.files.content(file.id)


def test_a_batch(server: Served) -> None:
    batch = begin(server, lines(40) + b"\n\n")
    done = until_done(server, batch.id)
    assert done.status == "completed"
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (40, 40, 0)
    assert done.metadata == {"a": "b"}
    answers = results(server, done.output_file_id)
    assert sorted(answers) == sorted(f"row {i}" for i in range(40))
    assert all(answer["status_code"] == 200 for answer in answers.values())
    assert all(answer["body"]["choices"][0]["text"] == ANSWER[:3] for answer in answers.values())
    assert done.error_file_id is None
    assert done.id in [each.id for each in client(server).batches.list(limit=2)]
    # The other half of the places is left to clients.
    assert server.engine.max_live <= server.engine.max_num_seqs // 2


def test_files_may_have_byte_order_marks(server: Served) -> None:
    """At their beginning, and where files were joined."""
    marked = b"".join(b"\xef\xbb\xbf" + line + b"\r\n" for line in lines(2).splitlines())
    done = until_done(server, begin(server, marked).id)
    assert done.request_counts is not None
    assert (done.status, done.request_counts.completed) == ("completed", 2)


def test_lines_that_are_refused_are_in_a_file_of_their_own(server: Served) -> None:
    content = (
        lines(2)
        + b"\n"
        + json.dumps(
            {"custom_id": "bad", "method": "POST", "url": URL, "body": {"prompt": "x", "temperature": 101}}
        ).encode()
    )
    done = until_done(server, begin(server, content).id)
    assert len(results(server, done.output_file_id)) == 2
    refused = results(server, done.error_file_id)["bad"]
    assert refused["status_code"] == 400
    assert refused["body"]["error"]["param"] == "temperature"
    assert done.request_counts.failed == 1


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/responses"])
def test_other_endpoints(server: Served, url: str) -> None:
    body: dict[str, Any] = {"input": "Hi", "max_output_tokens": 3}
    if "chat" in url:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    row = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body}).encode()
    done = until_done(server, begin(server, row, url).id)
    assert ANSWER[:3] in json.dumps(results(server, done.output_file_id)["a"]["body"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "1 to 50000 lines"),
        (b"{", "Line 1 must be an object"),
        (lines(1) + b"\n" + lines(1), "Line 2 has a 'custom_id'"),
        (lines(1, "/v1/chat/completions"), "must have the method POST and the url /v1/completions"),
        (lines(1, stream=True), "asks for a stream"),
        (b"[" * 100_000, "Line 1 must be an object"),
        (b"\xff\xfe", "Line 1 must be an object"),
    ],
)
def test_a_file_that_is_no_batch(server: Served, content: bytes, words: str) -> None:
    done = until_done(server, begin(server, content).id)
    assert done.status == "failed"
    assert words in done.errors.data[0].message


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"prompt": "\xff"}', "invalid_value"),
        (b'"\xff"', "invalid_json"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "invalid_value"),
        (b"9" * 5000, "invalid_json"),
        (b"1e999", "invalid_json"),
        (b'{"prompt": "a", "seed": 1e999}', "invalid_value"),
        (b'{"prompt": "a", "stream": 1e999}', "invalid_value"),
    ],
)
def test_a_body_that_cannot_be_read_is_the_error_of_its_line(server: Served, body: bytes, code: str) -> None:
    row = b'{"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": %b}' % body
    done = until_done(server, begin(server, lines(2) + b"\n" + row).id)
    assert done.status == "completed"
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 1)
    refused = results(server, done.error_file_id)["bad"]
    assert refused["status_code"] == 400
    assert refused["body"]["error"]["code"] == code


@pytest.mark.parametrize("value", [b'"\xff"', b"9" * 5000, b"1e999"])
def test_a_field_that_no_api_defines_is_not_decoded(server: Served, value: bytes) -> None:
    body = b'{"prompt": "a", "other": %b}' % value
    row = b'{"custom_id": "odd", "method": "POST", "url": "/v1/completions", "body": %b}' % body
    done = until_done(server, begin(server, row).id)
    assert (done.status, done.request_counts.completed) == ("completed", 1)
    assert results(server, done.output_file_id)["odd"]["status_code"] == 200


def test_what_a_job_does_not_foresee_ends_the_batch(serve_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def boom(*args: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(batches_module, "LineReader", boom)
    served = serve_app()
    done = until_done(served, begin(served, lines(2)).id)
    assert done.status == "failed"
    assert done.failed_at
    assert done.errors.data[0].code == "internal_error"
    assert "secret" not in done.errors.data[0].message


def test_a_damaged_database_ends_the_batch(serve_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = InProcessEngine(max_num_seqs=4, runs=False)
    served = serve_app(engine)
    batch = begin_and_do_two(served, engine)

    def damaged(*args: Any) -> Any:
        raise sqlite3.DatabaseError("database disk image is malformed")

    monkeypatch.setattr(served.app.state.services.store, "_put_all", damaged)
    engine.runs = True
    served.call(engine._schedule)
    done = until_done(served, batch.id)
    assert done.status == "failed"
    assert done.errors.data[0].code == "internal_error"


def test_a_batch_waits_while_the_disk_is_full(serve_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RETRY_SECONDS", 0.05)
    engine = InProcessEngine(max_num_seqs=4, runs=False)
    served = serve_app(engine)
    batch = begin_and_do_two(served, engine)
    fill(served)
    engine.runs = True
    served.call(engine._schedule)
    assert served.client.post("/v1/files", files={"file": b"x" * 9000}, data={"purpose": "batch"}).status_code == 507
    while engine.num_live:
        time.sleep(0.005)
    time.sleep(0.2)
    assert client(served).batches.retrieve(batch.id).status == "in_progress"
    make_room(served)
    done = until_done(served, batch.id)
    assert (done.status, done.request_counts.completed) == ("completed", 10)
    assert len(results(served, done.output_file_id)) == 10
    # What is kept of each line has gone with the end of the batch.
    assert execute(served, f"SELECT count(*) FROM items WHERE kind = 'lines of {batch.id}'") == 0


def test_a_batch_is_cancelled_while_the_disk_is_full(serve_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(background_jobs, "SETTLE_SECONDS", 0.1)
    engine = InProcessEngine(max_num_seqs=4, runs=False)
    served = serve_app(engine)
    batch = begin_and_do_two(served, engine)
    fill(served)
    assert client(served).batches.cancel(batch.id).status == "cancelling"
    make_room(served)
    done = until_done(served, batch.id)
    assert done.status == "cancelled"
    assert len(results(served, done.output_file_id)) == 2


def test_a_batch_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    settings = {"state_dir": str(tmp_path)}
    first = Served(InProcessEngine(), byte_tokenizer(), settings)
    good = until_done(first, begin(first, lines(1)).id)
    for kind in ("batch", "file", "pending_response", "response"):
        execute(first, f"INSERT INTO items VALUES ('{kind}', 'bad', '', 1e12, x'ff')")
    first.stop()
    second = Served(InProcessEngine(), byte_tokenizer(), settings)
    try:
        assert [each.id for each in client(second).batches.list()] == [good.id]
        assert good.input_file_id in [each.id for each in client(second).files.list()]
        # It is there until its owner deletes it.
        assert execute(second, "SELECT count(*) FROM items WHERE id = 'bad'") == 4
        assert second.client.delete("/v1/responses/bad").status_code == 200
        assert execute(second, "SELECT count(*) FROM items WHERE id = 'bad'") == 2
    finally:
        second.stop()


def test_what_is_refused(server: Served) -> None:
    api = client(server)
    file = api.files.create(file=("in.jsonl", lines(1)), purpose="batch")
    good = {"input_file_id": file.id, "endpoint": URL, "completion_window": "24h"}
    for field, value in (("input_file_id", "file-other"), ("endpoint", "/v1/other"), ("completion_window", "1h")):
        answer = server.client.post("/v1/batches", json={**good, field: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
    with pytest.raises(openai.BadRequestError, match="'purpose'"):
        api.files.create(file=("x", b"x"), purpose="fine-tune")
    assert server.client.post("/v1/files", json={}).json()["error"]["code"] == "unsupported_media_type"
    assert server.client.post("/v1/files", files={"other": b"x"}).status_code == 400
    torn = {"content-type": "multipart/form-data; boundary=x"}
    for body in (b"--y\r\n", b"--x\r\nContent-Disposition: form-data; name", b""):
        assert server.client.post("/v1/files", content=body, headers=torn).status_code == 400
    assert (
        server.client.post("/v1/files", content=b"", headers={"content-type": "multipart/form-data"}).status_code == 400
    )
    for limit in ("0", "10001", "-1", "x", "000001" + "9" * 5000):
        for kind in ("files", "batches"):
            assert server.client.get(f"/v1/{kind}?limit={limit}").status_code == 400
    assert server.client.get("/v1/batches/other").status_code == 404


def test_a_file_that_is_too_large(serve_app: Any) -> None:
    served = serve_app(max_request_bytes=10_000)
    assert served.client.post("/v1/files", files={"file": b"x" * 20_000}).status_code == 413


def begin_and_do_two(served: Served, engine: InProcessEngine) -> Any:
    """A batch of ten of which two are done; the engine stands still."""
    batch = begin(served, lines(10))
    while engine.num_live < 2:
        time.sleep(0.005)
    for _ in range(3):
        served.call(engine.step)
    while client(served).batches.retrieve(batch.id).request_counts.completed < 2:  # type: ignore[union-attr]
        time.sleep(0.005)
    return batch


def test_cancelling_keeps_what_is_done(serve_app: Any) -> None:
    engine = InProcessEngine(max_num_seqs=4, runs=False)
    served = serve_app(engine)
    batch = begin_and_do_two(served, engine)
    ended = client(served).batches.cancel(batch.id)
    assert ended.status == "cancelled"
    assert len(results(served, ended.output_file_id)) == 2
    assert engine.num_live == 0


def test_a_batch_outlives_the_process(tmp_path: Path) -> None:
    engine = InProcessEngine(max_num_seqs=4, runs=False)
    settings = {"state_dir": str(tmp_path)}
    first = Served(engine, byte_tokenizer(), settings)
    batch = begin_and_do_two(first, engine)
    first.stop()
    second = Served(InProcessEngine(), byte_tokenizer(), settings)
    try:
        done = until_done(second, batch.id)
        assert done.status == "completed"
        assert len(results(second, done.output_file_id)) == 10
        # Those that were done are not computed again.
        assert len(second.engine.requests) == 8
    finally:
        second.stop()


@pytest.mark.parametrize("change", [{}, {"reasoning_parser": "none"}])
def test_with_a_journal_lines_continue_where_they_were(tmp_path: Path, change: dict[str, Any]) -> None:
    """Unless the server has changed, whose tokens may be others."""
    settings = {"state_dir": str(tmp_path / "state"), "journal": str(tmp_path / "journal")}
    engine = InProcessEngine(max_num_seqs=4, runs=False)
    first = Served(engine, byte_tokenizer(), settings)
    batch = begin(first, lines(2, max_tokens=8))
    while len(engine.requests) < 2:
        time.sleep(0.005)
    for _ in range(3):
        first.call(engine.step)
    first.stop()
    second = Served(InProcessEngine(), byte_tokenizer(), settings | change)
    try:
        found = results(second, until_done(second, batch.id).output_file_id)
        assert [line["body"]["choices"][0]["text"] for line in found.values()] == [ANSWER[:8]] * 2
        known = [] if change else list(ANSWER[:3].encode())
        assert [request.output_tokens for request in second.engine.requests] == [known] * 2
        assert not second.app.state.services.first.journal._by_key
    finally:
        second.stop()


def test_cancelling_ends_lines_of_the_journal(serve_app: Any, tmp_path: Path) -> None:
    engine = InProcessEngine(max_num_seqs=4, runs=False)
    served = serve_app(engine, journal=str(tmp_path))
    batch = begin_and_do_two(served, engine)
    assert engine.num_live
    assert client(served).batches.cancel(batch.id).status == "cancelled"
    assert engine.num_live == 0
    assert not served.app.state.services.first.journal._by_key


def test_cancelling_outlives_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = InProcessEngine(max_num_seqs=4, runs=False)
    settings = {"state_dir": str(tmp_path)}
    first = Served(engine, byte_tokenizer(), settings)
    batch = begin_and_do_two(first, engine)
    with monkeypatch.context() as patch:
        patch.setattr(batches_module.Batches, "_finish", lambda *args: asyncio.sleep(60))
        patch.setattr(background_jobs, "SETTLE_SECONDS", 0.1)
        assert client(first).batches.cancel(batch.id).status == "cancelling"
        first.stop()
    second = Served(InProcessEngine(), byte_tokenizer(), settings)
    try:
        done = until_done(second, batch.id)
        assert done.status == "cancelled"
        assert len(results(second, done.output_file_id)) == 2
        assert not second.engine.requests
    finally:
        second.stop()


@pytest.mark.slow
def test_a_full_server_makes_a_batch_wait(serve_app: Any) -> None:
    engine = InProcessEngine(max_num_seqs=1, runs=False)
    served = serve_app(engine, max_num_queued_reqs=1)
    with httpx.Client(base_url=served.url, timeout=20) as other:
        waiting = [threading.Thread(target=lambda: other.post(URL, json={"prompt": "x"})) for _ in range(2)]
        for thread in waiting:
            thread.start()
        while engine.num_live < 2:
            time.sleep(0.005)
        batch = begin(served, lines(1))
        time.sleep(0.1)
        engine.runs = True
        served.call(engine._schedule)
        for thread in waiting:
            thread.join()
    assert until_done(served, batch.id).request_counts.completed == 1
