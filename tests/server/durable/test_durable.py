"""Requests with an idempotency key: attached to, replayed, resumed by event id, and continued by another server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.config import ModelSettings
from octavo.errors import ConfigError, RequestFailed
from octavo.grammar.trial_queue import TrialQueue
from octavo.types import Output, Request
from octavo_server.durable import journal, synced_log
from octavo_server.durable.records import NewWeights
from octavo_server.durable.synced_log import log_files
from octavo_server.engines.engine_client import OutputListener
from octavo_server.engines.lora_adapters import AdapterTable
from octavo_server.engines.request_table import had_grammars
from tests.server.child_engine import ROOT
from tests.server.conftest import Served
from tests.server.fake_engine import token_at
from tests.server.in_process import ANSWER, InProcessEngine, byte_tokenizer

KEY = {"Idempotency-Key": "a"}
BODY = {"prompt": "Hi", "max_tokens": 24, "stream": True, "stream_options": {"include_usage": True}}


class PacedEngine(InProcessEngine):
    """A token every 2 ms, so that there are many events, and continuations of outputs."""

    def _schedule(self) -> None:
        if self.runs and self.live and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_later(0.002, self._run)


@contextmanager
def serving(folder: Path, runs: bool = True, is_draining: bool = False, **settings: Any) -> Iterator[Served]:
    engine = PacedEngine(runs=runs, is_draining=is_draining)
    served = Served(engine, byte_tokenizer(), {"journal": str(folder), **settings})
    try:
        yield served
    finally:
        served.stop()


def send(served: Served, key: str = "a", path: str = "/v1/completions", last: str | None = None, **body: Any) -> Any:
    headers = {"Idempotency-Key": key} | ({} if last is None else {"Last-Event-ID": last})
    return served.client.post(path, json={**BODY, **body}, headers=headers)


def events(answer: httpx.Response) -> list[tuple[str, str]]:
    """Id and data of each event."""
    assert answer.status_code == 200, answer.text
    pairs = []
    for event in answer.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in event.splitlines() if not line.startswith(":"))
        if lines:
            pairs.append((lines.get("id", ""), lines["data"]))
    return pairs


class Text:
    def __init__(self, joined: dict[int, str], found: Any) -> None:
        self.joined, self.found = joined, found

    def __add__(self, other: Text) -> Text:
        keys = self.joined.keys() | other.joined.keys()
        return Text({k: self.joined.get(k, "") + other.joined.get(k, "") for k in keys}, self.found + other.found)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Text)
        return self.joined == other.joined and +self.found == +other.found

    def __repr__(self) -> str:
        return f"{self.joined} {self.found}"


def texts(pairs: list[tuple[str, str]]) -> Any:
    """The text of each choice, and what else the events say."""
    found: Counter[str] = Counter()
    joined: dict[int, str] = {}
    for _, data in pairs:
        if data == "[DONE]":
            continue
        chunk = json.loads(data)
        found["usage"] += bool(chunk.get("usage"))
        found[chunk["id"]] += 0
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            joined[choice["index"]] = joined.get(choice["index"], "") + (
                choice.get("text") or delta.get("content") or ""
            )
            found["roles"] += "role" in delta
            found["ends"] += choice["finish_reason"] is not None
    return Text(joined, found)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_names_its_weights_unless_it_is_read_again(tmp_path: Path, stream: bool) -> None:
    with serving(tmp_path, weight_updates_dir=str(tmp_path)) as served:
        served.engine.weight_version = "7"
        more = {} if stream else {"stream": False, "stream_options": None}
        first, again = (send(served, **more) for _ in range(2))
        assert first.status_code == again.status_code == 200, first.text
        assert first.headers["x-octavo-weight-version"] == "7"
        assert "x-octavo-weight-version" not in again.headers


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_names_the_weights_of_the_engine_that_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, has_ended: bool
) -> None:
    """Which of several it is, is known when the request is given to it; it may end before it is on disk."""

    class Chosen(PacedEngine):
        def add(self, request: Request, listener: OutputListener) -> None:
            listener.on_weights("8")
            super().add(request, listener)

    async def synced(log: journal.Journal) -> None:
        while has_ended and served.engine.live:
            await asyncio.sleep(0.001)

    monkeypatch.setattr(journal.Journal, "synced", synced)
    served = Served(Chosen(), byte_tokenizer(), {"journal": str(tmp_path), "weight_updates_dir": str(tmp_path)})
    try:
        answer = send(served, **({} if stream else UNSTREAMED))
        assert (answer.status_code, answer.headers["x-octavo-weight-version"]) == (200, "8")
    finally:
        served.stop()


def test_an_answer_names_the_weights_that_its_tokens_end_with(tmp_path: Path) -> None:
    class Updating(PacedEngine):
        def add(self, request: Request, listener: OutputListener) -> None:
            super().add(request, listener)
            asyncio.get_running_loop().call_later(0.01, listener.on_weights, "8")

    served = Served(Updating(), byte_tokenizer(), {"journal": str(tmp_path), "weight_updates_dir": str(tmp_path)})
    try:
        answer = send(served, stream=False, stream_options=None)
        assert (answer.status_code, answer.headers["x-octavo-weight-version"]) == (200, "8")
    finally:
        served.stop()


def test_tokens_of_many_steps_are_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[synced_log.Encode] = []
    append = synced_log.LogWriter.append

    def count(writer: synced_log.LogWriter, record: synced_log.Encode) -> None:
        records.append(record)
        append(writer, record)

    monkeypatch.setattr(synced_log.LogWriter, "append", count)
    monkeypatch.setattr(journal, "RECORD_SECONDS", 60.0)  # however long the steps take here
    with serving(tmp_path) as served:
        assert events(send(served))
        assert len(records) < 10 < served.engine.engine.num_steps


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {}),
        ("/v1/completions", {"n": 2, "prompt": ["Hi", "Ho"], "max_tokens": 5}),
        ("/v1/completions", {"stop": "bird"}),
        ("/v1/completions", {"logprobs": 1, "echo": True, "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
def test_a_stream_resumes_after_every_event(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    if "messages" in body:
        body["prompt"] = None
    with serving(tmp_path) as served:
        whole = events(send(served, path=path, **body))
        assert whole[-1] == ("", "[DONE]")
        assert all(id for id, _ in whole[:-1])
        num_requests = len(served.engine.requests)
        assert texts(events(send(served, path=path, **body))) == texts(whole)
        for place, (id, _) in enumerate(whole[:-1]):
            rest = events(send(served, path=path, last=id, **body))
            assert texts(whole[: place + 1]) + texts(rest) == texts(whole)
            if not body.get("n"):
                assert rest[-1] == whole[-1]
        assert len(served.engine.requests) == num_requests


def test_refusals(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        first = events(send(served))
        id = first[0][0]
        reused = send(served, max_tokens=5)
        assert (reused.status_code, reused.json()["error"]["code"]) == (422, "idempotency_key_reused")
        unknown = send(served, key="b", last=id)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (409, "stream_unknown")
        other_text = send(served, last=id.partition(".")[0] + ".00000000")
        assert (other_text.status_code, other_text.json()["error"]["code"]) == (409, "stream_changed")
        beyond = send(served, last=f"999.{id.partition('.')[2]}")
        assert (beyond.status_code, beyond.json()["error"]["code"]) == (409, "stream_changed")
        for bad in ("x", "1", "1.2", id + "-" + id, id + "+7.1.1", id + "+u+u", "-" + id):
            assert send(served, last=bad).status_code == 400, bad
        assert send(served, key="k" * 256).status_code == 400


def test_without_a_journal_the_header_has_no_effect() -> None:
    served = Served(InProcessEngine(), byte_tokenizer(), {})
    try:
        assert "id:" not in send(served).text
    finally:
        served.stop()


def test_a_failed_request_frees_its_key(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.engine.errors = {2: RequestFailed("It failed.")}
        assert send(served, stream=False, stream_options=None).status_code == 500
        served.engine.errors = {}
        assert send(served, stream=False, stream_options=None).status_code == 200


def test_ended_requests_are_replayed_by_another_server_until_something_changed(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        whole = events(send(served))
        unstreamed = send(served, key="b", stream=False, stream_options=None).json()
    with serving(tmp_path) as served:
        assert texts(events(send(served))) == texts(whole)
        place = len(whole) // 3  # tokens that come before the request is on disk are one event
        assert texts(events(send(served, last=whole[place][0]))) == texts(whole[place + 1 :])
        assert send(served, key="b", stream=False, stream_options=None).json() == unstreamed
        assert not served.engine.requests
    with serving(tmp_path, reasoning_parser="none") as served:
        for last in (None, whole[0][0]):
            changed = send(served, last=last)
            assert (changed.status_code, changed.json()["error"]["code"]) == (409, "server_changed")
        assert events(send(served, key="c"))


def test_ended_requests_are_forgotten(tmp_path: Path) -> None:
    with serving(tmp_path, journal_retention=0.0) as served:
        for _ in range(2):
            assert send(served, stream=False, stream_options=None).status_code == 200
        assert len(served.engine.requests) == 2
        assert not served.app.state.services.first.journal._requests


def test_one_server_at_a_time(tmp_path: Path) -> None:
    with serving(tmp_path), pytest.raises(ConfigError, match="journal: another server uses"), serving(tmp_path):
        pass


UNSTREAMED = {"stream": False, "stream_options": None}


def begin_unfinished(served: Served, num_tokens: int, **body: Any) -> None:
    """Let the engine compute so many tokens of a request whose client stays."""
    served.engine.runs = False

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError):
            send(served, **UNSTREAMED, **body)

    threading.Thread(target=ask, daemon=True).start()
    until(lambda: served.engine.requests)
    steps(served, num_tokens)


def steps(served: Served, count: int) -> None:
    for _ in range(count):
        served.call(served.engine.step)


def test_long_prompts_do_not_make_every_step_begin_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a new file holds of unfinished requests counts, too."""
    monkeypatch.setattr(journal, "ROLL_BYTES", 100)
    with serving(tmp_path) as served:
        begin_unfinished(served, 0, prompt=[1] * 400)
        log = served.app.state.services.first.journal
        for _ in range(20):
            steps(served, 1)
            asyncio.run_coroutine_threadsafe(log.synced(), served.loop).result(30)
        assert log._writer.number < 4


