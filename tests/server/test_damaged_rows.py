"""Stored items that cannot be read: who asks for one gets 503, lists go on without it, and the log names it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Served, execute
from tests.server.in_process import InProcessEngine

DAMAGED = ("ff00ff", "", "7b", "7b7d", "5b5d", "37", "6e756c6c", "7b226964223a22efbfbfff227d")
"""Bytes that are no text, nothing, half an object, an object of another form, and other values, in hexadecimal."""
ITEMS = {
    "response": ["GET /v1/responses/bad", "GET /v1/responses/bad/input_items", "POST /v1/responses/bad/cancel"],
    "conversation": [
        *("GET /v1/conversations/bad", "GET /v1/conversations/bad/items", "GET /v1/conversations/bad/items/x"),
        "DELETE /v1/conversations/bad/items/x",
    ],
    "file": ["GET /v1/files/bad", "GET /v1/files/bad/content"],
    "batch": ["GET /v1/batches/bad", "POST /v1/batches/bad/cancel"],
}
BODIES = {
    "response": {"/v1/responses": {"input": "Hi", "previous_response_id": "bad"}},
    "conversation": {
        "/v1/responses": {"input": "Hi", "conversation": "bad"},
        "/v1/conversations/bad": {"metadata": {}},
        "/v1/conversations/bad/items": {"items": [{"role": "user", "content": "Hi"}]},
    },
    "file": {"/v1/batches": {"input_file_id": "bad", "endpoint": "/v1/completions", "completion_window": "24h"}},
    "batch": {},
}


def damage(served: Served, kind: str, value: str) -> None:
    execute(served, f"INSERT OR REPLACE INTO items VALUES ('{kind}', 'bad', '', 1e12, x'{value}')")


@pytest.mark.parametrize("kind", ITEMS)
@pytest.mark.parametrize("value", DAMAGED)
def test_a_damaged_item_is_named_and_the_others_are_served(
    served: Served, kind: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(served, kind, value)
    asks = [(*ask.split(), None) for ask in ITEMS[kind]]
    asks += [("POST", path, body) for path, body in BODIES[kind].items()]
    for method, path, body in asks:
        caplog.clear()
        answer = served.client.request(method, path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_damaged"), (path, answer.text)
        told = [record for record in caplog.records if record.name.startswith("octavo")]
        assert any(f"{kind} bad" in record.getMessage() for record in told)
        assert not any(record.exc_info for record in told)
    if kind in ("file", "batch"):
        path = "/v1/files" if kind == "file" else "/v1/batches"
        listed = served.client.get(path)
        assert listed.status_code == 200
        assert "bad" not in [each["id"] for each in listed.json()["data"]]
    kind_path = {"response": "responses", "conversation": "conversations", "file": "files"}.get(kind)
    if kind_path:
        assert served.client.delete(f"/v1/{kind_path}/bad").status_code == 200, "it can be deleted"


RESPONSE = {"id": "bad", "status": "completed", "model": "m", "background": False, "store": True, "output": []}
PARTS = {
    "response": [
        *({"response": {**RESPONSE, name: value}} for name in RESPONSE for value in (5, None, {}, [5])),
        *({"response": {key: RESPONSE[key] for key in RESPONSE if key != name}} for name in RESPONSE),
    ],
    "conversation": [{"items": [item]} for item in ({}, {"id": 5}, {"type": "message"}, 5, None)],
}


@pytest.mark.parametrize("kind", PARTS)
def test_an_item_with_parts_that_are_missing_or_others_is_damaged(served: Served, kind: str) -> None:
    whole = {"response": {"history": []}, "conversation": {"id": "bad", "created_at": 1, "metadata": {}}}[kind]
    for parts in PARTS[kind]:
        damage(served, kind, json.dumps({**whole, **parts}).encode().hex())
        for path in (f"/v1/{kind}s/bad", f"/v1/{kind}s/bad/{'items' if kind == 'conversation' else 'input_items'}"):
            answer = served.client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_damaged"), (parts, path)


def test_a_response_is_stored_when_its_conversation_is_damaged_meanwhile(
    serve_app: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = InProcessEngine(runs=False)
    served = serve_app(engine)
    conversation = served.client.post("/v1/conversations", json={}).json()["id"]
    body = {"input": "Hi", "conversation": conversation, "background": True, "max_output_tokens": 2}
    id = served.client.post("/v1/responses", json=body).json()["id"]
    until(lambda: bool(engine.num_live))
    execute(served, f"UPDATE items SET value = x'ff' WHERE id = '{conversation}'")
    served.call(lambda: setattr(engine, "runs", True))
    served.call(engine._schedule)
    until(lambda: served.client.get(f"/v1/responses/{id}").json()["status"] == "incomplete")
    until(lambda: execute(served, "SELECT count(*) FROM items WHERE kind = 'pending_response'") == 0)
    assert f"conversation {conversation} cannot be read" in caplog.text


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)
