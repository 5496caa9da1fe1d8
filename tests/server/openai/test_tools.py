"""Tools: what the model gets to see, what comes back whole and streamed, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest

from octavo.grammar.matchers import compile_matcher, make_tokenizer
from octavo.text.message_format import TOOL_FORMATS
from octavo.text.message_parser import Call
from octavo.text.tool_calls.deepseek import ALL_BEGIN, ALL_END, BEGIN, END, SEPARATOR
from tests.server.conftest import Served
from tests.server.in_process import EOS, IM_END, InProcessEngine, byte_tokenizer
from tests.server.writing_engine import writing_engine
from tests.tiers import nightly_after, one_in

TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }}</tool>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>{% endfor %}"
    "{% if m.reasoning_content %}<why>{{ m.reasoning_content }}</why>{% endif %}"
    "{% endfor %}<assistant>"
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "f", "strict": True}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Z\u00fcrich"}}\n</tool_call>'
TEXT = f"I look.\n{CALL}\n" + '<tool_call>\n{"name": "f", "arguments": {"a": [1, 2]}}\n</tool_call>'


def says(text: str) -> InProcessEngine:
    return InProcessEngine(lambda request: [*text.encode(), IM_END])


@pytest.fixture(scope="module")
def hermes() -> Iterator[Served]:
    served = Served(says(""), byte_tokenizer(TEMPLATE), {"tool_call_parser": "hermes"})
    yield served
    served.stop()


@pytest.fixture
def serve_hermes(hermes: Served) -> Callable[[str], Served]:
    """Have the model of the one server say something; a process for templates is started for it once."""

    def start(text: str) -> Served:
        hermes.engine.answer = says(text).answer
        return hermes

    return start


def chunks_of(served: Served, **body: Any) -> list[dict[str, Any]]:
    text = served.chat(stream=True, max_tokens=400, **body).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_calls_come_whole(serve_hermes: Callable[[str], Served]) -> None:
    choice = serve_hermes(TEXT).chat(tools=TOOLS, max_tokens=400).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "get_weather", "arguments": '{"city": "Z\u00fcrich"}'},
        {"name": "f", "arguments": '{"a": [1, 2]}'},
    ]
    assert len({call["id"] for call in calls}) == 2
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)


FUNCTIONS = [tool["function"] for tool in TOOLS]


def test_functions_are_tools_of_which_one_is_called(serve_hermes: Callable[[str], Served]) -> None:
    """The forerunner of tools: https://platform.openai.com/docs/api-reference/chat/create"""
    served = serve_hermes(TEXT)
    served.chat(tools=TOOLS)
    choice = served.chat(functions=FUNCTIONS, function_call="auto", max_tokens=400).json()["choices"][0]
    one, other = served.engine.requests[-2:]
    assert one.prompt_tokens == other.prompt_tokens
    assert choice["finish_reason"] == "function_call"
    call = {"name": "get_weather", "arguments": '{"city": "Z\u00fcrich"}'}
    assert (choice["message"]["content"], choice["message"]["function_call"]) == ("I look.", call)
    assert "tool_calls" not in choice["message"]
    choices = [chunk["choices"][0] for chunk in chunks_of(served, functions=FUNCTIONS)]
    first, *rest = [each["delta"]["function_call"] for each in choices if "function_call" in each["delta"]]
    assert first == {"name": "get_weather", "arguments": ""}
    assert all(set(part) == {"arguments"} for part in rest)
    assert "".join(part["arguments"] for part in rest) == call["arguments"]
    assert choices[-1]["finish_reason"] == "function_call"
    named = serve_hermes(CALL).chat(functions=FUNCTIONS, function_call={"name": "get_weather"}, max_tokens=400)
    choice = named.json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["function_call"]) == ("stop", call)
    none = served.chat(functions=FUNCTIONS, function_call="none", max_tokens=400).json()["choices"][0]
    assert none["message"]["content"] == CALL


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"functions": [{"name": "f g"}]}, "functions", "'functions[0].name' must have"),
        ({"functions": [{"name": "f", "parameters": 1}]}, "functions", "'functions[0].parameters' must be"),
        ({"functions": FUNCTIONS, "function_call": {"name": "g"}}, "function_call", "'functions' does not have"),
        ({"functions": FUNCTIONS, "function_call": "required"}, "function_call", "'function_call' must be 'none'"),
        ({"function_call": {"name": "f"}}, "function_call", "only allowed when 'functions' are given"),
        ({"functions": FUNCTIONS, "tools": TOOLS}, "functions", "not both"),
    ],
)
def test_functions_that_are_refused(served: Served, body: dict[str, Any], param: str, words: str) -> None:
    error = served.chat(**body).json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_what_no_grammar_keeps_to_is_named_where_the_function_has_it(serve_app: Any) -> None:
    served = serve_app(tool_call_parser="hermes", unknown_fields="reject")
    described = {**function(UNUSABLE)["function"], "name": "f"}
    response = served.chat(functions=[described], function_call={"name": "f"})
    assert "functions[0].parameters.properties.a.uniqueItems" in response.json()["error"]["message"]


