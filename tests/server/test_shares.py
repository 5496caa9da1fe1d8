"""One API key cannot take what another one needs: places in the queue, turns at slow work."""

from __future__ import annotations

import asyncio
import json
import resource
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.cache.pinned_blocks import PINNED_SHARE
from octavo.config import ModelSettings, ServeConfig
from octavo.grammar import trial_queue
from octavo.server_settings import ServerSettings
from octavo.system.cpus import num_cpus
from octavo.telemetry.request_events import Event
from octavo.text.conversation import ChatPrompt
from octavo_server import pooling_requests
from octavo_server.app import create_app
from octavo_server.dialects.batches import batches, runner
from octavo_server.dialects.responses import conversations
from octavo_server.durable import background_jobs, journal, store
from octavo_server.http import middleware, request_body
from octavo_server.http import server as http
from octavo_server.http.connection_limits import ByteBudget
from octavo_server.observe import timelines
from octavo_server.tenants.api_keys import LEAST_SHARE, Caller, has_share
from octavo_server.tenants.turn_queue import Places, TurnQueue
from tests.server.conftest import Served
from tests.server.in_process import InProcessEngine
from tests.server.test_keys import bearer, key_file, line

ROOT = Path(__file__).parents[2]
ROOM = 8


def with_keys(serve_app: Any, folder: Path, engine: InProcessEngine | None = None, **settings: Any) -> Served:
    path = key_file(folder, line("alice", "a"), line("bob", "b"))
    served: Served = serve_app(engine or InProcessEngine(), api_key_file=path, **settings)
    return served


