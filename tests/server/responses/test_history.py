"""Items that other servers and clients made: whatever the API allows in the past, the next turn is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.anthropic.test_history import JSON
from tests.server.conftest import Served
from tests.server.in_process import IM_END, InProcessEngine, byte_tokenizer
from tests.tiers import search_again

USER = {"role": "user", "content": "Hi"}
SAID = {"role": "assistant", "content": "Well."}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,QUJD", "detail": "auto"}
SHELL = {"type": "local_shell", "name": "x"}
EXEC = {"type": "exec", "command": ["ls"], "env": {}}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": None}
PAST: list[dict[str, Any]] = [
    USER,
    SAID,
    {"role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "phase": "commentary"},
    {"type": "message", "id": "m", "role": "user", "content": [IMAGE, {"type": "input_text", "text": "See?"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_file", "filename": "a.pdf", "file_data": "QUJD"}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    {
        "type": "function_call",
        "call_id": "c1",
        "name": "f",
        "namespace": "n",
        "arguments": "{}",
        "status": "incomplete",
    },
    {"type": "function_call_output", "call_id": "c1", "output": "4"},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "4"}, IMAGE]},
    {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** Begin"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": "Done."},
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "QUJD"},
    {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "news"}},
    {"type": "file_search_call", "id": "fs", "status": "completed", "queries": ["q"], "results": [{"text": "Found."}]},
    {"type": "computer_call", "id": "cc", "call_id": "c3", "action": {"type": "click", "x": 1}, "status": "completed"},
    {"type": "computer_call_output", "call_id": "c3", "output": {"type": "computer_screenshot", "file_id": "f"}},
    {"type": "local_shell_call", "id": "l", "call_id": "c4", "action": EXEC, "status": "completed"},
    {"type": "local_shell_call_output", "id": "c4", "output": "a.txt"},
    {"type": "shell_call", "call_id": "c5", "action": {"commands": ["ls"]}},
    {
        "type": "shell_call_output",
        "call_id": "c5",
        "output": [{"stdout": "b.txt", "stderr": "", "outcome": {"type": "exit"}}],
    },
    {
        "type": "apply_patch_call",
        "call_id": "c6",
        "operation": {"type": "delete_file", "path": "x"},
        "status": "completed",
    },
    {"type": "apply_patch_call_output", "call_id": "c6", "status": "failed", "output": None},
    {"type": "another_call_output", "call_id": "c8", "output": True},
    {"type": "another_call_output", "call_id": "c9", "output": ["parts", 4]},
    {"type": "mcp_list_tools", "id": "ml", "server_label": "s", "tools": [{"name": "list", "input_schema": {}}]},
    {"type": "mcp_call", "id": "mc", "server_label": "s", "name": "list", "arguments": "{}", "output": "c.txt"},
    {"type": "mcp_approval_request", "id": "ma", "server_label": "s", "name": "list", "arguments": "{}"},
    {"type": "mcp_approval_response", "approval_request_id": "ma", "approve": True},
    {
        "type": "code_interpreter_call",
        "id": "ci",
        "code": "1+1",
        "container_id": "c",
        "outputs": [{"type": "logs", "logs": "2"}],
    },
    {
        "type": "code_interpreter_call",
        "id": "ci",
        "code": None,
        "container_id": "c",
        "outputs": None,
        "status": "failed",
    },
    {"type": "image_generation_call", "id": "ig", "result": "QUJD", "status": "completed"},
    {"type": "tool_search_call", "call_id": "c7", "arguments": {"query": "x"}, "execution": "client"},
    {"type": "tool_search_output", "call_id": "c7", "tools": [FUNCTION]},
    {"type": "additional_tools", "role": "developer", "tools": [FUNCTION]},
    {"type": "configuration_update", "reasoning": {"effort": "low"}},
    {"type": "compaction", "encrypted_content": "QUJD"},
    {"type": "compaction_trigger"},
    {"type": "item_reference", "id": "msg_1"},
    {"id": "msg_1"},
    {"type": None, "id": "msg_1"},
    {"type": "program", "id": "p", "call_id": "c8", "code": "x", "fingerprint": "y"},
    {"type": "program_output", "id": "p", "call_id": "c8", "result": "z", "status": "completed"},
]
KNOWN = ("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    served = Served(InProcessEngine(lambda request: [*b"Yes", IM_END], max_model_len=1 << 16), byte_tokenizer(), {})
    yield served
    served.stop()


def post(served: Served, **body: Any) -> Any:
    return served.client.post("/v1/responses", json={"input": "Hi", **body})


def prompt(served: Served) -> str:
    return byte_tokenizer().decode(served.engine.requests[-1].prompt_tokens, False)


def named(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [name for name in answer.headers.get("x-octavo-unknown-fields", "").split(", ") if name]


@pytest.mark.parametrize("item", PAST, ids=lambda item: item.get("type") or "message")
def test_an_item_of_an_earlier_turn(server: Served, item: dict[str, Any]) -> None:
    names = named(post(server, input=[USER, item, SAID, USER]))
    assert "QUJD" not in prompt(server)
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    if kind == "additional_tools":
        assert "Hi" in prompt(server)
    elif kind not in KNOWN:
        assert f"input.{kind}" in names
    elif "QUJD" not in json.dumps(item):
        assert names == []
    else:
        assert len(names) == 1


def test_what_can_be_read_is_text(server: Served) -> None:
    post(server, input=[*PAST, SAID, USER])
    shown = prompt(server)
    texts = (
        "news",
        "Found.",
        "a.txt",
        "b.txt",
        "c.txt",
        "1+1\n2",
        "*** Begin",
        "Done.",
        "n__f",
        "[image omitted]",
        "ls",
    )
    for text in (*texts, "[file omitted]", "No.", "z"):
        assert text in shown, text


def test_what_a_tool_of_another_server_found_joins_the_answer(server: Served) -> None:
    """Many chat templates require alternating turns."""
    post(server, input=[USER, PAST[14], PAST[15], SAID, USER])
    assert prompt(server).count("<|im_start|>assistant") == 2
    assert "[web_search_call: " in prompt(server)


def test_images_are_refused_where_they_are_to_be_answered(server: Served) -> None:
    seen = {"role": "user", "content": [IMAGE]}
    refused = post(server, input=[USER, SAID, seen])
    assert refused.json()["error"]["param"] == "input"
    assert "'input[2].content[0].type' 'input_image'" in refused.json()["error"]["message"]
    assert named(post(server, input=[seen, SAID, USER])) == ["input.input_image"]


def test_references_to_stored_items(server: Served) -> None:
    first = post(server, input="One").json()
    kept = [{"role": "user", "content": "One"}, {"type": "item_reference", "id": first["output"][0]["id"]}, USER]
    assert named(post(server, input=kept)) == []
    assert "One<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>" in prompt(server)


def test_errors_name_what_the_client_sent(server: Served) -> None:
    first = post(server, input="One").json()["id"]
    wrong = post(server, input=[USER, {"type": "function_call", "name": "f"}], previous_response_id=first)
    assert "'input[1]'" in wrong.json()["error"]["message"]
    tools = [{"type": "web_search"}, FUNCTION, {"type": "namespace", "name": "n", "tools": [{**FUNCTION, "name": ""}]}]
    wrong = post(server, tools=[*tools[:2], {"type": "namespace", "name": "", "tools": [{**FUNCTION, "name": ""}]}])
    assert "'tools[2].tools[0].name'" in wrong.json()["error"]["message"]
    too_long = post(server, input="x" * 70000).json()["error"]
    assert (too_long["param"], too_long["code"]) == ("input", "context_length_exceeded")


def test_fields_that_change_no_answer_are_passed_over(server: Served) -> None:
    answer = post(
        server,
        context_management=[{"type": "compaction", "compact_threshold": 1000}],
        include=["reasoning.encrypted_content", "web_search_call.action.sources"],
        stream_options={"include_obfuscation": True},
    )
    assert named(answer) == [
        "context_management", "include.web_search_call.action.sources", "stream_options.include_obfuscation"
    ]  # fmt: skip


def test_a_limit_beyond_the_context_is_lowered(serve_app: Any) -> None:
    answer = post(serve_app(InProcessEngine()), max_output_tokens=64000).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["usage"]["total_tokens"] == 512


CALL = st.builds(
    lambda kind, text: {"type": kind, "call_id": "c1", "name": "f", "arguments": text, "input": text},
    st.sampled_from(("function_call", "custom_tool_call")),
    st.one_of(st.text(max_size=9), st.sampled_from(('{"a": tru', "", "null", "[1]", '{"a": NaN}'))),
)
UNKNOWN = st.builds(
    lambda kind, members: {**members, "type": f"new{kind}"},
    st.sampled_from(("", "_call", "_call_output", "_result")),
    st.dictionaries(
        st.one_of(st.sampled_from(("call_id", "output", "content", "action", "id")), st.text(max_size=5)), JSON
    ),
)


ANYTHING = st.dictionaries(
    st.sampled_from(("type", "role", "content", "name", "id", "call_id", "arguments", "input", "output", "tools")),
    st.one_of(JSON, st.sampled_from(("user", "message", "function_call", "custom", "namespace", "function", "x_call"))),
)


@search_again(2)
@settings(deadline=None, max_examples=25)
@given(st.lists(ANYTHING, max_size=3), st.lists(ANYTHING, max_size=3), st.one_of(ANYTHING, JSON), st.booleans())
def test_a_body_of_anything_is_answered_or_refused(
    server: Served, run: int, items: list[Any], tools: list[Any], choice: Any, is_stream: bool
) -> None:
    for given_input in (items, [{"role": "user", "content": items}]):
        answer = post(
            server, input=given_input, tools=tools, tool_choice=choice, stream=is_stream, background=is_stream
        )
        assert answer.status_code in (200, 400), answer.text


@pytest.mark.slow
@search_again(2)
@settings(deadline=None, max_examples=25)
@given(st.lists(st.one_of(st.sampled_from(PAST), CALL, UNKNOWN), max_size=8), st.booleans())
def test_any_history_is_answered_and_the_answer_accepted(
    server: Served, run: int, items: list[Any], follows: bool
) -> None:
    history = [*items, SAID, USER]
    answer = post(server, input=history, tools=[FUNCTION])
    assert answer.status_code == 200, f"{answer.text} {json.dumps(items)}"
    answered = answer.json()
    again = (
        {"previous_response_id": answered["id"], "input": "And?"}
        if follows
        else {"input": [*history, *answered["output"], USER]}
    )
    assert post(server, tools=[FUNCTION], **again).status_code == 200