def test_content_is_null_only_with_calls(serve_hermes: Callable[[str], Served]) -> None:
    message = serve_hermes(CALL).chat(tools=TOOLS, max_tokens=400).json()["choices"][0]["message"]
    assert message["content"] is None


def test_calls_are_streamed_name_first(serve_hermes: Callable[[str], Served]) -> None:
    chunks = chunks_of(serve_hermes(TEXT), tools=TOOLS)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
    for index, name, arguments in ((0, "get_weather", '{"city": "Z\u00fcrich"}'), (1, "f", '{"a": [1, 2]}')):
        first, *rest = [part for part in parts if part["index"] == index]
        assert first["id"].startswith("call_")
        assert first["type"] == "function"
        assert first["function"] == {"name": name, "arguments": ""}
        assert all(set(part) == {"index", "function"} and set(part["function"]) == {"arguments"} for part in rest)
        assert len(rest) > 5, "arguments come while they are written"
        assert "".join(part["function"]["arguments"] for part in rest) == arguments
    assert [part["index"] for part in parts] == sorted(part["index"] for part in parts)
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_details_of_tokens_are_all_there_in_a_stream_of_calls(serve_hermes: Callable[[str], Served]) -> None:
    served = serve_hermes(TEXT)
    chunks = chunks_of(served, tools=TOOLS, logprobs=True, return_token_ids=True)
    tokens = [t for chunk in chunks for t in chunk["choices"][0].get("token_ids") or []]
    assert bytes(tokens[:-1]) == TEXT.encode()
    entries = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert len(entries) == len(tokens)


@pytest.mark.parametrize(
    ("num_bytes", "choice", "arguments"),
    [
        (CALL.index("rich"), "required", '{"city": "Z\u00fc'),
        (CALL.index("rich"), "auto", '{"city": "Z\u00fc'),
        (20, {"type": "function", "function": {"name": "get_weather"}}, ""),
        (20, "required", None),
    ],
)
def test_a_call_that_is_cut_is_a_call_as_far_as_it_goes(
    serve_hermes: Callable[[str], Served], num_bytes: int, choice: Any, arguments: str | None
) -> None:
    served = serve_hermes(CALL)
    body = {"tools": TOOLS, "tool_choice": choice, "max_tokens": len(CALL[:num_bytes].encode())}
    whole = served.chat(**body).json()["choices"][0]
    assert whole["finish_reason"] == "length"
    calls = [call["function"] for call in whole["message"].get("tool_calls", [])]
    assert calls == ([] if arguments is None else [{"name": "get_weather", "arguments": arguments}])
    assert not whole["message"]["content"]
    lines = [line.removeprefix("data: ") for line in served.chat(stream=True, **body).text.split("\n\n") if line]
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert choices[-1]["finish_reason"] == "length"
    assert not any(each["delta"].get("content") for each in choices)
    parts = [part["function"] for each in choices for part in each["delta"].get("tool_calls", [])]
    assert "".join(part["arguments"] for part in parts) == (arguments or "")
    assert [part["name"] for part in parts if "name" in part] == [call["name"] for call in calls]


