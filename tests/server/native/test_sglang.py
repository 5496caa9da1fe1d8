"""SGLang's own form of POST /generate, as trainers and its clients send it; and TGI's, which differs in the body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo_server.dialects.openai.answer_parts import TokenNames
from tests.server.conftest import Served
from tests.server.in_process import ANSWER, IM_END, InProcessEngine


def generate(served: Served, **body: Any) -> Any:
    if "inputs" not in body:
        body = {"text": "Hi", **body} if "input_ids" not in body else body
        body["sampling_params"] = {"max_new_tokens": 4, **body.get("sampling_params", {})}
    return served.client.post("/generate", json=body)


def test_token_ids_and_their_log_probabilities(server: Served) -> None:
    answer = generate(server, input_ids=[72, 105, 33], return_logprob=True, rid="mine").json()
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"]) == (ANSWER[:4], [*ANSWER[:4].encode()])
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 3, 4)
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in answer["output_ids"]]
    assert all(entry[0] <= 0 for entry in meta["output_token_logprobs"])
    assert meta["input_token_logprobs"] == []
    asked: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    meta = generate(server, input_ids=[72, 105, 33], logprob_start_len=0, **asked).json()["meta_info"]
    assert [entry[1:] for entry in meta["input_token_logprobs"]] == [[72, "H"], [105, "i"], [33, "!"]]
    assert meta["input_token_logprobs"][0][0] is None
    assert meta["input_top_logprobs"][0] is None
    assert [len(each) for each in (*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"])] == [2] * 6


def test_parameters_have_the_names_and_defaults_of_sglang(server: Served) -> None:
    own = {"max_new_tokens": None, "min_new_tokens": 1, "no_stop_trim": True, "sampling_seed": 7, "stop": ["x"]}
    assert generate(server, sampling_params={**own, "spaces_between_special_tokens": True}).status_code == 200
    request = server.engine.requests[-1]
    params = request.params
    assert (request.max_tokens, params.min_tokens, params.seed, params.stop) == (128, 1, 7, ("x",))
    assert (params.temperature, params.top_p, params.include_stop_str_in_output) == (1.0, 1.0, True)
    for name, value in {"regex": "[0-9]+", "json_schema": '{"type": "integer"}', "ebnf": 'root ::= "4"'}.items():
        assert generate(server, sampling_params={name: value}).status_code == 200
        assert server.engine.requests[-1].params.grammar


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input_ids": [1], "text": "x"}, "input_ids"),
        ({"sampling_params": {"max_new_tokens": -5}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"stop_regex": "x"}}, "sampling_params.stop_regex"),
        ({"image_data": "x"}, "image_data"),
        ({"rid": "x" * 257}, "rid"),
        ({"text": ""}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[72], []]}, "input_ids"),
        ({"timeout": -1.0}, "timeout"),
        ({"return_logprob": True, "top_logprobs_num": 99}, "top_logprobs_num"),
        ({"inputs": "Hi", "timeout": -1.0}, "timeout"),
    ],
)
def test_what_is_wrong_is_named_as_the_client_names_it(server: Served, body: dict[str, Any], field: str) -> None:
    answer = generate(server, **body)
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["param"] == field


def test_several_prompts_and_choices_are_a_list(server: Served) -> None:
    assert [each["text"] for each in generate(server, text=["a", "b"]).json()] == [ANSWER[:4]] * 2
    assert len(generate(server, sampling_params={"n": 2}).json()) == 2
    for batch_of_one in ({"text": ["a"]}, {"input_ids": [[72, 105]]}):
        (only,) = generate(server, **batch_of_one).json()
        assert only["text"] == ANSWER[:4]
    for alone in ({"text": "a"}, {"input_ids": [72, 105]}):
        assert generate(server, **alone).json()["text"] == ANSWER[:4]


def test_an_end_of_text_is_what_matched(serve_app: Any) -> None:
    served = serve_app(InProcessEngine(lambda request: [*b"Yes", IM_END]))
    answer = generate(served, sampling_params={"max_new_tokens": 9}).json()
    assert (answer["text"], answer["output_ids"][-1]) == ("Yes", IM_END)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": IM_END}


def test_each_event_has_the_text_so_far(server: Served) -> None:
    *frames, end = generate(server, stream=True).text.split("\n\n")[:-1]
    events = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    assert end == "data: [DONE]"
    assert [ANSWER.startswith(event["text"]) for event in events] == [True] * len(events)
    assert (events[-1]["text"], events[-1]["meta_info"]["finish_reason"]["type"]) == (ANSWER[:4], "length")
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)


def test_each_event_has_the_log_probabilities_so_far(server: Served) -> None:
    asked: dict[str, Any] = {"input_ids": [72, 105, 33], "return_logprob": True, "top_logprobs_num": 2}
    asked |= {"logprob_start_len": 1, "return_text_in_logprobs": True}
    whole = generate(server, **asked).json()["meta_info"]
    frames = generate(server, stream=True, **asked).text.split("\n\n")[:-2]
    events = [json.loads(frame.removeprefix("data: "))["meta_info"] for frame in frames]
    assert len(events) > 1
    for event in events:
        for name in ("input_token_logprobs", "input_top_logprobs"):
            assert event[name] == whole[name]
            assert len(event[name]) == 2
        for name in ("output_token_logprobs", "output_top_logprobs"):
            assert event[name] == whole[name][: event["completion_tokens"]]


def test_tokens_and_log_probabilities_are_rendered_once(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    named = list[int]()
    plain = TokenNames.name

    def name(names: TokenNames, token: int) -> str:
        named.append(token)
        return plain(names, token)

    monkeypatch.setattr(TokenNames, "name", name)
    asked: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "return_text_in_logprobs": True}
    assert generate(server, input_ids=[72, 105, 33], stream=True, **asked).status_code == 200
    assert named == [*ANSWER[:1].encode(), 72, 105, 33, *ANSWER[1:4].encode()]


def test_neutral_values_ask_for_nothing(server: Served) -> None:
    neutral: dict[str, Any] = {"json_schema": {}, "regex": "", "ebnf": "", "stop": None}
    assert generate(server, sampling_params=neutral).status_code == 200
    assert server.engine.requests[-1].params.grammar is None


def test_a_timeout_counts_in_each_form(serve_app: Any) -> None:
    served = serve_app(InProcessEngine(runs=False))
    for form in ({"text": "Hi"}, {"inputs": "Hi"}):
        assert generate(served, timeout=0.001, **form).status_code == 504


def test_the_model_is_described(server: Served) -> None:
    info = server.client.get("/get_model_info").json()
    assert (info["model_path"], info["is_generation"]) == ("test", True)


def test_the_form_of_tgi_is_answered_with_an_object(server: Served) -> None:
    answer = generate(server, inputs="Hi", parameters={"max_new_tokens": 4})
    assert answer.json() == {"generated_text": ANSWER[:4]}


def test_fields_of_another_form_are_named(server: Served) -> None:
    answer = server.client.post("/generate", json={"prompt": "Hi", "max_tokens": 2, "stream": True, "rid": "x"})
    assert answer.headers["x-octavo-unknown-fields"] == "rid, stream"
    answer = generate(server, inputs="Hi", rid="x", max_tokens=3)
    assert answer.headers["x-octavo-unknown-fields"] == "rid, max_tokens"
    answer = generate(server, text="Hi", temperature=0.5, stream=False)
    assert answer.headers["x-octavo-unknown-fields"] == "temperature"
