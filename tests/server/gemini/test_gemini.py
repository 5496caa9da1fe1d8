"""The Gemini API: bodies in both cases of names, streams to the byte, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from octavo.errors import RequestFailed
from octavo_server.dialects.gemini.body import json_schema
from tests.server.conftest import CALLS, AppServer, Served, tokens_of
from tests.server.in_process import ANSWER, InProcessEngine, byte_tokenizer
from tests.server.proxy.proxied import Proxy, Raw
from tests.server.writing_engine import writing_engine

CONTENTS: Any = [{"role": "user", "parts": [{"text": "Hi"}]}]
PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
ADD: Any = {"name": "add", "description": "Add.", "parameters": {"type": "OBJECT", "properties": {}}}
THINKING = {"thinkingConfig": {"includeThoughts": True}}
BROKEN = RequestFailed("The engine broke.")


def post(served: AppServer, method: str = "generateContent", **body: Any) -> Any:
    return served.client.post(f"/v1beta/models/test:{method}", json={"contents": CONTENTS, **body})


def config(**members: Any) -> dict[str, Any]:
    return {"generationConfig": {"maxOutputTokens": 2, **members}}


def prompt(served: Served) -> str:
    return byte_tokenizer().decode(served.engine.requests[-1].prompt_tokens, False)


def test_an_answer_and_its_stream(server: Served) -> None:
    whole = post(server, **config()).json()
    num_prompt = len(server.engine.requests[-1].prompt_tokens)
    assert len(whole.pop("responseId")) == 32
    parts = [{"text": ANSWER[:2]}]
    prompt_counts = {"promptTokenCount": num_prompt, "cachedContentTokenCount": 3}
    output_counts = {"candidatesTokenCount": 2, "thoughtsTokenCount": 0, "totalTokenCount": num_prompt + 2}
    assert whole == {
        "candidates": [{"content": {"role": "model", "parts": parts}, "index": 0, "finishReason": "MAX_TOKENS"}],
        "usageMetadata": prompt_counts | output_counts,
        "modelVersion": "test",
    }
    assert prompt(server) == PROMPT
    events = post(server, "streamGenerateContent?alt=sse", **config())
    assert events.headers["content-type"].startswith("text/event-stream")
    assert all(line.startswith("data: {") for line in events.text.split("\n\n")[:-1])
    listed = post(server, "streamGenerateContent", **config())
    assert listed.headers["content-type"] == "application/json"
    for found in (
        [json.loads(line.removeprefix("data: ")) for line in events.text.split("\n\n")[:-1]],
        listed.json(),
    ):
        assert len({each.pop("responseId") for each in found}) == 1
        texts = [part["text"] for each in found for part in each["candidates"][0]["content"]["parts"]]
        assert "".join(texts) == ANSWER[:2]
        assert [each["candidates"][0].get("finishReason") for each in found] == [None, "MAX_TOKENS"]
        assert found[-1]["usageMetadata"] == whole["usageMetadata"]


@pytest.mark.parametrize("mode", ["streamGenerateContent", "streamGenerateContent?alt=sse"])
def test_a_stream_that_breaks_ends_with_an_error(mode: str) -> None:
    """Google's clients find it on a line that is no event, or in an event: that depends on their version."""
    served = Served(InProcessEngine(errors={2: BROKEN}), byte_tokenizer(), {})
    text = post(served, mode, **config(maxOutputTokens=9)).text
    told = {"error": {"code": 500, "message": BROKEN.message, "status": "INTERNAL"}}
    if "alt" in mode:
        line, event, end = text.split("\n\n")[-3:]
        assert json.loads(line) == json.loads(event.removeprefix("data: ")) == told
        assert event.startswith("data: ")
        assert not end
    else:
        assert json.loads(text)[-1] == told
    served.stop()


def test_a_last_part_that_is_empty(server: Served) -> None:
    """Google's clients drop a turn with a content that has no parts from the history of a chat."""
    served = Served(InProcessEngine(lambda request: tokens_of("A")), byte_tokenizer(), {})
    found = post(served, "streamGenerateContent").json()
    assert all(each["candidates"][0]["content"]["parts"] for each in found)
    assert found[-1]["candidates"][0]["finishReason"] == "STOP"
    served.stop()