def test_text_behind_a_required_call_is_content_streamed_or_not(serve_hermes: Callable[[str], Served]) -> None:
    """As a client gets it that passes over the end, with ``ignore_eos``, up to its limit of tokens."""
    served = serve_hermes(CALL + " and more")
    body = {"tools": TOOLS, "tool_choice": "required", "max_tokens": len(CALL.encode()) + 5}
    whole = served.chat(**body).json()["choices"][0]
    assert (whole["finish_reason"], len(whole["message"]["tool_calls"])) == ("length", 1)
    lines = [line.removeprefix("data: ") for line in served.chat(stream=True, **body).text.split("\n\n") if line]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
    streamed = "".join(delta.get("content") or "" for delta in deltas)
    assert (whole["message"]["content"] or "").strip() == streamed.strip() == "and"


def test_one_call_when_no_more_are_wanted(serve_hermes: Callable[[str], Served]) -> None:
    served = serve_hermes(TEXT)
    message = served.chat(tools=TOOLS, max_tokens=400, parallel_tool_calls=False).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1
    chunks = chunks_of(served, tools=TOOLS, parallel_tool_calls=False)
    assert {p["index"] for c in chunks for p in c["choices"][0]["delta"].get("tool_calls", [])} == {0}


def test_a_malformed_call_is_content(serve_hermes: Callable[[str], Served]) -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": </tool_call>'
    choice = serve_hermes(text).chat(tools=TOOLS, max_tokens=400).json()["choices"][0]
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_a_call_cut_short_is_content_and_ends_with_length(serve_hermes: Callable[[str], Served]) -> None:
    served = serve_hermes(CALL)
    choice = served.chat(tools=TOOLS, max_tokens=30).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == CALL[:30]


def test_every_choice_has_calls_of_its_own(serve_hermes: Callable[[str], Served]) -> None:
    served = serve_hermes(CALL)
    choices = served.chat(tools=TOOLS, max_tokens=400, n=3).json()["choices"]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3
    chunks = chunks_of(served, tools=TOOLS, n=2)
    calls = [(c["choices"][0]["index"], c["choices"][0]["delta"].get("tool_calls", [{}])[0]) for c in chunks]
    assert sorted(index for index, call in calls if "id" in call) == [0, 1]
    assert {index for index, call in calls if call} == {0, 1}


def test_none_hides_the_tools(serve_hermes: Callable[[str], Served]) -> None:
    served = serve_hermes(CALL)
    choice = served.chat(tools=TOOLS, tool_choice="none", max_tokens=400).json()["choices"][0]
    assert choice["message"]["content"] == CALL
    assert b"<tool>" not in bytes(served.engine.requests[-1].prompt_tokens)


def test_the_template_sees_tools_calls_and_results(serve_hermes: Callable[[str], Served]) -> None:
    served = serve_hermes("Fine.")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm"},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sun"}]},
    ]
    assert served.chat(messages=messages, tools=TOOLS, max_tokens=20).status_code == 200
    prompt = bytes(served.engine.requests[-1].prompt_tokens).decode()
    assert prompt.startswith("<tool>get_weather</tool><tool>f</tool><user>Hi<assistant>")
    assert '<call>f{"a": 1}</call><why>Hm</why><tool>sun<assistant>' in prompt


SETTINGS = ["none", *(format.name for format in TOOL_FORMATS)]
AS_JSON = {
    "pythonic": "[f(**%s)]",
    "lfm2": "<|tool_call_start|>[f(**%s)]<|tool_call_end|>",
    "olmo3": "<function_calls>f(**%s)</function_calls>",
    "gemma4": "<|tool_call>call:f%s<tool_call|>",
    "functiongemma": "<start_function_call>call:f%s<end_function_call>",
}
"""Calls whose arguments a grammar constrains as one object of JSON, which models write otherwise."""


