"""Timelines and events of the cache over HTTP, and `octavo explain`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from octavo.cache.kv_events import Removed, Stored
from octavo.cli import main
from octavo.telemetry.request_events import Event
from octavo_server.observe.timelines import MAX_KV_EVENTS_AT_ONCE, MAX_REQUESTS, KVEventRing, Timelines
from tests.server.test_keys import bearer, key_file, line


def life(number: int, start: float = 1.0) -> list[Event]:
    """The events of a request from its arrival to its end."""
    return [
        Event(number, "arrived", start, 0, 0, tokens=5),
        Event(number, "admitted", start + 1, 3, 3),
        Event(number, "chunk", start + 2, 3, 3, tokens=5),
        Event(number, "ended", start + 4, 7, 9, tokens=4, reason="length"),
    ]


def test_a_timeline_by_the_id_of_the_answer(serve_app: Any) -> None:
    served = serve_app()
    answer = served.complete(n=2).json()
    for request in served.engine.requests:
        served.engine.timelines.add(life(request.id))
    body = served.client.get(f"/v1/requests/{answer['id']}/timeline").json()
    assert body["id"] == answer["id"]
    assert [choice["request"] for choice in body["choices"]] == [request.id for request in served.engine.requests]
    assert body["choices"][0]["seconds"] == {"waiting": 1.0, "prefill": 1.0, "decode": 2.0}
    assert body["choices"][0]["mean_sequences_per_step"] == 1.5
    chat = served.chat().json()
    served.engine.timelines.add(life(served.engine.requests[-1].id))
    assert served.client.get(f"/v1/requests/{chat['id']}/timeline").status_code == 200


def test_timelines_of_the_other_apis(serve_app: Any) -> None:
    served = serve_app()
    conversation = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    for path, body in (
        ("/v1/messages", conversation),
        ("/v1/messages", {**conversation, "stream": True}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2, "stream": True}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2, "background": True}),
    ):
        answer = served.client.post(path, json=body)
        found = re.search(r'"id":"((?:msg|resp)_[0-9a-f]{32})"', answer.text)
        assert found, answer.text
        while '"usage":null' in served.client.get(f"/v1/responses/{found[1]}").text:
            pass  # it is computed in the background
        served.engine.timelines.add(life(served.engine.requests[-1].id))
        timeline = served.client.get(f"/v1/requests/{found[1]}/timeline").json()
        assert timeline["id"] == found[1]
        assert [choice["request"] for choice in timeline["choices"]] == [served.engine.requests[-1].id]


def test_a_timeline_is_for_the_key_that_asked_and_for_the_admin(serve_app: Any, tmp_path: Path) -> None:
    path = key_file(tmp_path, line("alice", "a"), line("bob", "b"))
    served = serve_app(api_key_file=path, api_key="own", admin_key="root")
    body = {"prompt": "Hi", "max_tokens": 2}
    for key, others in (("a", ("b", "own")), ("b", ("a", "own")), ("own", ("a", "b"))):
        answer = served.client.post("/v1/completions", json=body, headers=bearer(key)).json()
        number = served.engine.requests[-1].id
        served.engine.timelines.add(life(number))
        for name in (answer["id"], str(number), f"0{number}"):
            timeline = f"/v1/requests/{name}/timeline"
            assert served.client.get(timeline, headers=bearer(key)).status_code == 200
            assert served.client.get(timeline, headers=bearer("root")).status_code == 200
            assert served.client.get(timeline, headers=bearer("wrong")).status_code == 401
            assert served.client.get(timeline).status_code == 401
            nobody = served.client.get("/v1/requests/x/timeline", headers=bearer("a")).text
            for other in others:
                refused = served.client.get(timeline, headers=bearer(other))
                assert refused.status_code == 404
                assert refused.text == nobody.replace("'x'", f"'{name}'")
    assert served.client.get("/v1/models", headers=bearer("root")).status_code == 401


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
        ("/infer/v1/completions", {"model": "test", "prompt": "Hi", "max_tokens": 2}),
        ("/v1/generate", {"prompt": "Hi", "max_new_tokens": 2}),
        ("/generate", {"prompt": "Hi", "max_tokens": 2}),
    ],
)
def test_requests_of_every_api_are_owned(serve_app: Any, tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    served = serve_app(api_key_file=key_file(tmp_path, line("alice", "a"), line("bob", "b")))
    assert served.client.post(path, json=body, headers=bearer("a")).status_code == 200
    number = served.engine.requests[-1].id
    served.engine.timelines.add(life(number))
    assert served.client.get(f"/v1/requests/{number}/timeline", headers=bearer("a")).status_code == 200
    assert served.client.get(f"/v1/requests/{number}/timeline", headers=bearer("b")).status_code == 404


def test_an_admin_key_alone_closes_no_timeline(serve_app: Any) -> None:
    served = serve_app(admin_key="root")
    answer = served.complete().json()
    served.engine.timelines.add(life(served.engine.requests[0].id))
    for headers in ({}, bearer("root"), bearer("anything")):
        assert served.client.get(f"/v1/requests/{answer['id']}/timeline", headers=headers).status_code == 200


@pytest.mark.parametrize("name", ["cmpl-unknown", "99999", "%00", "ٱ"])
def test_the_timeline_of_an_unknown_request(serve_app: Any, name: str) -> None:
    response = serve_app().client.get(f"/v1/requests/{name}/timeline")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


def test_the_command(serve_app: Any, capsys: pytest.CaptureFixture[str]) -> None:
    served = serve_app(api_key="secret")
    served.client.headers["Authorization"] = "Bearer secret"
    answer = served.complete().json()
    served.engine.timelines.add(life(served.engine.requests[0].id))
    url = f"http://127.0.0.1:{served.port}/"
    assert main(["explain", answer["id"], "--url", url, "--api-key", "secret"]) == 0
    assert "waiting 1.000 s behind 0 others, prefill 1.000 s, decode 2.000 s" in capsys.readouterr().out
    assert main(["explain", answer["id"], "--url", url, "--api-key", "secret", "--json"]) == 0
    assert '"choices"' in capsys.readouterr().out
    assert main(["explain", "nobody", "--url", url, "--api-key", "secret"]) == 2
    assert "Nothing is known" in capsys.readouterr().err
    assert main(["explain", "x", "--url", "http://127.0.0.1:9/"]) == 2
    assert "--url" in capsys.readouterr().err


def test_timelines_are_bounded() -> None:
    timelines = Timelines()
    for number in range(MAX_REQUESTS + 50):
        timelines.own(number, "alice")
        timelines.add(life(number))
        timelines.name(f"a{number}", [number])
    assert timelines.report("a0") is None
    assert timelines.report("0") is None
    newest = timelines.report(f"a{MAX_REQUESTS + 49}")
    assert newest is not None
    assert newest[0]["status"] == "length"
    assert timelines.report("50", "alice") is not None, "owners are known for as long as what happened"
    assert timelines.report("50", "bob") is None
    assert len(timelines._kept) == len(timelines._names) == MAX_REQUESTS
    timelines.add([Event(1, "ended", 9.0, 0, 0)])
    assert timelines.report("1") is None, "the end of a request that was forgotten is no request"


def test_events_of_the_cache(serve_app: Any) -> None:
    served = serve_app(enable_kv_events=True)
    served.engine.kv_events.add([Stored(1, 11, 0, [1, 2], "salt"), Removed(2, 11)])
    served.engine.kv_events.clear()
    body = served.client.get("/v1/kv_events").json()
    assert body["events"] == [
        {"type": "stored", "number": 1, "hash": 11, "parent": 0, "tokens": [1, 2], "salt": "salt"},
        {"type": "removed", "number": 2, "hash": 11},
        {"type": "cleared", "number": 3},
    ]
    assert (body["last"], body["is_complete"]) == (3, True)
    assert [event["number"] for event in served.client.get("/v1/kv_events?after=2").json()["events"]] == [3]
    assert served.client.get("/v1/kv_events?after=x").json()["error"]["param"] == "after"
    assert serve_app().client.get("/v1/kv_events").status_code == 400


def test_a_router_sees_what_it_missed() -> None:
    ring = KVEventRing()
    ring._events = type(ring._events)(maxlen=5)
    ring.add([Removed(0, number) for number in range(8)])
    late = ring.after(0)
    assert [event["number"] for event in late["events"]] == [4, 5, 6, 7, 8]
    assert late["is_complete"] is False
    assert ring.after(3)["is_complete"] is True
    assert ring.after(8)["events"] == []
    many = KVEventRing()
    many.add([Removed(0, number) for number in range(MAX_KV_EVENTS_AT_ONCE + 7)])
    assert len(many.after(0)["events"]) == MAX_KV_EVENTS_AT_ONCE
    assert len(many.after(MAX_KV_EVENTS_AT_ONCE)["events"]) == 7
