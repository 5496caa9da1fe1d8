"""Messages: the unmodified anthropic client, events to the byte, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import pydantic
import pytest

from octavo.text.message_pieces import Call
from octavo_server.dialects.chat_reply import members_of
from tests.server.conftest import CALLS, Served, tokens_of
from tests.server.in_process import ANSWER, InProcessEngine, byte_tokenizer
from tests.server.writing_engine import writing_engine

if TYPE_CHECKING:
    import anthropic  # where it is used, it is imported late: that takes more than a second

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
TOOLS: Any = [{"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}]


class Pick(pydantic.BaseModel):
    a: Literal[1, 2]


def client(served: Served) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, _strict_response_validation=True)


def post(served: Served, **body: Any) -> Any:
    return served.client.post("/v1/messages", json={"messages": MESSAGES, "max_tokens": 4, **body})


def prompt(served: Served) -> str:
    return byte_tokenizer().decode(served.engine.requests[-1].prompt_tokens, False)


def test_a_message(server: Served) -> None:
    answer = client(server).messages.create(model="test", max_tokens=10, messages=MESSAGES)
    assert answer.content[0].type == "text"
    assert answer.content[0].text == ANSWER[:10]
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("max_tokens", None, "assistant")
    assert answer.usage.output_tokens == 10
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (
        len(server.engine.requests[-1].prompt_tokens) - 3,
        3,
    )
    assert prompt(server) == PROMPT


def test_a_stop_sequence_and_an_end(server: Served, serve_app: Any) -> None:
    answer = client(server).messages.create(
        model="test", max_tokens=30, messages=MESSAGES, stop_sequences=["4", "answer"], system="Be brief."
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "answer")
    assert prompt(server).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    ended = client(serve_app(InProcessEngine(lambda request: tokens_of("Yes"))))
    assert ended.messages.create(model="test", max_tokens=30, messages=MESSAGES).stop_reason == "end_turn"


def test_the_helper_for_streams(server: Served) -> None:
    with client(server).messages.stream(model="test", max_tokens=12, messages=MESSAGES) as stream:
        assert "".join(stream.text_stream) == ANSWER[:12]
        final = stream.get_final_message()
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 12


@pytest.mark.parametrize(("end", "arguments"), [(" 2}", {}), ("}}", {"a": 2}), (' {"a"', {})])
def test_a_call_that_is_cut_has_the_input_that_is_whole(caller: Served, end: str, arguments: dict[str, int]) -> None:
    num_tokens = len(CALLS[: CALLS.index(end)]) + (end == "}}")
    answer = client(caller).messages.create(model="test", max_tokens=num_tokens, messages=MESSAGES, tools=TOOLS)
    assert answer.stop_reason == "max_tokens"
    call = answer.content[-1]
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("add", arguments)


def test_events_to_the_byte(server: Served) -> None:
    with server.client.stream(
        "POST", "/v1/messages?beta=true", json={"messages": MESSAGES, "max_tokens": 2, "stream": True}
    ) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        text = response.read().decode()
    events = [frame.split("\n") for frame in text.split("\n\n") if frame]
    assert text.endswith("\n\n")
    assert all(name.startswith("event: ") and data.startswith("data: ") for name, data in events)
    bodies = [json.loads(data[6:]) for _, data in events]
    assert [name[7:] for name, _ in events] == [body["type"] for body in bodies]
    kinds = [body["type"] for body in bodies if body["type"] != "content_block_delta"]
    assert kinds == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"
    ]  # fmt: skip
    start = bodies[0]["message"]
    assert start.pop("id").startswith("msg_")
    assert start.pop("usage")["output_tokens"] == 0
    assert start == {
        "type": "message",
        "role": "assistant",
        "model": "test",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
    }
    block = {"type": "text", "text": "", "citations": []}
    assert bodies[1] == {"type": "content_block_start", "index": 0, "content_block": block}
    end = {"stop_reason": "max_tokens", "stop_sequence": None, "stop_details": None, "container": None}
    assert bodies[-2]["delta"] == end


def test_every_key_that_the_api_requires_is_there(caller: Served) -> None:
    """As Anthropic's published schema has them, those too that are always null here."""
    answer = post(caller, max_tokens=200, tools=TOOLS).json()
    keys = {"id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "stop_details", "usage"}
    assert keys | {"container"} == answer.keys()
    counts = {"input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"}
    details = {"cache_creation", "output_tokens_details", "server_tool_use", "service_tier", "inference_geo"}
    assert counts | details == answer["usage"].keys()
    assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": len("Two and two.")}, "a token is a byte"
    text, call = answer["content"]
    assert text == {"type": "text", "text": "I add.", "citations": []}  # no null, which the AI SDK refuses
    assert call.keys() == {"type", "id", "name", "input", "caller"}
    history = [*MESSAGES, {"role": "assistant", "content": answer["content"]}]
    history += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "2"}]}]
    assert post(caller, messages=history, tools=TOOLS).status_code == 200


