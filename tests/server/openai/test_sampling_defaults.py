"""What a request leaves open is as the model recommends, and what it says counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from octavo.sampling_params import SamplingParams
from tests.server.conftest import Served
from tests.server.in_process import MAX_MODEL_LEN

RECOMMENDED: dict[str, int | float] = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.01,
    "repetition_penalty": 1.05,
    "max_tokens": 7,
}
OTHER: dict[str, int | float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""What OpenAI and vLLM take when nobody says anything; asked for, it must not be taken for silence."""
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(served: Served) -> Iterator[None]:
    yield
    served.engine.sampling_defaults = {}


def params_of(served: Served, path: str, **body: Any) -> SamplingParams:
    asked = {"prompt": "Hi"} if path == "completions" else {"messages": MESSAGES}
    assert served.client.post(f"/v1/{path}", json=asked | body).status_code == 200
    return served.engine.requests[-1].params


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_open_fields_are_filled_in_and_given_ones_are_kept(served: Served, path: str) -> None:
    served.engine.sampling_defaults = RECOMMENDED
    left_open = params_of(served, path)
    assert {name: getattr(left_open, name) for name in OTHER} == {name: RECOMMENDED[name] for name in OTHER}
    null = params_of(served, path, temperature=None, top_k=None)
    assert (null.temperature, null.top_k) == (0.6, 20)
    given = params_of(served, path, **OTHER)
    assert {name: getattr(given, name) for name in OTHER} == OTHER
    one = params_of(served, path, temperature=0)
    assert (one.temperature, one.top_p) == (0, 0.95)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_without_recommendations_openais_defaults_hold(served: Served, path: str) -> None:
    left_open = params_of(served, path)
    assert {name: getattr(left_open, name) for name in OTHER} == OTHER


def test_a_recommended_limit_is_for_messages_without_one(served: Served) -> None:
    served.engine.sampling_defaults = RECOMMENDED
    for path, body, expected in (
        ("chat/completions", {}, 7),
        ("chat/completions", {"max_tokens": 9}, 9),
        ("completions", {}, 16),
    ):
        params_of(served, path, **body)
        assert served.engine.requests[-1].max_tokens == expected
    served.engine.sampling_defaults = {}
    params_of(served, "chat/completions", stop=["x"])
    assert MAX_MODEL_LEN / 2 < served.engine.requests[-1].max_tokens < MAX_MODEL_LEN


def test_the_list_of_models_shows_them(served: Served) -> None:
    assert served.client.get("/v1/models/test").json()["sampling_defaults"] == {}
    served.engine.sampling_defaults = RECOMMENDED
    assert served.client.get("/v1/models").json()["data"][0]["sampling_defaults"] == RECOMMENDED