@one_in(9)
@pytest.mark.slow
@pytest.mark.parametrize("parser", SETTINGS)
@pytest.mark.parametrize("has_marks", nightly_after(1, (True, False)))
def test_a_call_that_is_asked_for_is_made_with_valid_arguments(serve_app: Any, parser: str, has_marks: bool) -> None:
    marks = next((format.marks for format in TOOL_FORMATS if format.name == parser), ())
    tokenizer = byte_tokenizer(TEMPLATE, tuple(dict.fromkeys(marks)) if has_marks else ())
    served = serve_app(writing_engine(tokenizer), tokenizer=tokenizer, tool_call_parser=parser)
    named = {"type": "function", "function": {"name": "get_weather"}}
    schemas = {"get_weather": PARAMETERS, "f": {"type": "object"}}
    num_ended = 0
    for seed in range(4):
        for choice, reason in (("any" if seed % 2 else "required", "tool_calls"), (named, "stop")):
            body = {"tools": TOOLS, "tool_choice": choice, "seed": seed, "max_tokens": 450}
            answer = served.chat(**body).json()["choices"][0]
            if answer["finish_reason"] == "length":
                continue
            num_ended += 1
            assert answer["finish_reason"] == reason
            calls = answer["message"]["tool_calls"]
            assert 1 <= len(calls) <= (1 if choice is named else 16)
            for call in calls:
                jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
            chunks = chunks_of(served, **{key: value for key, value in body.items() if key != "max_tokens"})
            parts = [p for c in chunks for p in c["choices"][0]["delta"].get("tool_calls", [])]
            streamed = {}
            for part in parts:
                own = streamed.setdefault(part["index"], {"name": "", "arguments": ""})
                for key, value in part["function"].items():
                    own[key] += value
            if chunks[-1]["choices"][0]["finish_reason"] != "length":
                assert list(streamed.values()) == [call["function"] for call in calls]
    assert num_ended >= 4 or (parser == "openai" and not has_marks)


@one_in(9)
@pytest.mark.slow
@pytest.mark.parametrize("parser", [name for name in SETTINGS if name != "none"])
@pytest.mark.parametrize("has_marks", nightly_after(1, (False, True)))
def test_a_call_of_a_strict_tool_is_valid_even_if_the_model_is_free(
    serve_app: Any, parser: str, has_marks: bool
) -> None:
    format = next(format for format in TOOL_FORMATS if format.name == parser)
    tokenizer = byte_tokenizer(TEMPLATE, tuple(dict.fromkeys(format.marks)) if has_marks else ())
    served = serve_app(writing_engine(tokenizer), tokenizer=tokenizer, tool_call_parser=parser)
    strict = {"type": "function", "function": {"name": "f", "strict": True, "parameters": PARAMETERS}}
    loose = {"type": "function", "function": {"name": "g", "parameters": {"not": {}}}}
    assert served.chat(tools=[strict, loose], max_tokens=60).status_code == 200
    grammar = served.engine.requests[-1].params.grammar or ""
    matchers = make_tokenizer(tokenizer.vocabulary((EOS,)))

    def allows(text: str) -> bool:
        matcher = compile_matcher(grammar, matchers)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def written(arguments: str) -> str:
        if parser == "mistral" and not has_marks:
            return f'[TOOL_CALLS][{{"name": "f", "arguments": {arguments}}}]'
        return AS_JSON[parser] % arguments if parser in AS_JSON else format.write([Call("f", arguments)])

    good, bad = '{"city": "Rome", "days": 3}', '{"city": "Rome", "days": 10}'
    assert allows(written(good).removesuffix("<|call|>"))
    assert not allows(written(bad).removesuffix("<|call|>"))
    talk = "<|channel|>final<|message|>Hello {there}" if parser == "openai" else "Hello {there}"
    assert allows(talk)
    if format.has_mark and parser != "openai":
        assert allows(talk + written(good))
        assert not allows(talk + written(bad))


def test_mistral_gets_ids_that_its_template_takes(serve_app: Any) -> None:
    tokenizer = byte_tokenizer(TEMPLATE)
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}]'
    served = serve_app(says(text), tokenizer=tokenizer, tool_call_parser="mistral")
    (call,) = served.chat(tools=TOOLS, max_tokens=400).json()["choices"][0]["message"]["tool_calls"]
    assert re.fullmatch("[A-Za-z0-9]{9}", call["id"])