def test_names_in_snake_case_and_elements_that_stand_alone(server: Served) -> None:
    content = {"parts": {"text": "Hi"}}
    body = {"system_instruction": {"parts": {"text": "Be brief."}}, "generation_config": {"max_output_tokens": 3}}
    answer = post(server, contents=content, **body)
    assert answer.json()["candidates"][0]["content"]["parts"] == [{"text": ANSWER[:3]}]
    assert prompt(server) == "<|im_start|>system\nBe brief.<|im_end|>\n" + PROMPT
    twice = post(server, **config(), generation_config={})
    assert twice.status_code == 400


def test_sampling(server: Served) -> None:
    given = {"temperature": 0.5, "topP": 0.9, "topK": 40.0, "seed": 3, "presencePenalty": 1, "frequencyPenalty": -1}
    post(server, **config(**given, stopSequences=["zz"], candidateCount=2))
    params = server.engine.requests[-1].params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 40)
    assert (params.presence_penalty, params.frequency_penalty, params.stop) == (1, -1, ("zz",))
    post(server, **config(topP=0))
    assert 0 < server.engine.requests[-1].params.top_p < 1e-3


def test_several_candidates_and_their_log_probabilities(server: Served) -> None:
    whole = post(server, **config(candidateCount=2, responseLogprobs=True, logprobs=1)).json()
    assert [each["index"] for each in whole["candidates"]] == [0, 1]
    for candidate in whole["candidates"]:
        shown = candidate["logprobsResult"]
        assert [each["token"] for each in shown["chosenCandidates"]] == list(ANSWER[:2])
        assert [len(each["candidates"]) for each in shown["topCandidates"]] == [1, 1]
        mean = sum(each["logProbability"] for each in shown["chosenCandidates"]) / 2
        assert candidate["avgLogprobs"] == pytest.approx(mean)
    assert whole["usageMetadata"]["candidatesTokenCount"] == 4
    found = post(server, "streamGenerateContent", **config(candidateCount=2)).json()
    for index in (0, 1):
        mine = [each["candidates"][0] for each in found if each["candidates"][0]["index"] == index]
        assert "".join(part["text"] for each in mine for part in each["content"]["parts"]) == ANSWER[:2]


def test_thoughts_and_calls_and_their_results(caller: Served) -> None:
    body = {"tools": [{"functionDeclarations": [ADD]}, {"googleSearch": {}}]}
    answer = post(caller, **body, generationConfig=THINKING)
    assert answer.headers["x-octavo-unknown-fields"] == "tools.googleSearch"
    (candidate,) = answer.json()["candidates"]
    thought, text, call = candidate["content"]["parts"]
    assert thought == {"text": "Two and two.", "thought": True}
    assert text == {"text": "I add."}
    assert (call["functionCall"]["name"], call["functionCall"]["args"]) == ("add", {"a": 2})
    assert candidate["finishReason"] == "STOP"
    usage = answer.json()["usageMetadata"]
    assert usage["thoughtsTokenCount"] == len("Two and two.")
    assert usage["promptTokenCount"] + len(tokens_of(CALLS)) == usage["totalTokenCount"]
    found = post(caller, "streamGenerateContent", **body, generationConfig=THINKING).json()
    parts = [part for each in found for part in each["candidates"][0]["content"]["parts"]]
    assert "".join(part["text"] for part in parts if part.get("thought")) == thought["text"]
    assert [part["functionCall"]["args"] for part in parts if "functionCall" in part] == [{"a": 2}]
    assert found[-1]["usageMetadata"] == usage
    hidden = post(caller, **body).json()["candidates"][0]["content"]["parts"]
    assert [list(part) for part in hidden] == [["text"], ["functionCall"]]
    # Clients keep the parts of a stream as contents of their own.
    contents = [{"role": "model", "parts": [part]} for part in (thought, text, {**call, "thoughtSignature": "c2ln"})]
    given = {"id": call["functionCall"]["id"], "name": "add"}
    results = [{"functionResponse": {**given, "response": response}} for response in ({"result": 4}, {"error": "no"})]
    followed = [*CONTENTS, *contents, {"role": "user", "parts": [*results, {"text": "And?"}]}]
    assert post(caller, contents=followed, **body, **config()).status_code == 200
    told = prompt(caller)
    assert "assistant:I add." in told
    assert "(Two and two.)" in told
    assert told.endswith("tool:4tool:Error: nouser:And?")


