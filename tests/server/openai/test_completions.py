"""POST /v1/completions: forms of prompts, echo, log-probabilities, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.types import Request
from tests.server.conftest import Served
from tests.server.in_process import ANSWER, IM_END, InProcessEngine
from tests.server.test_response import events


def choices_of(response: Any) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


def streamed(response: Any) -> dict[int, dict[str, Any]]:
    """The choices that the pieces of a stream add up to."""
    assert response.status_code == 200, response.text
    whole: dict[int, dict[str, Any]] = {}
    for event in events(response.content):
        for piece in event["choices"]:
            choice = whole.setdefault(piece["index"], {**piece, "text": "", "logprobs": None})
            assert choice["finish_reason"] is None
            choice["text"] += piece["text"]
            choice["finish_reason"], choice["stop_reason"] = piece["finish_reason"], piece["stop_reason"]
            if piece["logprobs"] is not None:
                lists = choice["logprobs"] = choice["logprobs"] or {name: [] for name in piece["logprobs"]}
                for name, values in piece["logprobs"].items():
                    lists[name] += values
    return whole


def test_a_completion(served: Served) -> None:
    response = served.complete()
    body = response.json()
    assert body["object"] == "text_completion"
    assert body["model"] == "test"
    assert body["choices"] == [
        {"index": 0, "text": ANSWER[:4], "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97], [98, 99]], [b"a", b"bc"]),
    ],
)
def test_forms_of_prompts(serve_app: Any, prompt: Any, expected: list[bytes]) -> None:
    served = serve_app(InProcessEngine(answer=lambda request: request.prompt_tokens))
    choices = choices_of(served.complete(prompt=prompt, max_tokens=2, n=2))
    assert [choice["index"] for choice in choices] == list(range(2 * len(expected)))
    assert [choice["text"] for choice in choices] == [(2 * text)[:2].decode() for text in expected for _ in range(2)]
    usage = served.complete(prompt=prompt, n=2).json()["usage"]
    assert usage["prompt_tokens"] == sum(map(len, expected))
    assert usage["completion_tokens"] == 8 * len(expected)


def test_streams_of_several_prompts_and_choices_equal_the_whole(serve_app: Any) -> None:
    served = serve_app(InProcessEngine(answer=lambda request: request.prompt_tokens))
    body = {"prompt": ["ab", "xyz"], "n": 2, "max_tokens": 7, "logprobs": 2, "echo": True}
    whole = choices_of(served.complete(**body))
    pieces = streamed(served.complete(**body, stream=True))
    assert [pieces[index] for index in range(4)] == whole


def test_end_of_text_stop_tokens_and_stop_strings(serve_app: Any) -> None:
    tokens = [*b"Yes, ", IM_END]
    served = serve_app(InProcessEngine(answer=lambda request: tokens))
    reasons = {}
    for name, options in {
        "eos": {},
        "token": {"stop_token_ids": [ord(",")]},
        "shown token": {"stop_token_ids": [ord(",")], "include_stop_str_in_output": True},
        "string": {"stop": "es"},
        "shown string": {"stop": ["x", "es"], "include_stop_str_in_output": True},
        "late": {"stop": "s", "min_tokens": 4},
        "none": {"ignore_eos": True, "max_tokens": 8},
    }.items():
        body = {"max_tokens": 50, **options}
        choice = choices_of(served.complete(**body))[0]
        assert streamed(served.complete(**body, stream=True))[0] == choice
        reasons[name] = (choice["text"], choice["finish_reason"], choice["stop_reason"])
    assert reasons == {
        "eos": ("Yes, ", "stop", None),
        "token": ("Yes", "stop", ord(",")),
        "shown token": ("Yes,", "stop", ord(",")),
        "string": ("Y", "stop", "es"),
        "shown string": ("Yes", "stop", "es"),
        "late": ("Yes, ", "stop", None),
        "none": ("Yes, Ye", "length", None),
    }


def test_tokens_after_a_stop_string_do_not_count(serve_app: Any) -> None:
    served = serve_app()
    response = served.complete(max_tokens=50, stop="ans", logprobs=0)
    assert response.json()["usage"]["completion_tokens"] == len("The ans")
    lists = response.json()["choices"][0]["logprobs"]
    assert len(lists["tokens"]) == len(lists["token_logprobs"]) == len("The ans")


def test_logprobs(served: Served) -> None:
    (choice,) = choices_of(served.complete(max_tokens=3, logprobs=2))
    assert choice["logprobs"] == {
        "tokens": ["T", "h", "e"],
        "token_logprobs": [-85 / 1024, -105 / 1024, -50.0],
        "top_logprobs": [
            {"T": -85 / 1024, "\0": -85 / 1024 - 1},
            {"h": -105 / 1024, "\0": -105 / 1024 - 1},
            {"e": -50.0, "\0": -1.0, "\1": -2.0},
        ],
        "text_offset": [0, 1, 2],
    }
    (choice,) = choices_of(served.complete(max_tokens=2, logprobs=0))
    assert choice["logprobs"]["top_logprobs"] == [{"T": -85 / 1024}, {"h": -105 / 1024}]


def test_the_harness_scoring_call(serve_app: Any) -> None:
    """lm-eval's loglikelihood: lists of token ids, one token more, and exact equality of numbers."""
    served = serve_app()
    body = {
        "prompt": [[70, 71, 72, 74], [80, 81]],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "echo": True,
        "seed": 1234,
    }
    choices = sorted(choices_of(served.complete(**body)), key=lambda choice: choice["index"])
    for prompt, choice in zip(body["prompt"], choices, strict=True):
        lists = choice["logprobs"]
        assert {len(values) for values in lists.values()} == {len(prompt) + 1}
        assert lists["token_logprobs"][0] is None
        assert lists["top_logprobs"][0] is None
        context = 1
        scored = lists["token_logprobs"][context:-1]
        is_greedy = [
            logprob == max(top.values()) for logprob, top in zip(scored, lists["top_logprobs"][context:-1], strict=True)
        ]
        assert scored == [-(t + 1) / 1024 if t % 2 == 0 else -50.0 for t in prompt[context:]]
        assert is_greedy == [t % 2 == 0 for t in prompt[context:]]
        for name, logprob, top in zip(
            lists["tokens"][1:], lists["token_logprobs"][1:], lists["top_logprobs"][1:], strict=True
        ):
            assert top[name] == logprob


