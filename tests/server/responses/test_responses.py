"""Responses: the unmodified openai client, events and their numbers, the store, and the background."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo.errors import RequestFailed
from octavo_server.dialects.responses import background_responses
from octavo_server.durable import store as store_module
from tests.server.conftest import Served, execute, fill, make_room
from tests.server.in_process import ANSWER, IM_END, InProcessEngine, byte_tokenizer
from tests.server.openai.test_client import options

TOOLS: Any = [{"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}}]
HERMES = (
    "{% if tools %}<tool_call>arguments</tool_call> {{ tools | tojson }}{% endif %}<think></think>"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %};{% endfor %}"
)
HARMONY = {"tool_call_parser": "openai"}
CALLS = '<think>Two and two.</think>I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def caller() -> Iterator[Served]:
    """A server whose model thinks, then calls a function."""
    served = Served(InProcessEngine(lambda request: [*CALLS.encode(), IM_END]), byte_tokenizer(HERMES), {})
    yield served
    served.stop()


def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(**options(served))


def post(served: Served, **body: Any) -> Any:
    return served.client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 4, **body})


def prompt(served: Served) -> str:
    return byte_tokenizer().decode(served.engine.requests[-1].prompt_tokens, False)


def until_done(served: Served, name: str, seconds: float = 10) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        answer = served.client.get(f"/v1/responses/{name}").json()
        if answer["status"] not in ("queued", "in_progress"):
            return answer
        time.sleep(0.01)
    raise AssertionError("it does not end")


def test_a_response(server: Served) -> None:
    answer = client(server).responses.create(
        model="test", input="Hi", max_output_tokens=10, instructions="Be brief.", metadata={"a": "b"}
    )
    assert answer.output_text == ANSWER[:10]
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 10
    assert answer.metadata == {"a": "b"}
    assert prompt(server).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi")


def test_every_key_that_the_api_requires_is_there(serve_app: Any) -> None:
    """As openresponses.org publishes them; what the client does not say is there as it was chosen."""
    served = serve_app(InProcessEngine(lambda request: [*b"Yes", IM_END], sampling_defaults={"temperature": 0.5}))
    asked = {"input": "Hi", "prompt_cache_key": "k", "safety_identifier": "s"}
    answer = served.client.post("/v1/responses", json=asked).json()
    assert answer["completed_at"] >= answer["created_at"]
    assert (answer["temperature"], answer["top_p"], answer["presence_penalty"]) == (0.5, 1, 0)
    assert (answer["prompt_cache_key"], answer["safety_identifier"], answer["service_tier"]) == ("k", "s", "default")
    assert served.engine.requests[-1].session == "k"
    assert {"frequency_penalty", "max_tool_calls", "incomplete_details", "truncation"} <= answer.keys()


def test_a_response_is_kept_followed_and_forgotten(server: Served) -> None:
    api = client(server)
    first = api.responses.create(model="test", input="Hi", max_output_tokens=3)
    assert api.responses.retrieve(first.id) == first
    assert [item.type for item in api.responses.input_items.list(first.id)] == ["message"]
    api.responses.create(model="test", input="And?", previous_response_id=first.id, max_output_tokens=3)
    assert "user\nHi<|im_end|>\n<|im_start|>assistant\nThe<|im_end|>\n<|im_start|>user\nAnd?" in prompt(server)
    api.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as lost:
        api.responses.create(model="test", input="And?", previous_response_id=first.id)
    assert lost.value.code == "previous_response_not_found"


def test_tokens_of_a_conversation_are_counted_as_they_are_answered(caller: Served) -> None:
    api = client(caller)
    asked: Any = {"model": "test", "input": "Hi", "instructions": "Be brief.", "tools": TOOLS}
    first = api.responses.create(**asked, max_output_tokens=99)
    assert first.usage is not None
    for _ in range(2):  # nothing is kept
        counted = api.responses.input_tokens.count(**asked)
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", first.usage.input_tokens)
    following: Any = {"input": "And?", "previous_response_id": first.id, "tools": TOOLS}
    second = api.responses.create(model="test", **following)
    assert second.usage is not None
    assert api.responses.input_tokens.count(**following).input_tokens == second.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="no response"):
        api.responses.input_tokens.count(input="And?", previous_response_id="resp_x")


def test_a_response_with_store_false_is_not_stored(server: Served) -> None:
    answer = client(server).responses.create(model="test", input="Hi", max_output_tokens=3, store=False)
    assert server.client.get(f"/v1/responses/{answer.id}").status_code == 404


def test_the_helper_for_streams(serve_app: Any) -> None:
    api = client(serve_app(InProcessEngine(lambda request: [*ANSWER[:12].encode(), IM_END])))
    with api.responses.stream(model="test", input="Hi", max_output_tokens=20) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert final.output_text == ANSWER[:12]
    assert api.responses.retrieve(final.id).output_text == ANSWER[:12]


def test_every_event_is_of_the_type_that_its_name_says(caller: Served) -> None:
    with caller.client.stream(
        "POST", "/v1/responses", json={"input": "Hi", "stream": True, "tools": TOOLS, "max_output_tokens": 200}
    ) as response:
        text = response.read().decode()
    frames = [frame.split("\n") for frame in text.split("\n\n") if frame]
    bodies = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name.removeprefix("event: ") for name, _ in frames] == [body["type"] for body in bodies]
    joined = "".join(body["delta"] for body in bodies if body["type"] == "response.reasoning_text.delta")
    assert joined == "Two and two."
    assert bodies[-1]["type"] == "response.completed"


def test_calls_and_reasoning(caller: Served) -> None:
    api = client(caller)
    answer = api.responses.create(model="test", input="2+2?", tools=TOOLS, max_output_tokens=200)
    thought, text, call = answer.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert thought.content[0].text == "Two and two."
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == len("Two and two."), "a token is a byte"
    assert text.type == "message"
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 2})
    assert answer.status == "completed"
    history: Any = [
        {"role": "user", "content": "2+2?"},
        *[item.model_dump(exclude_none=True) for item in answer.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "4"},
    ]
    api.responses.create(model="test", input=history, tools=TOOLS, max_output_tokens=2)
    stateless = prompt(caller)
    assert "user:2+2?;assistant:I add." in stateless
    assert "(Two and two.)" in stateless
    assert '"name": "add"' in stateless.split("assistant:")[1]
    assert stateless.endswith("tool:4;")
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "4"}]
    api.responses.create(model="test", input=output, previous_response_id=answer.id, tools=TOOLS, max_output_tokens=2)
    assert prompt(caller) == stateless
    with api.responses.stream(model="test", input="2+2?", tools=TOOLS, max_output_tokens=200) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.usage == answer.usage


def test_a_call_that_is_cut_is_incomplete(caller: Served) -> None:
    num_tokens = len(CALLS[: CALLS.index(" 2}")])
    answer = client(caller).responses.create(model="test", input="2+2?", tools=TOOLS, max_output_tokens=num_tokens)
    assert answer.status == "incomplete"
    call = answer.output[-1]
    assert call.type == "function_call"
    assert (call.name, call.arguments, call.status) == ("add", '{"a":', "incomplete")


def test_the_background(server: Served, serve_app: Any) -> None:
    begun = client(server).responses.create(model="test", input="Hi", max_output_tokens=5, background=True)
    assert begun.status == "queued"
    done = until_done(server, begun.id)
    assert (done["status"], done["background"]) == ("incomplete", True)
    assert done["output"][0]["content"][0]["text"] == ANSWER[:5]
    failing = serve_app(InProcessEngine(errors={2: RequestFailed("The engine fails on this.")}))
    ended = until_done(failing, post(failing, background=True).json()["id"])
    assert ended["status"] == "failed"
    assert ended["error"] == {"code": "server_error", "message": "The engine fails on this."}


def test_cancelling(serve_app: Any) -> None:
    engine = InProcessEngine(runs=False)
    served = serve_app(engine)
    api = client(served)
    begun = api.responses.create(model="test", input="Hi", background=True)
    while not engine.num_live:
        time.sleep(0.005)
    assert api.responses.cancel(begun.id).status == "cancelled"
    assert engine.num_live == 0
    assert api.responses.retrieve(begun.id).status == "cancelled"
    engine.runs = True
    plain = post(served).json()["id"]
    assert served.client.post(f"/v1/responses/{plain}/cancel").status_code == 400
    assert served.client.post("/v1/responses/other/cancel").status_code == 404


def test_the_background_outlives_the_process(serve_app: Any, tmp_path: Path) -> None:
    stuck = Served(InProcessEngine(runs=False), byte_tokenizer(), {"state_dir": str(tmp_path)})
    begun = post(stuck, background=True).json()["id"]
    kept = post(serve_app(state_dir=str(tmp_path / "other"))).json()["id"]
    stuck.stop()
    later = serve_app(state_dir=str(tmp_path))
    assert until_done(later, begun)["output"][0]["content"][0]["text"] == ANSWER[:4]
    assert later.client.get(f"/v1/responses/{kept}").status_code == 404


def test_stored_responses_expire(serve_app: Any) -> None:
    served = serve_app(retention_hours=0.001)
    name = post(served).json()["id"]
    assert served.client.get(f"/v1/responses/{name}").status_code == 200
    served.app.state.services.store._retention = 0.0
    assert served.client.get(f"/v1/responses/{name}").status_code == 404


def test_a_failure_after_the_start_is_an_event(serve_app: Any) -> None:
    served = serve_app(InProcessEngine(errors={2: RequestFailed("The engine fails on this.")}))
    events = list(client(served).responses.create(model="test", input="Hi", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert events[-1].response.error.message == "The engine fails on this."


def test_a_full_disk_is_reported(serve_app: Any) -> None:
    served = serve_app()
    fill(served)
    refused = post(served)
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "storage_full")
    assert post(served, background=True).status_code == 507
    assert post(served, store=False).status_code == 200
    for count in (1, 9):  # the end comes with the first news, or later
        asked: Any = {"model": "test", "input": "Hi", "max_output_tokens": count, "stream": True}
        events = list(client(served).responses.create(**asked))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last = events[-1]
        assert last.type == "response.failed"
        assert last.response.status == "failed"
        assert last.response.error is not None
        assert "disk" in last.response.error.message
        assert not any(event.type in ("response.completed", "response.incomplete") for event in events)
    make_room(served)
    assert post(served).status_code == 200


def test_the_background_waits_while_the_disk_is_full(serve_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RETRY_SECONDS", 0.05)
    engine = InProcessEngine(runs=False)
    served = serve_app(engine)
    name = post(served, background=True).json()["id"]
    while not engine.num_live:
        time.sleep(0.005)
    time.sleep(0.05)
    fill(served)
    engine.runs = True
    served.call(engine._schedule)
    while engine.num_live:
        time.sleep(0.005)
    time.sleep(0.2)
    assert served.client.get(f"/v1/responses/{name}").json()["status"] == "in_progress"
    make_room(served)
    assert until_done(served, name)["output"][0]["content"][0]["text"] == ANSWER[:4]
    assert len(engine.requests) == 1
    assert execute(served, "SELECT count(*) FROM items WHERE kind = 'pending_response'") == 0


def test_what_a_job_does_not_foresee_ends_the_response(serve_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def boom(*args: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(background_responses, "chat_request", boom)
    served = serve_app()
    ended = until_done(served, post(served, background=True).json()["id"])
    assert (ended["status"], ended["error"]["code"]) == ("failed", "server_error")
    assert "secret" not in json.dumps(ended)


def test_log_probabilities_are_those_of_chat_completions(server: Served) -> None:
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "max_output_tokens": 6}
    expected = server.chat(logprobs=True, top_logprobs=1, max_tokens=6).json()["choices"][0]["logprobs"]["content"]
    answer = post(server, **asked).json()
    assert len(expected) == 6
    assert answer["output"][0]["content"][0]["logprobs"] == expected
    events = list(client(server).responses.create(model="test", input="Hi", stream=True, **asked))
    deltas = [event.to_dict()["logprobs"] for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert [each for delta in deltas for each in delta] == expected
    (done,) = (event.to_dict() for event in events if event.type == "response.output_text.done")
    assert done["logprobs"] == expected
    assert events[-1].to_dict()["response"]["output"] == [
        {**answer["output"][0], "id": events[-1].to_dict()["response"]["output"][0]["id"]}
    ]
    again = server.client.get(f"/v1/responses/{answer['id']}?stream=true")
    assert (again.status_code, "log-probabilities" in again.json()["error"]["message"]) == (400, True)
    plain = post(server, top_logprobs=1)
    assert plain.headers["x-octavo-unknown-fields"] == "top_logprobs"
    assert plain.json()["output"][0]["content"][0]["logprobs"] == []


def test_log_probabilities_are_those_of_the_text_alone(serve_app: Any) -> None:
    """Not of reasoning, and of the tokens around it that are not shown."""
    engine = InProcessEngine(lambda request: [*b"<think>Yes.</think>\n\nYes\xc3\xa9", IM_END])
    served = serve_app(engine, reasoning_parser="qwen3")
    asked: Any = {"include": ["message.output_text.logprobs"], "max_output_tokens": 50}
    events = list(client(served).responses.create(model="test", input="Hi", stream=True, **asked))
    (done,) = (event.to_dict() for event in events if event.type == "response.output_text.done")
    whole = post(served, **asked).json()["output"][-1]["content"][0]
    for part in (done, whole):
        assert part["text"] == "Yes\xe9"
        assert [byte for each in part["logprobs"] for byte in each["bytes"]] == [*"Yes\xe9".encode()]


MARKS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<think>", "</think>")
IDS = {mark: IM_END + 1 + place for place, mark in enumerate(MARKS)}


def marked(text: str) -> list[int]:
    """Tokens of ``text``: its marks, and the bytes between them."""
    parts = re.split("(" + "|".join(map(re.escape, MARKS)) + ")", text)
    return [token for part in parts for token in ([IDS[part]] if part in IDS else part.encode())]


@pytest.mark.parametrize(
    ("text", "settings", "shown"),
    [
        ("<|channel|>final<|message|>a", HARMONY, ["a"]),
        ("<|channel|>final<|message|>final", HARMONY, ["final"]),
        ("<|channel|>analysis<|message|>a or b<|end|><|start|>assistant<|channel|>final<|message|>a", HARMONY, ["a"]),
        (
            "<|channel|>commentary<|message|>an<|end|><|start|>assistant<|channel|>commentary to=functions.add"
            "<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>n",
            HARMONY,
            ["an", "n"],
        ),
        ("<think>\n\n</think>\n\nin fact", {"reasoning_parser": "qwen3"}, ["in fact"]),
        ("<think>i</think>\n i \n</think> \nk", {"reasoning_parser": "qwen3"}, ["i \n \nk"]),
        ("think, channel", {}, ["think, channel"]),
    ],
)
def test_log_probabilities_of_letters_that_marks_have_too(
    serve_app: Any, text: str, settings: dict[str, Any], shown: list[str]
) -> None:
    engine = InProcessEngine(lambda request: [*marked(text), IM_END])
    served = serve_app(engine, tokenizer=byte_tokenizer(more_special=MARKS), **settings)
    asked: Any = {"include": ["message.output_text.logprobs"], "max_output_tokens": 120, "tools": TOOLS}
    events = list(client(served).responses.create(model="test", input="Hi", stream=True, **asked))
    deltas = [event.to_dict() for event in events if event.type == "response.output_text.delta"]
    assert [[each["token"] for each in delta["logprobs"]] for delta in deltas] == [[*each["delta"]] for each in deltas]
    whole = post(served, **asked).json()
    for output in (events[-1].to_dict()["response"]["output"], whole["output"]):
        parts = [item["content"][0] for item in output if item["type"] == "message"]
        assert [part["text"] for part in parts] == shown
        assert ["".join(each["token"] for each in part["logprobs"]) for part in parts] == shown


def test_sampling_is_that_of_chat_completions(serve_app: Any) -> None:
    served = serve_app()
    more = {"top_k": 5, "min_p": 0.1, "seed": 3, "repetition_penalty": 1.5, "presence_penalty": 0.5, "top_p": 0.75}
    response = post(served, **more, stop=["zz"], logit_bias={"65": 2}, include_stop_str_in_output=True)
    assert (response.status_code, response.headers.get("x-octavo-unknown-fields")) == (200, None), response.text
    answer, params = response.json(), served.engine.requests[-1].params
    assert {name: getattr(params, name) for name in more} == more
    assert (params.stop, params.logit_bias, params.include_stop_str_in_output) == (("zz",), {65: 2.0}, True)
    assert (answer["presence_penalty"], answer["frequency_penalty"], answer["top_p"]) == (0.5, 0, 0.75)
    assert post(served, structured_outputs={"choice": ["Yes"]}).status_code == 200
    assert "Yes" in (served.engine.requests[-1].params.grammar or "")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"top_k": -2}, "top_k"),
        ({"n": 2}, "n"),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"priority": 1}, "priority"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"input": 7}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"id": 7, "content": "x", "type": 7}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"background": True, "store": False}, "background"),
        ({"include": ["message.output_text.logprobs"], "background": True}, "include"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [*TOOLS, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": {}}]}, "tools"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "bnf"}}]}, "tools"),
        ({"conversation": {"name": "conv_1"}}, "conversation"),
        ({"conversation": "conv_1", "previous_response_id": "resp_other"}, "conversation"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        ({"temperature": 101}, "temperature"),
        ({"previous_response_id": "resp_other"}, "previous_response_id"),
        ({"metadata": {"a": 7}}, "metadata"),
    ],
)
def test_what_is_refused(server: Served, body: dict[str, Any], param: str) -> None:
    answer = post(server, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