def test_whether_to_think(caller: Served) -> None:
    for thinking, ends in (
        ({"thinkingBudget": 5}, "think"),
        ({"thinkingBudget": -1}, "think"),
        ({"thinkingLevel": "HIGH"}, "think"),
        ({"thinkingBudget": 0}, "Hi"),
    ):
        answer = post(caller, **config(thinkingConfig=thinking))
        assert "x-octavo-unknown-fields" not in answer.headers
        assert prompt(caller).endswith(ends)
        budget = thinking.get("thinkingBudget")
        if budget in (0, 5):
            assert caller.engine.requests[-1].params.thinking_token_budget in (None, budget)


@pytest.mark.parametrize(
    ("calling", "must_call", "offered"),
    [
        ({}, False, ["add", "sub"]),
        ({"mode": "AUTO"}, False, ["add", "sub"]),
        ({"mode": "ANY"}, True, ["add", "sub"]),
        ({"mode": "ANY", "allowedFunctionNames": ["sub"]}, True, ["sub"]),
        ({"mode": "VALIDATED"}, True, ["add", "sub"]),
        ({"mode": "NONE"}, False, []),
    ],
)
def test_which_functions_may_be_called(
    caller: Served, calling: dict[str, Any], must_call: bool, offered: list[str]
) -> None:
    tools = [{"functionDeclarations": [ADD, {"name": "sub", "parametersJsonSchema": {"type": "object"}}]}]
    answer = post(caller, tools=tools, toolConfig={"functionCallingConfig": calling}, **config())
    assert answer.status_code == 200, answer.text
    assert (caller.engine.requests[-1].params.grammar is not None) == must_call
    assert [name for name in ("add", "sub") if f'"{name}"' in prompt(caller)] == offered


def test_the_form_of_an_answer() -> None:
    tokenizer = byte_tokenizer()
    served = Served(writing_engine(tokenizer), tokenizer, {})
    schema = {"type": "OBJECT", "properties": {"a": {"type": "STRING", "enum": ["x"]}}, "required": ["a"]}
    for given in ({"responseSchema": schema}, {"responseJsonSchema": json_schema(schema)}):
        answer = post(served, generationConfig={"responseMimeType": "application/json", **given})
        assert json.loads(answer.json()["candidates"][0]["content"]["parts"][0]["text"]) == {"a": "x"}
    one_of = {"responseMimeType": "text/x.enum", "responseSchema": {"type": "STRING", "enum": ["yes"]}}
    answer = post(served, generationConfig=one_of)
    assert answer.json()["candidates"][0]["content"]["parts"] == [{"text": "yes"}]
    served.stop()


def test_schemas() -> None:
    given = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "nullable": True, "example": "x"},
            "list": {"type": "ARRAY", "items": {"type": "INTEGER", "format": "int32"}, "min_items": "1"},
            "kind": {"anyOf": [{"type": "NUMBER"}, {"type": "STRING", "enum": ["A"], "nullable": True}]},
        },
        "propertyOrdering": ["list", "type"],
    }
    found = json_schema(given)
    assert list(found["properties"]) == ["list", "type", "kind"]
    assert found == {
        "type": "object",
        "properties": {
            "list": {"type": "array", "items": {"type": "integer", "format": "int32"}, "minItems": 1},
            "type": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "kind": {
                "anyOf": [{"type": "number"}, {"anyOf": [{"type": "string", "enum": ["A"]}, {"type": "null"}]}],
            },
        },
    }