def test_fields_of_vllm(caller: Served) -> None:
    """Options of the chat template come before what ``thinking`` says, and a salt keeps cached prompts apart."""
    for thinks in (True, False):
        answer = post(caller, max_tokens=200, chat_template_kwargs={"enable_thinking": thinks}, cache_salt="a").json()
        assert prompt(caller).endswith("think") == thinks
        assert answer["content"][0]["type"] == ("thinking" if thinks else "text")
    counted = [
        caller.client.post(
            "/v1/messages/count_tokens",
            json={"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": thinks}},
        ).json()["input_tokens"]
        for thinks in (True, False)
    ]
    assert counted[0] - counted[1] == len("think")
    assert caller.engine.requests[-1].cache_salt == "a"
    refused = post(caller, cache_salt="x" * 257)
    assert (refused.status_code, "'cache_salt'" in refused.json()["error"]["message"]) == (400, True)


def test_a_rendered_message_is_generated_alike(server: Served) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 4, "top_k": 3, "stop_sequences": ["zz"]}
    rendered = server.client.post("/v1/messages/render", json=body).json()
    answer = post(server, **body).json()
    direct = server.engine.requests[-1]
    assert rendered["token_ids"] == direct.prompt_tokens
    generated = server.client.post("/inference/v1/generate", json=rendered).json()
    params = server.engine.requests[-1].params
    assert (params.top_k, params.stop, params.max_tokens) == (3, ("zz",), 4)
    assert bytes(generated["choices"][0]["token_ids"]).decode() == answer["content"][0]["text"]
    refused = server.client.post("/v1/messages/render", json={**body, "max_tokens": 0}).json()
    assert (refused["type"], "max_tokens" in refused["error"]["message"]) == ("error", True)


def test_a_begun_reply_goes_on(server: Served) -> None:
    assert post(server, messages=[*MESSAGES, {"role": "assistant", "content": "The"}]).status_code == 200
    assert prompt(server) == PROMPT + "The"


def test_tokens_are_counted(server: Served) -> None:
    counted = client(server).messages.count_tokens(model="test", messages=MESSAGES, system="Be brief.")
    post(server, system="Be brief.")
    assert counted.input_tokens == len(server.engine.requests[-1].prompt_tokens)


def test_calls_and_thinking(caller: Served) -> None:
    answer = client(caller).messages.create(
        model="test",
        max_tokens=200,
        messages=MESSAGES,
        tools=TOOLS,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    thinking, text, call = answer.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "Two and two."
    assert text.type == "text"
    assert text.text.strip() == "I add."
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("add", {"a": 2})
    assert answer.stop_reason == "tool_use"
    assert prompt(caller).endswith("think")
    with client(caller).messages.stream(
        model="test",
        max_tokens=200,
        messages=MESSAGES,
        tools=TOOLS,
        thinking={"type": "enabled", "budget_tokens": 1024},
    ) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].type == "tool_use"
    assert final.content[2].input == {"a": 2}
    assert final.content[0].type == "thinking"
    assert final.content[0].thinking == "Two and two."


def test_thinking_that_was_not_asked_for_is_not_shown(caller: Served) -> None:
    answer = client(caller).messages.create(model="test", max_tokens=200, messages=MESSAGES, tools=TOOLS)
    assert [block.type for block in answer.content] == ["text", "tool_use"]
    assert not prompt(caller).endswith("think")


def test_a_conversation_with_calls_reaches_the_template(caller: Served) -> None:
    history: Any = [
        {"role": "user", "content": [{"type": "text", "text": "2+2?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 2}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "And?"},
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "4"}]},
            ],
        },
    ]
    client(caller).messages.create(model="test", max_tokens=2, messages=history, tools=TOOLS)
    shown = prompt(caller)
    assert "assistant:I add." in shown
    assert '"name": "add"' in shown
    assert "(Hm.)" in shown
    assert "tool:4user:And?" in shown