def post(served: Served, key: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return served.client.post(path, json={"prompt": "Hi", "max_tokens": 2, **body}, headers=bearer(key))


@pytest.fixture
def flood(serve_app: Any, tmp_path: Path) -> Iterator[Served]:
    """A server in which alice's requests have all places, and no request advances."""
    engine = InProcessEngine(runs=False, max_num_seqs=ROOM // 2)
    served = with_keys(serve_app, tmp_path, engine, max_num_queued_reqs=ROOM // 2, request_timeout=20)
    with ThreadPoolExecutor(ROOM) as pool:
        answers = [pool.submit(post, served, "a") for _ in range(ROOM)]
        while engine.num_live < ROOM:
            threading.Event().wait(0.001)
        yield served
        served.call(lambda: setattr(engine, "runs", True))
        served.call(engine._schedule)
        assert {answer.result().status_code for answer in answers} == {200}


def test_a_place_is_found_for_another_key_when_one_has_them_all(flood: Served) -> None:
    assert post(flood, "a").status_code == 429
    assert post(flood, "a", "/tokenize").status_code == 429
    assert post(flood, "b", "/tokenize").status_code == 200
    engine = flood.engine
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(post, flood, "b")
        while engine.live_owners["bob"] < 1:
            threading.Event().wait(0.001)
        assert engine.live_owners == {"alice": ROOM, "bob": 1}
        flood.call(lambda: setattr(engine, "runs", True))
        flood.call(engine._schedule)
        assert other.result().status_code == 200


def test_shares_of_a_full_queue() -> None:
    limit = 10 * LEAST_SHARE
    alone = Counter(a=limit)
    assert has_share(Counter(a=limit - 1), "a", 1, limit)
    assert not has_share(alone, "a", 1, limit)
    assert has_share(alone, "b", limit // 2, limit)
    assert not has_share(alone, "b", limit // 2 + 1, limit)
    many = alone + Counter(dict.fromkeys(range(99), 1))
    assert has_share(many, "new", LEAST_SHARE, limit)
    assert not has_share(many, "new", LEAST_SHARE + 1, limit)


def test_all_keys_together_are_bounded() -> None:
    held: Counter[str] = Counter()
    for number in range(20):
        while has_share(held, f"key{number}", 1, 100):
            held[f"key{number}"] += 1
    assert held.total() <= 100 * sum(1 / n for n in range(1, 21)) + 20 * LEAST_SHARE


def test_keys_have_turns_and_a_key_has_an_order() -> None:
    queue: TurnQueue[int] = TurnQueue()
    for number in range(3):
        queue.push("a", number)
    queue.push("b", 7)
    assert [queue.pop() for _ in range(5)] == [("a", 0), ("b", 7), ("a", 1), ("a", 2), None]


def test_slow_work_of_one_key_does_not_delay_that_of_another() -> None:
    async def check() -> None:
        places, begun, held = Places(3, 2), list[str](), asyncio.Event()

        async def work(owner: str) -> None:
            async with places.place(owner):
                begun.append(owner)
                await held.wait()

        tasks = [asyncio.create_task(work("a")) for _ in range(5)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(work("b")) for _ in range(2)]
        await asyncio.sleep(0)
        assert begun == ["a", "a", "b"]
        tasks[3].cancel()
        await asyncio.sleep(0)
        held.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert Counter(begun) == {"a": 4, "b": 2}
        async with places.place("a"), places.place("b"), places.place("c"):  # all are free again
            pass

    asyncio.run(asyncio.wait_for(check(), 30))


def test_a_place_that_was_given_to_a_cancelled_request_goes_on() -> None:
    async def check() -> None:
        places = Places(1)
        async with places.place("a"):
            waiting = asyncio.create_task(places.place("b").__aenter__())
            await asyncio.sleep(0)
        waiting.cancel()  # it has the place, and does not know yet
        await asyncio.sleep(0)
        async with asyncio.timeout(1), places.place("c"):
            pass

    asyncio.run(check())


def test_a_long_text_of_one_key_leaves_a_place_to_tokenise_for_another(serve_app: Any, tmp_path: Path) -> None:
    served = with_keys(serve_app, tmp_path)
    admission, held = served.app.state.services.first.admission, threading.Event()

    def slow() -> ChatPrompt:
        held.wait(20)
        return ChatPrompt("Hi", "Hi")

    async def occupy() -> Any:
        return await admission.encode(slow, "prompt", False, Caller("alice"))

    occupied = [asyncio.run_coroutine_threadsafe(occupy(), served.loop) for _ in range(6)]
    assert post(served, "b", prompt="x" * 400).status_code == 200
    assert post(served, "b", "/tokenize").status_code == 200
    held.set()
    assert [each.result(20).text for each in occupied] == ["Hi"] * 6


def test_bodies_of_the_key_that_sends_most_are_given_up_first() -> None:
    gone: list[str] = []
    budget = ByteBudget(100)
    for number in range(9):
        budget.share(lambda number=number: gone.append(f"a{number}"), "a").resize(10)  # type: ignore[misc]
    large = budget.share(lambda: gone.append("b"), "b")
    large.resize(40)
    assert len(gone) == 3
    assert "b" not in gone


def test_timelines_of_one_key_do_not_drive_out_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MAX_REQUESTS", 10)
    kept = timelines.Timelines()

    def run(number: int, owner: str) -> None:
        kept.own(number, owner)
        kept.name(f"cmpl-{number}", [number])
        kept.add([Event(number, "arrived", 1.0, 0, 0), Event(number, "ended", 2.0, 0, 0)])

    for number in range(3):
        run(number, "bob")
    for number in range(3, 100):
        run(number, "alice")
    for number in range(3):
        assert kept.report(f"cmpl-{number}", "bob") is not None
        assert kept.report(f"cmpl-{number}", "alice") is None
    assert kept.report("cmpl-99", "alice") is not None
    assert kept.report("cmpl-90", "alice") is None
    assert (len(kept._kept), len(kept._names)) == (10, 10)


def test_unfinished_background_responses_and_batches_have_a_bound_and_each_key_a_share(
    serve_app: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_jobs, "MAX_JOBS", 4)
    served = with_keys(serve_app, tmp_path, InProcessEngine(runs=False))

    def begin(key: str) -> int:
        body = {"input": "Hi", "background": True}
        return served.client.post("/v1/responses", json=body, headers=bearer(key)).status_code

    assert [begin("a") for _ in range(5)] == [200] * 4 + [429]
    files = {"file": ("a", b"{}")}
    sent = served.client.post("/v1/files", files=files, data={"purpose": "batch"}, headers=bearer("a")).json()
    body = {"input_file_id": sent["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    assert served.client.post("/v1/batches", json=body, headers=bearer("a")).status_code == 429
    assert begin("b") == 200


def test_many_batches_of_one_key_do_not_delay_those_of_another(serve_app: Any, tmp_path: Path) -> None:
    engine = InProcessEngine(runs=False, max_num_seqs=4)  # two places for lines
    served = with_keys(serve_app, tmp_path, engine)

    def begin(key: str) -> str:
        body = {"prompt": "Hi", "max_tokens": 2}
        text = "".join(
            json.dumps({"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body}) + "\n"
            for n in range(3)
        )
        files = {"file": ("a", text.encode())}
        sent = served.client.post("/v1/files", files=files, data={"purpose": "batch"}, headers=bearer(key)).json()
        asked = {"input_file_id": sent["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        return str(served.client.post("/v1/batches", json=asked, headers=bearer(key)).json()["id"])

    def status(key: str, id: str) -> str:
        return str(served.client.get(f"/v1/batches/{id}", headers=bearer(key)).json()["status"])

    many = [begin("a") for _ in range(batches.MAX_AT_ONCE + 2)]
    while engine.num_live < 2:
        threading.Event().wait(0.005)
    other = begin("b")
    assert [status("a", id) for id in many[-2:]] == ["validating"] * 2, "they wait, and hold no lines"
    while status("b", other) != "in_progress":
        threading.Event().wait(0.005)
    while status("b", other) != "completed":
        served.call(engine.step)
    assert len([id for id in many if status("a", id) == "completed"]) <= 3
    while any(status("a", id) != "completed" for id in many):
        served.call(engine.step)


def test_only_the_admin_changes_adapters_for_all_keys(serve_app: Any, tmp_path: Path) -> None:
    """One key could unload those of another, or load as many as there may be."""
    served = with_keys(serve_app, tmp_path, enable_lora=True, allow_runtime_lora_updating=True, admin_key="admin")
    for path, body in (("load", {"lora_path": "/nowhere"}), ("unload", {})):
        path, body = f"/v1/{path}_lora_adapter", {"lora_name": "x", **body}
        assert served.client.post(path, json=body, headers=bearer("a")).status_code == 403
        assert served.client.post(path, json=body, headers=bearer("admin")).status_code in (400, 404)


def test_the_stored_bytes_of_one_key_leave_room_for_another(
    serve_app: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_BYTES", 100_000)
    served = with_keys(serve_app, tmp_path)

    def keep(key: str, num_bytes: int) -> int:
        files = {"file": ("a", b"x" * num_bytes)}
        return served.client.post("/v1/files", files=files, data={"purpose": "batch"}, headers=bearer(key)).status_code

    assert [keep("a", 24_000) for _ in range(5)] == [200] * 4 + [507]
    assert keep("b", 40_000) == 200
    assert keep("b", 40_000) == 507
    assert keep("a", 1) == 507


def test_memory_does_not_grow_with_the_files_that_are_kept(serve_app: Any) -> None:
    served, data = serve_app(), b"x" * (8 << 20)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def send() -> str:
        answer = served.client.post("/v1/files", files={"file": ("a", data)}, data={"purpose": "batch"})
        assert answer.status_code == 200
        return str(answer.json()["id"])

    id = send()
    before = resident()
    for _ in range(3):
        send()
    assert resident() - before < 8 << 20, "three times as much is kept"
    assert served.client.get(f"/v1/files/{id}/content").content == data


def rows() -> dict[str, list[str]]:
    text = (ROOT / "docs/security.md").read_text()
    table = text[text.index("| what | bound |") :].split("\n\n")[0].splitlines()[2:]
    return {cells[0]: cells[1:] for line in table if (cells := [cell.strip() for cell in line.strip("|").split("|")])}


MIB = 1 << 20
SETTINGS = ServerSettings()
BOUNDS: dict[str, str] = {
    "unfinished requests, `/tokenize` and `/detokenize` among them": f"({SETTINGS.max_num_queued_reqs})",
    "unfinished requests with an `Idempotency-Key`": f"({SETTINGS.max_num_queued_reqs})",
    "kept answers to an `Idempotency-Key`": f"{journal.MAX_RETAINED_BYTES // MIB} MiB",
    "unfinished background responses and batches": f"{background_jobs.MAX_JOBS:,}",
    "stored bytes: files, responses, conversations, results of batches": f"{store.MAX_BYTES // MIB:,} MiB",
    "bytes of a conversation": f"{conversations.MAX_BYTES // MIB} MiB",
    "lines of a batch": f"{runner.MAX_LINES:,}",
    "batches worked on at a time": "",
    "lines of batches at a time": "half of `--max-num-seqs`",
    "bodies that arrive, in memory": f"`--max-request-bytes` and {request_body.SPARE_BYTES // MIB} MiB",
    "files that arrive, on disk": f"{request_body.MAX_SPOOLED_BYTES // MIB} MiB",
    f"bodies of over {request_body.SMALL_BYTES >> 10} KiB decoded at a time": "one",
    "numbers in the vectors of all tokens of several texts (`/pooling`, `/embed_all`, scores by late interaction)": (
        f"{pooling_requests.MAX_NUMBERS:,} in a request"
    ),
    "texts tokenised and templates rendered at a time": "half of the cores, and one",
    "grammars tested at a time": f"{trial_queue.MAX_PROCESSES}, each for {trial_queue.MAX_SECONDS:g} s at most",
    "grammars that wait": "",
    "requests begun at a time": "one",
    "timelines": f"{timelines.MAX_REQUESTS:,} requests",
    "names of sessions": "one for each block",
    "pinned blocks of the KV cache": {0.5: "half of them"}[PINNED_SHARE],
    "sessions read from disk because of a hint": "",
    "adapters": f"`--max-loras` ({ModelSettings().max_loras})",
    "connections": f"{http.MAX_CONNECTIONS:,};",
    "heads that arrive": f"{http.MAX_UNFINISHED_HEADS // MIB} MiB",
}
"""What the documentation has to say of each bound, by the code."""


def test_the_table_of_shares_has_the_bounds_of_the_code() -> None:
    found = rows()
    assert found.keys() == BOUNDS.keys()
    for what, bound in BOUNDS.items():
        assert bound in found[what][0], what
        assert found[what][2], "what follows"
    assert f"one in {middleware.PAUSE * 1000:g} ms" in found["requests begun at a time"][1]
    assert found["grammars that wait"][1] == str(trial_queue.MAX_WAITING)
    assert found["batches worked on at a time"][1] == str(batches.MAX_AT_ONCE)
    assert f", and {LEAST_SHARE} at least" in (ROOT / "docs/security.md").read_text()
    services = create_app(ServeConfig.from_flat({}), InProcessEngine(), None).state.services.first
    num_each = max(1, num_cpus() // 2)
    assert (services.admission.tokenising.num_places, services.admission.tokenising.num_each) == (
        num_each + 1,
        num_each,
    )