def test_histories_are_data(server: Served) -> None:
    run = [
        {"executableCode": {"language": "PYTHON", "code": "print(1)"}},
        {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "1"}},
        {"inlineData": {"mimeType": "image/png", "data": "AAAA"}},
        {"thoughtSignature": "c2ln"},
    ]
    answer = post(server, contents=[*CONTENTS, {"role": "model", "parts": run}, *CONTENTS], **config())
    assert answer.status_code == 200, answer.text
    named = [f"contents.{kind}" for kind in ("executableCode", "codeExecutionResult", "inlineData")]
    assert answer.headers["x-octavo-unknown-fields"] == ", ".join(named)
    assert "print(1)" in prompt(server)
    assert "[image omitted]" in prompt(server)
    begun = post(server, contents=[*CONTENTS, {"role": "model", "parts": [{"text": "Well, "}]}], **config())
    assert begun.status_code == 200
    assert prompt(server) == PROMPT + "Well, "


def test_counts_of_tokens(server: Served) -> None:
    post(server, **config(), systemInstruction={"parts": [{"text": "Be brief."}]})
    num_prompt = len(server.engine.requests[-1].prompt_tokens)
    whole = {"model": "models/test", "contents": CONTENTS, "systemInstruction": {"parts": [{"text": "Be brief."}]}}
    for path, body, count in (
        ("test", {"generateContentRequest": whole}, num_prompt),
        ("test", {"contents": CONTENTS}, num_prompt - len("system\nBe brief.\n") - 2),
    ):
        counted = server.client.post(f"/v1beta/models/{path}:countTokens", json=body)
        assert counted.json() == {"totalTokens": count}, counted.text


