"""Streams of responses that are read again, or from an event on, with the unmodified openai client."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo.errors import RequestFailed, Unavailable
from tests.server.conftest import Served, execute
from tests.server.in_process import ANSWER, IM_END, InProcessEngine, byte_tokenizer
from tests.server.responses.test_responses import CALLS, HERMES, TOOLS, client, post, until_done
from tests.tiers import one_in


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server whose model thinks, then calls a function."""
    served = Served(InProcessEngine(lambda request: [*CALLS.encode(), IM_END]), byte_tokenizer(HERMES), {})
    yield served
    served.stop()


def ask(served: Served, **body: Any) -> openai.Stream[Any]:
    stream: openai.Stream[Any] = client(served).responses.create(
        **{"model": "test", "input": "Hi", "max_output_tokens": 8, "stream": True, "background": True, **body}
    )
    return stream


def take(stream: openai.Stream[Any], count: int) -> list[Any]:
    return [next(stream) for _ in range(count)]


def rest(served: Served, name: str, after: int | None = None) -> list[Any]:
    more = {} if after is None else {"starting_after": after}
    return list(client(served).responses.retrieve(name, stream=True, **more))


def text(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def steps(served: Served, count: int) -> None:
    while not served.engine.num_live:
        time.sleep(0.005)
    for _ in range(count):
        served.call(served.engine.step)


@one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("body", [{}, {"background": False}, {"tools": TOOLS, "max_output_tokens": 200}])
def test_every_rest_of_a_finished_stream(server: Served, body: dict[str, Any]) -> None:
    """Text, reasoning, and calls; in the background or not."""
    events = list(ask(server, **body))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    name = events[0].response.id
    assert rest(server, name) == events
    for after in range(len(events)):
        assert rest(server, name, after) == events[after + 1 :]
    assert events[-1].response == client(server).responses.retrieve(name)


def test_a_response_that_was_not_streamed_has_events(server: Served) -> None:
    name = post(server, tools=TOOLS, max_output_tokens=200).json()["id"]
    events = rest(server, name)
    assert events[-1].response == client(server).responses.retrieve(name)
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message", "function_call"]


def test_the_helper_continues(server: Served) -> None:
    api = client(server)
    name = post(server).json()["id"]
    with api.responses.stream(response_id=name, starting_after=3) as stream:
        assert next(event.sequence_number for event in stream) == 4


def test_the_example(serve_app: Any, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    served = serve_app(InProcessEngine(lambda request: [*ANSWER[:12].encode(), IM_END]))
    exec(example.replace("http://127.0.0.1:8000", served.url), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("6 ")
    assert lines[-1].endswith("response.completed")


def test_a_stream_in_the_background(serve_app: Any) -> None:
    """It starts in the queue, goes on without its client, and several clients read it at once."""
    engine = InProcessEngine(runs=False)
    served = serve_app(engine)
    first = ask(served)
    assert [event.type for event in take(first, 3)] == ["response.created", "response.queued", "response.in_progress"]
    steps(served, 2)
    seen = take(first, 3)
    assert [event.type.rpartition(".")[2] for event in seen] == ["added", "added", "delta"]
    name, last = seen[0].item.id.replace("msg_", "resp_")[:-2], seen[-1].sequence_number
    first.close()
    found: dict[int, list[Any]] = {}
    readers = [
        threading.Thread(target=lambda place=place: found.update({place: rest(served, name, place)}), daemon=True)
        for place in (0, last, last + 3)
    ]
    for reader in readers:
        reader.start()
    time.sleep(0.05)
    assert engine.num_live == 1
    steps(served, 6)
    for reader in readers:
        reader.join()
    assert text(found[0]) == ANSWER[:8]
    assert found[last] == found[0][last:]
    assert found[last + 3] == found[0][last + 3 :]
    assert until_done(served, name)["output"][0]["content"][0]["text"] == ANSWER[:8]


def test_a_failure_ends_the_stream(serve_app: Any) -> None:
    served = serve_app(InProcessEngine(errors={2: RequestFailed("The engine fails on this.")}))
    events = list(ask(served))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "The engine fails on this."
    assert [item.status for item in events[-1].response.output] == ["incomplete"]
    assert rest(served, events[0].response.id, 3) == events[4:]


@pytest.mark.parametrize("count", [0, 3])
def test_a_cancelled_response_ends_its_streams(serve_app: Any, count: int) -> None:
    served = serve_app(InProcessEngine(runs=False))
    stream = ask(served)
    events = take(stream, 3)
    name = events[0].response.id
    if count:
        steps(served, count)
        events += take(stream, count + 2)
    cancelled = client(served).responses.cancel(name)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", ANSWER[:count])
    events += list(stream)
    assert (events[-1].type, events[-1].response) == ("response.incomplete", cancelled)
    for after in range(len(events)):
        assert rest(served, name, after) == events[after + 1 :]


def test_a_deleted_response_ends_its_streams(serve_app: Any) -> None:
    served = serve_app(InProcessEngine(runs=False))
    stream = ask(served)
    name = take(stream, 3)[0].response.id
    client(served).responses.delete(name)
    assert list(stream) == []
    with pytest.raises(openai.NotFoundError):
        rest(served, name)


def test_text_that_another_server_began_again_is_not_joined(serve_app: Any, tmp_path: Path) -> None:
    """Without a journal: what was shown may differ, and what was not shown cannot."""
    stuck = Served(InProcessEngine(runs=False), byte_tokenizer(), {"state_dir": str(tmp_path), "max_num_seqs": 1})
    shown, waiting = (ask(stuck) for _ in range(2))
    name = take(shown, 3)[0].response.id
    steps(stuck, 2)
    assert text(take(shown, 3)) == "T"
    other = take(waiting, 3)[0].response.id
    execute(stuck, f"UPDATE items SET value = replace(value, 'in_progress', 'queued') WHERE id = '{other}'")
    shown.close()
    waiting.close()
    stuck.stop()
    served = serve_app(state_dir=str(tmp_path))
    for _ in range(2):
        for after in (3, 5):
            with pytest.raises(openai.ConflictError) as refused:
                rest(served, name, after)
            assert refused.value.code == "stream_changed"
        assert text(rest(served, name, 2)) == text(rest(served, name)) == ANSWER[:8]
        assert rest(served, other, 5)[-1].response.output_text == ANSWER[:8]
        until_done(served, name)


def test_an_engine_that_is_gone_for_a_while_ends_streams(serve_app: Any) -> None:
    """The response begins again, and a client that returns with an event of the first time is told."""
    engine = InProcessEngine(errors={2: Unavailable("The server shuts down.", retry_after=0.3)})
    served = serve_app(engine)
    stream = ask(served)
    events = list(stream)
    assert events[-1].type in ("response.in_progress", "response.output_text.delta")
    engine.errors = {}
    name = events[0].response.id
    until_done(served, name)
    with pytest.raises(openai.ConflictError):
        rest(served, name, 4)
    assert text(rest(served, name)) == ANSWER[:8]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=yes", "stream"),
        ("starting_after=3", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=x", "starting_after"),
        ("stream=true&starting_after=12345678901234567890", "starting_after"),
        ("stream=true&starting_after=4711", "starting_after"),
    ],
)
def test_refusals(server: Served, query: str, param: str) -> None:
    name = post(server).json()["id"]
    refused = server.client.get(f"/v1/responses/{name}?{query}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert server.client.get(f"/v1/responses/{name}?stream=false").status_code == 200
    assert server.client.get("/v1/responses/other?stream=true").status_code == 404


def test_a_record_of_an_earlier_version(server: Served) -> None:
    name = post(server).json()["id"]
    store = server.app.state.services.store

    def age() -> None:
        (value,) = store._database.execute("SELECT value FROM items WHERE id = ?", (name,)).fetchone()
        record = json.loads(value)
        del record["deltas"], record["is_restarted"]
        store._database.execute("UPDATE items SET value = ? WHERE id = ?", (json.dumps(record).encode(), name))

    store._thread.submit(age).result()
    assert server.client.get(f"/v1/responses/{name}").status_code == 200
    assert server.client.get(f"/v1/responses/{name}?stream=true").status_code == 400
