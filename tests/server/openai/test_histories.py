"""Random histories of every kind of message, in any order: the next turn is answered, on every API of this folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.conftest import Served
from tests.server.in_process import IM_END, TEMPLATE, InProcessEngine, byte_tokenizer
from tests.text.family_templates import DEEPSEEK, GEMMA, GPT_OSS, LLAMA3, MISTRAL, QWEN3
from tests.tiers import one_in, search_again

EXAMPLES = int(os.environ.get("OCTAVO_EXAMPLES", "10"))
TEMPLATES = {
    "plain": TEMPLATE,
    "strict": GEMMA,
    "one call": LLAMA3,
    "thinks": QWEN3,
    "m": MISTRAL,
    "d": DEEPSEEK,
    "g": GPT_OSS,
}
ANSWER = '<think>Hm.</think>I look.\n<tool_call>\n{"name": "f", "arguments": {"a": "\\u00e9"}}\n</tool_call>'
TEXTS = st.sampled_from(["", " ", "Hi", "<think>a</think>b", "</think>", "<|im_end|>", "{{ x }}", "é😀", "\n", "null"])
IDS = st.sampled_from(["a", "b", "call_1234567890", "toolu_ü"])
ARGUMENTS = st.sampled_from(
    ['{"a": 1}', "{}", "", "null", '{"a": tru', "[1]", '"x"', "5", "{", "[", '{"a": {"<s>": []}}']
)


def texts(kind: str, key: str = "text") -> Any:
    return st.builds(lambda text: {"type": kind, key: text, "cache_control": None}, TEXTS)


PARTS = st.lists(texts("text"), max_size=3)
ANSWER_PARTS = st.lists(
    st.one_of(
        *(texts("text"), texts("output_text"), texts("refusal", "refusal"), texts("thinking", "thinking")),
        st.just({"type": "redacted_thinking", "data": "QUJD"}),
        st.just({"type": "server_tool_use", "id": "s", "name": "x", "input": {}}),
    ),
    max_size=3,
)
FUNCTIONS = st.fixed_dictionaries({"name": st.sampled_from(["f", "g"]), "arguments": ARGUMENTS})
CALLS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"id": IDS, "type": st.just("function"), "function": FUNCTIONS}),
        st.builds(lambda id, text: {"id": id, "type": "custom", "custom": {"name": "g", "input": text}}, IDS, TEXTS),
    ),
    min_size=1,
    max_size=3,
)
MESSAGES = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "developer"]), "content": TEXTS | PARTS}),
    st.fixed_dictionaries({"role": st.just("user"), "content": TEXTS | PARTS}, optional={"name": TEXTS}),
    st.fixed_dictionaries(
        {"role": st.just("assistant")},
        optional={
            "content": st.none() | TEXTS | ANSWER_PARTS,
            "refusal": st.none() | TEXTS,
            "tool_calls": st.none() | CALLS,
            "function_call": st.none() | FUNCTIONS,
            "audio": st.none() | st.just({"id": "a"}),
            "name": TEXTS,
            "reasoning_content": st.none() | TEXTS,
            "annotations": st.just([]),
        },
    ),
    st.fixed_dictionaries({"role": st.just("tool"), "content": TEXTS | PARTS, "tool_call_id": IDS}),
    st.fixed_dictionaries({"role": st.just("function"), "content": st.none() | TEXTS, "name": st.just("f")}),
)
OLLAMA_CALLS = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": st.just("f"), "arguments": st.just({"a": [None, "é"]})})},
        optional={"id": IDS},
    ),
    max_size=3,
)
OLLAMA_MESSAGES = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": TEXTS}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": TEXTS}, optional={"thinking": TEXTS, "tool_calls": OLLAMA_CALLS}
    ),
    st.fixed_dictionaries(
        {"role": st.just("tool"), "content": TEXTS},
        optional={"tool_name": st.sampled_from(["f", "g"]), "tool_call_id": IDS},
    ),
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "Go on."}


@pytest.fixture(scope="module", params=TEMPLATES)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    tokenizer = byte_tokenizer(TEMPLATES[request.param], more_special=("</s>", "<s>"))
    engine = InProcessEngine(lambda request: [*ANSWER.encode(), IM_END], max_model_len=1 << 14)
    served = Served(engine, tokenizer, {})
    yield served
    served.stop()


def answered(served: Served, path: str, body: dict[str, Any]) -> Any:
    answer = served.client.post(path, json={"model": "test", "tools": [TOOL], **body})
    assert answer.status_code == 200, (answer.text, json.dumps(body))
    return answer.json()


@one_in(3)
@search_again(2)
@pytest.mark.slow
@given(history=st.lists(MESSAGES, min_size=1, max_size=6))
@settings(max_examples=EXAMPLES, deadline=None)
def test_chat_completions(served: Served, run: int, history: list[dict[str, Any]]) -> None:
    made = answered(served, "/v1/chat/completions", {"messages": history, "max_tokens": 120})["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in made.get("tool_calls", ())]
    for after in ([made], [made, *results], [made, USER], [{**made, "tool_calls": None}]):
        answered(served, "/v1/chat/completions", {"messages": [*history, *after], "max_tokens": 1})
    begun = {"messages": history, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 1}
    if history[-1]["role"] == "assistant":
        answered(served, "/v1/chat/completions", begun)


@one_in(3)
@search_again(2)
@pytest.mark.slow
@given(history=st.lists(OLLAMA_MESSAGES, min_size=1, max_size=6))
@settings(max_examples=EXAMPLES, deadline=None)
def test_ollama(served: Served, run: int, history: list[dict[str, Any]]) -> None:
    body = {"messages": history, "stream": False, "options": {"num_predict": 120}}
    made = answered(served, "/api/chat", body)["message"]
    for after in ([made], [made, {"role": "tool", "tool_name": "f", "content": "4"}], [made, USER]):
        answered(served, "/api/chat", {**body, "messages": [*history, *after], "options": {"num_predict": 1}})