def test_models_of_both_versions(server: Served) -> None:
    keyed = {"x-goog-api-key": "any"}
    (listed,) = server.client.get("/v1beta/models").json()["models"]
    assert server.client.get("/v1/models", headers=keyed).json() == {"models": [listed]}
    assert server.client.get("/v1beta/models/test").json() == listed
    assert server.client.get("/v1/models/test", headers=keyed).json() == listed
    assert (listed["name"], listed["inputTokenLimit"]) == ("models/test", 512)
    assert "generateContent" in listed["supportedGenerationMethods"]
    assert server.client.get("/v1/models").json()["object"] == "list"
    body = {"contents": CONTENTS, **config()}
    answer = server.client.post("/v1/models/test:generateContent", json=body)
    assert answer.json()["candidates"][0]["content"]["parts"] == [{"text": ANSWER[:2]}]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"contents": []}, "contents"),
        ({"contents": None}, "contents"),
        ({"contents": [{"role": "system", "parts": []}]}, "contents"),
        ({"contents": [{"parts": ["Hi"]}]}, "contents[0].parts[0]"),
        ({"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": "AAAA"}}]}]}, "contents"),
        ({"contents": [{"parts": [{"inlineData": {"mimeType": "", "data": "AAAA"}}]}]}, "contents"),
        ({"contents": [{"parts": [{"fileData": {"fileUri": "https://a.example/a.pdf"}}]}]}, "contents"),
        ({"contents": [{"parts": [{"functionCall": {}}], "role": "model"}]}, "contents"),
        ({"cachedContent": "cachedContents/x"}, "cachedContent"),
        ({"systemInstruction": {"parts": [{"inlineData": {}}]}}, "systemInstruction"),
        ({"generationConfig": {"temperature": -1}}, "generationConfig.temperature"),
        ({"generationConfig": {"temperature": "1"}}, "generationConfig"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens"),
        ({"generationConfig": {"candidateCount": 0}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"responseMimeType": "text/xml"}}, "generationConfig.responseMimeType"),
        ({"generationConfig": {"responseModalities": ["AUDIO"]}}, "generationConfig.responseModalities"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "generationConfig.responseSchema"),
        ({"generationConfig": {"thinkingConfig": {"thinkingBudget": "x"}}}, "generationConfig"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}}, "toolConfig.functionCallingConfig"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "toolConfig.functionCallingConfig"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "tools"),
    ],
)
def test_refusals_name_the_field(server: Served, body: dict[str, Any], field: str) -> None:
    answer = post(server, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    assert error["details"][0]["fieldViolations"][0]["field"] == field
    assert error["message"].startswith(("'", "Missing", "Invalid")), error["message"]


def test_other_errors(server: Served) -> None:
    for path, status, name in (
        ("models/other:generateContent", 404, "NOT_FOUND"),
        ("nothing", 404, "NOT_FOUND"),
        ("models/test:embedContent", 400, "INVALID_ARGUMENT"),
    ):
        body = {"content": CONTENTS[0]} if "embed" in path else {"contents": CONTENTS}
        answer = server.client.post(f"/v1beta/{path}", json=body)
        assert (answer.status_code, answer.json()["error"]["status"]) == (status, name), answer.text


def test_what_is_passed_over_is_named(server: Served) -> None:
    answer = post(server, safetySettings=[{}], labels={"a": "b"}, toolConfig={"retrievalConfig": {}}, **config(x=1))
    named = "safetySettings, toolConfig.retrievalConfig, generationConfig.x"
    assert answer.headers["x-octavo-unknown-fields"] == named


def test_keys(serve_app: Callable[..., Served]) -> None:
    served = serve_app(api_key="own")
    path, body = "/v1beta/models/test:generateContent", {"contents": CONTENTS, **config()}
    for given in ({"headers": {"x-goog-api-key": "own"}}, {"params": {"key": "own"}}):
        assert served.client.post(path, json=body, **given).status_code == 200
        assert served.client.get("/v1beta/models", **given).status_code == 200
    for given in ({}, {"headers": {"x-goog-api-key": "other"}}, {"params": {"key": "\u20ac"}}):
        refused = served.client.post(path, json=body, **given)
        assert (refused.status_code, refused.json()["error"]["status"]) == (401, "UNAUTHENTICATED")
    assert served.client.get("/v1/completions", params={"key": "own"}).status_code == 401


def test_through_a_proxy(server: Served) -> None:
    """It counts the tokens, answers in the same form when the server breaks, and keeps its keys to itself."""
    event = b'data: {"usageMetadata": {"promptTokenCount": 5, "candidatesTokenCount": 2, "thoughtsTokenCount": 4}}\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    raw = Raw(head + b"%x\r\n%b\r\n" % (len(event), event))
    proxies = [Proxy(url, {"api_key": "own"}) for url in (server.url, raw.url)]
    query = "?alt=sse&key=own&k%65y=own"
    given: Any = {"json": {"contents": CONTENTS, **config()}, "headers": {"x-goog-api-key": "own"}}
    answer = proxies[0].client.post(f"/v1/models/test:streamGenerateContent{query}", **given)
    assert answer.text.count("data: ") == 2, answer.text
    num_tokens = len(server.engine.requests[-1].prompt_tokens) + 2
    assert proxies[0].upstream.metrics.prompt_tokens + proxies[0].upstream.metrics.output_tokens == num_tokens
    broken = proxies[1].client.post(f"/v1beta/models/a/b:streamGenerateContent{query}", **given).text
    assert broken.startswith(event.decode())
    line, again, _ = broken.removeprefix(event.decode()).split("\n\n")
    assert again == f"data: {line}"
    assert json.loads(line)["error"]["status"] == "INTERNAL"
    metrics = proxies[1].upstream.metrics
    assert (metrics.prompt_tokens, metrics.output_tokens) == (5, 6)
    (sent,) = raw.requests
    assert sent.startswith(b"POST /v1beta/models/a/b:streamGenerateContent?alt=sse HTTP/1.1\r\n")
    assert b"own" not in sent
    for proxy in proxies:
        proxy.stop()
    raw.close()


@pytest.mark.parametrize(
    "wrong",
    [
        *({"propertyOrdering": value} for value in (5, True, [["a"]], [{}], "a", {"a": 1})),
        *(
            {"properties": {"a": {"type": "STRING", "maxLength": digits}}}
            for digits in ("\u00b2", "9" * 5000, "\u0665")
        ),
    ],
)
def test_a_schema_of_any_values_is_answered(server: Served, wrong: dict[str, Any]) -> None:
    schema = {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}, **wrong}
    declared = {"tools": [{"functionDeclarations": [{**ADD, "parameters": schema}]}]}
    for body in (config(responseMimeType="application/json", responseSchema=schema), {**config(), **declared}):
        assert post(server, **body).status_code in (200, 400)
