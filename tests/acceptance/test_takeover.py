"""Servers that take over from each other under load: no request fails, and no text changes.

``OCTAVO_TAKEOVERS=10 pytest tests/acceptance/test_takeover.py`` does it ten times.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import Server
from tests.tiers import nightly_after

pytestmark = pytest.mark.slow

NUM_TAKEOVERS = int(os.environ.get("OCTAVO_TAKEOVERS", "1"))

Serve = Callable[..., Server]


@pytest.fixture
def tmp_path(socket_folder: Path) -> Path:
    return socket_folder


def body(prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}


def text_of(stream: str) -> str:
    """The text of a complete stream of completions."""
    *events, end, rest = stream.split("\n\n")
    assert (end, rest) == ("data: [DONE]", ""), stream[-300:]
    chunks = [json.loads(event.partition("data: ")[2]) for event in events if "data: " in event]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


class Clients:
    """Threads that stream completions one after the other, each on one connection or on a new one each time."""

    def __init__(self, url: str, count: int) -> None:
        self.url = url + "/v1/completions"
        self.right = Counter[str]()
        self.wrong: list[str] = []
        self._is_over = threading.Event()
        self._known: dict[str, str] = {}
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]

    def __enter__(self) -> Clients:
        with self._client() as client:
            for number in range(len(self._threads)):
                prompt = f"word {number}"
                answer = client.post(self.url, json=body(prompt, 200)).json()
                self._known[prompt] = answer["choices"][0]["text"]
        for thread in self._threads:
            thread.start()
        return self

    def _client(self) -> httpx.Client:
        return httpx.Client(timeout=60, verify=False)  # plain HTTP: no certificates to read

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, number: int) -> None:
        prompt, kept, count = f"word {number}", self._client(), 0
        while not self._is_over.is_set():
            count += 1
            client = kept if number % 2 else self._client()
            headers = {"Idempotency-Key": f"{number}-{count}"} if number % 4 < 2 else {}
            asked = body(prompt, 200, stream=number % 8 < 6)
            try:
                answer = client.post(self.url, json=asked, headers=headers)
                assert answer.status_code == 200, answer.text
                text = text_of(answer.text) if asked["stream"] else answer.json()["choices"][0]["text"]
                assert text == self._known[prompt], text
                self.right["stream" if asked["stream"] else "whole"] += 1
            except Exception as error:
                self.wrong.append(f"{number}: {error!r}"[:500])
            if client is not kept:
                client.close()
        kept.close()


@pytest.mark.parametrize(("num_takeovers", "num_streams"), nightly_after(1, ((NUM_TAKEOVERS, 8), (3, 64))))
def test_no_request_fails(serve: Serve, tmp_path: Path, num_takeovers: int, num_streams: int) -> None:
    args = ("--backend", "instant", "--takeover-socket", str(tmp_path / "s"), "--journal", str(tmp_path / "j"))
    servers = [serve(*args)]
    with Clients(servers[0].url, num_streams) as clients:
        for _ in range(num_takeovers):
            answered = clients.right.total()
            servers.append(serve(*args))
            assert servers[-1].url == servers[-2].url
            assert servers[-2].process.wait(60) == 0
            while clients.right.total() < answered + 2 * num_streams and not clients.wrong:
                time.sleep(0.05)
    assert not clients.wrong, "".join(line for each in servers for line in each.lines if " I " not in line)
    assert clients.right["stream"] > clients.right["whole"] > 0
    assert len(list((tmp_path / "j").iterdir())) == 1  # the journals became one
    print(f"{clients.right.total()} answers during {num_takeovers} takeovers")


@pytest.mark.nightly
def test_what_the_old_server_leaves(serve: Serve, tmp_path: Path) -> None:
    """Requests that outlast it continue at the new one, which waits for it where it is asked for one of them."""
    state = ("--journal", str(tmp_path / "j"), "--state-dir", str(tmp_path / "state"))
    engine = ("--backend", "toy", "--shutdown-timeout", "3")
    args = (*engine, "--takeover-socket", str(tmp_path / "s"), *state)
    old = serve(*args)
    long = body("a long story", 3000, stream=True, ignore_eos=True)
    response = old.post("/v1/responses", {"input": "Hi", "background": True, "max_output_tokens": 2500}).json()
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body("x", 900)} for i in (1, 2)]
    file = httpx.post(
        old.url + "/v1/files",
        data={"purpose": "batch"},
        files={"file": ("lines.jsonl", "\n".join(map(json.dumps, lines)).encode())},
    ).json()["id"]
    batch = old.post(
        "/v1/batches", {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    ).json()
    url, key = old.url + "/v1/completions", {"Idempotency-Key": "long"}
    begun: list[str] = []
    with httpx.stream("POST", url, json=long, headers=key, timeout=60) as stream:
        for line in stream.iter_lines():
            begun.append(line)
            if len(begun) > 100:
                break
        os.kill(old.engine_pid(), signal.SIGSTOP)  # so that nothing ends at the old server
        new = serve(*args)
        ids = [line.partition("id: ")[2] for line in begun if line.startswith("id: ")]
        rest = httpx.post(url, json=long, headers={**key, "Last-Event-ID": ids[-1]}, timeout=60)
    assert old.process.wait(60) == 0
    assert rest.status_code == 200, rest.text
    whole = httpx.post(url, json=long, headers=key, timeout=60)
    assert text_of(whole.text).endswith(text_of(rest.text))
    assert len(text_of(whole.text)) > len(text_of(rest.text)) > 0
    assert int(re.findall(r"taken over; (\d+) requests are left", "".join(old.lines))[0]) >= 2
    assert int(re.findall(r"(\d+) requests of the journal continue", "".join(new.lines))[0]) >= 1
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ended = new.get(f"/v1/responses/{response['id']}").json()
        done = new.get(f"/v1/batches/{batch['id']}").json()
        if ended["status"] not in ("queued", "in_progress") and done["status"] == "completed":
            break
        time.sleep(0.1)
    assert ended["status"] in ("completed", "incomplete")
    assert done["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


def test_another_port_is_refused(serve: Serve, tmp_path: Path) -> None:
    args = ("--backend", "instant", "--takeover-socket", str(tmp_path / "s"))
    server = serve(*args)
    with pytest.raises(pytest.fail.Exception, match="takeover_socket: the server there listens on port"):
        serve(*args, "--port", "1")
    assert server.get("/ready").status_code == 200
