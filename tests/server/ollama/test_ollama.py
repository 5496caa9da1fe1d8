"""Ollama's API: its unmodified client, lines to the byte, and what is refused."""

from __future__ import annotations

import json
from threading import get_ident
from typing import Any

import ollama
import pytest

from octavo_server.dialects.openai.answer_parts import TokenNames
from tests.server.conftest import Served
from tests.server.in_process import ANSWER, InProcessEngine, byte_tokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]
PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def client(served: Served) -> ollama.Client:
    return ollama.Client(host=served.url)


def post(served: Served, path: str = "chat", **body: Any) -> Any:
    return served.client.post(f"/api/{path}", json={"model": "test", **body})


def prompt(served: Served) -> str:
    return byte_tokenizer().decode(served.engine.requests[-1].prompt_tokens, False)


def test_a_chat_and_its_stream(server: Served) -> None:
    options = {"num_predict": 10, "temperature": 0, "num_ctx": 128}
    whole = client(server).chat("test:latest", MESSAGES, options=options)
    assert (whole.message.content, whole.message.role) == (ANSWER[:10], "assistant")
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 10)
    assert whole.prompt_eval_count == len(server.engine.requests[-1].prompt_tokens)
    assert prompt(server) == PROMPT
    parts = list(client(server).chat("test", MESSAGES, stream=True, options=options))
    assert "".join(part.message.content or "" for part in parts) == ANSWER[:10]
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].total_duration >= parts[-1].eval_duration > 0