class FullDisk:
    """A disk that takes nothing while ``is_full``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_full = True
        write = os.write
        patch.setattr(synced_log.os, "write", lambda *args: self._fail() if self.is_full else write(*args))

    def _fail(self) -> int:
        raise OSError(28, "No space left on device")


def test_a_snapshot_that_does_not_fit_makes_no_wrong_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as served:
        begin_unfinished(served, 3)
    disk = FullDisk(monkeypatch)
    with serving(tmp_path, runs=False) as served:
        writer = served.app.state.services.first.journal._writer
        until(lambda: writer.num_failures)
        disk.is_full = False
        steps(served, 5)
    with serving(tmp_path, runs=False) as served:
        (again,) = served.engine.requests
        assert again.output_tokens == list(ANSWER[:8].encode())


def test_what_a_full_disk_left_out_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "REPAIR_SECONDS", 0.01)
    disk = FullDisk(monkeypatch)
    with serving(tmp_path) as served:
        begin_unfinished(served, 3)
        writer = served.app.state.services.first.journal._writer
        until(lambda: writer.is_incomplete)
        disk.is_full = False
        until(lambda: not writer.is_incomplete)
    with serving(tmp_path, runs=False) as served:
        (again,) = served.engine.requests
        assert again.output_tokens == list(ANSWER[:3].encode())


def test_a_server_that_ends_while_it_starts_loses_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        begin_unfinished(served, 3)
    with serving(tmp_path, is_draining=True) as served:
        assert not served.engine.requests
    with serving(tmp_path, runs=False) as served:
        (again,) = served.engine.requests
        assert again.output_tokens == list(ANSWER[:3].encode())


def give_weights(served: Served, version: str) -> None:
    """Update the weights: all live requests go on with them."""

    def update() -> None:
        served.engine.weight_version = version
        for live in served.engine.live.values():
            live.listener.on_weights(version)

    served.call(update)


@pytest.mark.parametrize("updates", [("7",), (None, "7"), ("7", "default"), (None, "7", "default"), (None,)])
def test_a_request_goes_on_after_a_restart_only_with_its_weights(
    tmp_path: Path, updates: tuple[str | None, ...]
) -> None:
    """A server starts with its first weights; ``None`` is where the request begins."""
    with serving(tmp_path) as served:
        if updates[0] is not None:
            served.engine.weight_version = updates[0]
        begin_unfinished(served, 3, n=2)
        for version in filter(None, updates[1:]):
            give_weights(served, version)
            steps(served, 2)
    num_tokens = 3 + 2 * len(updates[1:])
    for _ in range(2):
        with serving(tmp_path, runs=False) as served:
            if updates[-1] == "7":
                assert not served.engine.requests
                answer = send(served, n=2, **UNSTREAMED)
                assert (answer.status_code, answer.json()["error"]["code"]) == (409, "server_changed")
            else:
                expected = list(ANSWER[:num_tokens].encode())
                assert [again.output_tokens for again in served.engine.requests] == [expected, expected]


def test_a_request_whose_choices_have_several_weights_does_not_go_on(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        begin_unfinished(served, 3, n=2)
        first, _ = served.engine.live.values()
        served.call(lambda: first.listener.on_weights("7"))
        served.call(lambda: first.listener.on_weights("8"))
    with serving(tmp_path, runs=False) as served:
        assert not served.engine.requests


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_request_of_a_loaded_adapter_goes_on_with_that_of_the_settings(tmp_path: Path, is_changed: bool) -> None:
    """If that has the same contents."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / file).write_text("{}")
    settings = ModelSettings(enable_lora=True, lora_modules=f"step={folder}")

    @contextmanager
    def serving_adapters() -> Iterator[Served]:
        engine = PacedEngine(runs=False, adapters=AdapterTable(settings))
        served = Served(engine, byte_tokenizer(), {"journal": str(tmp_path / "journal"), "enable_lora": True})
        try:
            yield served
        finally:
            served.stop()

    with serving_adapters() as served:
        adapters = served.engine.adapters
        served.call(lambda: adapters.add("step", str(folder), adapters.known["step"].digest))
        begin_unfinished(served, 3, model="step")
        assert served.engine.requests[0].adapter == adapters.alias("step") != "step"
    if is_changed:
        (folder / "adapter_config.json").write_text("{ }")
    with serving_adapters() as served:
        assert [again.adapter for again in served.engine.requests] == ([] if is_changed else ["step"])