SEARCH = {"type": "web_search_20250305", "name": "web_search"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "'messages' must not be empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "'messages[0].role'"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "images are not supported"),
        ({"messages": [{"role": "user", "content": 7}]}, "'messages[0].content'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "'messages[0].content[0].thinking'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "'input'"),
        ({"max_tokens": 0}, "'max_tokens'"),
        ({"max_tokens": None}, "'max_tokens'"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "prompt is too long"),
        ({"temperature": -1}, "'temperature'"),
        ({"stop_sequences": [""]}, "stop string"),
        ({"thinking": {"type": "much"}}, "'thinking.type'"),
        ({"output_config": {"format": {"type": "xml"}}}, "'output_config.format'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "'output_config.format'"),
        ({"output_config": {"effort": 3}}, "'output_config.effort'"),
        ({"output_format": {"type": "json_schema", "schema": []}}, "'output_format'"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "'web_search_20250305'"),
        ({"tools": [SEARCH, *TOOLS], "tool_choice": {"type": "tool", "name": "web_search"}}, "'web_search_20250305'"),
        ({"tools": [SEARCH, {"name": "a b", "input_schema": {}}]}, "'tools[1].name'"),
        ({"tools": [{"name": "add"}]}, "'input_schema'"),
        ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "'tool_choice.type'"),
        ({"tool_choice": {"type": "any"}}, "'tool_choice'"),
        ({"metadata": {"user_id": 7}}, "'metadata.user_id'"),
        ({"metadata": {"user_id": "x" * 257}}, "'metadata.user_id'"),
        ({"system": [IMAGE]}, "'system[0].type'"),
    ],
)
def test_what_is_refused(server: Served, body: dict[str, Any], words: str) -> None:
    answer = post(server, **body)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert words in answer.json()["error"]["message"]


def test_error_classes(server: Served, serve_app: Any) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError):
        client(server).messages.create(model="other", max_tokens=1, messages=MESSAGES)
    late = client(serve_app(InProcessEngine(is_draining=True)))
    with pytest.raises(anthropic.InternalServerError) as unavailable:
        late.messages.create(model="test", max_tokens=1, messages=MESSAGES)
    assert unavailable.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]


def test_an_error_after_the_start_is_an_event(serve_app: Any) -> None:
    import anthropic

    from octavo.errors import RequestFailed

    served = serve_app(InProcessEngine(errors={2: RequestFailed("The engine fails on this.")}))
    with pytest.raises(anthropic.APIStatusError, match="fails on this"):
        list(client(served).messages.create(model="test", max_tokens=9, messages=MESSAGES, stream=True))


def test_content_in_a_form(serve_app: Any) -> None:
    tokenizer = byte_tokenizer()
    served = serve_app(writing_engine(tokenizer), tokenizer=tokenizer)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": schema}
    for field in ({"output_config": {"format": form}}, {"output_format": form}):
        answer = post(served, max_tokens=200, **field)
        assert answer.status_code == 200, answer.text
        assert json.loads(answer.json()["content"][0]["text"])["a"] in (1, 2)
    parsed = client(served).messages.parse(model="test", max_tokens=200, messages=MESSAGES, output_format=Pick)
    assert parsed.parsed_output is not None
    assert parsed.parsed_output.a in (1, 2)


def test_models_in_the_form_of_this_api(serve_app: Any) -> None:
    import anthropic

    served = serve_app(served_model_name="small,tiny")
    page = client(served).models.list(limit=1)
    assert [(model.id, model.display_name, model.type) for model in page] == [
        ("small", "small", "model"),
        ("tiny", "tiny", "model"),
    ]
    assert (page.has_more, page.first_id, page.last_id) == (False, "small", "tiny")
    assert client(served).models.retrieve("tiny").id == "tiny"
    with pytest.raises(anthropic.NotFoundError, match="This server serves `small`, `tiny`"):
        client(served).models.retrieve("other")
    # Whatever it was asked by, the model has one name in answers.
    answer = client(served).messages.create(model="tiny", max_tokens=1, messages=MESSAGES)
    assert answer.model == "small"


def test_numbers_that_json_lacks_are_text_in_an_input() -> None:
    assert members_of(Call("f", '{"a": 1e999, "b": [NaN], "c": 1')) == {"a": "Infinity", "b": ["NaN"], "c": 1}
    assert members_of(Call("f", '{"a": 1e999}')) == {"a": "Infinity"}
