"""Conversations, and responses that belong to them, with the unmodified openai client."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo_server.dialects.responses import conversations
from octavo_server.durable.stored_state import check
from tests.server.conftest import Served, execute
from tests.server.in_process import ANSWER, IM_END, InProcessEngine, byte_tokenizer
from tests.server.responses.test_responses import CALLS, HERMES, TOOLS, client, post, prompt, until_done


def message(text: str, role: Any = "user") -> Any:
    return {"type": "message", "role": role, "content": text}


def texts(served: Served, name: str, **query: Any) -> list[str]:
    return [item.content[0].text for item in client(served).conversations.items.list(name, **query)]  # type: ignore


def test_a_conversation(server: Served) -> None:
    api = client(server).conversations
    begun = api.create(items=[message("Hi")], metadata={"a": "b"})
    assert (begun.object, begun.metadata) == ("conversation", {"a": "b"})
    assert api.retrieve(begun.id) == begun
    assert api.update(begun.id, metadata={"c": "d"}).metadata == api.retrieve(begun.id).metadata == {"c": "d"}
    added = api.items.create(begun.id, items=[message("Hello.", "assistant"), message("Bye")])
    assert [item.status for item in added.data] == ["completed"] * 2  # type: ignore[union-attr]
    assert texts(server, begun.id) == ["Bye", "Hello.", "Hi"]
    assert texts(server, begun.id, order="asc", limit=2) == ["Hi", "Hello.", "Bye"]  # the client asks for each page
    assert api.items.retrieve(added.last_id, conversation_id=begun.id) == added.data[1]
    assert api.items.delete(added.first_id, conversation_id=begun.id).id == begun.id
    assert texts(server, begun.id) == ["Bye", "Hi"]
    assert api.delete(begun.id).deleted
    for gone in (api.retrieve, api.delete, api.items.list):
        with pytest.raises(openai.NotFoundError):
            gone(begun.id)  # type: ignore[operator]


def test_items_of_all_types(server: Served) -> None:
    given: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "4"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "4"}]},
    ]
    api = client(server).conversations
    name = api.create(items=given).id
    found = list(api.items.list(name, order="asc"))
    assert [item.type for item in found] == [item.get("type", "message") for item in given]
    assert len({item.id for item in found}) == 5


@pytest.mark.parametrize("further", [{}, {"stream": True}, {"background": True}, {"store": False}])
def test_responses_are_added(server: Served, further: dict[str, Any]) -> None:
    api = client(server)
    name = api.conversations.create(items=[message("Hi")]).id
    for place, conversation in enumerate((name, {"id": name})):
        answer: Any = api.responses.create(
            model="test", input=f"And {place}?", max_output_tokens=3, conversation=conversation, **further
        )
        answer = list(answer)[-1].response if "stream" in further else answer
        if "background" in further:
            until_done(server, answer.id)
        assert answer.conversation.id == name
    assert "user\nHi<|im_end|>\n<|im_start|>user\nAnd 0?<|im_end|>\n<|im_start|>assistant\nThe<|im_end|>" in prompt(
        server
    )
    assert texts(server, name, order="asc") == ["Hi", "And 0?", "The", "And 1?", "The"]
    if further.get("store", True):
        before = api.responses.input_items.list(answer.id, order="asc")
        assert [item.content[0].text for item in before] == ["Hi", "And 0?", "The", "And 1?"]  # type: ignore[union-attr]


def test_calls_are_continued(serve_app: Any) -> None:
    served = serve_app(InProcessEngine(lambda request: [*CALLS.encode(), IM_END]), tokenizer=byte_tokenizer(HERMES))
    api = client(served)
    name = api.conversations.create().id
    asked: Any = {"model": "test", "conversation": name, "tools": TOOLS, "max_output_tokens": 120}
    call: Any = api.responses.create(**asked, input="2+2?").output[-1]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    api.responses.create(**asked, input=[result])
    kinds = ["message", "reasoning", "message", "function_call"]
    kinds += ["function_call_output", "reasoning", "message", "function_call"]
    assert [item.type for item in api.conversations.items.list(name, order="asc")] == kinds
    assert "tool:4" in prompt(served)


def test_what_did_not_end_is_not_added(serve_app: Any) -> None:
    engine = InProcessEngine(runs=False)
    served = serve_app(engine)
    api = client(served)
    name = api.conversations.create(items=[message("Hi")]).id
    asked: Any = {"model": "test", "input": "And?", "conversation": name, "background": True, "max_output_tokens": 3}
    cancelled = api.responses.create(**asked)
    api.responses.cancel(cancelled.id)
    assert texts(served, name) == ["Hi"]
    late = api.responses.create(**asked)
    api.conversations.delete(name)
    engine.runs = True
    served.call(engine._schedule)
    assert until_done(served, late.id)["status"] == "incomplete"
    with pytest.raises(openai.NotFoundError):
        api.conversations.retrieve(name)


def test_nothing_is_lost_at_the_same_time(server: Served) -> None:
    api = client(server)
    name = api.conversations.create().id
    asked: Any = {"model": "test", "conversation": name, "max_output_tokens": 3}
    work = [lambda text=str(place): api.responses.create(**asked, input=text) for place in range(6)]
    work += [lambda text=str(place): api.conversations.items.create(name, items=[message(text)]) for place in range(6)]
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = texts(server, name)
    assert sorted(found) == sorted([*map(str, range(6)), *map(str, range(6)), *["The"] * 6])
    assert all(found[place + 1].isdigit() for place, text in enumerate(found) if text == "The")


def test_a_conversation_outlives_the_process(tmp_path: Path) -> None:
    """A background response is added once, though its end is stored twice."""
    stuck = Served(InProcessEngine(runs=False), byte_tokenizer(), {"state_dir": str(tmp_path)})
    name = client(stuck).conversations.create(items=[message("Hi")]).id
    begun = post(stuck, background=True, conversation=name).json()["id"]
    execute(
        stuck, "INSERT INTO items SELECT 'kept', id, owner, created, value FROM items WHERE kind = 'pending_response'"
    )
    stuck.stop()
    for _ in range(2):
        served = Served(InProcessEngine(), byte_tokenizer(), {"state_dir": str(tmp_path)})
        until_done(served, begun)
        assert texts(served, name, order="asc") == ["Hi", "Hi", ANSWER[:4]]
        execute(served, "UPDATE items SET kind = 'pending_response' WHERE kind = 'kept'")
        served.stop()
    assert "conversation" in [kind.name for kind in check(tmp_path).kinds]


def test_keys_have_conversations_of_their_own(serve_app: Any, tmp_path: Path) -> None:
    served = serve_app(api_key="a", admin_key="b")
    headers = {"Authorization": "Bearer a"}
    name = served.client.post("/v1/conversations", json={}, headers=headers).json()["id"]
    execute(served, f"UPDATE items SET owner = 'other' WHERE id = '{name}'")
    for method, path, body in (
        ("GET", "", None),
        ("POST", "", {"metadata": {}}),
        ("DELETE", "", None),
        ("GET", "/items", None),
        ("POST", "/items", {"items": [message("Hi")]}),
        ("GET", "/items/x", None),
        ("DELETE", "/items/x", None),
    ):
        answer = served.client.request(method, f"/v1/conversations/{name}{path}", json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    body = {"input": "Hi", "conversation": name}
    answer = served.client.post("/v1/responses", json=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "conversation")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [message("Hi")] * 21}, "items"),
        ({"items": [{"role": "robot", "content": "x"}]}, "items"),
        ({"items": [{"type": "item_reference", "id": "x"}]}, "items"),
        ({"items": [{"content": "x"}]}, "items"),
        ({"items": []}, "items"),
        ({"items": "Hi"}, "items"),
        ({}, "items"),
    ],
)
def test_what_is_refused(server: Served, body: dict[str, Any], param: str) -> None:
    name = server.client.post("/v1/conversations", json={}).json()["id"]
    answer = server.client.post(f"/v1/conversations/{name}/items", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    if body.get("items"):
        assert server.client.post("/v1/conversations", json=body).status_code == 400
    assert server.client.get(f"/v1/conversations/{name}/items").json()["data"] == []


def test_other_refusals(server: Served) -> None:
    name = server.client.post("/v1/conversations", json={}).json()["id"]
    for query in ("limit=0", "limit=101", "order=up"):
        assert server.client.get(f"/v1/conversations/{name}/items?{query}").status_code == 400
    metadata = {str(number): "x" for number in range(17)}
    for path in ("", f"/{name}"):
        assert server.client.post(f"/v1/conversations{path}", json={"metadata": metadata}).status_code == 400
    assert server.client.delete(f"/v1/conversations/{name}/items/x").json()["error"]["param"] == "item_id"


def test_a_conversation_does_not_grow_without_bound(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_BYTES", 600)
    name = server.client.post("/v1/conversations", json={"items": [message("x" * 300)]}).json()["id"]
    refused = server.client.post(f"/v1/conversations/{name}/items", json={"items": [message("x" * 300)]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "items")
    assert server.client.post("/v1/conversations", json={"items": [message("x" * 600)]}).status_code == 400
    assert post(server, conversation=name, input="x" * 100).status_code == 200
    assert post(server, conversation=name).json()["error"]["param"] == "conversation"
