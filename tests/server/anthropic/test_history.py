"""Conversations that began elsewhere: whatever the API allows in a past turn, the next one is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.conftest import Served
from tests.server.in_process import IM_END, InProcessEngine, byte_tokenizer
from tests.tiers import search_again

USER = {"role": "user", "content": "Hi"}
TOOLS = [{"name": "find", "input_schema": {"type": "object", "properties": {}}}]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
URL_IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "QUJD"}}
TEXT_FILE = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "Words."}}
FOUND = {"type": "search_result", "source": "http://x", "title": "X", "content": [{"type": "text", "text": "About."}]}
REFERENCE = {"type": "tool_reference", "tool_name": "fetch"}
SEARCHED = {
    "type": "web_search_result",
    "title": "News",
    "url": "http://n",
    "encrypted_content": "SECRET",
    "page_age": None,
}
RAN = {"type": "code_execution_result", "stdout": "42", "stderr": "", "return_code": 0, "content": []}
SERVER_USE = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "news"}}
PAST: list[dict[str, Any]] = [
    {"type": "text", "text": "Well."},
    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
    {"type": "redacted_thinking", "data": "QUJD"},
    {"type": "tool_use", "id": "t1", "name": "find", "input": {"a": [1]}},
    SERVER_USE,
    {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [SEARCHED]},
    {"type": "web_search_tool_result", "tool_use_id": "s1", "content": {"type": "e", "error_code": "unavailable"}},
    {
        "type": "web_fetch_tool_result",
        "tool_use_id": "s1",
        "content": {"type": "web_fetch_result", "content": TEXT_FILE},
    },
    {"type": "code_execution_tool_result", "tool_use_id": "s1", "content": RAN},
    {"type": "bash_code_execution_tool_result", "tool_use_id": "s1", "content": {**RAN, "content": []}},
    {"type": "tool_search_tool_result", "tool_use_id": "s1", "content": {"tool_references": [REFERENCE]}},
    {"type": "mcp_tool_use", "id": "m1", "name": "list", "server_name": "s", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "m1", "is_error": False, "content": [{"type": "text", "text": "a.txt"}]},
    {"type": "container_upload", "file_id": "file_1"},
    {"type": "compaction", "content": "They greeted."},
    {"type": "compaction", "content": None, "encrypted_content": "QUJD"},
    {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
    IMAGE,
    URL_IMAGE,
    PDF,
    TEXT_FILE,
    FOUND,
]
RESULTS: list[Any] = ["4", None, [], [IMAGE], [REFERENCE], [FOUND, TEXT_FILE, PDF], [{"type": "text", "text": "4"}]]
KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    served = Served(InProcessEngine(lambda request: [*b"Yes", IM_END], max_model_len=1 << 16), byte_tokenizer(), {})
    yield served
    served.stop()


def post(served: Served, path: str = "/v1/messages", **body: Any) -> Any:
    return served.client.post(path, json={"messages": [USER], "max_tokens": 4, **body})


def prompt(served: Served) -> str:
    return byte_tokenizer().decode(served.engine.requests[-1].prompt_tokens, False)


def named(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [name for name in answer.headers.get("x-octavo-unknown-fields", "").split(", ") if name]


def after(*blocks: Any) -> list[Any]:
    return [USER, {"role": "assistant", "content": list(blocks)}, USER]


def used(content: Any) -> list[Any]:
    call = {"type": "tool_use", "id": "t1", "name": "find", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": content}
    return [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


@pytest.mark.parametrize("block", PAST, ids=lambda block: block["type"])
def test_a_block_of_an_earlier_turn(server: Served, block: dict[str, Any]) -> None:
    answer = post(server, messages=after(block))
    shown = prompt(server)
    assert "SECRET" not in shown
    assert "QUJD" not in shown
    if (
        block["type"] in ("text", "thinking", "tool_use")
        or block in (TEXT_FILE, FOUND)
        or block.get("content") == "They greeted."
    ):
        assert named(answer) == []
    else:
        assert named(answer) == [f"messages.{block['type']}"]


def test_what_can_be_read_is_text(server: Served) -> None:
    post(server, messages=after(*PAST))
    shown = prompt(server)
    for text in ("news", "News\nhttp://n", "unavailable", "42", "fetch", "a.txt", "They greeted."):
        assert text in shown
    assert shown.count("[image omitted]") == 2
    assert shown.count("[document omitted]") == 1
    assert "Words." in shown
    assert "About." in shown


def test_results_of_tools(server: Served) -> None:
    for content in (None, [], ""):
        assert named(post(server, messages=used(content))) == []
    without = used(None)
    del without[2]["content"][0]["content"]
    assert named(post(server, messages=without)) == []
    assert named(post(server, messages=used([REFERENCE]))) == []
    assert "The tool fetch can be called." in prompt(server)
    assert named(post(server, messages=used([{"type": "text", "text": "A screen:"}, IMAGE]))) == ["messages.image"]
    assert "A screen:\n[image omitted]" in prompt(server)


def test_images_are_refused_where_they_are_to_be_answered(server: Served) -> None:
    seen = {"role": "user", "content": [IMAGE, {"type": "text", "text": "What is it?"}]}
    assert post(server, messages=[seen]).status_code == 400
    assert post(server, messages=[*after(), {"role": "user", "content": [PDF]}]).status_code == 400
    assert named(post(server, messages=[seen, {"role": "assistant", "content": "A cat."}, USER])) == ["messages.image"]


def test_system_messages_anywhere(server: Served) -> None:
    said = {
        "role": "system",
        "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    }
    for messages in ([said, USER], [USER, said], [*after({"type": "text", "text": "a"}), said]):
        answer = post(server, messages=messages, system="Rules.")
        assert named(answer) == []
        assert "Be brief." in prompt(server)
        counted = post(server, "/v1/messages/count_tokens", messages=messages, system="Rules.")
        assert counted.json()["input_tokens"] == len(server.engine.requests[-1].prompt_tokens)


def test_a_label_in_front_of_the_system_prompt_is_left_out(server: Served) -> None:
    label = "x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;"
    system: list[Any] = [{"type": "text", "text": label}, {"type": "text", "text": "Rules."}]
    prompts = set()
    for given_system in (system, system[1:], f"{label}\nRules.", [{"type": "text", "text": f"{label}\nRules."}]):
        assert named(post(server, system=given_system)) == []
        prompts.add(prompt(server))
    assert len(prompts) == 1


def test_tools_that_a_server_runs_are_skipped(server: Served) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    toolset = {"type": "mcp_toolset", "mcp_server_name": "s"}
    answer = post(
        server, tools=[*TOOLS, search, toolset], mcp_servers=[{"type": "url", "name": "s", "url": "http://x"}]
    )
    assert named(answer) == ["mcp_servers", "tools.web_search_20250305", "tools.mcp_toolset"]
    assert '"find"' in prompt(server)
    assert "web_search" not in prompt(server)
    assert named(post(server, tools=[search], tool_choice={"type": "auto"})) == ["tools.web_search_20250305"]


def test_edits_of_the_context_are_not_made(server: Served) -> None:
    assert named(post(server, context_management=KEEP_ALL)) == []
    assert named(post(server, "/v1/messages/count_tokens", context_management=KEEP_ALL)) == ["max_tokens"]
    edits = [{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 3}}, *KEEP_ALL["edits"]]
    answer = post(server, context_management={"edits": edits})
    assert named(answer) == ["context_management.edits.clear_tool_uses_20250919"]


def test_fields_about_where_a_request_is_computed_are_passed_over(server: Served) -> None:
    answer = post(server, container="c", inference_geo="eu", speed="fast", thinking={"type": "adaptive"})
    assert named(answer) == ["container", "inference_geo", "speed", "thinking"]


def test_a_limit_beyond_the_context_is_lowered(server: Served, serve_app: Any) -> None:
    endless = serve_app(InProcessEngine())
    answer = post(endless, max_tokens=64000).json()
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert (
        answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] + answer["usage"]["output_tokens"]
        == 512
    )
    assert post(endless, max_tokens=4).json()["stop_reason"] == "max_tokens"
    assert post(server, max_tokens=64000).json()["stop_reason"] == "end_turn"
    too_long = post(endless, messages=[{"role": "user", "content": "x" * 600}]).json()["error"]["message"]
    assert too_long == "prompt is too long: 619 tokens > 512 maximum"


# --- any history ---

JSON: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)
UNKNOWN = st.builds(
    lambda kind, members: {**members, "type": f"new_{kind}"},
    st.text(max_size=5),
    st.dictionaries(st.one_of(st.sampled_from(("content", "text", "input", "source")), st.text(max_size=5)), JSON),
)
RESULT = st.builds(
    lambda content, error: {"type": "tool_result", "tool_use_id": "t1", "content": content, "is_error": error},
    st.sampled_from(RESULTS),
    st.booleans(),
)
USE = st.builds(
    lambda values: {"type": "tool_use", "id": "t1", "name": "find", "input": values},
    st.dictionaries(st.text(max_size=3), JSON),
)
BLOCKS = st.lists(st.one_of(st.sampled_from(PAST), UNKNOWN, RESULT, USE), max_size=5)
MESSAGE = st.one_of(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(("user", "assistant", "system")),
        BLOCKS,
    ),
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(("user", "assistant")),
        st.text(max_size=9),
    ),
)


ANYTHING = st.dictionaries(
    st.sampled_from(("type", "role", "content", "name", "id", "input", "text", "source", "input_schema")),
    st.one_of(JSON, st.sampled_from(("user", "text", "tool_use", "tool_result", "tool", "any", "custom", "image"))),
)


@pytest.mark.slow
@search_again(2)
@settings(deadline=None, max_examples=25)
@given(st.lists(ANYTHING, max_size=3), st.lists(ANYTHING, max_size=3), ANYTHING)
def test_a_body_of_anything_is_answered_or_refused(
    server: Served, run: int, parts: list[Any], tools: list[Any], choice: Any
) -> None:
    for messages in (parts, [{"role": "assistant", "content": parts}, {"role": "user", "content": parts}]):
        answer = post(server, messages=messages, tools=tools, tool_choice=choice, system=parts)
        assert answer.status_code in (200, 400), answer.text


@pytest.mark.slow
@search_again(2)
@settings(deadline=None, max_examples=25)
@given(st.lists(MESSAGE, max_size=6), st.booleans())
def test_any_history_is_answered_and_the_answer_accepted(
    server: Served, run: int, messages: list[Any], is_last: bool
) -> None:
    """``is_last``: the last message is the assistant's, which it goes on with."""
    history = [*messages, {"role": "assistant", "content": "So?"}, *([] if is_last else [USER])]
    answer = post(server, messages=history, tools=TOOLS)
    assert answer.status_code == 200, f"{answer.text} {json.dumps(messages)}"
    counted = post(server, "/v1/messages/count_tokens", messages=history, tools=TOOLS)
    assert counted.json()["input_tokens"] == len(server.engine.requests[-1].prompt_tokens)
    history += [{"role": "assistant", "content": answer.json()["content"]}, USER]
    assert post(server, messages=history, tools=TOOLS).status_code == 200
