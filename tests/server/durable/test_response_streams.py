"""Streams of background responses, and a batch, that continue after a restart, a kill, or a change of the server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo_server.durable import synced_log
from tests.server.child_engine import ROOT
from tests.server.conftest import Served
from tests.server.durable.test_durable import serving, steps, until
from tests.server.in_process import ANSWER
from tests.server.responses.test_responses import client
from tests.server.responses.test_streams import ask, rest, take, text

COUNT = 12


def begin(served: Served, num_tokens: int, **body: Any) -> list[Any]:
    """The first events of a response of which so many tokens are computed; its client goes away."""
    served.engine.runs = False
    stream = ask(served, max_output_tokens=COUNT, **body)
    until(lambda: served.engine.requests)
    steps(served, num_tokens)
    with stream:
        return take(stream, num_tokens + 5)


def settings(folder: Path) -> dict[str, Any]:
    return {"folder": folder / "journal", "state_dir": str(folder / "state")}


def test_a_stream_continues_after_a_restart(tmp_path: Path) -> None:
    """What was computed before comes in the same events, and nothing comes twice."""
    with serving(**settings(tmp_path)) as served:
        seen = begin(served, 4)
    name = seen[0].response.id
    with serving(**settings(tmp_path), runs=False) as served:
        stream = client(served).responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number)
        until(lambda: served.engine.requests)
        steps(served, 2)
        with stream:
            seen += take(stream, 2)
    with serving(**settings(tmp_path)) as served:
        seen += rest(served, name, seen[-1].sequence_number)
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        assert text(seen) == ANSWER[:COUNT]
        assert rest(served, name) == seen
        assert served.engine.requests[-1].output_tokens == list(ANSWER[:6].encode())


def test_events_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_slow, sync = threading.Event(), os.fdatasync
    is_slow.set()
    monkeypatch.setattr(synced_log.os, "fdatasync", lambda file: (is_slow.wait(), sync(file)))
    with serving(**settings(tmp_path)) as served:
        served.engine.runs = False
        stream = ask(served, max_output_tokens=COUNT)
        take(stream, 3)
        is_slow.clear()
        steps(served, COUNT - 1)
        found: list[Any] = []
        reader = threading.Thread(target=lambda: found.extend(stream), daemon=True)
        reader.start()
        time.sleep(0.1)
        assert not text(found)
        is_slow.set()
        until(lambda: text(found) == ANSWER[: COUNT - 1])
        steps(served, 1)
        reader.join()
        assert text(found) == ANSWER[:COUNT]


def test_a_changed_server_begins_again_and_says_so(tmp_path: Path) -> None:
    with serving(**settings(tmp_path)) as served:
        seen = begin(served, 4)
    name = seen[0].response.id
    with serving(**settings(tmp_path), reasoning_parser="none") as served:
        for _ in range(2):
            with pytest.raises(openai.ConflictError) as refused:
                rest(served, name, seen[-1].sequence_number)
            assert refused.value.code == "stream_changed"
            assert text(rest(served, name)) == ANSWER[:COUNT]
        assert served.engine.requests[-1].output_tokens == []


SCRIPT = """
import sys
from octavo.config import ServeConfig
from octavo_server.front import serving
from octavo.text import tokenizer
from tests.server.forked_engine import forked
from tests.server.fake_engine import VOCAB
from tests.server.in_process import byte_tokenizer
serving.with_local_model = lambda config: config
tokenizer.load_tokenizer = lambda path: byte_tokenizer(words=tuple(f"w{i}" for i in range(VOCAB)))
model = '{"step_seconds": 0.015}'  # so that a slow client still meets a batch that has not ended
settings = {"model": model, "port": 0, "journal": sys.argv[1] + "/journal", "state_dir": sys.argv[1] + "/state"}
sys.exit(serving.run(ServeConfig.from_flat(settings), forked()))
"""


@contextmanager
def serving_process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(folder)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        found = next(filter(None, (re.search(r"http://127\.0\.0\.1:\d+", line) for line in process.stdout)))
        yield process, openai.OpenAI(base_url=found[0] + "/v1", api_key="none", max_retries=0)
    finally:
        process.kill()
        process.communicate()


LINES: list[dict[str, Any]] = [{"prompt": [1, number], "max_tokens": 4 * number + 1} for number in range(40)]


def begin_batch(api: openai.OpenAI) -> str:
    """A batch whose lines end one after the other."""
    rows = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(LINES)
    ]
    content = "\n".join(map(json.dumps, rows)).encode()
    file = api.files.create(file=("in.jsonl", content), purpose="batch")
    return api.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id


def check_batch(api: openai.OpenAI, name: str) -> None:
    """Every line has its own text, once."""
    until(lambda: api.batches.retrieve(name).status == "completed")
    rows = [json.loads(row) for row in api.files.content(api.batches.retrieve(name).output_file_id or "").iter_lines()]
    assert sorted(int(row["custom_id"]) for row in rows) == list(range(len(LINES)))
    most = LINES[-1]["max_tokens"]
    whole = api.completions.create(model="", prompt=[body["prompt"] for body in LINES], max_tokens=most)
    for row in rows:
        (choice,) = row["response"]["body"]["choices"]
        known = choice["text"].rstrip("\ufffd")  # the end of a text may be an incomplete character
        assert whole.choices[int(row["custom_id"])].text.startswith(known)


@pytest.mark.slow
def test_a_stream_and_a_batch_continue_after_kills_of_engine_and_server(tmp_path: Path) -> None:
    body: Any = {"model": "", "input": "Hi", "max_output_tokens": 120, "temperature": 1}
    seen: list[Any] = []
    num_done: list[int] = []
    for until_event in (30, 60):
        with serving_process(tmp_path) as (process, api):
            if seen:
                after = seen[-1].sequence_number
                stream = api.responses.retrieve(seen[0].response.id, stream=True, starting_after=after)
            else:
                batch = begin_batch(api)
                stream = api.responses.create(**body, background=True, stream=True)
            while len(seen) < until_event - 15:
                seen.append(next(stream))
            engine = httpx.get(str(api.base_url).replace("/v1/", "/stats")).json()["engine_pid"]
            os.kill(engine, signal.SIGKILL)
            while len(seen) < until_event:
                seen.append(next(stream))
            most = num_done[-1] if num_done else 0  # counted again when the batch goes on
            while (count := api.batches.retrieve(batch).request_counts.completed) <= most:
                time.sleep(0.01)
            num_done.append(count)
            process.kill()
    with serving_process(tmp_path) as (_, api):
        name, after = seen[0].response.id, seen[-1].sequence_number
        seen += api.responses.retrieve(name, stream=True, starting_after=after)
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        assert seen[-1].type == "response.incomplete"
        assert text(seen) == api.responses.create(**body).output_text
        assert list(api.responses.retrieve(name, stream=True)) == seen
        assert 0 < num_done[0] < num_done[1] < len(LINES)
        check_batch(api, batch)