SIGNS = {
    '{"name": <function-name>, "arguments": <args>} in <tool_call></tool_call>': "hermes",
    '<|python_tag|> {"name": function name, "parameters": dictionary}': "llama3_json",
    "[TOOL_CALLS]": "mistral",
    f"{ALL_BEGIN}{BEGIN}function{SEPARATOR}```json{END}{ALL_END}": "deepseek_v3",
    f"{ALL_BEGIN}{BEGIN}{SEPARATOR}{END}{ALL_END}": "deepseek_v31",
    "<|start|>assistant<|channel|>final<|message|>": "openai",
    "<tool_call><function=f><parameter=a> arguments": "qwen3_coder",
    "nothing of the kind": "hermes",
}


@pytest.mark.parametrize(("signs", "name"), SIGNS.items())
def test_the_format_is_seen_in_the_template(serve_app: Any, signs: str, name: str) -> None:
    served = serve_app(tokenizer=byte_tokenizer("{# " + signs.replace("{", "(").replace("}", ")") + " #}" + TEMPLATE))
    assert served.app.state.services.first.message_format.tools.name == name


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": ["null"]}}}]}, "tools"),
    ({"tools": [TOOLS[1], TOOLS[1]]}, "tools"),
    ({"tools": ["f"]}, "tools"),
    ({"tools": TOOLS * 200}, "tools"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}],
            "tool_choice": "required",
        },
        "tools",
    ),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_what_cannot_be_done_is_refused_by_name(
    serve_hermes: Callable[[str], Served], fields: dict[str, Any], param: str
) -> None:
    response = serve_hermes("x").chat(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_server_may_refuse_tools_that_need_not_be_called(serve_app: Any) -> None:
    for settings in ({"tool_call_parser": "none"}, {"enable_auto_tool_choice": False}):
        error = serve_app(**settings).chat(tools=TOOLS).json()["error"]
        assert error["param"] == "tools"
        assert "--tool-call-parser" in error["message"]


def test_an_answer_may_be_bound_or_be_a_call(serve_app: Any) -> None:
    tokenizer = byte_tokenizer(TEMPLATE)
    served = serve_app(writing_engine(tokenizer), tokenizer=tokenizer, tool_call_parser="hermes")
    kinds = set()
    for seed in range(12):
        choice = served.chat(tools=TOOLS, guided_choice=["yes", "no"], seed=seed, max_tokens=400).json()["choices"][0]
        if choice["finish_reason"] == "stop":
            assert choice["message"]["content"] in ("yes", "no")
        kinds.add(choice["finish_reason"])
    assert {"stop", "tool_calls"} <= kinds


def function(parameters: Any = ..., **more: Any) -> dict[str, Any]:
    given = {} if parameters is ... else {"parameters": parameters}
    return {"type": "function", "function": {"name": "get_time", **given, **more}}


@pytest.fixture(scope="module")
def writer() -> Iterator[Served]:
    """A model of random logits, which writes what a grammar allows."""
    tokenizer = byte_tokenizer(TEMPLATE)
    served = Served(writing_engine(tokenizer), tokenizer, {"tool_call_parser": "hermes"})
    yield served
    served.stop()


EMPTY = {"type": "object", "properties": {}}


@pytest.mark.parametrize("parameters", [..., None, {}, EMPTY, {**EMPTY, "required": [], "title": "T"}])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
def test_a_function_without_parameters_gets_no_arguments(writer: Served, parameters: Any, choice: Any) -> None:
    tools = [function(parameters)]
    for seed in range(3):
        answer = writer.chat(tools=tools, tool_choice=choice, seed=seed, max_tokens=200).json()["choices"][0]
        assert [call["function"]["arguments"] for call in answer["message"]["tool_calls"]][:1] == ["{}"]


def test_a_type_that_parameters_cannot_have_is_refused_by_its_place(writer: Served) -> None:
    for kind in ("string", ["string", "null"]):
        error = writer.chat(tools=[TOOLS[0], function({"type": kind})]).json()["error"]
        assert "'tools[1].function.parameters.type' must be 'object'" in error["message"]


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "boolean"}}, "required": ["a"]},
        {"type": ["object", "null"], "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
        {"anyOf": [{"type": "string"}, {"properties": {"a": {"type": "boolean"}}, "required": ["a"]}]},
        {
            "$ref": "#/$defs/n",
            "$defs": {
                "n": {
                    "properties": {"a": {"type": "boolean"}, "n": {"$ref": "#/$defs/n"}},
                    "required": ["a"],
                    "type": "object",
                }
            },
        },
    ],
)
def test_arguments_are_an_object_whatever_the_schema_lets_be(writer: Served, parameters: Any) -> None:
    answer = writer.chat(tools=[function(parameters)], tool_choice="required", max_tokens=400).json()["choices"][0]
    (call, *_) = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == "length" or isinstance(json.loads(call["function"]["arguments"])["a"], bool)