def noted_weights(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The versions that are recorded from now on."""
    found, note = list[str](), journal.Journal.note

    def noted(self: journal.Journal, item: Any) -> None:
        if isinstance(item, NewWeights):
            found.append(item.version)
        note(self, item)

    monkeypatch.setattr(journal.Journal, "note", noted)
    return found


def test_an_update_of_all_choices_is_recorded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = noted_weights(monkeypatch)
    with serving(tmp_path) as served:
        begin_unfinished(served, 3, n=3)
        give_weights(served, "7")
        steps(served, 1)
        give_weights(served, "8")
        steps(served, 1)
    assert found == ["7", "8"]


def test_choices_whose_weights_others_did_not_get_go_on_with_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several engines, an update reaches one choice after the other."""
    found = noted_weights(monkeypatch)
    with serving(tmp_path) as served:
        begin_unfinished(served, 3, n=3)
        first, second, _ = served.engine.live.values()
        served.call(lambda: first.listener.on_weights("7"))
        served.call(lambda: second.listener.on_weights("7"))
        for live in (first, second):
            end = Output(0, [], "stop")
            served.call(lambda live=live, end=end: live.listener.on_output(end))  # type: ignore[misc]
    assert found == ["", "default"]


@pytest.mark.parametrize("body", [{}, {"stop": "said"}])
def test_an_answer_that_has_ended_is_read_again_whatever_its_weights(tmp_path: Path, body: dict[str, Any]) -> None:
    with serving(tmp_path) as served:
        served.engine.weight_version = "7"
        whole = send(served, **UNSTREAMED, **body).json()
    with serving(tmp_path) as served:
        assert send(served, **UNSTREAMED, **body).json() == whole
        assert not served.engine.requests


SCRIPT = """
import sys
from octavo.config import ServeConfig
from octavo_server.front import serving
from octavo.text import tokenizer
from tests.server.forked_engine import forked
serving.with_local_model = lambda config: config
tokenizer.load_tokenizer = lambda path: None
settings = {"model": '{"step_seconds": 0.003}', "port": 0, "journal": sys.argv[1]}
sys.exit(serving.run(ServeConfig.from_flat(settings), forked()))
"""


@contextmanager
def serving_process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server with an engine process, and the URL of its completions."""
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        found = next(filter(None, (re.search(r"http://127\.0\.0\.1:\d+", line) for line in process.stdout)))
        yield process, found[0] + "/v1/completions"
    finally:
        process.kill()
        process.communicate()


def tokens(pairs: list[tuple[str, str]]) -> dict[int, list[int]]:
    """The token ids of each choice."""
    found: dict[int, list[int]] = {}
    for _, data in pairs:
        for choice in json.loads(data)["choices"] if data != "[DONE]" else []:
            found.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
    return found


@pytest.mark.slow
def test_streams_continue_after_a_kill(tmp_path: Path) -> None:
    body = {"prompt": [1, 2], "max_tokens": 150, "n": 2, "stream": True, "temperature": 1}
    expected = [token_at([1, 2], place) for place in range(150)]
    received: list[tuple[str, str]] = []
    for place in (40, 80):  # two kills; the second is of a server that continued
        headers = KEY | ({"Last-Event-ID": received[-1][0]} if received else {})
        with (
            serving_process(tmp_path) as (process, url),
            httpx.stream("POST", url, json=body, headers=headers, timeout=30) as answer,
        ):
            assert answer.status_code == 200
            lines = filter(None, answer.iter_lines())
            while len(tokens(received).get(0, [])) < place:
                received.append((next(lines).removeprefix("id: "), next(lines).removeprefix("data: ")))
            process.kill()
    with serving_process(tmp_path) as (_, url):
        rest = httpx.post(url, json=body, headers={**KEY, "Last-Event-ID": received[-1][0]}, timeout=30)
        received += events(rest)
        assert tokens(received) == {0: expected, 1: expected}
        assert tokens(events(httpx.post(url, json=body, headers=KEY, timeout=30))) == {0: expected, 1: expected}
    assert len({json.loads(data)["id"] for _, data in received[:-1]}) == 1


@pytest.mark.slow
def test_damaged_journals_give_right_tokens(tmp_path: Path) -> None:
    """Whatever is lost: a server starts, and a client gets the text or an error."""
    rng = random.Random(2)
    with serving(tmp_path) as served:
        pairs = {key: events(send(served, key=key)) for key in "abc"}
    (file,) = log_files(tmp_path)
    content = file.path.read_bytes()
    for _ in range(12):
        for old in log_files(tmp_path):
            old.path.unlink()
        damaged = bytearray(content)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        file.path.write_bytes(damaged[: rng.randrange(len(damaged) // 2, len(damaged) + 1)])
        with serving(tmp_path) as served:
            for key, whole in pairs.items():
                place = rng.randrange(len(whole) - 1)
                answer = send(served, key=key, last=whole[place][0])
                if answer.status_code == 200:
                    assert texts(events(answer)) == texts(whole[place + 1 :])
                else:
                    assert answer.json()["error"]["code"] == "stream_unknown"


def test_background_responses_continue(tmp_path: Path) -> None:
    settings = {"state_dir": str(tmp_path / "state")}
    with serving(tmp_path / "journal", **settings) as served:
        served.engine.runs = False
        body = {"input": "Hi", "max_output_tokens": 8, "background": True}
        name = served.client.post("/v1/responses", json=body).json()["id"]
        until(lambda: served.engine.requests)
        for _ in range(3):
            served.call(served.engine.step)
        first = served.engine.requests[-1]
    with serving(tmp_path / "journal", **settings) as served:
        until(lambda: served.client.get(f"/v1/responses/{name}").json()["status"] == "incomplete")
        (again,) = served.engine.requests
        assert again.seed == first.seed
        assert again.output_tokens == list(ANSWER[:3].encode())
        until(lambda: not served.app.state.services.first.journal._requests)
        answer = served.client.get(f"/v1/responses/{name}").json()
        assert answer["output"][0]["content"][0]["text"] == ANSWER[:8]


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_health_fails_after_a_bound(tmp_path: Path) -> None:
    with serving(tmp_path, health_fail_after=60.0) as served:
        served.engine.seconds_since_progress = 59.0
        assert served.client.get("/health").status_code == 200
        served.engine.seconds_since_progress = 61.0
        assert served.client.get("/health").status_code == 503


def test_a_restarted_server_is_ready_for_grammars_if_there_were_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as served:
        send(served)
        assert not had_grammars(served.app.state.services.first.config.server)
    started: list[bool] = []
    monkeypatch.setattr(TrialQueue, "start_process", lambda trials: started.append(True))
    with serving(tmp_path) as served:
        assert not started
        send(served, key="b", structured_outputs={"regex": "[a-z]+"})
        assert had_grammars(served.app.state.services.first.config.server)
    with serving(tmp_path):
        assert started