def test_scoring_alone(served: Served) -> None:
    (choice,) = choices_of(served.complete(prompt="naïve", max_tokens=0, echo=True, logprobs=1))
    assert choice["text"] == "naïve"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["n", "a", "bytes:\\xc3", "bytes:\\xaf", "v", "e"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 3, 4]


def test_echo_without_logprobs(serve_app: Any) -> None:
    served = serve_app()
    (choice,) = choices_of(served.complete(prompt=[97, 98, IM_END], echo=True))
    assert choice["text"] == "ab" + ANSWER[:4]
    assert streamed(served.complete(prompt=[97, 98, IM_END], echo=True, stream=True))[0] == choice
    assert served.engine.requests[0].params.prompt_logprobs is None


def test_minus_infinity_is_a_number(serve_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.types import TokenLogprobs
    from tests.server import fake_engine

    worst = TokenLogprobs(97, float("-inf"), 9, [98, 99], [-0.5, float("nan")])
    monkeypatch.setattr(fake_engine, "logprobs_of", lambda token, num_top: worst)
    response = serve_app().complete(max_tokens=1, logprobs=2)
    assert json.loads(response.text, parse_constant=pytest.fail)["choices"][0]["logprobs"]["top_logprobs"] == [
        {"a": -9999.0, "b": -0.5, "c": -9999.0}
    ]


def test_prompt_logprobs_in_vllms_form(served: Served) -> None:
    (choice,) = choices_of(served.complete(prompt="Hij", prompt_logprobs=1))
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert second == {
        "105": {"logprob": -50.0, "rank": 3, "decoded_token": "i"},
        "0": {"logprob": -1.0, "rank": 1, "decoded_token": "\0"},
    }
    assert third == {"106": {"logprob": -107 / 1024, "rank": 1, "decoded_token": "j"}}
    assert choice["logprobs"] is None


def test_token_ids_in_answers(serve_app: Any) -> None:
    served = serve_app()
    (choice,) = choices_of(served.complete(return_token_ids=True))
    assert choice["prompt_token_ids"] == list(b"Hi")
    assert choice["token_ids"] == list(b"The ")
    received = events(served.complete(return_token_ids=True, stream=True).content)
    assert received[0]["choices"][0]["prompt_token_ids"] == list(b"Hi")
    assert [t for event in received for t in event["choices"][0].get("token_ids", [])] == list(b"The ")
    (choice,) = choices_of(served.complete(return_tokens_as_token_ids=True, logprobs=1))
    assert choice["logprobs"]["tokens"][0] == "token_id:84"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


def test_a_model_without_tokenizer_serves_token_ids(serve_app: Any) -> None:
    served = serve_app(tokenizer=None)
    (choice,) = choices_of(served.complete(prompt=[1, 2], logprobs=1, echo=True))
    assert choice["text"] == ""
    assert choice["token_ids"] == list(b"The ")
    assert choice["prompt_token_ids"] == [1, 2]
    assert choice["logprobs"]["tokens"][0] == "token_id:1"
    pieces = events(served.complete(prompt=[1, 2], stream=True).content)
    assert [t for event in pieces for t in event["choices"][0].get("token_ids", [])] == list(b"The ")
    for response, field in (
        (served.complete(prompt="Hi"), "prompt"),
        (served.complete(prompt=[1], stop="x"), "stop"),
        (served.chat(), "messages"),
        (served.client.post("/tokenize", json={"prompt": "x"}), "prompt"),
        (served.client.post("/detokenize", json={"tokens": [1]}), "tokens"),
    ):
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "x"),
        ("guided_whitespace_pattern", " "),
        ("structured_outputs", {"regex": "a", "whitespace_pattern": " "}),
        ("prompt_embeds", "AAAA"),
        ("logits_processors", ["x"]),
        ("truncate_prompt_tokens", 5),
        ("priority", 1),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(served: Served, name: str, value: Any) -> None:
    error = served.complete(**{name: value}).json()["error"]
    assert error["param"] == name
    assert error["code"] == "unsupported_parameter"
    assert name in error["message"]