def test_lines(server: Served) -> None:
    answer = post(server, messages=MESSAGES, options={"num_predict": 2.0})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    for line in lines:
        assert line.pop("created_at").endswith("Z")
    for name in DURATIONS:
        assert lines[-1].pop(name) > 0
    texts = [line["message"]["content"] for line in lines]
    assert "".join(texts) == ANSWER[:2]
    assert lines[0] == {"model": "test", "message": {"role": "assistant", "content": texts[0]}, "done": False}
    assert lines[-1] == {
        "model": "test",
        "message": {"role": "assistant", "content": ""},
        "done": True,
        "done_reason": "length",
        "prompt_eval_count": len(PROMPT) - len("<|im_start|>") * 2 - len("<|im_end|>") + 3,
        "eval_count": 2,
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_predict", [1, 8])
def test_clients_can_divide_by_every_time(server: Served, stream: bool, num_predict: int) -> None:
    for path, body in (
        ("chat", {"messages": MESSAGES}),
        ("generate", {"prompt": "Hi"}),
        ("generate", {"prompt": "Hi", "raw": True}),
    ):
        answer = post(server, path, **body, stream=stream, options={"num_predict": num_predict})
        end = json.loads(answer.text.splitlines()[-1])
        total, *parts = (end[name] for name in DURATIONS)
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(total, rel=1e-3, abs=1000)


def test_a_last_message_of_the_assistant_is_continued(server: Served) -> None:
    post(server, messages=[*MESSAGES, {"role": "assistant", "content": "Well, "}], options={"num_predict": 1})
    assert prompt(server) == PROMPT + "Well, "


def test_results_belong_to_calls_by_their_ids(caller: Served) -> None:
    def call(id: str, arguments: Any) -> dict[str, Any]:
        return {"id": id, "function": {"name": "add", "arguments": arguments}}

    calls = {"role": "assistant", "content": "", "tool_calls": [call("call_a", {"a": 1}), call("call_b", '{"a": 2')]}
    results = [{"role": "tool", "content": text, "tool_call_id": f"call_{text}"} for text in "ba"]
    stray = {"role": "tool", "content": "c"}
    body: dict[str, Any] = {"tools": [TOOL], "stream": False}
    answer = post(caller, messages=[*MESSAGES, calls, *results, stray], **body, options={"num_predict": 110})
    assert answer.status_code == 200, answer.text
    text = prompt(caller)
    assert text.index("tool:a") < text.index("tool:b") < text.index("tool:c")
    made = answer.json()["message"]["tool_calls"]
    assert made[0]["id"]
    again = post(caller, messages=[*MESSAGES, answer.json()["message"], *results], options={"num_predict": 1})
    assert again.status_code == 200


def test_a_generated_text(server: Served) -> None:
    answer = client(server).generate("test", "Hi", system="Be brief.", options={"num_predict": 5, "stop": ["zzz"]})
    assert (answer.response, answer.done_reason) == (ANSWER[:5], "length")
    assert prompt(server).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    raw = client(server).generate("test", "Hi", raw=True, stream=True, options={"num_predict": 5})
    assert "".join(part.response for part in raw) == ANSWER[:5]
    assert prompt(server) == "Hi"


def test_options_are_sampling_parameters(server: Served) -> None:
    options = {"temperature": 0.5, "top_k": 7.0, "top_p": 0.9, "min_p": 0.1, "seed": 3, "repeat_penalty": 1.5}
    post(server, messages=MESSAGES, stream=False, options={**options, "num_predict": 1})
    params = server.engine.requests[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 7, 0.9, 0.1)
    assert (params.seed, params.repetition_penalty) == (3, 1.5)
    assert server.engine.requests[-1].max_tokens == 1
    named = post(server, messages=MESSAGES, stream=False, options={"mirostat": 1, "num_ctx": 9, "num_predict": 1})
    assert named.headers["x-octavo-unknown-fields"] == "options.mirostat"


def test_thinking_and_calls_and_their_results(caller: Served) -> None:
    answer = client(caller).chat("test", MESSAGES, tools=[TOOL], options={"num_predict": 200})
    assert answer.message.thinking == "Two and two."
    assert answer.message.tool_calls is not None
    assert answer.message.tool_calls[0].function.name == "add"
    assert answer.message.tool_calls[0].function.arguments == {"a": 2}
    parts = list(client(caller).chat("test", MESSAGES, tools=[TOOL], stream=True, think=True))
    assert "".join(part.message.thinking or "" for part in parts) == "Two and two."
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [dict(call.function.arguments) for call in calls] == [{"a": 2}]
    results = [{"role": "tool", "tool_name": "add", "content": "4"}]
    client(caller).chat("test", [*MESSAGES, answer.message, *results], tools=[TOOL], options={"num_predict": 1})
    text = prompt(caller)
    assert "(Two and two.)" in text
    assert "tool:4" in text


def test_a_schema(server: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for form in ("json", schema):
        post(server, messages=MESSAGES, stream=False, format=form, options={"num_predict": 1})
        assert server.engine.requests[-1].params.grammar


def test_models(server: Served) -> None:
    asking = client(server)
    assert [model.model for model in asking.list().models] == ["test"]
    assert [model.model for model in asking.ps().models] == ["test"]
    shown = asking.show("test:latest")
    assert "completion" in (shown.capabilities or [])
    assert asking.pull("test").status == "success"
    assert [part.status for part in asking.pull("test", stream=True)] == ["pulling manifest", "success"]
    assert server.client.get("/api/version").json()["version"]


def test_nothing_to_answer_only_loads(server: Served) -> None:
    assert post(server, messages=[]).json()["done_reason"] == "load"
    assert post(server, "generate").json()["done_reason"] == "load"


def test_an_unknown_model_is_an_error(server: Served) -> None:
    with pytest.raises(ollama.ResponseError, match="This server serves `test`") as caught:
        client(server).chat("other", MESSAGES)
    assert caught.value.status_code == 404
    for path in ("show", "pull"):
        assert post(server, path, model="other").status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("chat", {"messages": [{"role": "user", "content": "Hi", "images": ["AAAA"]}]}, "messages[0].images"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages[0].tool_calls"),
        ("chat", {"messages": MESSAGES, "options": {"num_predict": 1.5}}, "options.num_predict"),
        ("chat", {"messages": MESSAGES, "options": {"num_predict": 2**31}}, "options.num_predict"),
        ("chat", {"messages": MESSAGES, "options": {"temperature": "hot"}}, "options.temperature"),
        ("chat", {"messages": MESSAGES, "options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
        ("generate", {"prompt": "Hi", "raw": True, "options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
        ("generate", {"prompt": "Hi" * 600}, "length of the prompt"),
        ("chat", {"messages": MESSAGES, "options": {"stop": [1]}}, "options.stop"),
        ("chat", {"messages": MESSAGES, "options": {"top_k": 1.5}}, "options.top_k"),
        ("chat", {"messages": MESSAGES, "format": "xml"}, "format"),
        ("chat", {"messages": MESSAGES, "think": True}, "thinking"),
        ("chat", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("generate", {"prompt": "Hi", "raw": True, "logprobs": True, "top_logprobs": 21}, "'top_logprobs'"),
        ("generate", {"prompt": "Hi", "suffix": "x"}, "suffix"),
        ("generate", {"prompt": "Hi", "images": ["AAAA"]}, "images"),
        ("generate", {"prompt": 3}, "prompt"),
    ],
)
def test_what_is_refused(server: Served, path: str, body: dict[str, Any], named: str) -> None:
    answer = post(server, path, **body)
    assert answer.status_code == 400
    assert named in answer.json()["error"]


@pytest.mark.parametrize("raw", [True, False])
def test_log_probabilities_of_each_token(server: Served, raw: bool) -> None:
    asked: Any = {"options": {"num_predict": 5}, "logprobs": True, "top_logprobs": 2}
    api = client(server)
    wholes = [api.generate("test", "Hi", raw=raw, **asked), api.chat("test", MESSAGES, **asked)]
    streams = [
        api.generate("test", "Hi", raw=raw, stream=True, **asked),
        api.chat("test", MESSAGES, stream=True, **asked),
    ]
    parts = [[each for part in stream for each in part.logprobs or ()] for stream in streams]
    for found in [*(whole.logprobs or () for whole in wholes), *parts]:
        assert "".join(each.token for each in found) == ANSWER[:5]
        assert [len(each.top_logprobs or ()) for each in found] == [2] * 5
        assert all(each.logprob <= 0 for each in found)
    plain = post(server, "chat", messages=MESSAGES, top_logprobs=2, stream=False)
    assert plain.headers["x-octavo-unknown-fields"] == "top_logprobs"
    assert "logprobs" not in plain.json()


@pytest.mark.parametrize(
    ("path", "body"),
    [("chat", {"messages": MESSAGES}), ("generate", {"prompt": "Hi"}), ("generate", {"prompt": "Hi", "raw": True})],
)
def test_log_probabilities_are_rendered_beside_the_loop(
    server: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    threads = set[int]()
    plain = TokenNames.name

    def name(names: TokenNames, token: int) -> str:
        threads.add(get_ident())
        return plain(names, token)

    monkeypatch.setattr(TokenNames, "name", name)
    assert post(server, path, logprobs=True, stream=False, **body).json()["logprobs"]
    assert len(threads) == 1
    assert server.call(get_ident) not in threads


def test_a_share_of_nothing_is_the_most_likely_token(server: Served) -> None:
    assert post(server, "generate", prompt="Hi", options={"top_p": 0, "num_predict": 2}).status_code == 200
    assert 0 < server.engine.requests[-1].params.top_p < 1e-5


def test_an_error_within_a_stream_is_a_line(serve_app: Any) -> None:
    from octavo.errors import RequestFailed

    engine = InProcessEngine(errors={3: RequestFailed("The engine failed.")})
    with pytest.raises(ollama.ResponseError, match="The engine failed"):
        list(client(serve_app(engine)).chat("test", MESSAGES, stream=True))


@pytest.mark.parametrize("media_type", [None, "application/x-www-form-urlencoded", "text/plain"])
def test_curl_needs_no_content_type_and_web_pages_do(server: Served, media_type: str | None) -> None:
    """``curl URL -d BODY``, as in Ollama's documentation, sends the type of a form."""
    body = json.dumps({"model": "test", "prompt": "Hi", "stream": False, "options": {"num_predict": 10}}).encode()
    headers = {} if media_type is None else {"Content-Type": media_type}
    answered = server.client.post("/api/generate", content=body, headers=headers)
    assert answered.status_code == 200
    assert answered.json()["response"] == ANSWER[:10]
    for sign in ({"Origin": server.url}, {"Sec-Fetch-Site": "same-origin"}, {"Referer": "x"}):
        refused = server.client.post("/api/generate", content=body, headers=headers | sign)
        assert (refused.status_code, "Content-Type" in refused.json()["error"]) == (400, True)
    for sign in ({"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        refused = server.client.post("/api/generate", content=body, headers=headers | sign)
        assert (refused.status_code, "--allowed-origins" in refused.json()["error"]) == (403, True)
