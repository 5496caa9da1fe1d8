"""Wishes without an effect on the answer: they are passed over and named in a header, not refused."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.text.reasoning_effort import BUDGETS
from tests.server.conftest import Served
from tests.server.in_process import MAX_MODEL_LEN, byte_tokenizer

HEADER = "x-octavo-unknown-fields"
MESSAGES = [{"role": "user", "content": "Hi"}]
THINKS = "<think></think>{{ messages[0].content }}"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 4},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 4},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"messages": MESSAGES},
}
PASSED_OVER: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"store": True, "service_tier": "flex"}, "store, service_tier"),
    ("/v1/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
    (
        "/v1/completions",
        {"guided_decoding_backend": "x", "length_penalty": 2},
        "guided_decoding_backend, length_penalty",
    ),
    ("/v1/chat/completions", {"store": True}, "store"),
    (
        "/v1/chat/completions",
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    ("/v1/chat/completions", {"web_search_options": {}, "reasoning": {"effort": "low"}}, "reasoning"),
    (
        "/v1/chat/completions",
        {"kv_transfer_params": {"a": 1}, "thinking_token_budget": 9},
        "kv_transfer_params, thinking_token_budget",
    ),
    ("/tokenize", {"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
    ("/v1/chat/completions", {"verbosity": "low"}, "verbosity"),
    ("/v1/chat/completions", {"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ("/v1/chat/completions", {"reasoning_effort": "high"}, "reasoning_effort"),
    ("/v1/chat/completions", {"stream_options": {"include_usage": True}, "zzz": 1}, "zzz, stream_options"),
    ("/v1/responses", {"truncation": "auto", "max_tool_calls": 3}, "truncation, max_tool_calls"),
    ("/v1/responses", {"text": {"verbosity": "high"}}, "text.verbosity"),
    ("/v1/responses", {"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ("/v1/responses", {"reasoning": {"max_tokens": 7}}, "reasoning.max_tokens"),
    (
        "/v1/messages",
        {"output_config": {"effort": "low", "task_budget": {}}},
        "output_config.task_budget, output_config.effort",
    ),
    ("/v1/messages/count_tokens", {"thinking": {"type": "adaptive"}}, "thinking"),
]
NOTHING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"tool_choice": "auto"}),
    ("/v1/chat/completions", {"reasoning_effort": "none"}),
    ("/v1/chat/completions", {"verbosity": "medium", "store": False, "service_tier": "auto"}),
    ("/v1/responses", {"tool_choice": "auto", "truncation": "disabled", "text": {"verbosity": "medium"}}),
    ("/v1/messages", {"thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"}, "service_tier": "auto"}),
]


@pytest.mark.parametrize(("path", "fields", "named"), PASSED_OVER)
def test_fields_without_an_effect_are_named(served: Served, path: str, fields: dict[str, Any], named: str) -> None:
    answer = served.client.post(path, json=BODIES[path] | fields)
    assert (answer.status_code, answer.headers.get(HEADER)) == (200, named), answer.text


@pytest.mark.parametrize(("path", "fields"), NOTHING)
def test_fields_that_ask_for_nothing_are_not(served: Served, path: str, fields: dict[str, Any]) -> None:
    answer = served.client.post(path, json=BODIES[path] | fields)
    assert (answer.status_code, answer.headers.get(HEADER)) == (200, None), answer.text


def test_a_server_may_refuse_them(serve_app: Any) -> None:
    served = serve_app(unknown_fields="reject")
    for fields, name in (({"store": True}, "store"), ({"reasoning_effort": "low"}, "reasoning_effort")):
        error = served.chat(**fields).json()["error"]
        assert (error["param"], error["code"]) == (name, "unknown_parameter")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_minus_one_is_as_many_tokens_as_fit(served: Served, path: str) -> None:
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    served.engine.sampling_defaults = {"max_tokens": 7}
    answer = served.client.post(path, json=BODIES[path] | {name: -1})
    served.engine.sampling_defaults = {}
    assert (answer.status_code, answer.headers.get(HEADER)) == (200, None), answer.text
    request = served.engine.requests[-1]
    assert request.max_tokens == MAX_MODEL_LEN - len(request.prompt_tokens)


def test_no_effort_is_no_thinking_where_the_template_can_say_so(serve_app: Any) -> None:
    can = serve_app(tokenizer=byte_tokenizer(THINKS + "{{ enable_thinking is defined and not enable_thinking }}"))
    answer = can.chat(reasoning_effort="none")
    assert HEADER not in answer.headers
    assert bytes(can.engine.requests[-1].prompt_tokens).endswith(b"HiTrue")
    assert can.engine.requests[-1].thinking is None
    cannot = serve_app(tokenizer=byte_tokenizer(THINKS))
    assert HEADER not in cannot.chat(reasoning_effort="none").headers
    assert cannot.engine.requests[-1].thinking.num_tokens == 0


EFFORTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "reasoning_effort": "low"}),
    ("/v1/responses", {"input": "Hi", "reasoning": {"effort": "low"}}),
    (
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 9, "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
    ),
    ("/api/chat", {"model": "test", "messages": MESSAGES, "think": "low"}),
    ("/api/generate", {"model": "test", "prompt": "Hi", "think": "low"}),
]
SHOWN = "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
LEVEL = "{% if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}"


@pytest.mark.parametrize(("path", "body"), EFFORTS)
def test_an_effort_is_what_the_template_reads_or_a_bound(serve_app: Any, path: str, body: dict[str, Any]) -> None:
    for template, shown, budget in (
        (THINKS + SHOWN, "True", BUDGETS["low"]),
        (THINKS, "", BUDGETS["low"]),
        (THINKS + LEVEL, "low", None),
    ):
        served = serve_app(tokenizer=byte_tokenizer(template))
        answer = served.client.post(path, json=body)
        assert (answer.status_code, answer.headers.get(HEADER)) == (200, None), answer.text
        request = served.engine.requests[-1]
        assert bytes(request.prompt_tokens).decode() == "<think></think>Hi" + shown
        assert (request.thinking and request.thinking.num_tokens) == budget


BOUNDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 4, "thinking_token_budget": 7}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "thinking_token_budget": 7}),
    ("/v1/responses", {"input": "Hi", "reasoning": {"max_tokens": 7}}),
    ("/v1/responses", {"input": "Hi", "thinking_token_budget": 7}),
    (
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 7}},
    ),
    ("/inference/v1/generate", {"token_ids": [72], "sampling_params": {"thinking_token_budget": 7}}),
]


@pytest.mark.parametrize(("path", "body"), BOUNDS)
def test_every_api_has_a_name_for_the_bound(serve_app: Any, path: str, body: dict[str, Any]) -> None:
    for template, num_tokens in ((THINKS, 7), ("{{ messages[0].content }}", None)):
        served = serve_app(tokenizer=byte_tokenizer(template))
        answer = served.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        thinking = served.engine.requests[-1].thinking
        assert (thinking and thinking.num_tokens) == num_tokens
        assert (HEADER in answer.headers) is (num_tokens is None)


def test_a_bound_of_its_own_comes_before_that_of_an_effort(serve_app: Any) -> None:
    served = serve_app(tokenizer=byte_tokenizer(THINKS + SHOWN))
    served.chat(reasoning_effort="low", thinking_token_budget=7)
    assert served.engine.requests[-1].thinking.num_tokens == 7


def test_thinking_is_turned_on_and_off_by_whatever_a_template_reads(serve_app: Any) -> None:
    served = serve_app(tokenizer=byte_tokenizer(THINKS + "{% if not thinking is defined %}-{% endif %}{{ thinking }}"))
    for path, body, shown in (
        ("/v1/messages", {"max_tokens": 9, "thinking": {"type": "enabled"}}, "True"),
        ("/v1/messages", {"max_tokens": 9}, "False"),
        ("/api/chat", {"model": "test", "think": True}, "True"),
        ("/api/chat", {"model": "test", "think": False}, "False"),
        ("/api/chat", {"model": "test"}, "-"),
    ):
        assert served.client.post(path, json={"messages": MESSAGES, **body}).status_code == 200
        assert bytes(served.engine.requests[-1].prompt_tokens).decode() == "<think></think>Hi" + shown


def test_a_grammar_of_a_completion_has_no_reasoning_to_bound(serve_app: Any) -> None:
    served = serve_app(tokenizer=byte_tokenizer(THINKS))
    for fields, has_effect in (({}, True), ({"guided_regex": "[a-z .,]+"}, False)):
        answer = served.complete(prompt="Hi<think>", thinking_token_budget=3, **fields)
        assert answer.headers.get(HEADER) == (None if has_effect else "thinking_token_budget")
        assert (served.engine.requests[-1].thinking is not None) is has_effect
    asked = {"thinking_token_budget": 3, "response_format": {"type": "json_object"}}
    for path, has_effect in (("/v1/completions", False), ("/v1/chat/completions", True)):
        rendered = served.client.post(f"{path}/render", json=BODIES[path] | asked).json()
        one = rendered if has_effect else rendered[0]
        assert ("thinking_token_budget" in one["sampling_params"]) is has_effect
        assert served.client.post("/inference/v1/generate", json=one).status_code == 200
        assert (served.engine.requests[-1].thinking is not None) is has_effect