UNUSABLE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True, "maxItems": 2}}}


def test_one_schema_that_cannot_be_kept_to_leaves_the_others_usable(writer: Served) -> None:
    tools = [TOOLS[0], function(UNUSABLE)]
    response = writer.chat(tools=tools, tool_choice="required", max_tokens=300)
    assert response.status_code == 200
    left_out = "tools[1].function.parameters.properties.a.uniqueItems"
    assert response.headers["x-octavo-unknown-fields"] == left_out
    streamed = writer.chat(tools=tools, tool_choice="required", max_tokens=300, stream=True, no_such_field=1)
    assert streamed.headers["x-octavo-unknown-fields"] == f"no_such_field, {left_out}"
    grammar = writer.engine.requests[-1].params.grammar or ""
    assert '"city"' in grammar
    assert '"uniqueItems"' not in grammar
    assert "x-octavo-unknown-fields" not in writer.chat(tools=TOOLS, tool_choice="required", max_tokens=9).headers


def test_a_strict_schema_and_the_form_of_an_answer_are_kept_to_or_refused(writer: Served) -> None:
    strict = writer.chat(tools=[TOOLS[0], function(UNUSABLE, strict=True)], tool_choice="required")
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": False, "schema": UNUSABLE}}
    for response in (strict, writer.chat(response_format=form)):
        assert response.status_code == 400
        assert "'uniqueItems'" in response.json()["error"]["message"]


def test_a_server_that_rejects_what_has_no_effect_rejects_a_weaker_schema(serve_app: Any) -> None:
    served = serve_app(tool_call_parser="hermes", unknown_fields="reject")
    response = served.chat(tools=[function(UNUSABLE)], tool_choice="required")
    assert response.status_code == 400
    assert "tools[0].function.parameters.properties.a.uniqueItems" in response.json()["error"]["message"]


def test_what_no_grammar_keeps_to_between_tags_is_left_out_at_its_place(serve_app: Any) -> None:
    tokenizer = byte_tokenizer(TEMPLATE)
    served = serve_app(writing_engine(tokenizer), tokenizer=tokenizer, tool_call_parser="qwen3_coder")
    numbers = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 2}
    parameters = {"type": "object", "properties": {"a": numbers}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    response = served.chat(tools=[tool], tool_choice="required", max_tokens=200)
    assert response.status_code == 200
    assert "tools[0].function.parameters.properties.a.uniqueItems" in response.headers["x-octavo-unknown-fields"]
    for call in response.json()["choices"][0]["message"]["tool_calls"]:
        assert isinstance(json.loads(call["function"]["arguments"])["a"], list)


def test_arguments_between_tags_are_weakened_one_by_one(serve_app: Any) -> None:
    tokenizer = byte_tokenizer(TEMPLATE)
    served = serve_app(writing_engine(tokenizer), tokenizer=tokenizer, tool_call_parser="qwen3_coder")
    schema = {**UNUSABLE, "properties": {**UNUSABLE["properties"], "b": {"type": "integer", "const": 2**64}}}
    response = served.chat(tools=[function(schema)], tool_choice="required", max_tokens=300)
    assert response.headers["x-octavo-unknown-fields"] == "tools[0].function.parameters.properties.a.uniqueItems"
    assert str(2**64) in (served.engine.requests[-1].params.grammar or "")
    response = served.chat(tools=[function()], tool_choice="required", max_tokens=300)
    (call, *_) = response.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == "{}"
