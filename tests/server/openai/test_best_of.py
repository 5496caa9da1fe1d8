"""``best_of``: more texts are written than shown, and the likeliest per token come first."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Served
from tests.server.in_process import IM_END, InProcessEngine

WRITTEN = [b"\x04\x06", b"\x08", b"\x02\x02\x02\x02", b"\x01\x02", b"\x02\x02\x02\x10", b"\x00"]
"""The test's engine gives an even token the log-probability -(token + 1) / 1024, and an odd one -50."""


def engine() -> InProcessEngine:
    """Request number i, from 1, is given text i of ``WRITTEN``; after the last one it begins again."""
    return InProcessEngine(lambda request: [*WRITTEN[(request.id - 1) % 6], IM_END])


def shown(served: Served, **body: Any) -> list[Any]:
    response = served.complete(max_tokens=10, skip_special_tokens=False, **body)
    assert response.status_code == 200, response.text
    choices: list[Any] = response.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return choices


@pytest.mark.parametrize("num_shown", [1, 2, 6])
def test_the_likeliest_per_token_come_first(serve_app: Any, num_shown: int) -> None:
    served = serve_app(engine())
    ranked = sorted(range(6), key=mean_with_end, reverse=True)
    assert ranked != list(range(6))
    choices = shown(served, n=num_shown, best_of=6)
    if num_shown < 6:
        assert [choice["text"] for choice in choices] == [WRITTEN[i].decode() for i in ranked[:num_shown]]
    else:
        assert [choice["text"] for choice in choices] == [text.decode() for text in WRITTEN]
    assert all(choice["logprobs"] is None for choice in choices)


def mean_with_end(index: int) -> float:
    """The token that ends a text counts."""
    each = [-(token + 1) / 1024 if token % 2 == 0 else -50.0 for token in (*WRITTEN[index], IM_END)]
    return sum(each) / len(each)


def test_each_prompt_has_its_own_best_and_all_texts_are_counted(serve_app: Any) -> None:
    served = serve_app(engine())
    body = {"prompt": ["a", "b"], "n": 1, "best_of": 3, "logprobs": 1, "echo": True}
    choices = shown(served, **body)
    best = [max(group, key=mean_with_end) for group in ((0, 1, 2), (3, 4, 5))]
    assert [choice["text"] for choice in choices] == [
        prompt + WRITTEN[i].decode() for prompt, i in zip("ab", best, strict=True)
    ]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [1 + len(WRITTEN[i]) + 1 for i in best]
    assert len(served.engine.requests) == 6
    usage = served.complete(max_tokens=10, **body).json()["usage"]
    assert usage["completion_tokens"] == sum(len(text) + 1 for text in WRITTEN)
    assert usage["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"n": 3, "best_of": 2}, "best_of", "from 'n' (3) to 128"),
        ({"best_of": 0}, "best_of", "from 'n' (1) to 128"),
        ({"best_of": 129}, "best_of", "to 128"),
        ({"best_of": 10**30}, "best_of", "to 128"),
        ({"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        ({"n": 129, "best_of": 129}, "n", "1 to 128"),
        ({"best_of": True}, "best_of", "int"),
    ],
)
def test_what_cannot_be_is_refused_by_name(served: Served, body: dict[str, Any], field: str, words: str) -> None:
    response = served.complete(**body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, field, "invalid_value")
    assert words in error["message"]


def test_as_many_as_shown_is_no_choice(serve_app: Any) -> None:
    served = serve_app(engine())
    choices = shown(served, n=6, best_of=6, logprobs=0)
    assert [choice["text"] for choice in choices] == [text.decode() for text in WRITTEN]
    assert served.complete(n=2, best_of=2, stream=True).status_code == 200
    assert served.engine.requests[-1].params.logprobs is None
