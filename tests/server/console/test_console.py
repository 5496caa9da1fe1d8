"""The console's files, what they may load, who may read them, and the live view."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import octavo_server.console
from octavo.telemetry.request_events import Event
from octavo.types import EngineStats, Output
from octavo_server.console import stats_stream as live
from octavo_server.observe.step_log import MAX_SHARES, MAX_STEPS, StepLog, StepShare
from tests.server.conftest import Served
from tests.server.in_process import InProcessEngine, byte_tokenizer

PAGE = Path(octavo_server.console.__file__).parent / "page"
OWN = [file for file in PAGE.iterdir() if file.is_file()]
MOST_BYTES = 150_000
"""Of the page's own files, uncompressed."""
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    served = Served(InProcessEngine(), byte_tokenizer(), {"api_key": "secret"})
    yield served
    served.stop()


def first_snapshot(server: Served, **options: Any) -> dict[str, Any]:
    with server.client.stream("GET", "/stats/live", **options) as answer:
        assert answer.status_code == 200
        line = next(line for line in answer.iter_lines() if line.startswith("data: "))
    return dict(json.loads(line.removeprefix("data: ")))


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_loads_nothing_from_other_hosts(server: Served, path: str) -> None:
    page = server.client.get(path)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'self';")
    named = re.findall(r'(?:src|href)="(console/[^"]+)"', page.text)
    assert len(named) >= 3
    for name in named:
        assert server.client.get(f"/{name}").status_code == 200
    for file in OWN:
        assert not re.search(r"(?:https?:)?//[\w-]+\.\w", file.read_text().replace("http://www.w3.org/2000/svg", "")), (
            file
        )


def test_scripts_import_files_that_exist_and_write_no_html(server: Served) -> None:
    for file in PAGE.glob("*.js"):
        text = file.read_text()
        for name in re.findall(r'(?:from|import) "\./([^"]+)"', text):
            assert server.client.get(f"/console/{name}").headers["content-type"].startswith("text/javascript")
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", text), file
    assert sum(file.stat().st_size for file in OWN) < MOST_BYTES
    assert all(len(file.read_text().splitlines()) < 600 for file in OWN)


