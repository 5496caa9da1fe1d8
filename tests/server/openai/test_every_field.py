"""Every field of completions and chat completions: what the engine is told of it, or that it is refused by name.

A field that is in none of the tables below fails a test here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tokenizers import processors

from octavo.config import ServeConfig
from octavo.errors import ConfigError
from octavo.sampling_params import RepetitionDetectionParams
from octavo.types import Request
from octavo_server.dialects.anthropic import body as anthropic
from octavo_server.dialects.openai import chat_body, completions, tokenize
from octavo_server.dialects.responses import body as responses
from octavo_server.http.request_body import BodyDecoder
from tests.server.conftest import Served
from tests.server.in_process import EOS, IM_END, SPECIAL, InProcessEngine, byte_tokenizer
from tests.tiers import one_in

READERS: dict[str, BodyDecoder[Any]] = {"completions": completions.decoder, "chat/completions": chat_body.decoder}
OTHER_READERS: dict[str, tuple[BodyDecoder[Any], dict[str, Any]]] = {
    "/v1/responses": (responses.decoder, {"input": "Hi"}),
    "/v1/messages": (anthropic.message_decoder, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
    "/v1/messages/count_tokens": (anthropic.counted_decoder, {"messages": [{"role": "user", "content": "Hi"}]}),
    "/tokenize": (tokenize.tokenize_decoder, {"prompt": "Hi"}),
    "/detokenize": (tokenize.detokenize_decoder, {"tokens": [5]}),
}
"""Readers of other paths, with bodies that they take."""

REPETITION = RepetitionDetectionParams(max_pattern_size=3, min_count=4)
PARAMS: dict[str, tuple[Any, Any]] = {
    "n": (2, 2),
    "max_tokens": (3, 3),
    "min_tokens": (2, 2),
    "temperature": (0.5, 0.5),
    "top_p": (0.5, 0.5),
    "top_k": (7, 7),
    "min_p": (0.1, 0.1),
    "presence_penalty": (1.5, 1.5),
    "frequency_penalty": (-1.5, -1.5),
    "repetition_penalty": (1.5, 1.5),
    "logit_bias": ({"5": 1.5, "299": -100}, {5: 1.5, 299: -100.0}),
    "bad_words": (["x"], ("x",)),
    "allowed_token_ids": ([5, 6], (5, 6)),
    "stop": (["x", "yz"], ("x", "yz")),
    "thinking_token_budget": (9, 9),
    "stop_token_ids": ([5, 299], (5, 299)),
    "include_stop_str_in_output": (True, True),
    "ignore_eos": (True, True),
    "skip_special_tokens": (False, False),
    "seed": (-1, 2**64 - 1),
    "prompt_logprobs": (2, 2),
    "logprob_token_ids": ([5, 6], (5, 6)),
    "num_speculative_tokens": (2, 2),
    "repetition_detection": ({"max_pattern_size": 3, "min_count": 4}, REPETITION),
}
"""Fields that are parameters of the same name: what is sent, and what the engine gets."""

TOLD: dict[str, tuple[Any, Callable[[Request], Any], Any]] = {
    "priority": (3, lambda request: request.priority, 3),
    "cache_salt": ("me", lambda request: request.cache_salt, "me"),
    "user": ("me", lambda request: request.tenant, "me"),
    "prompt_cache_key": ("talk", lambda request: request.session, "talk"),
    "session_id": ("talk", lambda request: request.session, "talk"),
    "prompt_cache_retention": ("24h", lambda request: request.cache_ttl, 86400.0),
    "max_completion_tokens": (3, lambda request: request.max_tokens, 3),
    "structured_outputs": ({"regex": "a"}, lambda request: request.params.grammar is not None, True),
    "guided_json": ({"type": "integer"}, lambda request: request.params.grammar is not None, True),
    "guided_json_object": (True, lambda request: request.params.grammar is not None, True),
    "guided_regex": ("a", lambda request: request.params.grammar is not None, True),
    "guided_choice": (["a"], lambda request: request.params.grammar is not None, True),
    "guided_grammar": ('root ::= "a"', lambda request: request.params.grammar is not None, True),
    "regex": ("a", lambda request: request.params.grammar is not None, True),
    "ebnf": ('root ::= "a"', lambda request: request.params.grammar is not None, True),
    "grammar": ('root ::= "a"', lambda request: request.params.grammar is not None, True),
    "json_schema": ({"type": "integer"}, lambda request: request.params.grammar is not None, True),
    "response_format": ({"type": "json_object"}, lambda request: request.params.grammar is not None, True),
}
"""Other fields that the engine is told of."""

OTHER_TESTS = {
    "test_completions": {"prompt", "echo", "logprobs", "return_token_ids", "return_tokens_as_token_ids", "model"},
    "test_best_of": {"best_of"},
    "test_beam_search of the backends": {"use_beam_search", "length_penalty"},
    "test_response": {"stream", "stream_options"},
    "test_admission": {"timeout"},
    "test_completions, of a deadline policy": {"ttft_target", "tpot_target"},
    "test_chat": {
        "messages",
        "top_logprobs",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "documents",
        "reasoning_effort",
    },
    "test_special_tokens_go_around_a_prompt_unless_told_otherwise": {"add_special_tokens"},
    "test_kv_transfer": {"kv_transfer_params"},
    "test_tools": {"tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"},
}
"""Fields about the answer or the prompt, by where they are shown."""


@pytest.fixture
def server(serve_app: Any) -> Served:
    served: Served = serve_app(InProcessEngine(), scheduling_policy="priority")
    return served


def ask(served: Served, path: str, **body: Any) -> Any:
    given = {"prompt": "Hi"} if path == "completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    return served.client.post(f"/v1/{path}", json={"max_tokens": 4, **given, **body})


def bodies_that_ask_for_nothing(decoder: BodyDecoder[Any]) -> Iterator[dict[str, Any]]:
    """All refused fields at once, with every value that asks for nothing: each kind of those, then their defaults."""
    for nothing in (None, False, "", [], {}):
        yield dict.fromkeys(decoder.refused, nothing)
    for values in itertools.zip_longest(*decoder.refused.values()):
        yield dict(zip(decoder.refused, values, strict=True))


@pytest.mark.parametrize("path", READERS)
def test_every_field_is_in_a_table(path: str) -> None:
    elsewhere = set[str]().union(*OTHER_TESTS.values())
    assert not elsewhere & (PARAMS.keys() | TOLD.keys())
    assert set(READERS[path].decoders) <= elsewhere | PARAMS.keys() | TOLD.keys()


@pytest.mark.parametrize("path", READERS)
def test_parameters_reach_the_engine(server: Served, path: str) -> None:
    for name, (sent, wanted) in PARAMS.items():
        response = ask(server, path, **{name: sent})
        assert response.status_code == 200, (name, response.text)
        assert getattr(server.engine.requests[-1].params, name) == wanted, name
    everything = ask(server, path, **{name: sent for name, (sent, _) in PARAMS.items()})
    assert everything.status_code == 200, everything.text
    params = server.engine.requests[-1].params
    assert {name: getattr(params, name) for name in PARAMS} == {name: wanted for name, (_, wanted) in PARAMS.items()}


@pytest.mark.parametrize("path", READERS)
def test_other_fields_reach_the_engine(server: Served, path: str) -> None:
    assert ask(server, path).status_code == 200
    plain = server.engine.requests[-1]
    for name in TOLD.keys() & READERS[path].decoders.keys():
        sent, found, wanted = TOLD[name]
        response = ask(server, path, **{name: sent})
        assert response.status_code == 200, (name, response.text)
        assert found(server.engine.requests[-1]) == wanted, name
        assert found(plain) != wanted, name


@pytest.mark.parametrize("path", READERS)
def test_every_refused_field_is_named(server: Served, path: str) -> None:
    """And with a value that asks for nothing, it is no matter."""
    decoder = READERS[path]
    for name in decoder.refused:
        error = ask(server, path, **{name: {"asks": "something"}}).json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert name in error["message"]
    for body in bodies_that_ask_for_nothing(decoder):
        response = ask(server, path, **body)
        assert response.status_code == 200, response.text


@one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("path", OTHER_READERS)
def test_so_it_is_in_the_other_apis(server: Served, path: str) -> None:
    decoder, body = OTHER_READERS[path]
    for name in decoder.refused:
        refused = server.client.post(path, json={**body, name: {"asks": "something"}})
        assert refused.status_code == 400
        assert f"'{name}'" in refused.json()["error"]["message"]
        assert refused.json()["error"].get("param", name) == name
    for nothing in bodies_that_ask_for_nothing(decoder):
        response = server.client.post(path, json={**body, **nothing})
        assert response.status_code == 200, response.text
    for name in decoder.accepted - decoder.decoders.keys():
        accepted = server.client.post(path, json={**body, name: {"a": "b"}})
        assert accepted.status_code == 200
        assert "x-octavo-unknown-fields" not in accepted.headers
    unknown = server.client.post(path, json={**body, "frobnicate": 1})
    assert (unknown.status_code, unknown.headers["x-octavo-unknown-fields"]) == (200, "frobnicate")


@pytest.mark.parametrize("path", READERS)
def test_accepted_fields_change_nothing(server: Served, path: str) -> None:
    for name in READERS[path].accepted - READERS[path].decoders.keys():
        response = ask(server, path, **{name: {"a": "b"}})
        assert response.status_code == 200
        assert "x-octavo-unknown-fields" not in response.headers


@pytest.mark.parametrize("path", READERS)
def test_special_tokens_are_shown_when_asked(serve_app: Any, path: str) -> None:
    served = serve_app(InProcessEngine(lambda request: [*b"a", IM_END, *b"b"]))
    for skips, expected in ((True, "abab"), (False, "a<|im_end|>ba")):
        choice = ask(served, path, skip_special_tokens=skips, ignore_eos=True, max_tokens=6 if skips else 4).json()[
            "choices"
        ][0]
        assert (choice.get("text") or choice["message"]["content"]) == expected


def test_special_tokens_go_around_a_prompt_unless_told_otherwise(serve_app: Any) -> None:
    """Around a conversation only if asked for: its template writes them."""
    tokenizer = byte_tokenizer()
    around = processors.TemplateProcessing(single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], EOS)])
    tokenizer._backend.post_processor = around
    served = serve_app(tokenizer=tokenizer)
    for path, default in (("completions", True), ("chat/completions", False)):
        for body, is_added in (
            ({}, default),
            ({"add_special_tokens": True}, True),
            ({"add_special_tokens": False}, False),
        ):
            assert ask(served, path, **body).status_code == 200
            assert (served.engine.requests[-1].prompt_tokens[0] == EOS) == is_added, (path, body)


@pytest.mark.parametrize(
    "value", [{}, {"max_pattern_size": -1}, {"max_pattern_size": 3, "min_count": 1}, {"size": 3}, 3]
)
def test_bad_repetition_detection_is_refused_by_name(served: Served, value: Any) -> None:
    answer = ask(served, "completions", repetition_detection=value)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "repetition_detection"


def test_a_server_may_detect_repetitions_unless_a_request_says_otherwise(serve_app: Any) -> None:
    served = serve_app(repetition_detection='{"max_pattern_size": 3, "min_count": 4}')
    own = RepetitionDetectionParams(max_pattern_size=7)
    for given, expected in (({}, REPETITION), ({"max_pattern_size": 7}, own), ({"max_pattern_size": 0}, None)):
        for path in ("completions", "chat/completions"):
            assert ask(served, path, **({"repetition_detection": given} if given else {})).status_code == 200
            assert served.engine.requests[-1].params.repetition_detection == expected
    served.client.post("/v1/messages", json={"max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]})
    assert served.engine.requests[-1].params.repetition_detection == REPETITION


@pytest.mark.parametrize("value", ["{", "{}", '{"max_pattern_size": 3, "size": 3}', '{"max_pattern_size": 3000}'])
def test_a_bad_setting_of_it_is_refused_at_the_start(value: str) -> None:
    with pytest.raises(ConfigError, match="repetition_detection"):
        ServeConfig.from_flat({"repetition_detection": value})


def test_the_most_continuations_are_a_setting(serve_app: Any) -> None:
    served = serve_app(InProcessEngine(max_num_seqs=400), max_n=200)
    assert len(ask(served, "completions", n=200).json()["choices"]) == 200
    for path, name in (("completions", "n"), ("completions", "best_of"), ("chat/completions", "n")):
        error = ask(served, path, **{name: 201}).json()["error"]
        assert error["param"] == name
        assert error["message"].endswith("to 200 (max_n).")
    assert ask(serve_app(), "completions", n=129).json()["error"]["param"] == "n"