def test_defaults_that_ask_for_nothing_are_fine(served: Served) -> None:
    response = served.complete(
        suffix="",
        best_of=1,
        response_format={"type": "text"},
        guided_json=None,
        bad_words=[],
        structured_outputs={},
        use_beam_search=False,
        length_penalty=1.0,
        store=False,
        service_tier="auto",
        user="me",
        metadata={"a": "b"},
        spaces_between_special_tokens=True,
    )
    assert response.status_code == 200
    assert "x-octavo-unknown-fields" not in response.headers


def test_priority_and_salt_reach_the_engine(serve_app: Any) -> None:
    served = serve_app(scheduling_policy="priority")
    assert served.complete(priority=-3, cache_salt="me").status_code == 200
    request: Request = served.engine.requests[0]
    assert (request.priority, request.cache_salt) == (-3, "me")
    assert "U+0000" in served.complete(cache_salt="\0001").json()["error"]["message"]
    assert served.complete(priority=2**31).json()["error"]["param"] == "priority"


def test_the_tenant_that_is_charged(serve_app: Any) -> None:
    served = serve_app(scheduling_policy="fair")
    assert served.complete(user="alice").status_code == 200
    assert served.chat(user="bob").status_code == 200
    assert served.complete(user=None).status_code == 200
    assert [request.tenant for request in served.engine.requests] == ["alice", "bob", ""]
    assert served.complete(user="x" * 257).json()["error"]["param"] == "user"
    gated = serve_app(scheduling_policy="fair", tenant_header="X-Tenant")
    gated.client.headers["X-Tenant"] = "carol"
    assert gated.complete(user="mallory").status_code == 200
    assert gated.engine.requests[0].tenant == "carol", "the gateway knows better than the body"


def test_hints_for_the_prefix_cache(serve_app: Any) -> None:
    served = serve_app()
    assert served.complete(prompt_cache_key="talk 1", prompt_cache_retention="24h").status_code == 200
    assert served.chat(prompt_cache_retention="in_memory").status_code == 200
    first, second = served.engine.requests
    assert (first.session, first.cache_ttl) == ("talk 1", 86400)
    assert (second.session, second.cache_ttl) == ("", 0)
    assert served.complete(prompt_cache_retention="1w").json()["error"]["param"] == "prompt_cache_retention"
    assert served.complete(prompt_cache_key="x" * 257).json()["error"]["param"] == "prompt_cache_key"


@pytest.mark.parametrize("name", ["ttft_target", "tpot_target"])
def test_targets_for_the_first_token_and_those_after_it(serve_app: Any, name: str) -> None:
    served = serve_app(scheduling_policy="deadline")
    assert served.complete(**{name: 0.5}).status_code == 200
    assert served.chat(**{name: 0.25}).status_code == 200
    assert [getattr(request, name) for request in served.engine.requests] == [0.5, 0.25]
    for bad in (0, -1, 1e9, "soon"):
        assert served.complete(**{name: bad}).json()["error"]["param"] == name
    assert serve_app().complete(**{name: 0.5}).json()["error"]["param"] == name


@pytest.mark.parametrize("policy", ["warn", "reject", "ignore"])
def test_unknown_fields(serve_app: Any, policy: str) -> None:
    served = serve_app(unknown_fields=policy)
    body = {"frobnicate": 1, "x\r\ny": None}
    for response in (served.complete(**body), served.chat(**body), served.complete(**body, stream=True)):
        if policy == "reject":
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "unknown_parameter"
            assert response.json()["error"]["param"] == "frobnicate"
            assert "'frobnicate', 'x??y'" in response.json()["error"]["message"]
        else:
            assert response.status_code == 200
            expected = "frobnicate, x??y" if policy == "warn" else None
            assert response.headers.get("x-octavo-unknown-fields") == expected


def test_the_model_is_checked(served: Served) -> None:
    assert served.complete(model="test").status_code == 200
    response = served.complete(model="gpt\n4")
    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": "The model `gpt?4` does not exist. This server serves `test`.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


def test_named_tokens_are_those_whose_logprobs_are_asked_for(served: Served) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        served.client.post(path, json={**body, "max_tokens": 1, "logprob_token_ids": [7, 9]}).raise_for_status()
        params = served.engine.requests[-1].params
        assert (params.logprobs, params.logprob_token_ids) == (0, (7, 9))
        refused = served.client.post(path, json={**body, "logprob_token_ids": [300]})
        assert "'logprob_token_ids' has 300, which is not a token id" in refused.json()["error"]["message"]