def test_files_travel_compressed_and_once(server: Served) -> None:
    plain = server.client.get("/console/main.js", headers={"Accept-Encoding": "identity"})
    packed = server.client.get("/console/main.js", headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"])
    assert packed.text == plain.text == (PAGE / "main.js").read_text()
    again = server.client.get("/console/main.js", headers={"If-None-Match": plain.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_libraries_have_their_licence_and_the_version_that_is_written_down() -> None:
    rows = re.findall(r"^\| (\w+) \| \S+ ([\d.]+) \|", (PAGE / "vendor/README.md").read_text(), re.MULTILINE)
    folders = {folder.name: folder for folder in (PAGE / "vendor").iterdir() if folder.is_dir()}
    assert {name for name, _ in rows} == set(folders)
    for name, version in rows:
        assert (folders[name] / "LICENSE").stat().st_size > 500
        assert any(version in file.read_text() for file in folders[name].glob("*.js")), name


def test_there_are_no_other_files(server: Served) -> None:
    for name in ("nothing.js", "..%2ffiles.py", "../pages.py", "__init__.py", "vendor", "vendor/README.md"):
        assert server.client.get(f"/console/{name}").status_code == 404


def test_the_page_needs_no_key_and_what_it_shows_does(locked: Served) -> None:
    assert locked.client.get("/").status_code == 200
    assert locked.client.get("/console/main.js").status_code == 200
    for path in ("/stats/live", "/v1/models", "/openapi.json"):
        assert locked.client.get(path).status_code == 401
    assert locked.client.post("/", json={"inputs": "Hi"}).status_code == 401
    assert first_snapshot(locked, headers=KEY)["blocks"]["total"]


def test_it_can_be_left_out(serve_app: Any) -> None:
    served = serve_app(InProcessEngine(), console=False)
    for path in ("/", "/docs", "/console/main.js", "/console/vendor/katex/katex.min.css"):
        assert served.client.get(path).status_code in (404, 405)


def test_a_snapshot_has_sizes_and_no_text(serve_app: Any) -> None:
    engine = InProcessEngine(runs=False)
    served = serve_app(engine)

    async def post() -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=0.3) as client:
            await client.post("/v1/completions", json={"prompt": "a secret prompt", "max_tokens": 4})

    with pytest.raises(httpx.ReadTimeout):
        asyncio.run(post())
    snapshot = live.snapshot(engine)  # the disconnect may have ended the request by now
    assert set(snapshot) >= {"running", "waiting", "blocks", "requests", "inter_token_latency"}
    assert "secret" not in json.dumps(snapshot)


def test_snapshots_are_taken_once_for_all_viewers_and_only_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(live, "INTERVAL", 0.01)
    monkeypatch.setattr(live, "snapshot", lambda engine, views: {"number": taken.append(1) or len(taken)})
    engine = InProcessEngine()

    async def watch() -> list[list[bytes]]:
        view = live.LiveView(engine)

        async def viewer() -> list[bytes]:
            seen = []
            async for event in view.watch():
                seen.append(event)
                if len(seen) == 3:
                    break
            return seen

        found = await asyncio.gather(*(viewer() for _ in range(20)))
        await asyncio.sleep(0.05)
        before = len(taken)
        await asyncio.sleep(0.05)
        assert len(taken) == before
        return found

    found = asyncio.run(watch())
    assert len(taken) <= 6
    assert all(seen == found[0] for seen in found)


def test_the_view_ends_when_the_engine_is_not_ready() -> None:
    async def watch() -> list[bytes]:
        return [event async for event in live.LiveView(InProcessEngine(is_ready=False)).watch()]

    assert asyncio.run(watch()) == []


def test_only_a_toy_engine_goes_step_by_step_and_only_while_somebody_watches(serve_app: Any) -> None:
    engine = InProcessEngine()
    served = serve_app(engine)
    answer = served.client.post("/stats/pace?steps=1")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "steps")
    engine.architecture = "toy"
    assert served.client.post("/stats/pace?steps=-1").status_code == 400
    assert "while somebody reads" in served.client.post("/stats/pace?steps=1").json()["error"]["message"]
    with served.client.stream("GET", "/stats/live") as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        assert json.loads(next(lines).removeprefix("data: "))["is_held"] is False
        assert served.client.post("/stats/pace?steps=2").json() == {"is_held": True}
        assert json.loads(next(lines).removeprefix("data: "))["is_held"] is True
    assert engine.paces[0] == 2
    for _ in range(300):  # until the last viewer is seen to have left
        if engine.paces[1:] == [None]:
            break
        time.sleep(0.01)
    assert engine.paces == [2, None]


def test_steps_are_told_by_request_and_without_their_text() -> None:
    log = StepLog()
    stats = EngineStats(num_steps=7, step_tokens=40, step_seconds=0.01, num_waiting=3)
    events = [
        Event(1, "admitted", 0.0, 6, 0, tokens=16),
        Event(1, "chunk", 0.0, 7, 0, tokens=32, start=16),
        Event(3, "preempted", 0.0, 6, 0, tokens=5),
    ]
    outputs = [Output(1, [5]), Output(2, [5, 6, 7], "stop", num_drafts=4, num_accepted_drafts=2)]
    log.note(stats, outputs, events, now=1.0)
    assert log.take(1.0) == []  # nobody had asked yet
    log.note(stats, outputs, events, now=1.1)
    (step,) = log.take(2.0)
    assert (step.number, step.tokens, step.waiting, step.others) == (7, 40, 3, 0)
    assert step.shares == [
        StepShare(1, prompt=32, start=16, output=1, cached=16),
        StepShare(3, end="preempted"),
        StepShare(2, output=3, drafts=4, accepted=2, end="stop"),
    ]
    for number in range(100):
        log.note(stats, [Output(number, [1]) for number in range(80)], [], now=2.1)
    taken = log.take(3.0)
    assert len(taken) == MAX_STEPS
    assert (len(taken[0].shares), taken[0].others) == (MAX_SHARES, 80 - MAX_SHARES)
    log.note(stats, outputs, [], now=100.0)
    assert log.take(100.0) == []
