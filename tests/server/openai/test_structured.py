"""``response_format``, ``structured_outputs`` and ``guided_*``: what they do to an answer, and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import jsonschema
import pytest
from llguidance import LLTokenizer

from octavo.grammar.matchers import compile_matcher, make_tokenizer, normalised
from tests.server.conftest import Served
from tests.server.in_process import TEMPLATE, InProcessEngine, byte_tokenizer
from tests.server.writing_engine import writing_engine

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def writer() -> Iterator[Served]:
    tokenizer = byte_tokenizer()
    served = Served(writing_engine(tokenizer), tokenizer, {})
    yield served
    served.stop()


def json_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


WAYS: list[tuple[dict[str, Any], str]] = [
    (json_schema(SCHEMA), "json"),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        "json",
    ),
    ({"structured_outputs": {"json": SCHEMA}}, "json"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, "json"),
    ({"guided_json": SCHEMA}, "json"),
    ({"guided_json": json.dumps(SCHEMA)}, "json"),
    ({"response_format": {"type": "json_object"}}, "object"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json"),
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, "json"),
    ({"structured_outputs": {"json_object": True}}, "object"),
    ({"guided_json_object": True}, "object"),
    ({"structured_outputs": {"regex": "[a-c]{3}[0-9]"}}, "regex"),
    ({"guided_regex": "[a-c]{3}[0-9]"}, "regex"),
    ({"structured_outputs": {"choice": ["one", "two"]}}, "choice"),
    ({"guided_choice": ["one", "two"]}, "choice"),
    ({"structured_outputs": {"grammar": 'root ::= "(" root ")" | "x"'}}, "grammar"),
    ({"guided_grammar": 'start: "(" start ")" | "x"'}, "grammar"),
    ({"regex": "[a-c]{3}[0-9]"}, "regex"),
    ({"ebnf": 'root ::= "(" root ")" | "x"'}, "grammar"),
    ({"grammar": 'root ::= "(" root ")" | "x"'}, "grammar"),
    ({"json_schema": SCHEMA}, "json"),
]


def check(kind: str, text: str) -> None:
    if kind == "json":
        jsonschema.validate(json.loads(text), SCHEMA)
    elif kind == "object":
        assert isinstance(json.loads(text), dict)
    elif kind == "regex":
        assert re.fullmatch("[a-c]{3}[0-9]", text)
    elif kind == "choice":
        assert text in ("one", "two")
    else:
        assert re.fullmatch(r"\(*x\)*", text)
        assert text.count("(") == text.count(")")


def takes(served: Served, text: str) -> bool:
    """Whether ``text`` is a whole answer to the last request."""
    matcher = compile_matcher(normalised(served.engine.requests[-1].params.grammar or ""), matchers())
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@cache
def matchers() -> LLTokenizer:
    return make_tokenizer(byte_tokenizer().vocabulary(()))


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "kind"), WAYS)
def test_every_way_to_ask_binds_the_answer(writer: Served, fields: dict[str, Any], kind: str) -> None:
    for seed in range(3):
        chat = writer.chat(max_tokens=400, seed=seed, n=2, logprobs=True, **fields).json()["choices"]
        texts = writer.complete(max_tokens=400, seed=seed, prompt=["a", "b"], **fields).json()["choices"]
        found = [(choice["message"]["content"], choice["finish_reason"]) for choice in chat]
        found += [(choice["text"], choice["finish_reason"]) for choice in texts]
        ended = [text for text, reason in found if reason == "stop"]
        assert ended
        for text in ended:
            check(kind, text)


NO_FORM = (
    *({name: value} for name in ("regex", "ebnf", "grammar", "json_schema") for value in (False, [], None, "")),
    *({f"guided_{kind}": value} for kind in ("json", "regex", "grammar", "json_object") for value in (False, None)),
    *({f"guided_{kind}": []} for kind in ("json", "regex", "grammar")),
    *({name: value} for name in ("response_format", "structured_outputs") for value in (False, [], None)),
    *({"structured_outputs": {kind: value}} for kind in ("json", "regex") for value in (False, [], None)),
    {"guided_choice": False},
)


def test_what_asks_for_no_form_has_no_effect(serve_app: Any) -> None:
    served = serve_app()
    for fields in NO_FORM:
        response = served.chat(max_tokens=1, **fields)
        assert (response.status_code, served.engine.requests[-1].params.grammar) == (200, None), (fields, response.text)
        assert "x-octavo-unknown-fields" not in response.headers


def test_text_asks_for_nothing(serve_app: Any) -> None:
    served = serve_app()
    neutral: dict[str, Any] = {"grammar": "", "regex": "", "ebnf": "", "json_schema": ""}
    asked: list[dict[str, Any]] = [{"response_format": {"type": "text"}}, neutral, {"json_schema": {}}]
    for fields in asked:
        for answer in (served.chat(**fields), served.complete(**fields)):
            assert answer.status_code == 200
            assert served.engine.requests[-1].params.grammar is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", '"prompt": "Hi", "json_schema": %s'),
        ("/generate", '"text": "Hi", "sampling_params": {"json_schema": %s}'),
    ],
)
def test_numbers_of_a_schema_are_not_rounded(serve_app: Any, path: str, body: str) -> None:
    served = serve_app()
    for number, is_exact in (("0.5", True), ("0.123456789012345678", False)):
        text = "{" + body % f'{{"const": {number}}}' + "}"
        answer = served.client.post(path, content=text, headers={"content-type": "application/json"})
        assert answer.is_success == is_exact
        assert is_exact or "more digits" in answer.text


def test_a_structural_tag_binds_what_follows_its_triggers(writer: Served) -> None:
    tags = [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}]
    response = writer.chat(
        response_format={"type": "structural_tag", "structures": tags, "triggers": ["<f="]}, max_tokens=40
    )
    assert response.status_code == 200
    assert takes(writer, "None.")
    assert takes(writer, "It is <f=a>12</f> or <f=a>-3</f>, <b>surely</b>.")
    for wrong in ('<f=a>"x"</f>', "<f=b>1</f>", "<f=a>1", "<f=a>1</g>"):
        assert not takes(writer, wrong), wrong


BAD: list[tuple[dict[str, Any], str, str]] = [
    (json_schema({"not": {}}), "response_format", "uses 'not'"),
    (json_schema({"type": "array", "uniqueItems": True}), "response_format", "'uniqueItems'"),
    (json_schema({"type": "wrong"}), "response_format", "wrong"),
    (json_schema({"x-guidance": {"lenient": True}, "not": {}}), "response_format", "'x-guidance'"),
    (json_schema({"$ref": "http://127.0.0.1/schema"}), "response_format", "127.0.0.1"),
    (json_schema("x"), "response_format", "schema"),
    (json_schema({"enum": ["x" * 1000] * 300}), "response_format", "larger"),
    (json_schema(None), "response_format", "schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format", "name"),
    ({"response_format": {"type": "json_object", "value": 1}}, "response_format", "value"),
    ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
    ({"response_format": "json_object"}, "response_format", "object"),
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format", "structures"),
    (
        {"response_format": {"type": "structural_tag", "structures": [{}], "triggers": ["a"]}},
        "response_format",
        "begin",
    ),
    (
        {
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "<a", "schema": {}, "end": ""}],
                "triggers": ["<b"],
            }
        },
        "response_format",
        "trigger",
    ),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "invalid regex"),
    ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs", "regex"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs", "regular expression"),
    ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs", "strings"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs", "empty"),
    ({"structured_outputs": {"grammar": "root ::= missing"}}, "structured_outputs", "missing"),
    ({"structured_outputs": {"grammar": "start: /a/ x"}}, "structured_outputs", "x"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "JSON"),
    ({"structured_outputs": {"json": '{"items":' * 70 + "{}" + "}" * 70}}, "structured_outputs", "than 64 levels"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "takes one form, and has several"),
    ({"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs", "not supported"),
    ({"structured_outputs": {"unheard_of": 1}}, "structured_outputs", "unheard_of"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "together"),
    ({"guided_regex": "a", "regex": "b"}, "regex", "'guided_regex' and 'regex' cannot be given together"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "together",
    ),
    ({"guided_grammar": "start: " + "(" * 30000}, "guided_grammar", "grammar"),
    ({"guided_regex": "(a)\\1"}, "guided_regex", "cannot be used"),
    ({"guided_choice": []}, "guided_choice", "at least one string"),
    ({"guided_regex": ""}, "guided_regex", "a regular expression"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least one string"),
    ({"response_format": {}}, "response_format", "must be one of"),
    ({"guided_regex": "a(b"}, "guided_regex", "unclosed group"),
    ({"guided_grammar": "root ::= root"}, "guided_grammar", "no text satisfies it"),
    ({"guided_regex": "a" * 300_000}, "guided_regex", "larger"),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD)
def test_what_cannot_be_done_is_refused_by_name(writer: Served, fields: dict[str, Any], param: str, words: str) -> None:
    for response in (writer.chat(**fields), writer.complete(**fields)):
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["param"] == param
        assert words in error["message"]
        assert len(error["message"]) < 700
    assert writer.engine.num_live == 0


def test_without_a_tokenizer_there_is_no_structured_output(serve_app: Any) -> None:
    served = serve_app(tokenizer=None)
    error = served.complete(prompt=[1, 2], guided_regex="a").json()["error"]
    assert error["param"] == "guided_regex"


def test_others_are_answered_while_a_grammar_is_tried_out(writer: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial cannot end before they have their answers, however busy the machine is: its process is stopped."""
    assert writer.complete(guided_regex="warm").status_code == 200
    compiler = writer.app.state.services.first.admission.grammars
    assert compiler.process_id is not None
    monkeypatch.setitem(compiler._processes[0]._settings, "max_seconds", 60)
    os.kill(compiler.process_id, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        tried = pool.submit(writer.complete, guided_regex="[xyz]+")
        while not compiler._num_running:
            assert not tried.done()
        for _ in range(20):
            assert writer.client.get("/v1/models").status_code == 200
        assert not tried.done()
        os.kill(compiler.process_id, signal.SIGCONT)
        assert tried.result(60).status_code == 200


def test_a_grammar_that_hangs_is_given_up(writer: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert writer.complete(guided_regex="warm").status_code == 200
    compiler = writer.app.state.services.first.admission.grammars
    os.kill(compiler.process_id, signal.SIGSTOP)
    hung = writer.complete(guided_regex="[xy]+")
    assert hung.status_code == 400
    assert "more than 2 seconds" in hung.json()["error"]["message"]
    monkeypatch.setitem(compiler._limits, "max_seconds", 60)
    assert writer.complete(guided_regex="[yz]+").status_code == 200, "the next one gets a fresh process"


THINKING = TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>\n{% endif") + "{# </think> #}"


def test_reasoning_comes_before_what_is_bound(serve_app: Any) -> None:
    tokenizer = byte_tokenizer(THINKING)
    served = serve_app(writing_engine(tokenizer), tokenizer=tokenizer)
    response = served.chat(max_tokens=300, seed=1, guided_choice=["one", "two"])
    assert response.status_code == 200
    assert takes(served, "One or three?</think>\n\none")
    for wrong in ("One or three?</think>\n\nthree", "one", "Hm.</think>one</think>two"):
        assert not takes(served, wrong), wrong


def test_reasoning_is_separated_from_content(serve_app: Any) -> None:
    tokenizer = byte_tokenizer(THINKING)
    text = "Let me think.</think>\n\nFour."
    served = serve_app(InProcessEngine(lambda request: [*text.encode(), 258]), tokenizer=tokenizer)
    body = served.chat(max_tokens=100).json()
    message = body["choices"][0]["message"]
    assert message["content"] == "Four."
    assert message["reasoning_content"] == message["reasoning"] == "Let me think."
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("Let me think.")
    plain = serve_app(
        InProcessEngine(lambda request: [*text.encode(), 258]), tokenizer=tokenizer, reasoning_parser="none"
    )
    assert plain.chat(max_tokens=100).json()["choices"][0]["message"]["content"] == text


def streamed(text: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Content and reasoning of a stream, and its last choice."""
    lines = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
    choices = [line["choices"][0] for line in lines if line["choices"]]
    keys = ("content", "reasoning_content")
    return {key: "".join(choice["delta"].get(key) or "" for choice in choices) for key in keys}, choices[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_counts_in_the_answer_only(serve_app: Any, stream: bool) -> None:
    tokenizer = byte_tokenizer(THINKING)
    text = "Let me think.</think>\n\nFour. Five."
    served = serve_app(InProcessEngine(lambda request: [*text.encode(), 258]), tokenizer=tokenizer)
    response = served.chat(max_tokens=100, stop=[" ", "\n\n"], stream=stream)
    message, choice = streamed(response.text) if stream else ({}, response.json()["choices"][0])
    message = message or choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me think.", "Four.")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " ")


@pytest.mark.parametrize("user", ["Hi", "What does <think> do?"])
def test_a_message_may_be_continued_inside_its_reasoning(serve_app: Any, user: str) -> None:
    tokenizer = byte_tokenizer(TEMPLATE + "{# </think> #}")
    text = " the sum. Yes.</think>\n\nFour. Five."
    served = serve_app(InProcessEngine(lambda request: [*text.encode(), 258]), tokenizer=tokenizer)
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": "<think>I need"}]
    options = {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 60, "stop": [". "]}
    choice = served.chat(messages=messages, **options).json()["choices"][0]
    assert choice["message"]["reasoning_content"] == " the sum. Yes."
    assert choice["message"]["content"] == "Four"
    messages[1]["content"] = "I need"
    message = served.chat(messages=messages, **options).json()["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == (" the sum", None)


def test_a_mark_that_closes_reasoning_is_never_shown(serve_app: Any) -> None:
    """Nothing opened the reasoning: what is streamed cannot be taken back, an unstreamed message is divided."""
    tokenizer = byte_tokenizer(TEMPLATE + "{# </think> #}")
    text = "Let me think.</think>\n\nFour.</think>"
    served = serve_app(InProcessEngine(lambda request: [*text.encode(), 258]), tokenizer=tokenizer)
    message = served.chat(max_tokens=100).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me think.", "Four.")
    message, _ = streamed(served.chat(max_tokens=100, stream=True).text)
    assert message["content"] == "Let me think.\n\nFour."
